"""How much the machine itself was late while something was measured in seconds."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

JOIN_S = 60.0


class Stalls:
    """When, while inside `with`, the machine did not let a thread run that only wanted to look at the clock: what a
    bound in seconds is too late by is the machine's as far as that goes. May be asked inside, too."""

    TICK_S, USUAL_S = 0.01, 0.02

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._found: list[tuple[float, float]] = []
        self._clock = clock
        self._last: float | None = None  # look of the thread; None before its first and after its last
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    @property
    def seconds(self) -> float:
        """All of them so far."""
        return self.between(-math.inf, math.inf)

    def between(self, begin: float, end: float) -> float:
        """Seconds between two times of the clock; also those after which the thread has not run yet, for whoever asks
        may be the first."""
        with self._lock:
            found = [*self._found, *self._stall(self._clock())]
        return sum(max(0.0, min(b, end) - max(a, begin)) for a, b in found)

    def _stall(self, now: float) -> list[tuple[float, float]]:
        due = now if self._last is None else self._last + self.TICK_S
        return [(due, now)] if now - due > self.USUAL_S else []

    def _look(self, *, last: bool = False) -> None:
        with self._lock:
            now = self._clock()
            self._found += self._stall(now)
            self._last = None if last else now

    def _tick(self) -> None:
        self._look()
        while not self._over.wait(self.TICK_S):
            self._look()
        self._look(last=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(JOIN_S)
