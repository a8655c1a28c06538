"""``python -m verification.certificate.costs DIR...``: writes `costs.yaml` from the durations that runs have recorded.

DIR: output folders of runs of profile full (or of its shards). Of several runs the longest time counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from verification.certificate.outcomes import Outcome

FILE = Path(__file__).with_name("costs.yaml")
HEAD = """\
# Seconds of tests of profile full, by own id; written by `python -m verification.certificate.costs DIR...`.
# They only decide which tests go into which shard: a test that is not here has `default_s`.
"""
LEAST_S = 1.0  # below, a test has the default


def durations(folders: Sequence[Path]) -> dict[str, float]:
    """Seconds of every test that passed, by own id. Raises OSError or ValueError for a folder without a report."""
    found: dict[str, float] = {}
    for folder in folders:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        for test in report["tests"]:
            if test["outcome"] == Outcome.PASSED and not test["id"].startswith("corpus/"):
                found[test["id"]] = max(found.get(test["id"], 0.0), float(test["duration_s"]))
    return found


def text(seconds: Mapping[str, float], default_s: float) -> str:
    """The file's text: tests of a second or more, sorted."""
    lines = [f"  {json.dumps(test)}: {value:.0f}" for test, value in sorted(seconds.items()) if value >= LEAST_S]
    return f"{HEAD}default_s: {default_s:g}\ntests:\n" + "\n".join(lines or ["  {}"]) + "\n"


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    seconds = durations([Path(one) for one in arguments])
    FILE.write_text(text(seconds, LEAST_S), encoding="utf-8")
    print(f"{FILE}: {sum(value >= LEAST_S for value in seconds.values())} tests, {sum(seconds.values()):.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
