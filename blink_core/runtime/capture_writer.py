"""Takes the logits that steps offer in pinned memory to the capture file."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from blink_core import _native
from blink_core.abi.capture import record_dtype
from blink_core.runtime.memory import OwnedMemory

log = logging.getLogger("blink.capture")

LOOK_US = 100_000  # between two looks at whether to stop
CLOSE_S = 10.0  # for the write under way


class Closable(Protocol):
    """Memory registered with CUDA."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CaptureMemory:
    """Host memory of the logits capture: records [max_rows], offered and taken u64; see step_end.cu."""

    records: int
    offered: int
    taken: int


class CaptureWriter:
    """Takes the logits that steps offer and appends them to the capture file (`abi.capture`), on a thread.

    A step waits until they are taken, so they are taken whatever becomes of the file: one that cannot be written is
    logged and ends with its last whole step.
    """

    def __init__(self, path: Path, vocab: int, rows: int, pin: Callable[[OwnedMemory], Closable]) -> None:
        """rows: of a step, at most. pin: `cuda_memory.Pinned`. Raises OSError when the file cannot be opened."""
        self._path = path
        self._bytes = record_dtype(vocab).itemsize
        self._records = OwnedMemory("capture", rows * self._bytes)
        self._words = OwnedMemory("capture-words", 16)
        self._pinned = [pin(self._records), pin(self._words)]
        self.memory = CaptureMemory(self._records.address, self._words.address, self._words.address + 8)
        self._file = path.open("wb", buffering=0)
        self._written = 0
        self._broken = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="blink-capture", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        seen = 0
        while not self._stop.is_set():
            offer = _native.wait_word(self.memory.offered, seen, LOOK_US)
            if offer == seen:
                continue
            try:
                self._append((offer & 0xFFFFFFFF) * self._bytes)
            except Exception as error:
                self._give_up(error)
            finally:
                _native.store_release(self.memory.taken, offer >> 32)
            seen = offer

    def _append(self, nbytes: int) -> None:
        """The first bytes of the records. All of them, or an OSError: a disk that fills up takes a part."""
        if self._broken:
            return
        records = self._records.buffer[:nbytes]
        done = 0
        while done < nbytes:
            done += self._file.write(records[done:])
        self._written += nbytes

    def _give_up(self, error: Exception) -> None:
        self._broken = True
        log.error("capture: no logits are written to %s any more: %s", self._path, error)
        try:
            self._file.truncate(self._written)  # a part of a record would make the whole file unreadable
        except OSError as e:
            log.error("capture: %s ends with a part of a step: %s", self._path, e)

    def close(self) -> None:
        """Ends the thread; the steps have ended before."""
        self._stop.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():  # it has the file and the memory, until the process ends
            log.error("capture: the logits have not been written to %s within %g s", self._path, CLOSE_S)
            return
        self._file.close()
        for pinned in self._pinned:
            pinned.close()
