"""The engine process of the gpu rig, as far as it goes without a GPU."""

from __future__ import annotations

import importlib.util
import os
import secrets
import threading
from pathlib import Path

import numpy as np
import pytest

from blink_core.abi.config import EngineConfig
from blink_core.abi.params import SamplingParams
from blink_core.frontend.ring_client import RingClient
from blink_core.runtime import cuda_main
from blink_core.runtime.cpu import CpuRuntime, Plan, noop_step
from blink_core.runtime.engine_health import HealthReader
from blink_core.transport.shm import Segment, ShmTransport

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


def test_host_driven_step_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a step that hangs under the host's scheduler, whose heart beats on, so that streams wait for ever; an
    engine without a step taken for one that hangs."""
    monkeypatch.setattr(cuda_main, "HEARTBEAT_MARGIN_S", 0.3)
    ended, hung = threading.Event(), threading.Event()
    monkeypatch.setattr(os, "_exit", lambda status: ended.set())
    recording = tmp_path / "none.jsonl"
    recording.touch()
    options = ["--run-dir", str(tmp_path), "--segment", f"blink-hang-{os.getpid()}-{secrets.token_hex(4)}"]
    own, args = cuda_main.parse([*options, "--step-limit", "0.2", "--gpu-events", str(recording)])
    config = EngineConfig(vocab=251, slots=4, sq_entries=16, cq_entries=64, max_len=64, pages=18, max_rows=2)
    runtime = CpuRuntime(config, args.segment)

    def step(plan: Plan) -> None:
        if hung.is_set():
            assert ended.wait(20.0), "nobody ended the engine"
        noop_step(plan)

    serving = threading.Thread(target=runtime.serve, args=(step,))
    serving.start()
    watchdog = cuda_main.watch(own, args, runtime)
    try:
        layouts = config.layouts()
        transport = ShmTransport(Segment(runtime.segment.name), layouts["Control"].nbytes, layouts["Ring"].nbytes)
        client = RingClient(transport, config)
        client.attach(20.0)
        assert not ended.wait(1.0)  # idle for twice the limit
        hung.set()
        client.submit(np.arange(3, dtype=np.int32), SamplingParams(max_tokens=2))
        assert ended.wait(20.0)
        failure = HealthReader(tmp_path).read().failure
        assert failure is not None
        assert failure.reason == "the step in flight stood still for 0.5 s"
    finally:
        ended.set()
        watchdog.close()
        runtime.request_stop()
        serving.join(20.0)
        runtime.close()
