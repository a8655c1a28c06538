"""Whole drawn programs on the compiled scheduler, checked from raw memory after each call (design sections 4, 5, 9)."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from tests.unit.device.program import Program, programs, run

# What must occur in the drawn programs, or they test less than they say.
SITUATIONS = {
    *("ACCEPT", "REJECT", "ADMIT", "PREEMPT", "FINISH", "ERROR", "CANCEL", "PAGE_UNQUARANTINE", "EPOCH", "draining"),
    *("refused CHECKSUM", "refused BAD_LENGTH", "refused BAD_PARAM", "refused NEVER_FITS"),
}


def test_programs() -> None:
    """Catches: page leaks and double owners, starvation, lost or repeated events, credit overflow, wrong recompute."""
    seen: set[str] = set()

    @settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(programs())
    def check(program: Program) -> None:
        seen.update(run(program).situations)

    check()
    assert seen >= SITUATIONS, f"never occurred: {sorted(SITUATIONS - seen)}"
