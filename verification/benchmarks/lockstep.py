"""Lock-step on one core: compared steps and whole histories a second, `python -m verification.benchmarks.lockstep`.

A step is one call of the scheduler whose observables are all compared. Three figures: seeded random programs run and
compared; the same, drawn by hypothesis; and the compiled scheduler's share of the time. Seconds are processor time of
this process, so that a busy machine does not count.
"""

from __future__ import annotations

import argparse
import json
import random
import time

from hypothesis import HealthCheck, Phase, given, settings

from verification.lockstep.programs import Program, execute, random_program
from verification.lockstep.run import compare, run_native
from verification.lockstep.strategy import programs

TARGET_STEPS, TARGET_HISTORIES = 3000, 100  # a second, issue 4


def measure_random(count: int, length: int) -> dict[str, float]:
    """Runs `count` random programs of `length` operations. Raises AssertionError on a difference."""
    drawn = [random_program(random.Random(seed), length) for seed in range(count)]
    native, steps, begin = 0.0, 0, time.process_time()
    for program in drawn:
        driver = execute(program).d
        assert (difference := compare(driver)) is None, f"{difference}\n{program!r}"
        steps += driver.steps
    seconds = time.process_time() - begin
    for program in drawn[: count // 10]:
        driver = execute(program).d
        at = time.process_time()
        run_native(driver)
        native += time.process_time() - at
    return {
        "histories": count,
        "steps": steps,
        "steps_per_s": steps / seconds,
        "histories_per_s": count / seconds,
        "native_share": native * 10 / seconds,
    }


def measure_hypothesis(count: int) -> dict[str, float]:
    """The same with programs that hypothesis draws, drawing included."""
    steps = histories = 0

    @settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def run(program: Program) -> None:
        nonlocal steps, histories
        driver = execute(program).d
        assert (difference := compare(driver)) is None, f"{difference}\n{program!r}"
        steps, histories = steps + driver.steps, histories + 1

    begin = time.process_time()
    run()
    seconds = time.process_time() - begin
    return {
        "histories": histories,
        "steps": steps,
        "steps_per_s": steps / seconds,
        "histories_per_s": histories / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--operations", type=int, default=40, help="of one random program")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    figures = {
        "random": measure_random(chosen.histories, chosen.operations),
        "hypothesis": measure_hypothesis(chosen.histories),
    }
    if chosen.json:
        print(json.dumps(figures))
        return
    for name, figure in figures.items():
        met = figure["steps_per_s"] >= TARGET_STEPS and figure["histories_per_s"] >= TARGET_HISTORIES
        print(
            f"{name:10} {figure['histories']:.0f} histories, {figure['steps']:.0f} steps compared: "
            f"{figure['steps_per_s']:,.0f} steps/s, {figure['histories_per_s']:,.0f} histories/s "
            f"(target {TARGET_STEPS:,} and {TARGET_HISTORIES}: {'met' if met else 'NOT met'})"
        )
    print(f"the compiled scheduler takes {figures['random']['native_share']:.0%} of the time")


if __name__ == "__main__":
    main()
