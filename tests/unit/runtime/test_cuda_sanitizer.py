"""The host's part of the GPU's KV sanitizer, with the kernels' part played here; needs no GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blink_core import _native
from blink_core.runtime.cuda_sanitizer import KvReporter
from blink_core.runtime.descriptor import KV_COUNTERS
from blink_core.runtime.kv_report import MAX_REPORTS, REPORT_RECORD, Mismatch
from blink_core.runtime.memory import OwnedMemory

SLOTS = 8
REPORTS = KV_COUNTERS.index("reports")


@pytest.fixture
def reporter(tmp_path: Path) -> Iterator[KvReporter]:
    made = KvReporter(tmp_path / "kv-sanitizer.jsonl", SLOTS, lambda memory: SimpleNamespace(close=lambda: None))
    yield made
    made.close()


def records(reporter: KvReporter) -> Any:
    memory: OwnedMemory = reporter._reports
    return np.frombuffer(memory.buffer, REPORT_RECORD, MAX_REPORTS)


def offer(reporter: KvReporter, number: int) -> None:
    """As kv_tags_end does, which waits until the host has taken them."""
    _native.store_release(reporter.memory.offered, number)
    deadline = time.monotonic() + 20.0
    while _native.load_acquire(reporter.memory.told + 8 * REPORTS) != number:
        assert time.monotonic() < deadline, "not taken within 20 s"


def test_taken_reports_are_in_the_file(reporter: KvReporter, caplog: pytest.LogCaptureFixture) -> None:
    """Catches: a count that is told before its line is written, a report lost, told twice, or read from another's
    place; one that the engine's log does not have."""
    file = Path(reporter.info.reports)
    assert file.read_bytes() == b""
    for made, (kind, position) in enumerate(((Mismatch.FOREIGN, 16), (Mismatch.TAKEN, 33)), 1):
        raw = records(reporter)[made - 1 : made]
        raw["kind"], raw["reader"], raw["reader_position"] = list(Mismatch).index(kind), SLOTS + 3, position
        raw["writer"], raw["page_owner"] = 0, -1
        offer(reporter, made)
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(lines) == made
        assert (lines[-1]["kind"], lines[-1]["reader"]["ring"], lines[-1]["reader"]["slot"]) == (kind, 1, 3)
        assert (lines[-1]["reader"]["position"], lines[-1]["writer"]) == (position, None)
    assert sum("KV sanitizer: " in record.getMessage() for record in caplog.records) == 2


def test_reports_have_an_end(reporter: KvReporter, caplog: pytest.LogCaptureFixture) -> None:
    """Catches: a read beyond the records when more are counted than there is room for; a file without an end."""
    records(reporter)["page_owner"] = -1
    for number in (MAX_REPORTS - 1, MAX_REPORTS + 7, MAX_REPORTS + 9):
        offer(reporter, number)
    assert len(Path(reporter.info.reports).read_text().splitlines()) == MAX_REPORTS
    told = [record.getMessage() for record in caplog.records]
    assert [t for t in told if "only counted" in t] == [told[-1]]


def test_last_reports_are_taken_at_the_end(tmp_path: Path) -> None:
    """Catches: reports of the last step that go with the engine."""
    made = KvReporter(tmp_path / "r.jsonl", SLOTS, lambda memory: SimpleNamespace(close=lambda: None))
    made._stop.set()
    made._thread.join()
    records(made)["page_owner"] = -1
    _native.store_release(made.memory.offered, 1)
    made.close()
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 1
