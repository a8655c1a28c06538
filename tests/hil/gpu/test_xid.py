"""A real Xid error: a process of its own writes to an address that is not there, and the driver tells the watcher.

Only that process's context dies (Xid 31, a page fault; on some GPUs 13). NVML says on which GPU, not whose it was, so
an engine beside it must note the error and serve on. Skipped without a GPU, and where NVML refuses the registration:
an engine's word for that is held against what NVML tells the test itself.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import NoReturn

import numpy as np
import pytest

from blink_core.abi.enums import EngineState, EventKind
from blink_core.abi.params import SamplingParams
from blink_core.runtime.engine_health import HealthReader
from blink_core.runtime.gpu_events import EventError, GpuEvent, NvmlEvents, RecordedEvents
from blink_core.runtime.watchdog import RECORDING
from hil_rigs.description import load_rig
from hil_rigs.gpu.processes import environment_of, first_gpu
from hil_rigs.local import LocalOptions, LocalRig
from tests.hil.gpu.missing import MISSING

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

EVENT_S = 30.0  # the driver tells within milliseconds; a busy machine may take its time
DEADLINE_S = 60.0
APPLICATION_XIDS = {13, 31, 43, 45}
SIZES = {"max_len": 1 << 20, "pages": 1 << 17, "arena_tokens": 1 << 20, "slots": 16, "sq_entries": 64}

# Address 16 belongs to nobody in any process.
FAULT = """
import sys
import cupy
code = 'extern "C" __global__ void fault(unsigned long long to) { *(volatile int*)to = 1; }'
kernel = cupy.RawModule(code=code, backend="nvrtc").get_function("fault")
cupy.cuda.Device().synchronize()
kernel((1,), (1,), (cupy.uint64(16),))
try:
    cupy.cuda.Device().synchronize()
except cupy.cuda.runtime.CUDARuntimeError as error:
    sys.stderr.write(str(error))
    sys.stderr.flush()
    import os
    os._exit(3)  # a context that is dead cannot be given back
"""


def fault() -> None:
    """A process whose kernel hits an address that is not there, on this environment's first GPU; to its end."""
    done = subprocess.run(
        [sys.executable, "-c", FAULT], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 3, f"the process did not fault: status {done.returncode}\n{done.stderr}"
    assert "llegal" in done.stderr, done.stderr  # cudaErrorIllegalAddress: an illegal memory access was encountered


def buses() -> list[str]:
    import cupy

    return [str(cupy.cuda.runtime.deviceGetPCIBusId(i)) for i in range(cupy.cuda.runtime.getDeviceCount())]


def watch(bus: str) -> NvmlEvents:
    """Skips with NVML's reason where it refuses. Raises EventError where there is no NVML to ask."""
    try:
        return NvmlEvents(bus)
    except EventError as error:
        if isinstance(error.__cause__, ImportError):
            raise
        pytest.skip(f"{error} (kernel {platform.release()})")


def engine_does_not_watch(bus: str, reason: str) -> NoReturn:
    """Of an engine whose health says so. Skips where NVML refuses this process too; else it is the engine's fault."""
    watch(bus).close()
    pytest.fail(f"NVML gives this process the Xid events of GPU {bus}, but the engine's health says: {reason}")


def events_of(source: NvmlEvents) -> Iterator[GpuEvent]:
    deadline = time.monotonic() + EVENT_S
    while (left := deadline - time.monotonic()) > 0:
        if (event := source.wait(min(left, 1.0))) is not None:
            yield event


def test_a_real_xid_reaches_the_watcher_of_its_gpu() -> None:
    """Catches: a registration that NVML takes and that delivers nothing; a number that is read from the wrong field; an
    Xid of one GPU that is told of another."""
    own, *others = buses()
    with ExitStack() as stack:
        source = stack.enter_context(closing(watch(own)))
        beside = [stack.enter_context(closing(watch(bus))) for bus in others]
        fault()
        event = next(events_of(source), None)
        assert event is not None, f"no Xid within {EVENT_S:g} s of a fault, kernel {platform.release()}"
        assert (event.gpu, event.fatal) == (own, False)
        assert event.xid in APPLICATION_XIDS
        for bus, quiet in zip(others, beside, strict=True):
            seen = quiet.wait(1.0)
            assert seen is None, f"the fault on {own} was told of {bus}: {seen}"


@pytest.mark.parametrize("launch", ["fire", "tail", "host"])
def test_an_engine_outlives_another_process_fault(launch: str) -> None:
    """Catches: a healthy engine that ends for another process's Xid, or that says nothing of it; a stream that does
    not go on after it."""
    description = load_rig("gpu")
    command = (*description.engine_command, "--launch", launch)
    with LocalRig(description, None, http=False, options=LocalOptions(engine=SIZES, engine_command=command)) as rig:
        client = rig.ring()
        assert rig.run_dir is not None
        recording, health = rig.run_dir / RECORDING, HealthReader(rig.run_dir)

        def tokens() -> int:
            if not client.live:
                client.submit(np.arange(9, dtype=np.int32), SamplingParams(max_tokens=1_000_000, ignore_eos=True))
            found = client.poll(0.5)
            assert not (found["kind"] == EventKind.ERROR).any(), "the request ended with an error"
            return int((found["kind"] == EventKind.TOKEN).sum())

        assert any(tokens() for _ in range(60))
        with ThreadPoolExecutor(1) as beside:  # steps run on while the other process comes, faults and goes
            faulted = beside.submit(fault)
            while not faulted.done():
                tokens()
            faulted.result()
        refused = [n.reason for n in health.read().notices if "not watched" in n.reason]
        deadline = time.monotonic() + EVENT_S
        while not refused and not any(n.kind == "xid" for n in health.read().notices):
            assert time.monotonic() < deadline, f"nothing in health {EVENT_S:g} s after the fault"
            tokens()
        # Two seconds of looks of the watchdog, ten of them, with the event judged.
        until = time.monotonic() + 2.0
        made = 0
        while time.monotonic() < until:
            made += tokens()
        assert made > 0, "the stream stood still after another process's fault"
        assert rig.exited("engine") is None
        assert rig.memory.status("state") == EngineState.READY
        assert health.read().failure is None
        bus = first_gpu(environment_of(rig.pid("engine"))).bus
        if refused:
            engine_does_not_watch(bus, refused[0])
        event = RecordedEvents(recording).wait(DEADLINE_S)
        assert event is not None
        assert event.xid in APPLICATION_XIDS
        assert event.gpu.lower() == bus.lower()
