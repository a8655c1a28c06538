"""The one-sided interface every transport implements: post writes and reads, await completions by a deadline.

Semantics are those of one reliable-connected queue pair: writes become visible in the order they were posted, an
aligned 8-byte write is seen whole or not at all, a read posted after the completion of another sees memory no older.
"""

from __future__ import annotations

import time
from typing import Protocol

Data = bytes | bytearray | memoryview


class TransportError(Exception):
    """A transfer failed; the ring may be out of reach."""


class TransportTimeout(TransportError):
    """No completion before the deadline; says which transfer was awaited."""


def deadline_after(seconds: float) -> float:
    """A deadline for `wait`: `seconds` from now on the monotonic clock."""
    return time.monotonic() + seconds


class Transport(Protocol):
    """Access to one ring's memory, addressed by byte offset."""

    @property
    def nbytes(self) -> int:
        """Bytes reachable."""

    def post_write(self, offset: int, data: Data) -> int:
        """Posts a write; returns its work id. Raises TransportError outside the ring."""

    def post_read(self, offset: int, nbytes: int) -> int:
        """Posts a read; returns its work id. Raises TransportError outside the ring."""

    def wait(self, work: int, deadline: float) -> bytes:
        """Awaits completion of `work` and of all posted before it; returns what a read fetched, b'' for a write.

        `deadline` is on `time.monotonic`. Raises TransportTimeout if it passes first, or TransportError if `work` or a
        transfer before it that nobody has awaited failed. May be called from several threads at once.
        """

    def wait_word(self, offset: int, old: int, timeout: float) -> int:
        """Reads the 8-byte word until it differs from `old` or `timeout` s have passed; returns the last value."""

    def close(self) -> None:
        """Gives the mapping back. Idempotent."""
