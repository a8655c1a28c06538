"""The host's part of the GPU's KV sanitizer, with the kernels' part played here; needs no GPU."""

from __future__ import annotations

import json
import threading
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
from tests.waiting import DEADLINE_S, until

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
    until(lambda: _native.load_acquire(reporter.memory.told + 8 * REPORTS) == number, "not taken")


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


def test_report_that_cannot_be_told_is_taken(
    reporter: KvReporter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: a broken record that ends the thread, so that every later step with a report waits until it is overdue;
    the reports behind it lost."""
    records(reporter)["page_owner"] = -1
    records(reporter)["kind"][0] = 99
    offer(reporter, 2)
    assert len(Path(reporter.info.reports).read_text().splitlines()) == 1
    assert any("report 0 cannot be told" in r.getMessage() for r in caplog.records)

    def fails(*_: object) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(reporter._file, "add", fails)
        offer(reporter, 3)
    offer(reporter, 4)
    assert len(Path(reporter.info.reports).read_text().splitlines()) == 2


def test_close_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Catches: an engine that does not end because its reports cannot be written; memory taken from under the thread
    that still writes them."""
    monkeypatch.setattr("blink_core.runtime.cuda_sanitizer.CLOSE_S", 0.1)
    closed: list[OwnedMemory] = []
    made = KvReporter(tmp_path / "r.jsonl", SLOTS, lambda memory: SimpleNamespace(close=lambda: closed.append(memory)))
    writing, goes_on = threading.Event(), threading.Event()

    def stuck(*_: object) -> None:
        writing.set()
        assert goes_on.wait(DEADLINE_S)

    monkeypatch.setattr(made._file, "add", stuck)
    records(made)["page_owner"] = -1
    _native.store_release(made.memory.offered, 1)
    assert writing.wait(DEADLINE_S)
    closing = threading.Thread(target=made.close, daemon=True)
    closing.start()
    try:
        closing.join(DEADLINE_S / 2)
        assert not closing.is_alive(), "close waits for the disk"
        assert closed == []
        assert any("have not been written within 0.1 s" in r.getMessage() for r in caplog.records)
    finally:
        goes_on.set()
    made._thread.join(DEADLINE_S)
    made.close()
    assert len(closed) == 3
