"""Whose contexts the freeze check counts on a machine of several GPUs; NVML and CUDA are stood in for: no GPU here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hil_rigs.gpu import freeze, machine, processes
from hil_rigs.gpu.processes import Gpu, environment_of, first_gpu, gpu_processes

FIRST = Gpu("11111111-1111-1111-1111-111111111111", "0000:01:00.0")
SECOND = Gpu("22222222-2222-2222-2222-222222222222", "0000:C1:00.0")
INSTANCE = Gpu("33333333-3333-3333-3333-333333333333", SECOND.bus)
ENGINE, OTHER_ENGINE = 40, 50


class TwoGpus:
    """As pynvml, of a machine with two GPUs, the second one with an instance. NVML's order is not CUDA's."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    def __init__(self) -> None:
        self.running: dict[str, list[int]] = {FIRST.uuid: [], SECOND.uuid: [], INSTANCE.uuid: []}
        self.names = {f"GPU-{FIRST.uuid}", f"GPU-{SECOND.uuid}", f"MIG-{INSTANCE.uuid}"}
        self.divided = False

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return (FIRST, SECOND)[index].uuid

    def nvmlDeviceGetHandleByUUID(self, name: bytes) -> str:
        if name.decode() not in self.names:
            raise self.NVMLError(f"Not Found: {name!r}")
        return name.decode()[4:]

    def nvmlDeviceGetHandleByPciBusId(self, bus: bytes) -> str:
        for gpu in (FIRST, SECOND):
            if gpu.bus == bus.decode():
                return gpu.uuid
        raise self.NVMLError(f"Not Found: {bus!r}")

    def nvmlDeviceGetMigMode(self, handle: str) -> tuple[int, int]:
        return int(self.divided), int(self.divided)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid) for pid in self.running[handle]]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        raise self.NVMLError("Not Supported")

    nvmlDeviceGetMPSComputeRunningProcesses = nvmlDeviceGetGraphicsRunningProcesses

    def __getattr__(self, name: str) -> Any:
        def refuse(*arguments: object) -> None:
            raise self.NVMLError(f"Not Supported: {name}")

        if name.startswith("nvml"):
            return refuse
        raise AttributeError(name)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> TwoGpus:
    fake = TwoGpus()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.mark.parametrize(("own", "other"), [(FIRST, SECOND), (SECOND, FIRST)])
@pytest.mark.parametrize("intruder", [[], [77]])
def test_only_contexts_on_the_engines_gpu_count(
    nvml: TwoGpus, own: Gpu, other: Gpu, intruder: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: another engine on the machine's second GPU taken for a process beside this one; an engine on the second
    GPU looked for on the first; a process beside it there that is overlooked."""
    monkeypatch.setattr(freeze, "first_gpu", lambda environment: own)
    monkeypatch.setattr(freeze, "environment_of", lambda pid: {})
    nvml.running[other.uuid] = [OTHER_ENGINE, OTHER_ENGINE + 1]
    contexts = freeze.Contexts()
    nvml.running[own.uuid] = [ENGINE, *intruder]
    contexts.started(ENGINE)
    assert contexts.beside(ENGINE) == {"bus": own.bus, "engine": True, "others": intruder}


def test_an_engine_of_another_environment_is_looked_for_on_its_own_gpu(
    nvml: TwoGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: the GPU of the check's own environment looked at, where the engine was given the other one; a process
    that was on that other one before, taken for the engine in a container."""
    monkeypatch.setattr(freeze, "environment_of", lambda pid: {"CUDA_VISIBLE_DEVICES": "1"})
    monkeypatch.setattr(freeze, "first_gpu", lambda environment: SECOND if "1" in environment.values() else FIRST)
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": "0"})
    contexts = freeze.Contexts()
    contexts.started(ENGINE)
    nvml.running[SECOND.uuid] = [999_999_999]  # of another namespace
    assert contexts.beside(ENGINE) == {"bus": SECOND.bus, "engine": False, "others": [999_999_999]}
    nvml.running[SECOND.uuid] = [ENGINE]
    assert contexts.beside(ENGINE) == {"bus": SECOND.bus, "engine": True, "others": []}


def test_processes_of_an_instance_are_its_own(nvml: TwoGpus) -> None:
    """Catches: processes of the other instances of a divided GPU taken for the engine's company; an instance that NVML
    does not know answered with the whole GPU's list."""
    nvml.running |= {SECOND.uuid: [ENGINE, OTHER_ENGINE], INSTANCE.uuid: [ENGINE]}
    nvml.divided = True
    assert gpu_processes(INSTANCE) == [ENGINE]
    nvml.names.remove(f"MIG-{INSTANCE.uuid}")
    with pytest.raises(RuntimeError, match="divided .* no instance of this UUID"):
        gpu_processes(INSTANCE)
    nvml.divided = False  # CUDA and NVML name one whole GPU differently
    assert gpu_processes(INSTANCE) == [ENGINE, OTHER_ENGINE]
    with pytest.raises(RuntimeError, match=r"processes of GPU 0000:09:00\.0 \(none\).*Not Found"):
        gpu_processes(Gpu("none", "0000:09:00.0"))


STAND_IN = """
import os
class _Result(int):
    name = "CUDA_ERROR_NO_DEVICE"
class _Uuid:
    def __init__(self, digit): self.bytes = bytes([0x11 * digit]) * 16
SEEN = [1, 2] if os.environ.get("CUDA_VISIBLE_DEVICES") is None else [
    2 if v in ("1", "GPU-2222") else 1 for v in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if v not in ("", "-1")
]
def cuInit(flags): return (_Result(0),) if SEEN else (_Result(100),)
def cuDeviceGet(ordinal): return _Result(0), SEEN[ordinal]
def cuDeviceGetPCIBusId(length, device): return _Result(0), (b"0000:01:00.0", b"0000:C1:00.0")[device - 1] + bytes(20)
def cuDeviceGetUuid(device): return _Result(0), _Uuid(device)
"""


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda.bindings of a machine with two GPUs, in the processes that are started here."""
    package = tmp_path / "stand-in" / "cuda" / "bindings"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "driver.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(package.parents[1]))
    for name in processes.CHOICE:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, FIRST),
        ({"CUDA_VISIBLE_DEVICES": "1"}, SECOND),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, SECOND),
        ({"CUDA_VISIBLE_DEVICES": "GPU-2222", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, SECOND),
        ({"PATH": "/nowhere"}, FIRST),
    ],
)
def test_the_engines_gpu_is_the_one_that_cuda_gives_it(
    environment: dict[str, str], expected: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a GPU chosen by CUDA_VISIBLE_DEVICES that is taken for the machine's first; this process's own choice
    taken for the engine's; a UUID read wrongly."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0" if expected == SECOND else "1")
    assert first_gpu(environment) == expected


@pytest.mark.usefixtures("cuda")
def test_a_gpu_that_cannot_be_told_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a check that looks at some other GPU where the engine's cannot be found out, or that says only that it
    failed; a driver that does not answer waited for without an end."""
    with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES=-1.*cuInit: CUDA_ERROR_NO_DEVICE"):
        first_gpu({"CUDA_VISIBLE_DEVICES": "-1"})
    monkeypatch.setattr(processes, "_ASK_CUDA", "import time; time.sleep(600)")
    monkeypatch.setattr(processes, "CUDA_TIMEOUT_S", 0.2)
    with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES not set.*TimeoutExpired"):
        first_gpu({})
    contexts = freeze.Contexts()
    contexts.started(os.getpid())
    unknown = contexts.beside(os.getpid())["unknown"]
    assert "which GPU is the engine's cannot be told" in unknown
    host = {"frozen": [{"tokens": 0}], "frozen_with_new": {"ends": 0}, "moved_while_frozen": []}
    window = {"tokens": 9, "ends": 0, "errors": 0, "seconds": 0.4}
    parts: dict[str, Any] = {"running": [window] * 4, "frozen": [window] * 3, "frozen_with_new": window | {"ends": 4}}
    assert freeze.judge(parts | {"moved_while_frozen": [], "gpu": {"unknown": unknown}}, host) == [
        f"other CUDA contexts: {unknown}"
    ]


def test_the_environment_is_the_engines(tmp_path: Path) -> None:
    """Catches: an environment of which values with '=' or empty ones are lost; a process that is gone taken for one
    without variables."""
    with subprocess.Popen(
        [sys.executable, "-c", "print('up', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"CUDA_VISIBLE_DEVICES": "1", "A": "b=c", "E": ""},
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"up\n"  # within exec, for a moment, the system shows no variables
            seen = environment_of(child.pid)
        finally:
            child.kill()
    assert {name: seen[name] for name in ("CUDA_VISIBLE_DEVICES", "A", "E")} == {
        "CUDA_VISIBLE_DEVICES": "1",
        "A": "b=c",
        "E": "",
    }
    with pytest.raises(RuntimeError, match="environment of process 7 cannot be read"):
        environment_of(7, tmp_path)


def test_facts_of_the_second_gpu_are_its_own(nvml: TwoGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a probe that shows the clocks and the processes of another GPU, because NVML counts otherwise than CUDA;
    a probe that ends with NVML's error; Xid errors that no engine would see, unsaid."""
    nvml.running |= {FIRST.uuid: [1, 2, 3], SECOND.uuid: [ENGINE]}
    assert machine._management(SECOND.bus)["processes"] == 1
    assert "knows no GPU 0000:09:00.0" in str(machine._management("0000:09:00.0")["nvml"])
    assert "not watched (NVML gives no Xid events of GPU 0000:C1:00.0" in machine.xid_events(SECOND.bus)
    monkeypatch.setattr(machine, "NvmlEvents", lambda bus: SimpleNamespace(close=lambda: None))
    assert machine.xid_events(SECOND.bus) == "delivered"
