"""Event log and its check: `python -m verification.benchmarks.trace [--json]`.

Check: entries a second that `blink trace check` compares with the specification, on one core, over drawn programs.
Log: steps a second of the compiled scheduler with 64 running rows and a no-op model (`blink_core.bench`), by log level,
best of several rounds, and what each level costs of the steps without a log.
"""

from __future__ import annotations

import argparse
import json
import random
import time

from blink_core.abi.enums import LogLevel
from blink_core.bench import scheduler_steps
from verification.lockstep.programs import random_program
from verification.trace.drawn import logged, trace_of
from verification.trace.monitor import VALID, check

LEVELS = (LogLevel.OFF, LogLevel.DECISIONS, LogLevel.ALL)


def measure_check(programs: int, operations: int) -> dict[str, float]:
    """CPU seconds, recording not included."""
    drawn = [logged(random_program(random.Random(seed), operations)) for seed in range(programs)]
    traces = [trace_of(program) for program in drawn]
    begin = time.process_time()
    for trace in traces:
        assert check(trace).word == VALID
    seconds = time.process_time() - begin
    entries = sum(len(trace.entries) for trace in traces)
    return {"entries": entries, "entries_per_s": entries / seconds}


def measure_log(rounds: int) -> dict[str, float]:
    best = {level: max(scheduler_steps(level).value for _ in range(rounds)) for level in LEVELS}
    steps = {f"steps_per_s_{level.name.lower()}": value for level, value in best.items()}
    return steps | {f"overhead_{level.name.lower()}": best[LogLevel.OFF] / best[level] - 1 for level in LEVELS[1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--operations", type=int, default=50, help="of one random program")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    checked, log = measure_check(chosen.programs, chosen.operations), measure_log(chosen.rounds)
    if chosen.json:
        print(json.dumps({"check": checked, "log": log}))
        return
    print(f"trace check: {checked['entries']:.0f} entries, {checked['entries_per_s']:,.0f} entries/s")
    for level in LEVELS:
        name = level.name.lower()
        cost = f", {log[f'overhead_{name}']:+.0%} a step" if level else ""
        print(f"event log {name:10} {log[f'steps_per_s_{name}']:>9,.0f} steps/s{cost}")


if __name__ == "__main__":
    main()
