"""Waits for what another thread or process does, and how much the machine itself was late meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

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


class Stalls:
    """Seconds, while inside `with`, for which the machine did not let a thread run that only wanted to look at the
    clock: what a bound in seconds is too late by is the machine's as far as that goes. `seconds` may be read inside."""

    TICK_S, USUAL_S = 0.01, 0.02

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def _tick(self) -> None:
        last = self._clock()
        while not self._over.wait(self.TICK_S):
            now = self._clock()
            late, last = now - last - self.TICK_S, now
            if late > self.USUAL_S:
                self.seconds += late

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(DEADLINE_S)
