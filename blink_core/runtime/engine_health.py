"""What an engine's process knows of its health beyond the ring: `health.json` beside its `engine.json`.

The ring says *that* an engine has failed; a GPU that is gone cannot say why. The engine's watchdog writes this file,
front ends read it for GET /health and for what they tell their clients. One writer; replaced whole, never edited.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

log = logging.getLogger("blink.health")

FILE = "health.json"
MOST_NOTICES = 64  # kept; of later ones only the count grows


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that happened. kind: "scheduler", "xid", "heartbeat", "gpu" or "lost". at: seconds since 1970."""

    kind: str
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class Health:
    """failure: why the engine serves no more, None while it does. notices: what did not end it, oldest first."""

    failure: Notice | None = None
    notices: tuple[Notice, ...] = ()
    noticed: int = 0

    @property
    def detail(self) -> str:
        """In one line; empty if there is nothing to say."""
        told = [] if self.failure is None else [self.failure.reason]
        if self.notices:
            more = f" ({self.noticed} in all)" if self.noticed > 1 else ""
            told.append(f"{self.notices[-1].reason}{more}")
        return "; ".join(told)


class HealthWriter:
    """The engine's side. The first failure stays: what follows it is mostly its doing.

    A file that cannot be written is logged and ends nothing: what is told here must reach the engine all the same.
    """

    def __init__(self, run_dir: Path) -> None:
        """Takes away what an earlier engine in the same folder left: its failure is none of this one's."""
        self._path = run_dir / FILE
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            log.error("%s stays from an earlier engine: %s", self._path, error)
        self._health = Health()
        self._lock = threading.Lock()

    @property
    def failed(self) -> str | None:
        """The reason of the failure, if there was one."""
        failure = self._health.failure
        return None if failure is None else failure.reason

    def fail(self, kind: str, reason: str) -> bool:
        """Says why the engine serves no more. False if a reason was given already, which stays."""
        with self._lock:
            if self._health.failure is not None:
                return False
            self._write(Health(Notice(kind, reason, time.time()), self._health.notices, self._health.noticed))
            return True

    def note(self, kind: str, reason: str) -> None:
        """Says what happened without ending the engine."""
        with self._lock:
            old = self._health
            kept = (*old.notices, Notice(kind, reason, time.time()))[-MOST_NOTICES:]
            self._write(Health(old.failure, kept, old.noticed + 1))

    def _write(self, health: Health) -> None:
        self._health = health
        temporary = self._path.with_suffix(".new")
        try:
            temporary.write_text(json.dumps(asdict(health), indent=1), encoding="utf-8")
            os.replace(temporary, self._path)
        except OSError as error:
            log.error("%s cannot be written, front ends see an older one: %s", self._path, error)


class HealthReader:
    """A front end's side; `read` costs one look at the file's date while nothing changes."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE
        self._seen: tuple[int, int] | None = None
        self._health = Health()

    def read(self) -> Health:
        """What the file says now; nothing where there is none, or it cannot be read."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            stat = os.stat(self._path)
            key = (stat.st_mtime_ns, stat.st_ino)
            if key != self._seen:
                raw = json.loads(self._path.read_text(encoding="utf-8"))
                failure = None if raw["failure"] is None else Notice(**raw["failure"])
                self._health = Health(failure, tuple(Notice(**n) for n in raw["notices"]), int(raw["noticed"]))
                self._seen = key
        return self._health
