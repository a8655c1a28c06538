"""`python -m verification.ring_model [--full] [--only MODEL] [--json]`: exit 0 all as expected, 1 not so, 2 no Spin."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from verification.ring_model import spin
from verification.ring_model.variants import CORRECT, LARGE, VARIANTS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m verification.ring_model", description=__doc__)
    parser.add_argument("--full", action="store_true", help="also the larger bounds: minutes")
    parser.add_argument("--only", metavar="TEXT", default="", help="searches with this text in MODEL/NAME")
    parser.add_argument("--timeout", type=float, default=spin.TIMEOUT_S, help="seconds for one search")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    searches = [one for one in (*CORRECT, *(LARGE if chosen.full else ()), *VARIANTS) if chosen.only in str(one)]
    if not searches:
        parser.error(f"no search has {chosen.only!r} in its name")
    outcomes = []
    try:
        for search in searches:
            outcomes.append(spin.run(search, timeout_s=chosen.timeout))
            if not chosen.json:
                print(outcomes[-1].line(), flush=True)
                if not outcomes[-1].ok:
                    print(*outcomes[-1].trail, sep="\n", flush=True)
    except spin.SpinMissing as missing:
        print(f"skipped: {missing}", file=sys.stderr)
        return 2
    except spin.SpinFailed as failed:
        print(f"error: {failed}", file=sys.stderr)
        return 1
    if chosen.json:
        print(json.dumps([asdict(one) | {"ok": one.ok} for one in outcomes]))
    good = sum(one.ok for one in outcomes)
    if not chosen.json:
        print(f"{good} of {len(outcomes)} searches ended as they should; exhaustive, with partial-order reduction")
    return 0 if good == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
