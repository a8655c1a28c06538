"""Ends a process when the one that started it is gone, so that a killed launcher leaves nothing behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERVAL_S = 0.5
EXIT_ORPHANED = 3


class ParentWatch:
    """Watches, from a daemon thread, that `parent` is still this process's parent.

    The launcher gives its own pid: one that was gone before this process looked is noticed too. Once the parent is gone
    the process ends at once with status `EXIT_ORPHANED`, until `on_gone` has named another way.
    """

    def __init__(self, parent: int | None) -> None:
        """Starts watching; None watches nothing."""
        self._parent = parent
        self._handler: Callable[[], None] = lambda: os._exit(EXIT_ORPHANED)
        self._lock = threading.Lock()
        if parent is not None:
            threading.Thread(target=self._watch, name="blink-parent-watch", daemon=True).start()

    def on_gone(self, handler: Callable[[], None]) -> None:
        """From now on calls `handler`, once, on the watching thread. Call it inside `hold` or outside."""
        self._handler = handler

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Inside, nothing is done about a parent that is gone: for taking what a sudden end would leave behind."""
        with self._lock:
            yield

    def _watch(self) -> None:
        never = threading.Event()
        while os.getppid() == self._parent:
            never.wait(INTERVAL_S)
        with self._lock:
            self._handler()
