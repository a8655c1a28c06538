"""Judges stored histories and draws them: `python -m verification.linearisability FILE ... [--out FOLDER] [--png]`.

FILE: an operation history (`traces/histories/*.json`). Exit status 0 if all are valid, 1 if one is invalid, 2 if one is
undecided or cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from verification.linearisability.check import BUDGET, check
from verification.linearisability.operations import OperationHistory
from verification.linearisability.picture import draw
from verification.linearisability.scene import to_svg, write_png
from verification.result import Verdict

_STATUS = {Verdict.VALID: 0, Verdict.INVALID: 1, Verdict.UNKNOWN: 2}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--out", type=Path, help="folder for a picture of each history")
    parser.add_argument("--png", action="store_true", help="pictures as PNG, not SVG")
    parser.add_argument("--budget", type=int, default=BUDGET, help=f"steps for each history, {BUDGET} by default")
    asked = parser.parse_args(arguments)
    worst = 0
    for path in asked.files:
        try:
            history = OperationHistory.from_json(json.loads(path.read_text(encoding="utf-8")))
            decision = check(history, asked.budget)
        except (OSError, ValueError) as error:
            print(f"{path}: {error}", file=sys.stderr)
            worst = 2
            continue
        print(f"{path}: {decision.verdict.value}: {decision.law}{': ' * bool(decision.law)}{decision.message}")
        worst = max(worst, _STATUS[decision.verdict])
        if asked.out is not None:
            asked.out.mkdir(parents=True, exist_ok=True)
            scene = draw(history, decision, title=path.stem)
            if asked.png:
                write_png(scene, asked.out / f"{path.stem}.png")
            else:
                (asked.out / f"{path.stem}.svg").write_text(to_svg(scene), encoding="utf-8")
    return worst


if __name__ == "__main__":
    sys.exit(main())
