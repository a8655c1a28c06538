"""Looks at an engine from beside its path, and sees that nothing ends in silence (design section 4).

A thread of the engine's process. It waits for Xid events of the GPU, looks whether the scheduler says that it failed,
and whether its heart beats: a step that was launched by tail launch and never ends leaves nobody on the GPU to say so.
What it sees stands in `health.json`; when the engine is lost it says so once, by `on_lost`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from blink_core.runtime.engine_health import HealthWriter
from blink_core.runtime.gpu_events import EventError, EventSource, GpuEvent, GpuLost

log = logging.getLogger("blink.watchdog")

LOOK_S = 0.2  # between two looks; the wait for events is part of it
CLOSE_S = 5.0  # a look takes no longer than its wait
RECORDING = "gpu-events.jsonl"


class NoEvents:
    """A source without events, where the driver gives none."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def wait(self, seconds: float) -> GpuEvent | None:
        """None, after `seconds`."""
        self._closed.wait(seconds)
        return None

    def close(self) -> None:
        """Ends a `wait`."""
        self._closed.set()


class Watchdog:
    """Watches while it is open. `lost` is the reason once the engine is lost; None until then."""

    def __init__(
        self,
        run_dir: Path,
        source: Callable[[], EventSource],
        *,
        heartbeat: Callable[[], int | None],
        failure: Callable[[], str | None] = lambda: None,
        heartbeat_limit_s: float,
        on_lost: Callable[[str], None] = lambda reason: None,
        watched: str = "the scheduler's heart",
    ) -> None:
        """source: opened here; an EventError, then or later, is noted and the rest watched all the same. heartbeat: a
        number that changes while the scheduler lives, None while it need not (not begun, or stopped). failure: why the
        scheduler says that it failed. heartbeat_limit_s: above the longest step. on_lost: called once, on the watching
        thread, whatever becomes of the files. watched: what `heartbeat` is of, for the reason.
        """
        self.health = HealthWriter(run_dir)
        self.lost: str | None = None
        self._heartbeat, self._failure, self._limit_s = heartbeat, failure, heartbeat_limit_s
        self._on_lost, self._watched, self._recording = on_lost, watched, run_dir / RECORDING
        self._beat: int | None = None
        self._still_s, self._looked = 0.0, time.monotonic()
        self._stop = threading.Event()
        try:
            self._source: EventSource = source()
        except EventError as error:
            self._source = self._without_events(error)
        self._thread = threading.Thread(target=self._run, name="blink-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the watch."""
        self._stop.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.error("the watchdog has not ended within %g s", CLOSE_S)
        self._source.close()

    def _run(self) -> None:
        try:
            while not self._stop.is_set() and self.lost is None:
                self.look(self._next_event())
        except GpuLost as error:
            self._lose("gpu", str(error))
        except Exception as error:  # the watch ends, and that must not be silent either
            log.exception("the watchdog failed")
            self.health.note("gpu", f"the watchdog failed: {type(error).__name__}: {error}")

    def _next_event(self) -> GpuEvent | None:
        try:
            return self._source.wait(LOOK_S)
        except EventError as error:
            ended, self._source = self._source, self._without_events(error)
            ended.close()
            return None

    def _without_events(self, error: EventError) -> NoEvents:
        log.warning("no Xid events: %s", error)
        self.health.note("gpu", f"Xid errors are not watched: {error}")
        return NoEvents()

    def look(self, event: GpuEvent | None) -> None:
        """One look, with the event that came since the last one."""
        if event is not None:
            log.error("%s", event)
            self._record(event)
            if event.fatal:
                self._lose("xid", str(event))
                return
            self.health.note("xid", str(event))
        if (why := self._failure()) is not None:
            self.health.fail("scheduler", why)
        self._look_at_heart()

    def _record(self, event: GpuEvent) -> None:
        """For replays, and not worth an engine: a disk that is full must not keep the event from being judged."""
        try:
            with self._recording.open("a", encoding="utf-8") as file:
                file.write(event.to_json() + "\n")
        except OSError as error:
            log.error("%s cannot be written: %s", self._recording, error)

    def _look_at_heart(self) -> None:
        now, beat = time.monotonic(), self._heartbeat()
        # A pause of this very process (SIGSTOP) is none of the heart's.
        passed, self._looked = min(now - self._looked, 5 * LOOK_S), now
        if beat is None or beat != self._beat:
            self._beat, self._still_s = beat, 0.0
            return
        self._still_s += passed
        if self._still_s > self._limit_s:
            self._lose("heartbeat", f"{self._watched} stood still for {self._limit_s:g} s")

    def _lose(self, kind: str, reason: str) -> None:
        try:
            if self.health.fail(kind, reason):  # first: who hears of the loss may end the process
                log.error("engine lost: %s", reason)
        finally:
            self.lost = reason
            self._on_lost(reason)
