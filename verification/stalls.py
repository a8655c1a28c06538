"""How much the machine itself was late while something was measured in seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

JOIN_S = 60.0


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
        self._thread.join(JOIN_S)
