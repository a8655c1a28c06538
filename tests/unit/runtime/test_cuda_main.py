"""The engine process of the gpu rig, as far as it goes without a GPU."""

from __future__ import annotations

import errno
import importlib.util
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blink_core import _native
from blink_core.abi.config import EngineConfig
from blink_core.abi.definition import CONTROL_LINE
from blink_core.abi.params import SamplingParams
from blink_core.frontend.ring_client import RingClient
from blink_core.runtime import cuda_main
from blink_core.runtime.cpu import HOLD_LIMIT_S, CpuRuntime, Plan, noop_step
from blink_core.runtime.engine_health import HealthReader
from blink_core.runtime.gpu_events import GpuEvent
from blink_core.transport.shm import Segment, ShmTransport
from tests.waiting import DEADLINE_S, until

ARGUMENTS = ["--run-dir", "run", "--segment", "blink-x", "--slots", "16"]


def test_arguments_are_those_of_every_engine_and_its_own() -> None:
    """Catches: an option of the rig's description that the GPU's engine does not take, or takes for another's."""
    own, args = cuda_main.parse([*ARGUMENTS, "--dtype", "float32", "--launch", "host"])
    assert (own.dtype, own.launch, own.step_limit) == ("float32", "host", 30.0)
    assert (args.segment, args.slots) == ("blink-x", 16)


@pytest.mark.parametrize("wrong", [["--dtype", "float64"], ["--launch", "often"], ["--nothing"]])
def test_unknown_options_are_refused(wrong: list[str]) -> None:
    """Catches: a misspelt option that is passed over in silence."""
    with pytest.raises(SystemExit):
        cuda_main.parse([*ARGUMENTS, *wrong])


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_without_cupy_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a traceback where one line would say what to install."""
    assert cuda_main.main(ARGUMENTS) == 2
    assert "pip install" in capsys.readouterr().err


@contextmanager
def watched(folder: Path, step: Callable[[Plan], None], *limits: str) -> Iterator[tuple[CpuRuntime, RingClient]]:
    """A served runtime under the watchdog of a host-driven engine, and a client of it."""
    recording = folder / "none.jsonl"
    recording.touch()
    options = ["--run-dir", str(folder), "--segment", f"blink-hang-{os.getpid()}-{secrets.token_hex(4)}"]
    own, args = cuda_main.parse([*options, *limits, "--gpu-events", str(recording)])
    config = EngineConfig(vocab=251, slots=4, sq_entries=16, cq_entries=64, max_len=64, pages=18, max_rows=2)
    runtime = CpuRuntime(config, args.segment)
    serving = threading.Thread(target=runtime.serve, args=(step,))
    serving.start()
    watchdog = cuda_main.watch(own, args, runtime)
    try:
        layouts = config.layouts()
        transport = ShmTransport(Segment(runtime.segment.name), layouts["Control"].nbytes, layouts["Ring"].nbytes)
        client = RingClient(transport, config)
        client.attach(DEADLINE_S)
        yield runtime, client
    finally:
        watchdog.close()
        runtime.request_stop()
        serving.join(DEADLINE_S)
        runtime.close()


def submit(client: RingClient) -> None:
    client.submit(np.arange(3, dtype=np.int32), SamplingParams(max_tokens=2))


def ask(runtime: CpuRuntime, word: str, ticket: int) -> int:
    """Writes a word of the control line, as verification does from another process."""
    _native.store_release(runtime._control + CONTROL_LINE.offsets()[word], ticket)
    return ticket


def test_host_driven_step_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a step that hangs under the host's scheduler, whose heart beats on, so that streams wait for ever; an
    engine without a step taken for one that hangs."""
    monkeypatch.setattr(cuda_main, "HEARTBEAT_MARGIN_S", 0.3)
    ended, hung = threading.Event(), threading.Event()
    monkeypatch.setattr(os, "_exit", lambda status: ended.set())

    def step(plan: Plan) -> None:
        if hung.is_set():
            assert ended.wait(DEADLINE_S), "nobody ended the engine"
        noop_step(plan)

    with watched(tmp_path, step, "--step-limit", "0.2") as (_, client):
        try:
            assert not ended.wait(1.0)  # idle for twice the limit
            hung.set()
            submit(client)
            assert ended.wait(DEADLINE_S)
            failure = HealthReader(tmp_path).read().failure
            assert failure is not None
            assert failure.reason == "the step in flight stood still for 0.5 s"
        finally:
            ended.set()


def test_hold_is_no_step_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: an engine ended because verification holds it before a step, for longer than a step may take; a step
    that hangs after a hold and is not looked at."""
    monkeypatch.setattr(cuda_main, "HEARTBEAT_MARGIN_S", 0.1)
    ended, begun, goes_on = threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(os, "_exit", lambda status: ended.set())

    def step(plan: Plan) -> None:
        begun.set()
        assert goes_on.wait(DEADLINE_S)
        noop_step(plan)

    with watched(tmp_path, step, "--step-limit", "0.2") as (runtime, client):
        try:
            first = ask(runtime, "pause_request", runtime.status("pause_ack") + 1)
            until(lambda: runtime.status("pause_ack") == first)
            submit(client)
            # Held again behind the boundary that takes the request in: its step is in flight and does not begin.
            second = ask(runtime, "pause_request", first + 1)
            ask(runtime, "pause_release", first)
            until(lambda: runtime.status("pause_ack") == second)
            assert runtime.step_in_flight
            assert not begun.is_set()
            assert not ended.wait(1.5), "ended in a hold"
            ask(runtime, "pause_release", second)
            assert begun.wait(DEADLINE_S)
            assert ended.wait(DEADLINE_S), "not looked at after the hold"
        finally:
            goes_on.set()


def test_hold_without_release_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a holder that died without a release, after which a step that hangs is taken for a hold for ever."""
    now = [100.0]
    monkeypatch.setattr("blink_core.runtime.cuda_main.time.monotonic", lambda: now[0])
    runtime: Any = SimpleNamespace(step_in_flight=False, hold=3, status=lambda field: 7)
    heart = cuda_main.StepsOfHost(runtime)
    assert heart() is None
    runtime.step_in_flight = True
    assert heart() is None
    now[0] += HOLD_LIMIT_S - 1.0
    assert heart() is None
    now[0] += 2.0
    assert heart() == 7
    runtime.hold = 4
    assert heart() is None
    runtime.hold = 0
    assert heart() == 7


def test_end_of_a_lost_engine_needs_no_standard_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a process that stays, on a GPU that is lost, because its last line or its segment's name gives an
    error."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    recording = tmp_path / "events.jsonl"
    recording.write_text(GpuEvent("0000:01:00.0", 79, 0.0).to_json() + "\n")
    own, args = cuda_main.parse(["--run-dir", str(tmp_path), "--segment", "x", "--gpu-events", str(recording)])

    def refuse(*_: object) -> None:
        raise OSError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("blink_core.runtime.cuda_main.sys.stderr", SimpleNamespace(write=refuse, flush=refuse))
    runtime: Any = SimpleNamespace(status=lambda field: 0, segment=SimpleNamespace(close=refuse))
    watchdog = cuda_main.watch(own, args, runtime)
    watchdog._thread.join(DEADLINE_S)
    watchdog.close()
    assert ended == [cuda_main.EXIT_LOST]
