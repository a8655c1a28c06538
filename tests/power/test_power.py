"""The tester is tested: each planted fault is found within the registered number of programs and shrunk to the
registered size (`tester` in verification/thresholds.yaml). For the scheduler, lock-step shows the same in
tests/unit/spec.
"""

from __future__ import annotations

import pytest

from tests.power.serving import FAULTS, Fault, caught, draw, serve, shrink, verdict
from verification.program import Program
from verification.thresholds import default_thresholds

LIMITS = default_thresholds().tester


def first(fault: Fault) -> tuple[int, Program]:
    for seed in range(LIMITS.found_within):
        if caught(program := draw(seed), fault):
            return seed, program
    pytest.fail(f"{fault.__name__} was not found within {LIMITS.found_within} programs")


def test_faultless_serving_passes() -> None:
    """Catches: a checker that finds faults where there are none: it would find all that are planted."""
    for seed in range(100):
        result = verdict(serve(draw(seed)))
        assert result.ok(), (seed, str(result))


@pytest.mark.parametrize("fault", FAULTS, ids=[f.__name__ for f in FAULTS])
def test_planted_fault_is_found_and_shrunk(fault: Fault) -> None:
    """Catches: programs that have stopped reaching a boundary, a checker that went blind, a failure nobody can read."""
    _, program = first(fault)
    small = shrink(program, lambda p: caught(p, fault))
    assert caught(small, fault)
    assert len(small.requests) <= LIMITS.shrunk_to_requests, small
    assert not caught(small, lambda program, events: events)  # the fault is what it shows
