"""`record`: follows the event log of a live engine into a trace file, without holding the engine.

A look takes only entries that were there at the look before, so that none is half written; entries that were
overwritten before they were read are a counted gap. Descriptors are copied from the ring as soon as their SQ_ENTRY is
seen; one whose slot already has another generation is left out, and `check` then says that it is missing.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from blink_core.abi.definition import SQ_OP_SHIFT
from blink_core.abi.dtypes import LOG_ENTRY, SLOT, Array
from blink_core.abi.enums import LogKind, LogLevel, Op
from hil_rigs.engine_memory import EngineMemory, EngineUnreachable
from verification.trace import snapshot
from verification.trace.format import Header, TraceWriter
from verification.trace.submission import capture_words

LOOK_S = 0.001
STOP_LIMIT_S = 30.0
LIMIT_BYTES = 1 << 30  # of entries; a recording ends there


class Recorder:
    """Records while inside `with`; `problem` says why it ended early, None if it did not."""

    def __init__(
        self,
        memory: EngineMemory,
        path: Path,
        header: Header,
        *,
        snapshot_every_s: float | None = None,
        limit_bytes: int = LIMIT_BYTES,
        look_s: float = LOOK_S,
    ) -> None:
        """Raises FileExistsError when `path` is there. snapshot_every_s: None takes no snapshots of raw state."""
        self.limit_bytes, self.look_s = limit_bytes, look_s
        self.memory, self.config = memory, memory.config
        self.writer = TraceWriter(path, header)
        self.payloads, self.snapshot_every_s = header.payloads, snapshot_every_s
        self.problem: str | None = None
        self.submissions_missed = self.snapshots = 0
        self._at = self._looked = self._settled = 0
        self._rings = [memory.ring_views(ring) for ring in range(self.config.rings)]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="blink-trace", daemon=True)

    @property
    def warning(self) -> str | None:
        """Why `check` will not be able to decide on this recording, known beforehand."""
        if self.config.log_level != LogLevel.ALL:
            level = LogLevel(self.config.log_level).name
            return f"the engine logs at level {level}: `check` needs {LogLevel.ALL.name} (engine option log_level 2)"
        if self.writer.lost:
            return f"{self.writer.lost} entries were overwritten before they were read"
        return None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def settle(self, limit_s: float = STOP_LIMIT_S) -> None:
        """Waits until every entry that is in the log now has been followed. Raises TimeoutError."""
        tail, deadline = self.memory.log_tail(), time.monotonic() + limit_s
        while self._at < tail and self.problem is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the recorder is at entry {self._at} of {tail} after {limit_s:.0f} s")
            self._stop.wait(self.look_s)

    def stop(self) -> None:
        """Takes what is there and ends the file. Raises TimeoutError when the recorder does not come to its end."""
        self._stop.set()
        self._thread.join(STOP_LIMIT_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the recorder did not end within {STOP_LIMIT_S:.0f} s")

    def _follow(self) -> None:
        due = time.monotonic() + (self.snapshot_every_s or 0.0)
        try:
            while not self._stop.wait(self.look_s):
                self._look()
                if self.writer.entries * LOG_ENTRY.itemsize > self.limit_bytes:
                    self.problem = f"the recording reached its limit of {self.limit_bytes} bytes"
                    return self.writer.close()
                if self.snapshot_every_s is not None and time.monotonic() >= due:
                    self._snapshot()
                    due = time.monotonic() + self.snapshot_every_s
            self._look()
            time.sleep(LOOK_S)
            self._look()
            self.writer.end("stopped")
        except Exception as e:  # shown by whoever waits for the recorder
            self.problem = f"{type(e).__name__}: {e}"
            self.writer.close()

    def _look(self) -> None:
        tail = self.memory.log_tail()
        self._descriptors(self._looked, tail)
        settled, self._looked = self._looked, tail
        self._take(settled)

    def _take(self, until: int) -> None:
        """Writes the entries up to `until`, as far as they are still there."""
        if until <= self._at:
            return
        got = self.memory.log_entries(self._at, until)
        oldest = self.memory.log_tail() - self.config.log_entries + 1  # the entry before may be being overwritten
        if oldest > self._at:
            lost = min(oldest, until) - self._at
            self.writer.gap(self._at, lost)
            got, self._at = got[lost:], self._at + lost
        if len(got):
            self.writer.log(self._at, got)
        self._at = until

    def _descriptors(self, first: int, last: int) -> None:
        first = max(first, last - self.config.log_entries + 1)
        if first >= last:
            return
        new = self.memory.log_entries(first, last)
        words = new["a"].astype("u8") | new["b"].astype("u8") << 32
        submits = (new["kind"] == LogKind.SQ_ENTRY) & ((words >> SQ_OP_SHIFT & 15) == int(Op.SUBMIT))
        for n in submits.nonzero()[0]:
            entry = new[n]
            if int(entry["slot"]) < self.config.slots and int(entry["ring"]) < self.config.rings:
                self._descriptor(first + int(n), entry)

    def _descriptor(self, index: int, entry: Array) -> None:
        views, slot = self._rings[int(entry["ring"])], int(entry["slot"])
        size = SLOT.itemsize
        raw = views["slots"].view("u1")[slot * size : (slot + 1) * size].tobytes()
        record = np.frombuffer(raw, SLOT)[0]
        size_of = int(record["prompt_len"]), int(record["n_bias"])
        words = self.memory.payload(int(entry["ring"]), slot, int(entry["generation"]), *size_of)
        index_of = index, int(entry["c"])
        made = capture_words(*index_of, raw, words, payloads=self.payloads, exact=False)
        if made.generation != int(entry["generation"]):
            self.submissions_missed += 1
            return
        self.writer.submission(made)

    def _snapshot(self) -> None:
        try:
            with self.memory.hold():
                self._look()
                self._look()  # nothing is being written now
                self.writer.snapshot(self._at, snapshot.summary(self.memory.snapshot(self._at)))
            self.snapshots += 1
        except EngineUnreachable as e:
            self.problem = f"no snapshot: {e}"
            self.snapshot_every_s = None
