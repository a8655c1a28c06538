"""POSIX shared memory: named segments, and the transport of the `local` rig over a ring inside one."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import threading
from pathlib import Path

import numpy as np

from blink_core import _native
from blink_core.transport.interface import Data, TransportError

SHM_DIR = Path("/dev/shm")
_NAME = re.compile(r"blink-[A-Za-z0-9_.-]{1,80}")


def shm_available() -> int:
    """Bytes free for shared memory on this machine; 0 where there is none."""
    try:
        stat = os.statvfs(SHM_DIR)
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize


def remove_dead_segments() -> list[str]:
    """Removes segments whose creator ended without unlinking them, and returns their names.

    A creator holds a file lock on its segment for as long as it lives, so that no process id is trusted that another
    process, or one in another container, may carry by now.
    """
    removed = []
    for path in sorted(SHM_DIR.glob("blink-*")):
        with contextlib.suppress(OSError):  # locked: its creator lives; or another user's; or just gone
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_size == 0:
                    continue  # being created: it is locked before it gets its size
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    path.unlink()
                    removed.append(path.name)
            finally:
                os.close(fd)
    return removed


class Segment:
    """A named segment. The creator owns the name, keeps it locked, and unlinks it on close."""

    def __init__(self, name: str, nbytes: int | None = None) -> None:
        """Creates the segment with `nbytes` zero bytes, or opens it when `nbytes` is None.

        Raises TransportError if the name is malformed, taken, missing, or memory is short.
        """
        if not _NAME.fullmatch(name):
            raise TransportError(f"segment name {name!r} does not match {_NAME.pattern}")
        self.name, self._owner = name, nbytes is not None
        path = SHM_DIR / name
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if self._owner else 0)
        try:
            fd = os.open(path, flags, 0o600)
        except OSError as e:
            raise TransportError(f"shared memory segment {name}: {e.strerror}") from e
        try:
            if nbytes is not None:
                # Held until the process ends, as the mapping keeps a duplicate of fd. See remove_dead_segments.
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Reserves the pages now: a full /dev/shm is an error here instead of a SIGBUS later.
                os.posix_fallocate(fd, 0, nbytes)
            self.nbytes = os.fstat(fd).st_size
            self.buffer = mmap.mmap(fd, self.nbytes)
        except (OSError, ValueError) as e:
            if self._owner:
                path.unlink(missing_ok=True)
            raise TransportError(f"shared memory segment {name} of {nbytes} bytes: {e}") from e
        finally:
            os.close(fd)
        self.address = int(np.frombuffer(self.buffer, np.uint8).ctypes.data)

    def close(self) -> None:
        """Unlinks an owned name. The mapping itself goes with the last array over it."""
        if self._owner:
            (SHM_DIR / self.name).unlink(missing_ok=True)
            self._owner = False


class ShmTransport:
    """Transport over `nbytes` bytes of a segment from `base`: transfers complete when they are posted.

    Aligned 8-byte writes are release stores and aligned 8-byte reads acquire loads, so payload written before a word
    is visible to whoever acquires that word, on any processor.
    """

    def __init__(self, segment: Segment, base: int, nbytes: int) -> None:
        if base < 0 or nbytes < 0 or base + nbytes > segment.nbytes:
            raise TransportError(f"ring of {nbytes} bytes at {base} outside segment of {segment.nbytes} bytes")
        if base % 8:
            raise TransportError(f"ring at {base} is not aligned to 8 bytes")
        self._segment, self._nbytes = segment, nbytes
        self._address = segment.address + base
        self._view = memoryview(segment.buffer)[base : base + nbytes]
        self._lock = threading.Lock()  # submitters and the polling thread post at once
        self._work = 0
        self._fetched: dict[int, bytes] = {}

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def _check(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self._nbytes:
            raise TransportError(f"transfer of {nbytes} bytes at {offset} outside ring of {self._nbytes} bytes")

    def _next_work(self) -> int:
        with self._lock:
            self._work += 1
            return self._work

    def post_write(self, offset: int, data: Data) -> int:
        raw = memoryview(data).cast("B")
        self._check(offset, len(raw))
        if len(raw) == 8 and offset % 8 == 0:
            _native.store_release(self._address + offset, int.from_bytes(raw, "little"))
        else:
            self._view[offset : offset + len(raw)] = raw
        return self._next_work()

    def post_read(self, offset: int, nbytes: int) -> int:
        self._check(offset, nbytes)
        work = self._next_work()
        if nbytes == 8 and offset % 8 == 0:
            self._fetched[work] = _native.load_acquire(self._address + offset).to_bytes(8, "little")
        else:
            self._fetched[work] = bytes(self._view[offset : offset + nbytes])
        return work

    def wait(self, work: int, deadline: float) -> bytes:
        if not 0 < work <= self._work:
            raise TransportError(f"work id {work} was never posted (last is {self._work})")
        return self._fetched.pop(work, b"")

    def wait_word(self, offset: int, old: int, timeout: float) -> int:
        self._check(offset, 8)
        if offset % 8:
            raise TransportError(f"word at {offset} is not aligned to 8 bytes")
        return int(_native.wait_word(self._address + offset, old, max(0, int(timeout * 1e6))))

    def close(self) -> None:
        self._fetched.clear()
