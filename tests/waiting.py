"""Waits for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
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
