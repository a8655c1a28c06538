"""What the tests wait with."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from tests.waiting import DEADLINE_S, ended, until
from verification.stalls import Stalls


def test_until_gives_what_came_or_says_what_did_not() -> None:
    """Catches: a wait that ends before its condition holds, or never; a failure that does not say what was awaited."""
    looks = iter([0, "", "there"])
    assert until(lambda: next(looks)) == "there"
    with pytest.raises(AssertionError, match="no such thing"):
        until(lambda: False, "no such thing", 0.01)


def test_ended_child_is_told_though_nobody_reaps_it() -> None:
    """Catches: a zombie taken for a process that lives on, so that the wait for its end has none."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not ended(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert ended(child.pid)
    child.communicate(timeout=DEADLINE_S)
    assert ended(child.pid)


def test_stall_is_counted() -> None:
    """Catches: a machine that stood still for a second and is told as no later than usual, or one that did not."""
    now, looked = [100.0], threading.Event()

    def clock() -> float:
        looked.set()
        return now[0]

    with Stalls(clock) as stalls:
        assert looked.wait(DEADLINE_S)
        assert stalls.seconds == 0.0
        now[0] += 1.0
        until(lambda: stalls.seconds)
    assert stalls.seconds == pytest.approx(1.0 - Stalls.TICK_S)
