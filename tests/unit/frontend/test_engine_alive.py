"""How the front end tells that its engine's process is gone."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from blink_core.frontend.engine_client import _start_time, _still_runs


def test_living_ended_and_zombie() -> None:
    """Catches: a dead engine taken for a living one until its heartbeat is missed."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = _start_time(child.pid)
    assert started is not None
    assert _still_runs(child.pid, started)
    assert not _still_runs(child.pid, started + 1), "a later process with the same pid"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and not yet reaped
    assert not _still_runs(child.pid, started)
    child.communicate(timeout=60)
    assert not _still_runs(child.pid, started)


def test_no_file_descriptor_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a front end out of file descriptors that declares a living engine dead for good."""
    started = _start_time(os.getpid())
    assert started is not None

    def exhausted(*args: object, **kwargs: object) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_text", exhausted)
    assert _still_runs(os.getpid(), started)
