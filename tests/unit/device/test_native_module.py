"""The native module as it ships: its calls refuse what would race."""

from __future__ import annotations

import pytest

from verification.scheduler.harness import Harness, small_config


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
