"""Lock-step in the suite: the compiled scheduler and the executable specification, compared after every call."""

from __future__ import annotations

import random

import pytest

from verification.certificate.recorder import Recorder
from verification.lockstep.programs import Program, execute, random_program
from verification.lockstep.run import compare
from verification.lockstep.shrink import shrink
from verification.result import JSON, CheckResult, Measurement, Verdict
from verification.run_context import RunContext

PROPERTY = "specification"
pytestmark = [pytest.mark.blink_property(PROPERTY), pytest.mark.capability("cpu")]

HISTORIES = {"smoke": 1000, "nightly": 50_000, "full": 200_000}  # of all parts together
PARTS = 8  # each far below the timeout of one test, with a seed of its own, so that shards can share them out
OPERATIONS = 50


def _differs(program: Program) -> bool:
    return compare(execute(program).d) is not None


@pytest.mark.parametrize("part", range(1, PARTS + 1), ids=str)
def test_lockstep(part: int, blink_run: RunContext, record: Recorder, seed: int) -> None:
    """Whole programs drawn by the part's seed: configurations, submissions, cancels, faults, restarts, drains.

    Catches: any observable of the scheduler, after any call, that the rules do not give.
    """
    rng, count = random.Random(seed), HISTORIES[blink_run.profile_name] // PARTS
    steps = 0
    for _ in range(count):
        program = random_program(rng, OPERATIONS)
        driver = execute(program).d
        steps += driver.steps
        record.cases()
        if (difference := compare(driver)) is not None:
            smallest = shrink(program, _differs)
            found = compare(execute(smallest).d) or difference
            witness: dict[str, JSON] = {
                "program": repr(smallest),
                "step": found.step,
                "name": found.name,
                "call": found.call,
            }
            record.check(CheckResult(Verdict.INVALID, PROPERTY, "lock-step", str(found), witness))
    measured = {"histories": Measurement(count, "histories"), "steps": Measurement(steps, "steps", n=count)}
    message = f"every observable is equal after each of {steps} calls in {count} histories (part {part} of {PARTS})"
    record.check(CheckResult(Verdict.VALID, PROPERTY, "lock-step", message, {}, measured))
