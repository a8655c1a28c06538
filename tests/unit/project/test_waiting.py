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


def test_stall_is_told_to_whoever_runs_first_behind_it() -> None:
    """Catches: a stall that is over and not counted yet, because the thread that counts it runs after the one that asks
    how late it is; one that counts twice; time after the end."""
    now = [100.0]
    stalls = Stalls(lambda: now[0])  # whose thread does not come to run
    stalls._look()
    now[0] += 1.0
    assert stalls.seconds == pytest.approx(1.0 - Stalls.TICK_S)
    stalls._look(last=True)
    now[0] += 1.0
    assert stalls.seconds == pytest.approx(1.0 - Stalls.TICK_S)


def test_stall_at_another_time_is_no_excuse() -> None:
    """Catches: a machine that stood still before a fault, or after its victims were told, taken for why they were told
    late."""
    now = [100.0]
    stalls = Stalls(lambda: now[0])
    for at in (100.0, 103.0, 103.01, 106.0):  # stands still from 100 to 103, and from 103.01 to 106
        now[0] = at
        stalls._look()
    assert stalls.between(0.0, 100.01) == 0.0
    assert stalls.between(103.0, 103.02) == 0.0
    assert stalls.between(102.0, 103.52) == pytest.approx(1.5)
    assert stalls.between(106.0, 200.0) == 0.0
