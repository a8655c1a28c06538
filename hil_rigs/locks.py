"""Locks of rigs and of other things that one run must have to itself: held by owner and process, stale ones taken over.

A lock is a JSON file that names its owner. It is only read or changed while a short file lock (`filelock`) is held, so
that two processes never both see a stale lock and both take it. A lock is stale when its process is gone: the pid is
free, or belongs to a process that started at another time, or the machine was booted since.
"""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import filelock
import psutil

from blink_core.model_store import blink_home

if TYPE_CHECKING:
    from hil_rigs.description import RigDescription

LOCK_DIR_VARIABLE = "BLINK_LOCK_DIR"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_POLL_S = 0.05
_GUARD_TIMEOUT_S = 10.0
# psutil derives start times from boot time, which a clock step moves by a little; a reused pid starts far later.
_START_TOLERANCE_S = 2.0


class LockError(RuntimeError):
    """A lock that cannot be used: a bad name, a folder that cannot be written, a release by somebody else."""


class LockTimeout(LockError):
    """The lock is held by a live owner; the message says which."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock. `started` is the process's start in seconds since the epoch, `boot` the kernel's boot id."""

    owner: str
    user: str
    host: str
    pid: int
    started: float
    boot: str
    command: str
    acquired: float

    def __str__(self) -> str:
        return f"{self.owner} (pid {self.pid}, {self.user}@{self.host}: {self.command[:120]})"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _me(owner: str) -> Holder:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return Holder(
        owner=owner,
        user=user,
        host=platform.node(),
        pid=os.getpid(),
        started=psutil.Process().create_time(),
        boot=_boot_id(),
        command=" ".join(sys.argv)[:400],
        acquired=time.time(),
    )


def is_stale(holder: Holder) -> bool:
    """True when the holder's process is surely gone. A holder on another host is never called stale from here."""
    if holder.host != platform.node():
        return False
    if holder.boot and holder.boot != _boot_id():
        return True
    try:
        process = psutil.Process(holder.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return True
        return abs(process.create_time() - holder.started) > _START_TOLERANCE_S
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


def lock_directory() -> Path:
    """Where locks lie: $BLINK_LOCK_DIR (for a shared rig: a folder that all its users can write), or the user's own."""
    if configured := os.environ.get(LOCK_DIR_VARIABLE):
        return Path(configured)
    return blink_home() / "locks"


class OwnedLock:
    """An exclusive lock by name, for one owner in one process. Use it as a context manager, or `acquire` and `release`.

    Args:
        name: what is locked; letters, digits, ".", "_" and "-", at most 100.
        owner: who locks, for others to read: a run id.
        directory: folder of the lock files, by default `lock_directory()`.
        timeout_s: how long `with` waits for a live owner.
    """

    def __init__(self, name: str, *, owner: str, directory: Path | None = None, timeout_s: float = 0.0) -> None:
        if not _NAME.fullmatch(name):
            raise LockError(f"lock name {name!r} must match {_NAME.pattern}")
        self.name = name
        self.owner = owner
        self.timeout_s = timeout_s
        self._directory = directory or lock_directory()
        self._path = self._directory / f"{name}.json"
        self._held: Holder | None = None

    @property
    def path(self) -> Path:
        """The lock's file, which names its holder."""
        return self._path

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._held is not None

    def holder(self) -> Holder | None:
        """Who holds the lock now, stale or not; None when nobody does. A file that cannot be parsed holds nothing."""
        try:
            values = json.loads(self._path.read_text(encoding="utf-8"))
            return Holder(**values)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):
            return None

    def acquire(self, timeout_s: float | None = None) -> Holder | None:
        """Take the lock, waiting at most `timeout_s` (default: the object's own) for a live owner to let go.

        Returns the stale holder that was removed for it, if there was one. Raises `LockTimeout` with the owner's name.
        """
        if self._held is not None:
            raise LockError(f"lock {self.name} is already held by this object")
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        while True:
            mine, holder = self._try()
            if mine is not None:
                self._held = mine
                return holder
            if time.monotonic() >= deadline:
                raise LockTimeout(f"{self.name} is in use by {holder}")
            time.sleep(_POLL_S)

    def _guard(self) -> filelock.BaseFileLock:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LockError(f"lock folder {self._directory}: {error.strerror or error}") from error
        return filelock.FileLock(self._directory / f"{self.name}.guard", timeout=_GUARD_TIMEOUT_S)

    def _try(self) -> tuple[Holder | None, Holder | None]:
        """Take the lock if it is free or stale. Returns the new holder (None: not taken) and the one found."""
        try:
            with self._guard():
                found = self.holder()
                if found is not None and not is_stale(found):
                    return None, found
                mine = _me(self.owner)
                draft = self._path.with_suffix(f".{os.getpid()}.new")
                draft.write_text(json.dumps(asdict(mine)), encoding="utf-8")
                draft.replace(self._path)
                return mine, found
        except filelock.Timeout as error:
            raise LockError(f"lock {self.name}: its guard was busy for {_GUARD_TIMEOUT_S} s") from error
        except OSError as error:
            raise LockError(f"lock {self.name} in {self._directory}: {error.strerror or error}") from error

    def release(self) -> None:
        """Let go. Does nothing when the lock is not held, and never removes a lock that somebody else has taken."""
        mine, self._held = self._held, None
        if mine is None or mine.pid != os.getpid():  # a forked child must not free its parent's lock
            return
        with self._guard():
            if self.holder() == mine:
                self._path.unlink(missing_ok=True)

    def __enter__(self) -> OwnedLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def clean_stale(directory: Path | None = None) -> list[Holder]:
    """Remove every stale lock of a folder; returns whose they were."""
    folder = directory or lock_directory()
    removed = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        lock = OwnedLock(path.stem, owner="clean-up", directory=folder)
        with lock._guard():
            found = lock.holder()
            if found is not None and is_stale(found):
                path.unlink(missing_ok=True)
                removed.append(found)
    return removed


_rigs_lock = threading.Lock()
_rigs: dict[Path, tuple[OwnedLock, int]] = {}  # held by this process, and how often


def _acquire_rig(lock: OwnedLock, timeout_s: float, sibling_s: float) -> None:
    try:
        lock.acquire(timeout_s)
    except LockTimeout:
        deadline = time.monotonic() + sibling_s
        # Siblings take turns: the rig may pass from one to the next while this one waits, never to a stranger.
        while (holder := lock.holder()) is None or holder.owner == lock.owner:
            try:
                lock.acquire(0.0)
                return
            except LockTimeout:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_POLL_S)
        raise


@contextmanager
def rig_lock(
    description: RigDescription,
    owner: str,
    *,
    directory: Path | None = None,
    timeout_s: float = 0.0,
    sibling_s: float = 0.0,
) -> Iterator[None]:
    """Has the rig to itself while inside, if its description says `exclusive`; else does nothing and leaves nothing.

    owner: the run id. One owner may enter again in the same process, for a second engine on its rig. Raises LockTimeout
    with the holder's name when another owner or process still has the rig after `timeout_s`; another process of this
    owner, a worker of one run under pytest-xdist, is waited for up to `sibling_s`.
    """
    if not description.exclusive:
        yield
        return
    lock = OwnedLock(f"rig-{description.name}", owner=owner, directory=directory)
    with _rigs_lock:
        held, count = _rigs.get(lock.path, (lock, 0))
        if count == 0 or held.owner != owner:
            held, count = lock, 0
            _acquire_rig(lock, timeout_s, sibling_s)
        _rigs[lock.path] = held, count + 1
    try:
        yield
    finally:
        with _rigs_lock:
            held, count = _rigs[lock.path]
            if count > 1:
                _rigs[lock.path] = held, count - 1
            else:
                del _rigs[lock.path]
                held.release()
