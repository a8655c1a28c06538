"""Takes the logits that steps offer in pinned memory to the capture file."""

from __future__ import annotations

import threading
from pathlib import Path

from blink_core import _native
from blink_core.abi.capture import record_dtype
from blink_core.runtime.cuda_memory import Pinned
from blink_core.runtime.cuda_step import CaptureMemory
from blink_core.runtime.memory import OwnedMemory


class CaptureWriter:
    """Takes the logits that steps offer and appends them to the capture file (`abi.capture`), on a thread."""

    def __init__(self, path: Path, vocab: int, rows: int) -> None:
        self._bytes = record_dtype(vocab).itemsize
        self._records = OwnedMemory("capture", rows * self._bytes)
        self._words = OwnedMemory("capture-words", 16)
        self._pinned = [Pinned(self._records), Pinned(self._words)]
        self.memory = CaptureMemory(self._records.address, self._words.address, self._words.address + 8)
        self._file = path.open("wb", buffering=0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="blink-capture", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        seen = 0
        while not self._stop.is_set():
            offer = _native.wait_word(self.memory.offered, seen, 100_000)
            if offer == seen:
                continue
            self._file.write(self._records.buffer[: (offer & 0xFFFFFFFF) * self._bytes])
            _native.store_release(self.memory.taken, offer >> 32)
            seen = offer

    def close(self) -> None:
        """Ends the thread; the steps have ended before."""
        self._stop.set()
        self._thread.join()
        self._file.close()
        for pinned in self._pinned:
            pinned.close()
