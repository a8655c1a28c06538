"""``python -m verification.certificate.costs DIR...``: writes `costs.yaml` from the durations that runs have recorded.

DIR: output folders of runs: of profile full or of its shards, joined or not, or of nightly, whose times are less than
those of full. Of several runs the longest time counts. What none of them ran to its end keeps the figure that it has:
a test that failed was not measured, and a nightly has not all tests of full.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from verification.certificate.corpus import PREFIX
from verification.certificate.outcomes import Outcome
from verification.certificate.required import load
from verification.certificate.shards import Costs, registered_costs

FILE = Path(__file__).with_name("costs.yaml")
HEAD = """\
# Seconds of tests on two cores, by own id; written by `python -m verification.certificate.costs DIR...`.
# They only decide which tests go into which shard: a test that is not here has `default_s`.
"""
LEAST_S = 1.0  # below, a test has the default


def durations(folders: Sequence[Path]) -> dict[str, float]:
    """Seconds of every test that passed, by own id. Raises OSError or ValueError for a folder without a report."""
    found: dict[str, float] = {}
    for folder in folders:
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        for test in report["tests"]:
            if test["outcome"] == Outcome.PASSED and not test["id"].startswith(PREFIX):
                found[test["id"]] = max(found.get(test["id"], 0.0), float(test["duration_s"]))
    return found


def merged(measured: Mapping[str, float], known: Costs, tests: Iterable[str]) -> dict[str, float]:
    """Measured seconds with those figures of `known` that still speak of a test that nobody measured.

    tests: own ids of all tests there are. A pattern stays, behind the ids, while one of its tests has no other figure.
    """
    open_tests = [test for test in tests if test not in measured]
    kept = {name: s for name, s in known.tests.items() if any(Costs(-1.0, {name: s}).of(t) == s for t in open_tests)}
    rest = Costs(LEAST_S, kept)
    own = {test: max(LEAST_S, s) for test, s in measured.items() if s >= LEAST_S or rest.of(test) != LEAST_S}
    return own | {name: seconds for name, seconds in kept.items() if name not in own}


def text(seconds: Mapping[str, float], default_s: float) -> str:
    """The file's text: ids, then patterns in their order, for the first that fits counts."""
    ids = sorted(name for name in seconds if "*" not in name)
    lines = [f"  {json.dumps(n)}: {seconds[n]:.0f}" for n in (*ids, *(n for n in seconds if "*" in n))]
    return f"{HEAD}default_s: {default_s:g}\ntests:\n" + "\n".join(lines or ["  {}"]) + "\n"


def main(arguments: Sequence[str], rig: str = "local") -> int:
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        measured = durations([Path(one) for one in arguments])
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    if not measured:
        print("error: no test passed in these runs, so none was measured", file=sys.stderr)
        return 2
    wanted = load(rig).profile("full").properties.values()
    found = merged(measured, registered_costs(), [test for requirement in wanted for test in requirement.tests])
    FILE.write_text(text(found, LEAST_S), encoding="utf-8")
    kept = [name for name in found if name not in measured]
    print(f"{FILE}: {len(found) - len(kept)} tests measured, {sum(measured.values()):.0f} s in all")
    print(f"{len(kept)} figures kept of what was not measured: {', '.join(kept) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
