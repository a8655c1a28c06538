"""Whole drawn programs on the compiled scheduler, checked from raw memory after each call (design sections 4, 5, 9)."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, given, settings

from verification.scheduler.programs import EXAMPLES, Program, programs, run

FULL = 150
# What must occur in the drawn programs, or they test less than they say.
SITUATIONS = {
    *("ACCEPT", "REJECT", "ADMIT", "PREEMPT", "FINISH", "ERROR", "CANCEL", "PAGE_UNQUARANTINE", "EPOCH", "draining"),
    *("refused CHECKSUM", "refused BAD_LENGTH", "refused BAD_PARAM", "refused BAD_TOKEN", "refused NEVER_FITS"),
    *("PREFIX_HIT", "PAGE_SHARE", "PAGE_UNSHARE", "PAGE_PUBLISH", "PAGE_EVICT", "twin", "resume hit"),
    *("RESERVATION 0", "RESERVATION 1", "RESERVATION 2", "LEASE 0", "LEASE 1", "deadline", "logprobs", "MASK"),
    *("CLOCK", "CREDITS", "SQ_ENTRY", "RESULT", "CONTROL", "log overflow"),
}


def test_programs() -> None:
    """Catches: page leaks and double owners, starvation, lost or repeated events, credit overflow, wrong recompute."""
    seen: set[str] = set()

    examples = int(os.environ.get(EXAMPLES, FULL))

    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(programs())
    def check(program: Program) -> None:
        seen.update(run(program).situations)

    check()
    if examples >= FULL:
        assert seen >= SITUATIONS, f"never occurred: {sorted(SITUATIONS - seen)}"
