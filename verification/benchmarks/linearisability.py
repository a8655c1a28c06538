"""Speed of the linearisability checker: `python -m verification.benchmarks.linearisability [--json]`.

Simulated histories of ten requests, with four clients that overlap and calls of unknown outcome; as many with a fault,
which includes making the witness. One core; the time is that of this process.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict, dataclass

from verification.linearisability.check import check
from verification.linearisability.operations import EVENTS, OperationHistory
from verification.linearisability.simulated import Mix, draw
from verification.result import Verdict

REQUESTS, HISTORIES = 10, 300
TARGET = 100.0  # histories a second


@dataclass(frozen=True, slots=True)
class Speed:
    """histories checked a second, and what they were: operations and steps of the specification, each a history."""

    name: str
    histories_per_s: float
    operations: float
    steps: float


def with_fault(history: OperationHistory, rng: random.Random) -> OperationHistory:
    """One event of the history comes twice."""
    operations = list(history.operations)
    at = rng.choice([i for i, o in enumerate(operations) if o.kind in EVENTS])
    return history.with_operations([*operations[:at], operations[at], *operations[at:]])


def measure(name: str, histories: list[OperationHistory], expected: Verdict) -> Speed:
    """Raises RuntimeError if one gets another verdict than expected: the speed of a wrong answer is none."""
    start = time.process_time()
    found = [check(history) for history in histories]
    took = time.process_time() - start
    wrong = [decision.message for decision in found if decision.verdict is not expected]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(found)} {name} are not {expected.value}: {wrong[0]}")
    count = len(histories)
    operations = sum(len(history.operations) for history in histories)
    return Speed(name, count / took, operations / count, sum(d.steps for d in found) / count)


def run(count: int = HISTORIES) -> list[Speed]:
    """Both kinds, `count` histories each."""
    good = [draw(random.Random(seed), Mix(requests=REQUESTS, clients=4, tokens=24)) for seed in range(count)]
    plain = [draw(random.Random(seed), Mix(requests=REQUESTS, clients=4, story=0.0)) for seed in range(count)]
    bad = [with_fault(history, random.Random(seed)) for seed, history in enumerate(plain)]
    return [measure("good histories", good, Verdict.VALID), measure("bad histories", bad, Verdict.INVALID)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = run()
    if asked.json:
        print(json.dumps({"target": TARGET, "results": [asdict(speed) for speed in found]}))
        return
    for speed in found:
        print(
            f"{speed.name}: {speed.histories_per_s:.0f} a second (target {TARGET:.0f}), "
            f"{speed.operations:.0f} operations and {speed.steps:.0f} steps each"
        )


if __name__ == "__main__":
    main()
