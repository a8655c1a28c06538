"""The watchdog of the gpu rig's engine, and what it reads: recordings of Xid errors, hearts, failures."""

from __future__ import annotations

import errno
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blink_core.runtime.engine_health import FILE, MOST_NOTICES, HealthReader, HealthWriter
from blink_core.runtime.gpu_events import (
    FATAL_XIDS,
    EventError,
    EventSource,
    GpuEvent,
    GpuLost,
    NvmlEvents,
    RecordedEvents,
)
from blink_core.runtime.watchdog import RECORDING, NoEvents, Watchdog
from tests.waiting import DEADLINE_S, until

GPU = "0000:01:00.0"


class Beats:
    """A heart that beats at each look until it is told to stand still."""

    def __init__(self) -> None:
        self.count, self.still, self.looks = 0, False, 0

    def __call__(self) -> int | None:
        self.looks += 1
        self.count += not self.still
        return self.count


@contextmanager
def watching(
    folder: Path,
    source: Callable[[], EventSource] = NoEvents,
    heart: Callable[[], int | None] | None = None,
    failure: Callable[[], str | None] = lambda: None,
    limit_s: float = 3600.0,
) -> Iterator[tuple[Watchdog, list[str]]]:
    lost: list[str] = []
    dog = Watchdog(
        folder, source, heartbeat=heart or Beats(), failure=failure, heartbeat_limit_s=limit_s, on_lost=lost.append
    )
    try:
        yield dog, lost
    finally:
        dog.close()


def recording(folder: Path, *events: GpuEvent) -> Path:
    path = folder / "recording.jsonl"
    path.write_text("".join(e.to_json() + "\n" for e in events))
    return path


def test_fatal_xid_ends_the_engine_once_with_its_reason(tmp_path: Path) -> None:
    """Catches: an Xid after which nothing runs that is passed over, told twice, or told without its number; one of
    another process's work that ends the engine."""
    events = [GpuEvent(GPU, 31, 0.0), GpuEvent(GPU, 79, 0.05), GpuEvent(GPU, 48, 0.1)]
    path = recording(tmp_path, *events)
    with watching(tmp_path, lambda: RecordedEvents(path)) as (dog, lost):
        until(lambda: lost)
    health = HealthReader(tmp_path).read()
    assert lost == [dog.lost] == ["Xid 79 of GPU 0000:01:00.0: the GPU has fallen off the bus"]
    assert health.failure is not None
    assert (health.failure.kind, health.failure.reason) == ("xid", lost[0])
    assert [n.reason for n in health.notices] == [f"Xid 31 of GPU {GPU}: memory page fault"]
    assert "Xid 79" in health.detail
    assert "Xid 31" in health.detail


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 63, 64, 69, 74, 92, 94, 154, 999])
def test_xids_of_anybodys_work_end_no_engine(xid: int, tmp_path: Path) -> None:
    """Catches: an engine that ends for a fault of another process on its GPU, which NVML does not tell apart from its
    own; an Xid that nobody knows taken for a loss; one that is not noted; a watch that is over after it."""
    path = recording(tmp_path, *[GpuEvent(GPU, xid, 0.0)] * 3)
    heart = Beats()
    with watching(tmp_path, lambda: RecordedEvents(path), heart, limit_s=0.5) as (dog, lost):
        until(lambda: HealthReader(tmp_path).read().noticed == 3)
        looks = heart.looks
        until(lambda: heart.looks > looks + 2)
        assert (lost, dog.lost, HealthReader(tmp_path).read().failure) == ([], None, None)
        heart.still = True  # the engine's own fault: nothing runs any more, and that is what ends it
        until(lambda: lost)
    health = HealthReader(tmp_path).read()
    assert health.failure is not None
    assert (health.failure.kind, lost) == ("heartbeat", ["the scheduler's heart stood still for 0.5 s"])
    assert {(n.kind, n.reason.startswith(f"Xid {xid} of GPU {GPU}")) for n in health.notices} == {("xid", True)}
    assert len((tmp_path / RECORDING).read_text().splitlines()) == 3


@pytest.mark.parametrize("xid", [46, 48, 61, 62, 79, 95, 119, 120, 140])
def test_xids_after_which_nothing_runs_end_the_engine(xid: int, tmp_path: Path) -> None:
    """Catches: a number that has left the list, so that an engine on a dead GPU waits for its heart to be missed."""
    path = recording(tmp_path, GpuEvent(GPU, 31, 0.0), GpuEvent(GPU, xid, 0.0))
    with watching(tmp_path, lambda: RecordedEvents(path)) as (_, lost):
        until(lambda: lost)
    assert lost == [f"Xid {xid} of GPU {GPU}: {FATAL_XIDS[xid]}"]
    assert len(FATAL_XIDS) == 9  # one that is added is tried here too


def test_what_was_seen_can_be_replayed(tmp_path: Path) -> None:
    """Catches: a recording that an engine wrote and that no engine reads, or that says something else."""
    events = [GpuEvent(GPU, 13, 0.0), GpuEvent(GPU, 79, 0.01)]
    path = recording(tmp_path, *events)
    with watching(tmp_path, lambda: RecordedEvents(path)) as (_, lost):
        until(lambda: lost)
    again = RecordedEvents(tmp_path / RECORDING)
    assert [again.wait(5.0), again.wait(5.0), again.wait(0.0)] == [*events, None]


def test_heart_that_stands_still_is_a_loss(tmp_path: Path) -> None:
    """Catches: a step that never ends and leaves nobody on the GPU to say so; a heart that need not beat, of an engine
    that has stopped, taken for one."""
    heart = Beats()
    heart.still = True
    with watching(tmp_path, heart=heart, limit_s=0.3) as (_, lost):
        until(lambda: lost)
    assert lost == ["the scheduler's heart stood still for 0.3 s"]
    looks = 0

    def stopped() -> int | None:
        nonlocal looks
        looks += 1
        return None

    with watching(tmp_path / "..", heart=stopped, limit_s=0.01) as (dog, lost):
        until(lambda: looks > 2)
        assert (lost, dog.lost) == ([], None)


def test_pause_of_the_process_is_none_of_the_heart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: an engine process that was stopped for an hour and takes its scheduler for dead at the first look."""
    heart, now = Beats(), [time.monotonic()]
    heart.still = True
    with watching(tmp_path, heart=heart, limit_s=3.0) as (dog, lost):
        dog._stop.set()
        dog._thread.join(DEADLINE_S)
        monkeypatch.setattr("blink_core.runtime.watchdog.time.monotonic", lambda: now[0])
        dog.look(None)
        now[0] += 3600.0
        dog.look(None)
        assert lost == []
        for _ in range(5):
            now[0] += 0.9
            dog.look(None)
        assert lost != []


def test_failure_of_the_scheduler_is_told_and_the_first_one_stays(tmp_path: Path) -> None:
    """Catches: an overrun or a refused launch whose reason stays in a log; a later consequence told as the cause."""
    said = ["step 7 took longer than its limit"]
    with watching(tmp_path, failure=lambda: said[0]) as (dog, lost):
        reader = HealthReader(tmp_path)
        until(lambda: reader.read().failure)
        assert not dog.health.fail("lost", "the graph has ended")
        assert lost == []  # the engine says it itself, on the ring
    failure = reader.read().failure
    assert failure is not None
    assert (failure.kind, failure.reason) == ("scheduler", said[0])


def test_no_events_and_a_lost_nvml_are_told(tmp_path: Path) -> None:
    """Catches: Xid errors that nobody watches, without a word; a GPU that NVML no longer reaches taken for quiet."""

    def refused() -> EventSource:
        raise EventError("NVML does not start: Driver Not Loaded")

    heart = Beats()
    with watching(tmp_path, refused, heart):
        assert "not watched: NVML does not start" in HealthReader(tmp_path).read().detail
        until(lambda: heart.looks > 1)  # the rest is watched all the same

    class Gone(NoEvents):
        def wait(self, seconds: float) -> GpuEvent | None:
            raise GpuLost("NVML no longer reaches GPU 0: GPU is lost")

    with watching(tmp_path / "..", Gone) as (_, lost):
        until(lambda: lost)
    assert lost == ["NVML no longer reaches GPU 0: GPU is lost"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "line 1"),
        ('{"after_s": 1, "gpu": "g", "xid": 79}\n{"after_s": 0.5, "gpu": "g", "xid": 79}', "line 2"),
        ('{"after_s": 0, "gpu": "g", "xid": "often"}', "line 1"),
        ("nothing", "line 1"),
    ],
)
def test_recordings_that_do_not_hold_are_refused(text: str, words: str, tmp_path: Path) -> None:
    """Catches: a recording whose bad line is skipped, so that a replay shows less than was recorded."""
    (tmp_path / "r").write_text(text)
    with pytest.raises(EventError, match=words):
        RecordedEvents(tmp_path / "r")


def test_notices_are_bounded_and_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    """Catches: a file that grows with every event of a night; a reader that fails its front end on half a file."""
    writer, reader = HealthWriter(tmp_path), HealthReader(tmp_path)
    assert reader.read().detail == ""
    for i in range(MOST_NOTICES + 6):
        writer.note("xid", f"Xid {i}")
    health = reader.read()
    assert (len(health.notices), health.noticed) == (MOST_NOTICES, MOST_NOTICES + 6)
    assert f"({MOST_NOTICES + 6} in all)" in health.detail
    (tmp_path / FILE).write_text("{")
    assert reader.read() == health


def test_an_earlier_engine_of_the_same_folder_is_forgotten(tmp_path: Path) -> None:
    """Catches: yesterday's failure in health.json, for which front ends give today's engine up."""
    HealthWriter(tmp_path).fail("xid", "Xid 79 yesterday")
    HealthWriter(tmp_path)
    assert HealthReader(tmp_path).read().failure is None


@pytest.mark.parametrize("unwritable", [FILE, RECORDING, "both"])
def test_fatal_xid_is_told_without_files(
    unwritable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: a full disk that ends the watching thread before it has judged the event, so that an engine on a dead
    GPU waits for ever; a file that cannot be written, without a word."""

    def full(*paths: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if unwritable != RECORDING:
        monkeypatch.setattr(os, "replace", full)
    if unwritable != FILE:
        (tmp_path / RECORDING).mkdir()
    path = recording(tmp_path, GpuEvent(GPU, 31, 0.0), GpuEvent(GPU, 79, 0.01))
    with watching(tmp_path, lambda: RecordedEvents(path)) as (dog, lost):
        until(lambda: lost or not dog._thread.is_alive())
        assert lost == [dog.lost] == ["Xid 79 of GPU 0000:01:00.0: the GPU has fallen off the bus"]
        assert dog.health.failed == lost[0]
    for name in (FILE, RECORDING):
        told = any(r.levelno == logging.ERROR and f"{name} cannot be written" in r.getMessage() for r in caplog.records)
        assert told == (unwritable in (name, "both"))


class Nvml:
    """As pynvml, as far as events go. Answers of `nvmlEventSetWait_v2` come from `answers`; without one it times out,
    and a hanging one comes back when told."""

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(f"error {value}")
            self.value = value

    NVML_ERROR_TIMEOUT, NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED, NVML_ERROR_UNKNOWN = 10, 15, 16, 999
    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        self.answers: queue.SimpleQueue[int | SimpleNamespace] = queue.SimpleQueue()
        self.hanging, self.back = threading.Event(), threading.Event()
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append(name)

    def nvmlEventSetWait_v2(self, events: object, milliseconds: int) -> SimpleNamespace:
        if self.hanging.is_set():
            assert self.back.wait(DEADLINE_S)
        try:
            answer = self.answers.get(timeout=milliseconds / 1000)
        except queue.Empty:
            answer = self.NVML_ERROR_TIMEOUT
        if isinstance(answer, int):
            raise self.NVMLError(answer)
        return answer


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    fake = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.mark.parametrize("code", [Nvml.NVML_ERROR_GPU_IS_LOST, Nvml.NVML_ERROR_RESET_REQUIRED])
def test_nvml_tells_xids_and_the_loss_of_the_gpu(nvml: Nvml, code: int, tmp_path: Path) -> None:
    """Catches: an Xid or a lost GPU that the thread which waits for NVML keeps to itself."""
    nvml.answers.put(SimpleNamespace(eventType=8, eventData=31))
    nvml.answers.put(SimpleNamespace(eventType=1, eventData=79))  # no Xid
    nvml.answers.put(code)
    with watching(tmp_path, lambda: NvmlEvents(GPU)) as (_, lost):
        until(lambda: lost)
    assert lost == [f"NVML no longer reaches GPU {GPU}: error {code}"]
    health = HealthReader(tmp_path).read()
    assert [n.reason for n in health.notices] == [f"Xid 31 of GPU {GPU}: memory page fault"]
    assert nvml.calls[-2:] == ["nvmlEventSetFree", "nvmlShutdown"]


def test_other_errors_of_nvml_end_no_engine(nvml: Nvml, tmp_path: Path) -> None:
    """Catches: a healthy engine that ends for an error of NVML alone, or one that is noted again and again; a watch of
    heart and scheduler that ends with it."""
    nvml.answers.put(nvml.NVML_ERROR_UNKNOWN)
    heart, said = Beats(), [None, "step 7 took longer than its limit"]
    with watching(tmp_path, lambda: NvmlEvents(GPU), heart, lambda: said[0], limit_s=1.0) as (dog, lost):
        reader = HealthReader(tmp_path)
        until(lambda: reader.read().noticed or lost)
        assert (lost, dog.lost) == ([], None)
        assert "Xid errors are not watched: NVML gives no more Xid events" in reader.read().detail
        looks = heart.looks
        until(lambda: heart.looks > looks + 2)
        said.reverse()
        until(lambda: reader.read().failure)
        assert reader.read().noticed == 1
        heart.still = True
        until(lambda: lost)
    assert lost == ["the scheduler's heart stood still for 1 s"]


def test_nvml_that_hangs_hides_neither_heart_nor_failure(
    nvml: Nvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: a driver in trouble whose call does not come back, and the one thread that watches stuck in it; a close
    that waits for it for ever, or takes away what it still uses."""
    monkeypatch.setattr("blink_core.runtime.gpu_events.NVML_CLOSE_S", 0.1)
    nvml.hanging.set()
    heart = Beats()
    heart.still = True
    made: list[NvmlEvents] = []

    def source() -> EventSource:
        made.append(NvmlEvents(GPU))
        return made[0]

    try:
        with watching(tmp_path, source, heart, lambda: "step 7 failed", limit_s=0.3) as (_, lost):
            until(lambda: lost)
            failure = HealthReader(tmp_path).read().failure
            assert failure is not None
            assert failure.reason == "step 7 failed"
        assert any("NVML has not answered within 0.1 s" in r.getMessage() for r in caplog.records)
        assert "nvmlShutdown" not in nvml.calls
    finally:
        nvml.back.set()
    made[0]._thread.join(DEADLINE_S)
    assert "nvmlShutdown" in nvml.calls
