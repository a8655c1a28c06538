"""Follows the engines that a run starts and hands what their logs show to the test that runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from blink_core.abi.capture import record_dtype
from blink_core.abi.enums import LogLevel
from hil_rigs.engine_memory import EngineMemory, EngineUnreachable
from verification.situations.observe import Key, LogObserver

if TYPE_CHECKING:
    from hil_rigs.local import LocalRig

HOLD_S = 2.0  # a healthy engine reaches a boundary in milliseconds


class EngineWatch:
    """One rig's engine, and after a restart the next one. `collect` is called after each program and each test."""

    def __init__(self, name: str, rig: LocalRig) -> None:
        self.name, self._rig = name, rig
        self._memory: EngineMemory | None = None
        self._observer: LogObserver | None = None
        self._seen = 0
        self._captured = 0
        self._laps: list[tuple[int, int]] = []
        self.counts: Counter[str] = Counter()
        self.unread = 0  # log entries that were overwritten before they were looked at

    def collect(self) -> None:
        """Reads what the log has had since the last call. A rig that is down has nothing new; no error is raised for an
        engine that died or does not answer: its memory is read as it lies."""
        if self._rig.run_dir is None:
            return
        memory = self._rig.memory
        if memory is not self._memory:
            self._memory, self._observer, self._seen, self._captured, self._laps = memory, None, 0, 0, []
        if memory.config.log_level < LogLevel.ALL or memory.log_tail() == self._seen:
            return
        observer = self._observer = self._observer or LogObserver(memory.config)
        try:
            with memory.hold(HOLD_S):
                entries, laps = self._read(memory, memory.log_tail())
        except EngineUnreachable:
            entries, laps = self._read(memory, memory.log_tail() - 1)  # the last one may be half written
        observer.feed(entries)
        if self._laps:
            observer.counts["cq-wrap"] += sum(
                now - was for (epoch, was), (same, now) in zip(self._laps, laps, strict=True) if epoch == same
            )
        self._laps = laps
        self._look_up_cancelled(memory, observer)
        self.counts += observer.take()

    def take(self) -> Counter[str]:
        """What was seen since the last call of `take`."""
        counts, self.counts = self.counts, Counter()
        return counts

    def _read(self, memory: EngineMemory, tail: int) -> tuple[list[tuple[int, ...]], list[tuple[int, int]]]:
        first = max(self._seen, tail - memory.config.log_entries)
        if first > self._seen:
            self.unread += first - self._seen
            assert self._observer is not None
            self._observer.gap()
        entries = memory.log_entries(first, tail).tolist() if tail > first else []
        self._seen = max(self._seen, tail)
        rings = memory.ring_states()
        return entries, [(int(r["epoch"]), int(r["cq_tail"]) // memory.config.cq_entries) for r in rings]

    def _look_up_cancelled(self, memory: EngineMemory, observer: LogObserver) -> None:
        """Among captured tokens: did the step that a cancel overtook sample an end-of-sequence id?"""
        cancelled, observer.cancelled = observer.cancelled, {}
        path = memory.descriptor.capture
        if path is None or not Path(path).is_file():
            return
        dtype = record_dtype(memory.descriptor.model.vocab_size)
        count = Path(path).stat().st_size // dtype.itemsize
        first, self._captured = self._captured, count
        if not cancelled or count <= first:
            return
        records = np.memmap(path, dtype, "r", first * dtype.itemsize, (count - first,))
        columns = [records[name].tolist() for name in ("ring", "slot", "generation", "position", "token")]
        sampled = {
            (ring, slot, generation, at): token for ring, slot, generation, at, token in zip(*columns, strict=True)
        }
        key: Key
        for key, position in cancelled.items():
            observer.counts["cancel-at-eos-step"] += sampled.get((*key, position)) in memory.config.eos_ids
