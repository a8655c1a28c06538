"""The host's part of the GPU's logits capture, with the kernels' part played here; needs no GPU."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blink_core import _native
from blink_core.abi.capture import record_dtype
from blink_core.runtime import capture_writer
from blink_core.runtime.capture_writer import CaptureWriter
from blink_core.runtime.memory import OwnedMemory
from tests.waiting import DEADLINE_S, until

VOCAB, ROWS = 7, 4
RECORD = record_dtype(VOCAB)


def writer(path: Path, closed: list[OwnedMemory] | None = None) -> CaptureWriter:
    def pin(memory: OwnedMemory) -> Any:
        return SimpleNamespace(close=lambda: None if closed is None else closed.append(memory))

    return CaptureWriter(path, VOCAB, ROWS, pin)


def offer(made: CaptureWriter, step: int, rows: int) -> None:
    """As step_end does, but for the wait until they are taken."""
    made._records.array(RECORD, (ROWS,))["step"] = step
    _native.store_release(made.memory.offered, step << 32 | rows)


def taken(made: CaptureWriter, step: int) -> None:
    until(lambda: _native.load_acquire(made.memory.taken) == step, f"step {step} not taken")


class Disk:
    """A capture file with room for `room` bytes, which takes at most 100 at a time."""

    def __init__(self, file: Any, room: int, before: Callable[[], object] = lambda: None) -> None:
        self._file, self.room, self._before = file, room, before

    def write(self, data: Any) -> int:
        self._before()
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = bytes(data)[: min(self.room, 100)]
        self.room -= len(part)
        return int(self._file.write(part))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_records_are_written_before_they_are_taken(tmp_path: Path) -> None:
    """Catches: logits lost, or a step that overwrites those of the one before it; a write that takes a part of them
    taken for whole."""
    made = writer(tmp_path / "c.bin")
    made._file = Disk(made._file, 1 << 20)  # type: ignore[assignment]
    for step, rows in ((1, 2), (2, 4), (3, 1)):
        offer(made, step, rows)
        taken(made, step)
        assert np.fromfile(tmp_path / "c.bin", RECORD)["step"][-rows:].tolist() == [step] * rows
    made.close()
    assert np.fromfile(tmp_path / "c.bin", RECORD)["step"].tolist() == [1] * 2 + [2] * 4 + [3]


def test_full_disk_ends_the_file_and_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches: a disk that fills up and ends the thread, so that the next step waits until it is overdue and ends the
    engine; a part of a record in the file, which makes it unreadable; the same line in the log for every step."""
    made = writer(tmp_path / "c.bin")
    made._file = Disk(made._file, 5 * RECORD.itemsize + 11)  # type: ignore[assignment]
    for step in range(1, 6):
        offer(made, step, 2)
        taken(made, step)
    made.close()
    assert np.fromfile(tmp_path / "c.bin", np.uint8).size == 4 * RECORD.itemsize
    assert np.fromfile(tmp_path / "c.bin", RECORD)["step"].tolist() == [1, 1, 2, 2]
    told = [r.getMessage() for r in caplog.records if "no logits are written" in r.getMessage()]
    assert len(told) == 1
    assert "No space left" in told[0]


def test_close_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Catches: an engine that does not end because its disk does not answer; memory or file taken from under the thread
    that still writes."""
    monkeypatch.setattr(capture_writer, "CLOSE_S", 0.1)
    closed: list[OwnedMemory] = []
    made = writer(tmp_path / "c.bin", closed)
    writing, goes_on = threading.Event(), threading.Event()

    def stuck() -> None:
        writing.set()
        assert goes_on.wait(DEADLINE_S)

    made._file = Disk(made._file, 1 << 20, stuck)  # type: ignore[assignment]
    offer(made, 1, 1)
    assert writing.wait(DEADLINE_S)
    closing = threading.Thread(target=made.close, daemon=True)
    closing.start()
    try:
        closing.join(DEADLINE_S / 2)
        assert not closing.is_alive(), "close waits for the disk"
        assert (closed, made._file.closed) == ([], False)
        assert any("have not been written" in r.getMessage() for r in caplog.records)
    finally:
        goes_on.set()
    made._thread.join(DEADLINE_S)
    made.close()
    assert (len(closed), made._file.closed) == (2, True)
    assert np.fromfile(tmp_path / "c.bin", RECORD)["step"].tolist() == [1]
