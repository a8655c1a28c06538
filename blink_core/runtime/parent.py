"""Ends a process when the one that started it is gone, so that a killed launcher leaves nothing behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

INTERVAL_S = 0.5


def watch_parent(on_gone: Callable[[], None]) -> None:
    """Calls `on_gone` once, from a daemon thread, within about `INTERVAL_S` of the parent's end."""
    parent = os.getppid()
    never = threading.Event()

    def watch() -> None:
        while os.getppid() == parent:
            never.wait(INTERVAL_S)
        on_gone()

    threading.Thread(target=watch, name="blink-parent-watch", daemon=True).start()
