"""The native module as it ships: no planted faults; its calls refuse what would race."""

from __future__ import annotations

from pathlib import Path

import pytest

from blink_core import _native
from tests.unit.device.harness import Harness, small_config

# Literals that only a build with planted faults holds.
TRACES = (b"active_mutant", b"activate_mutant")


def test_release_holds_no_mutants() -> None:
    """Catches: a planted fault shipped to users."""
    assert _native.mutants is False
    assert not hasattr(_native, "activate_mutant")
    binary = Path(str(_native.__file__)).read_bytes()
    assert [t for t in TRACES if t in binary] == []


def test_running_scheduler_refuses_direct_calls() -> None:
    """Catches: a test or tool that steps the scheduler while its thread does."""
    h = Harness(small_config())
    h.scheduler.start()
    try:
        for call in (h.scheduler.boundary, h.scheduler.poll, h.scheduler.init, h.scheduler.start):
            with pytest.raises(RuntimeError, match="scheduler thread"):
                call()
        with pytest.raises(RuntimeError, match="scheduler thread"):
            h.scheduler.run_noop(1)
    finally:
        h.scheduler.join()
    assert int(h.control["status"]["state"][0]) == 4


def test_group_of_many_has_no_thread() -> None:
    """Catches: a scheduler thread that would run only one member of a larger group."""
    h = Harness(small_config(), group_size=2)
    with pytest.raises(RuntimeError, match="group of one"):
        h.scheduler.start()
