"""Faults of processes, rings and clients, one at a time, on an engine of their own."""

from __future__ import annotations

import pytest

from verification.faults.bench import FaultBench
from verification.faults.model import known_faults

pytestmark = [
    pytest.mark.blink_property("fault-tolerance"),
    pytest.mark.capability("cpu", "shared-memory", "http"),
]


@pytest.mark.parametrize("name", known_faults())
def test_single_fault(fault: FaultBench, name: str) -> None:
    """One scenario of each registered fault: whoever it may not touch must finish with the tokens of a control run.

    Catches: a fault that spreads, a victim that hangs or gets wrong tokens, pages that stay taken, a rig that does not
    recover.
    """
    fault.check(fault.scenario(name))
