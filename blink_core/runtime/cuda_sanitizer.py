"""The host's part of the GPU's KV sanitizer: takes the reports that steps offer, writes them down, and says so."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from blink_core import _native
from blink_core.ops.kv_tags_abi import KvHostMemory
from blink_core.runtime.capture_writer import Closable
from blink_core.runtime.descriptor import KV_COUNTERS, Memory, SanitizerInfo
from blink_core.runtime.kv_report import MAX_REPORTS, REPORT_RECORD, KvReport, ReportFile
from blink_core.runtime.memory import OwnedMemory

log = logging.getLogger("blink.kv_sanitizer")

LOOK_US = 100_000  # between two looks at whether to stop
CLOSE_S = 10.0  # for the reports under way


class KvReporter:
    """Reports and counters of one engine: pinned memory that the kernels write, and the thread that reads it.

    A step whose reports have not been taken yet waits for this thread (`kv_tags_end`), so that a request never ends
    before its report is in the file, as on the host.
    """

    def __init__(self, path: Path, slots: int, pin: Callable[[OwnedMemory], Closable]) -> None:
        """path: file of one JSON object a line, each a `KvReport`. slots: of a ring. pin: `cuda_memory.Pinned`."""
        self._slots = slots
        self._reports = OwnedMemory("kv-reports", MAX_REPORTS * REPORT_RECORD.itemsize)
        self._counters = OwnedMemory("kv-sanitizer", 8 * len(KV_COUNTERS))
        self._words = OwnedMemory("kv-offered", 8)
        self._pinned = [pin(m) for m in (self._reports, self._counters, self._words)]
        self.memory = KvHostMemory(self._reports.address, self._counters.address, self._words.address, MAX_REPORTS)
        self._taken = self._counters.address + 8 * KV_COUNTERS.index("reports")
        path.touch()
        self._file = ReportFile(path)
        self._seen = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="blink-kv-reports", daemon=True)
        self._thread.start()

    @property
    def info(self) -> SanitizerInfo:
        """Where others find reports and counters."""
        return SanitizerInfo(str(self._file.path), Memory(self._counters.fd, self._counters.nbytes))

    def _run(self) -> None:
        while not self._stop.is_set():
            self._take(_native.wait_word(self.memory.offered, self._seen, LOOK_US))

    def _take(self, offered: int) -> None:
        if offered == self._seen:
            return
        records = np.frombuffer(self._reports.buffer, REPORT_RECORD, MAX_REPORTS)
        for number in range(self._seen, min(offered, MAX_REPORTS + 1)):
            # One more than there is room for: its number alone is told.
            try:
                report = KvReport.from_record(records[min(number, MAX_REPORTS - 1)], self._slots)
                self._file.add(report, number, MAX_REPORTS)
            except Exception:  # the step waits until they are taken: for one that cannot be told, for ever
                log.exception("KV sanitizer: report %d cannot be told", number)
        self._seen = offered
        _native.store_release(self._taken, offered)  # last: who reads the count finds the line

    def close(self) -> None:
        """Takes what is left and ends the thread; the steps have ended before. Idempotent."""
        self._stop.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():  # it has the file and the memory, until the process ends
            log.error("KV sanitizer: the reports have not been written within %g s", CLOSE_S)
            return
        self._take(_native.load_acquire(self.memory.offered))
        self._file.close()
        for pinned in self._pinned:
            pinned.close()
