"""What ends an engine on a GPU, one at a time: every live request is told, and health says why.

Skipped without a GPU.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from blink_core.abi.enums import EngineState, EventKind
from blink_core.abi.params import SamplingParams
from blink_core.runtime.engine_health import HealthReader
from blink_core.runtime.gpu_events import GpuEvent
from hil_rigs.description import load_rig
from hil_rigs.local import LocalOptions, LocalRig
from tests.hil.gpu.missing import MISSING
from tests.overflowing import overflowing
from verification.models.tiny import build_named

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

DEADLINE_S = 60.0
SIZES = {"pages": 130, "max_rows": 8, "token_budget": 256, "max_len": 2000, "slots": 16, "sq_entries": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_named("qwen3", tmp_path_factory.mktemp("model"), max_positions=2048).path


@contextmanager
def rig_with(*arguments: str, model: Path | None, http: bool = True, **sizes: int) -> Iterator[LocalRig]:
    description = load_rig("gpu")
    command = (*description.engine_command, *arguments)
    options = LocalOptions(engine=SIZES | sizes, engine_command=command)
    with LocalRig(description, model, http=http, options=options) as rig:
        yield rig


def complete(rig: LocalRig, prompt: list[int], max_tokens: int = 8) -> httpx.Response:
    body = {"model": rig.model_name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{rig.base_url}/v1/completions", json=body, timeout=DEADLINE_S)


def await_health(rig: LocalRig, status: int, reason: str) -> str:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        seen = httpx.get(f"{rig.base_url}/health", timeout=DEADLINE_S)
        if seen.status_code == status and reason in seen.json()["reason"]:
            return str(seen.json()["reason"])
        assert time.monotonic() < deadline, f"still {seen.status_code}: {seen.text}"
        time.sleep(0.05)


def ends(client: Any, count: int) -> list[tuple[str, int]]:
    """Kind and reason of the terminal events of `count` requests."""
    found: list[tuple[str, int]] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} requests were told"
        for event in client.poll(0.2):
            kind = EventKind(int(event["kind"]))
            if kind in (EventKind.FINISH, EventKind.ERROR):
                found.append((kind.name, int(event["reason"])))
    return found


def test_overrun_of_a_long_prefill(model: Path) -> None:
    """Catches: a step beyond its limit that ends in silence, or whose reason only the engine's log knows."""
    with rig_with("--launch", "fire", "--step-limit", "0.000001", model=model) as rig:
        answer = complete(rig, [3 + i % 400 for i in range(1500)])
        assert answer.status_code >= 500, answer.text
        assert "longer than its limit" in await_health(rig, 503, "longer than its limit")
        assert complete(rig, [5, 6, 7]).status_code == 503
        assert rig.memory.status("state") == EngineState.FAILED


@pytest.mark.parametrize("launch", ["fire", "tail", "host"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_logits(launch: str, dtype: str, model: Path, tmp_path: Path) -> None:
    """Catches: a NaN row that the GPU's sampler draws from, or that ends the engine; health that is silent on it."""
    broken = overflowing(model, tmp_path / "broken")
    with rig_with("--launch", launch, "--dtype", dtype, model=broken) as rig:
        for _ in range(2):
            answer = complete(rig, [5, 6, 7])
            assert answer.status_code == 500, answer.text
            assert "NAN_LOGITS" in answer.text
        await_health(rig, 200, "2 requests ended with NAN_LOGITS")
        assert rig.memory.status("state") == EngineState.READY


@pytest.mark.parametrize("launch", ["fire", "tail"])
def test_launch_that_the_device_refuses(launch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's own graph stands where the step's executables should: it cannot be launched beside itself, and
    behind itself only once.

    Catches: a device return code that nobody reads, live requests that wait for a step that never was."""
    import cupy

    from blink_core.runtime.launch import DeviceDriven, LaunchOptions
    from hil_rigs.gpu.runtime_check import noop_config
    from hil_rigs.gpu.session import client_of, running

    shipped = DeviceDriven.start

    def start(self: DeviceDriven) -> None:
        self._tables[1][:] = int(self._executable)  # before it runs: nothing may be loaded beside it
        cupy.cuda.Device().synchronize()
        shipped(self)

    monkeypatch.setattr(DeviceDriven, "start", start)
    with running(noop_config(), None, LaunchOptions(strategy=launch, step_limit_s=5.0, run_limit_s=60.0)) as runtime:
        assert isinstance(runtime, DeviceDriven)
        client = client_of(runtime)
        for i in range(6):
            client.submit(np.arange(1 + i, 9 + i, dtype=np.int32), SamplingParams(max_tokens=20, ignore_eos=True))
        assert {kind for kind, _ in ends(client, 6)} == {"ERROR"}
        deadline = time.monotonic() + DEADLINE_S
        while (why := runtime.failure()) is None:
            assert time.monotonic() < deadline, "no reason was given"
        assert "CUDA error" in why or "did not end" in why
        assert launch == "tail" or "could not be launched from the device" in why
        assert runtime.status("state") == EngineState.FAILED


@pytest.mark.parametrize("launch", ["fire", "tail", "host"])
def test_fatal_xid_of_a_recording(launch: str, tmp_path: Path) -> None:
    """Catches: a lost GPU of which rings, process and health file do not all tell; a process that cannot end."""
    recording = tmp_path / "recording.jsonl"
    recording.write_text(GpuEvent("0000:00:00.0", 79, 3.0).to_json() + "\n")
    sizes = {"max_len": 1 << 20, "pages": 1 << 17, "arena_tokens": 1 << 20}
    with rig_with("--launch", launch, "--gpu-events", str(recording), model=None, http=False, **sizes) as rig:
        client = rig.ring()
        client.submit(np.arange(9, dtype=np.int32), SamplingParams(max_tokens=1_000_000, ignore_eos=True))
        exited = rig.wait(DEADLINE_S)
        assert exited is not None, "the engine lives on"
        assert "status 4" in exited
        assert "Xid 79" in exited
        assert rig.run_dir is not None
        failure = HealthReader(rig.run_dir).read().failure
        assert failure is not None
        assert (failure.kind, "Xid 79" in failure.reason) == ("xid", True)
        if launch != "host":
            assert client.engine_words()[1] == EngineState.FAILED


HANG = """
import sys
from pathlib import Path
from blink_core.abi.params import SamplingParams
from blink_core.runtime.launch import EngineLost, LaunchOptions, make_runtime
from blink_core.runtime.watchdog import NoEvents, Watchdog
from hil_rigs.gpu.runtime_check import noop_config
from hil_rigs.gpu.session import client_of
import numpy as np, os, threading

options = LaunchOptions(strategy="tail", step_limit_s=0.5, noop_step_us=5e6)  # each step is run once at the build
config = noop_config(max_rows=1, token_budget=16)
runtime = make_runtime(config, f"blink-hang-{os.getpid()}", None, options)

def ask():
    client_of(runtime).submit(np.arange(9, dtype=np.int32), SamplingParams(max_tokens=4))

dog = Watchdog(Path(sys.argv[1]), NoEvents, heartbeat=lambda: runtime.status("heartbeat"), heartbeat_limit_s=1.5)
threading.Timer(1.0, ask).start()
try:
    runtime.serve(lost=lambda: dog.lost)
except EngineLost as error:
    print("LOST", error, flush=True)
    runtime.segment.close()
    os._exit(4)
print("ended by itself", flush=True)
os._exit(1)
"""


def test_tail_launched_step_that_does_not_end(tmp_path: Path) -> None:
    """Catches: a step that nobody on the GPU can see hang, for the scheduler waits behind it, and that the host misses
    too."""
    done = subprocess.run(
        [sys.executable, "-c", HANG, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 4, done.stdout + done.stderr
    assert "heart stood still" in done.stdout
    failure = HealthReader(tmp_path).read().failure
    assert failure is not None
    assert failure.kind == "heartbeat"


def test_the_driver_gives_xid_events() -> None:
    """Catches: a registration that NVML refuses, so that Xid errors are never seen; a wait that does not end."""
    import cupy

    from blink_core.runtime.gpu_events import EventError, NvmlEvents

    try:
        events = NvmlEvents(cupy.cuda.runtime.deviceGetPCIBusId(0))
    except EventError as error:
        pytest.skip(str(error))  # a virtual machine's driver may have none; the engine then says so in its health
    try:
        assert events.wait(0.2) is None
    finally:
        events.close()
