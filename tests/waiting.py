"""Waits for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

DEADLINE_S = 60.0  # for what takes milliseconds on a machine with nothing else to do
LOOK_S = 0.005

Seen = TypeVar("Seen")


def until(condition: Callable[[], Seen], what: str = "nothing came of it", deadline_s: float = DEADLINE_S) -> Seen:
    """What `condition` gives once it is true, looked at every LOOK_S seconds: a loop that spins takes the processor
    from those for whom it waits. AssertionError with `what` after `deadline_s` seconds."""
    deadline = time.monotonic() + deadline_s
    while not (seen := condition()):
        assert time.monotonic() < deadline, f"{what} ({deadline_s:g} s)"
        time.sleep(LOOK_S)
    return seen


def ended(pid: int) -> bool:
    """Whether a process is gone, or only waits to be reaped by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may go between the opening and the reading
        return True
