"""Reads a running engine's raw memory for verification: scheduler state, event log and KV pages at step boundaries.

Nothing here asks the engine what it holds: the bytes are read as they lie, through read-only mappings.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from blink_core import _native
from blink_core.abi.config import EngineConfig
from blink_core.abi.definition import CONTROL_LINE, STATUS_LINE
from blink_core.abi.dtypes import Array
from blink_core.runtime.descriptor import EngineDescriptor
from blink_core.runtime.memory import MappedMemory
from blink_core.transport.shm import Segment

HOLD_LIMIT_S = 30.0  # of the scheduler's loop
_LOOK_S = 0.1  # how often a wait for a boundary looks whether the engine's process is still there

_CONTROL, _STATUS = CONTROL_LINE.offsets(), STATUS_LINE.offsets()


class EngineUnreachable(RuntimeError):
    """The engine did not answer in time, or its memory is gone."""


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """Copies of the scheduler's state at one step boundary; arrays have the dtypes of `abi.definition`.

    requests: Request[rings * slots]. running, free_list, quarantine: uint32, only the valid part. block_tables:
    uint32[max_rows, max_pages]. pages: Page[pages]. log: LogEntry[n], oldest first; log_lost: entries before the
    first of them, overwritten or not asked for. log_from: the entry asked for. buckets: int32[pages] and page_tokens:
    int32[pages, page_size], of the prefix cache. running_tokens: int32[len(running), max_len], the token pool's rows of
    the running requests.
    """

    config: EngineConfig
    header: Any
    rings: Array
    requests: Array
    running: Array
    block_tables: Array
    pages: Array
    free_list: Array
    quarantine: Array
    log: Array
    log_lost: int
    log_from: int = 0
    buckets: Array = field(default_factory=lambda: np.zeros(0, np.int32))
    page_tokens: Array = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    running_tokens: Array = field(default_factory=lambda: np.zeros((0, 0), np.int32))

    @property
    def log_gap(self) -> int:
        """Entries that were asked for and had been overwritten: what is read from the log then decides nothing."""
        return max(0, self.log_lost - self.log_from)


class EngineMemory:
    """Read access to one engine process, and holds at its step boundaries."""

    def __init__(self, descriptor: EngineDescriptor) -> None:
        """Raises EngineUnreachable when the process is gone."""
        self.descriptor, self.config = descriptor, descriptor.config
        self._layouts = descriptor.config.layouts()
        try:
            self._process = psutil.Process(descriptor.pid)
            self._segment = Segment(descriptor.segment)
            self._state = MappedMemory(descriptor.pid, descriptor.state.fd, self._layouts["State"].nbytes)
            self._log = MappedMemory(descriptor.pid, descriptor.log.fd, self._layouts["Log"].nbytes)
            kv = descriptor.kv
            self._kv = MappedMemory(descriptor.pid, kv.fd, kv.nbytes) if kv else None
        except Exception as e:
            raise EngineUnreachable(f"memory of engine process {descriptor.pid}: {e}") from e
        control = self._layouts["Control"].sections
        self._control = self._segment.address + control["control"].offset
        self._status = self._segment.address + control["status"].offset
        self._views = self._layouts["State"].views(self._state.buffer)
        self._entries = self._layouts["Log"].view(self._log.buffer, "entries")
        self._hold = threading.Lock()

    def status(self, field: str) -> int:
        """A word of the status line: state, pause_ack, steps, failures or heartbeat."""
        return _native.load_acquire(self._status + _STATUS[field])

    @contextmanager
    def hold(self, timeout: float = 20.0) -> Iterator[None]:
        """Holds the engine at a step boundary. Raises EngineUnreachable if none is reached in `timeout` s, or at once
        when the engine's process is gone.

        The engine goes on by itself after HOLD_LIMIT_S; a body that may have outlived its hold ends in
        EngineUnreachable too, for what it copied may be torn.
        """
        with self._hold:
            ticket = _native.load_acquire(self._control + _CONTROL["pause_request"]) + 1
            asked = time.monotonic()  # before the engine's own clock of this hold can have started
            _native.store_release(self._control + _CONTROL["pause_request"], ticket)
            deadline = time.monotonic() + timeout
            try:
                seen = self.status("pause_ack")
                while seen != ticket:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise EngineUnreachable(f"engine did not reach a step boundary within {timeout} s")
                    wait = int(min(left, _LOOK_S) * 1e6)
                    seen = _native.wait_word(self._status + _STATUS["pause_ack"], seen, wait)
                    if seen != ticket and self._gone():
                        raise EngineUnreachable(f"engine process {self.descriptor.pid} is gone")
                yield
                held = time.monotonic() - asked
                if held >= HOLD_LIMIT_S or self.status("pause_ack") != ticket:
                    raise EngineUnreachable(
                        f"hold of {held:.1f} s; the engine goes on after {HOLD_LIMIT_S:.0f}: what was read may be torn"
                    )
            finally:
                _native.store_release(self._control + _CONTROL["pause_release"], ticket)

    def _gone(self) -> bool:
        """Whether the engine's process has ended; a zombie, which nobody has waited for yet, has."""
        try:
            return not self._process.is_running() or self._process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:  # it cannot be told now: the deadline decides
            return False

    def log_tail(self) -> int:
        """Entries that the event log has had so far. On a running engine the newest may still be being written."""
        return int(self._views["header"]["log_tail"][0])

    def ring_states(self) -> Array:
        """Copy of the scheduler's record of each ring: RingState[rings]."""
        rings: Array = self._views["rings"].copy()
        return rings

    def log_entries(self, first: int, last: int) -> Array:
        """Copies the entries `first` to `last - 1` of the log: LogEntry[n], as they lie now (see `log_tail`)."""
        entries: Array = self._entries[np.arange(first, last) & (self.config.log_entries - 1)]
        return entries

    def payload(self, ring: int, slot: int, generation: int, prompt_len: int, n_bias: int) -> Array | None:
        """Prompt and logit bias of an accepted request as the engine keeps them: uint32[prompt_len + 2 n_bias].

        None if the slot's request in engine memory is of another generation by now, or the lengths exceed the engine's.
        """
        c, v = self.config, self._views
        index = ring * c.slots + slot
        if prompt_len > c.max_len or n_bias > c.max_bias or int(v["requests"]["generation"][index]) != generation:
            return None
        tokens = v["tokens"][index * c.max_len :][:prompt_len].view(np.uint32)
        bias = np.frombuffer(v["bias"][index * c.max_bias :][:n_bias].tobytes(), np.uint32)
        words = np.concatenate([tokens, bias])
        return words if int(v["requests"]["generation"][index]) == generation else None

    def ring_views(self, ring: int) -> dict[str, Array]:
        """Arrays over one ring's shared memory, which front ends go on writing."""
        base = self._layouts["Control"].nbytes + ring * self._layouts["Ring"].nbytes
        return self._layouts["Ring"].views(memoryview(self._segment.buffer).toreadonly(), base)

    def snapshot(self, log_from: int = 0) -> StateSnapshot:
        """Copies the state, and the log from entry `log_from` on. Call it under `hold`, or on an idle engine."""
        v = self._views
        header = v["header"][0].copy()
        running = v["running"][: int(header["running"])].copy()
        pool = v["tokens"].reshape(-1, self.config.max_len)
        tail, size = int(header["log_tail"]), self.config.log_entries
        first = min(tail, max(log_from, tail - size, 0))
        return StateSnapshot(
            config=self.config,
            header=header,
            rings=v["rings"].copy(),
            requests=v["requests"].copy(),
            running=running,
            block_tables=v["block_tables"].reshape(self.config.max_rows, self.config.max_pages).copy(),
            pages=v["pages"].copy(),
            free_list=v["free_list"][: int(header["free_pages"])].copy(),
            quarantine=v["quarantine"][: int(header["quarantined"])].copy(),
            log=self._entries[np.arange(first, tail) & (size - 1)],
            log_lost=first,
            log_from=min(log_from, tail),
            buckets=v["buckets"].copy(),
            page_tokens=v["page_tokens"].reshape(self.config.pages, self.config.page_size).copy(),
            running_tokens=pool[np.minimum(running, len(pool) - 1)],  # an index beyond it is for the checker to find
        )

    def tokens(self, request: int, count: int) -> Array:
        """First `count` known tokens of a request: int32[count]."""
        return self._views["tokens"].reshape(-1, self.config.max_len)[request, :count].copy()

    def poisoned_pages(self) -> Array:
        """By page, whether its keys and values of all layers are NaN throughout: bool [pages]."""
        return np.asarray(np.isnan(self._pool()).all(axis=(0, 1, 3, 4, 5)))

    def _pool(self) -> Array:
        """float32 [2, layers, pages, page_size, kv_heads, head_dim], as it lies."""
        shape = self.descriptor.model.kv_shape
        if self._kv is None or shape is None:
            raise EngineUnreachable("this engine runs without a model: it has no KV pool")
        return np.frombuffer(self._kv.buffer, np.float32, int(np.prod(shape))).reshape(shape)

    def kv_rows(self, pages: Array, count: int) -> tuple[Array, Array]:
        """K and V of the first `count` positions of a block table: float32 [layers, count, kv_heads, head_dim] each."""
        pool, size = self._pool(), self.config.page_size
        used = pages[: -(-count // size)].astype(np.int64)
        both = pool[:, :, used].reshape(2, pool.shape[1], -1, *pool.shape[4:])[:, :, :count]
        return both[0].copy(), both[1].copy()
