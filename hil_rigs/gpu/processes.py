"""What the system knows of a process, and NVML of the engine's GPU: evidence that a frozen engine does nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROC = Path("/proc")
SMI_TIMEOUT_S = 20.0
CUDA_TIMEOUT_S = 60.0  # of a first start of the driver on a cold machine
# What decides which GPU a process calls its first.
CHOICE = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


@dataclass(frozen=True, slots=True)
class Activity:
    """So far, over all threads: clock ticks in user and system mode, context switches of either kind, and the state."""

    user: int
    system: int
    switches: int
    states: str

    def moved_since(self, before: Activity) -> list[str]:
        """What has changed, in words; nothing for a process that did nothing."""
        told = []
        for name in ("user", "system", "switches"):
            was, now = getattr(before, name), getattr(self, name)
            if now != was:
                told.append(f"{name} {was} -> {now}")
        return told


def activity(pid: int, proc: Path = PROC) -> Activity:
    """Reads /proc/PID/task/*: threads that end meanwhile are left out. Raises OSError if the process is gone."""
    user = system = switches = 0
    states = set()
    for task in sorted((proc / str(pid) / "task").iterdir()):
        with suppress(FileNotFoundError, ProcessLookupError):
            # The name, in parentheses, may hold anything.
            fields = (task / "stat").read_text(errors="replace").rpartition(")")[2].split()
            status = (task / "status").read_text(errors="replace")
            states.add(fields[0])
            user, system = user + int(fields[11]), system + int(fields[12])
            for line in status.splitlines():
                if "ctxt_switches:" in line:
                    switches += int(line.split()[1])
    return Activity(user, system, switches, "".join(sorted(states)))


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or an instance of one (MIG), as the driver itself names it. uuid: without the prefix; bus: its PCI
    address, of an instance that of the whole GPU."""

    uuid: str
    bus: str

    def __str__(self) -> str:
        return f"GPU {self.bus} ({self.uuid})"


# In a process of its own: CUDA reads these variables once, and here no context may come into being. It is asked rather
# than NVML, whose numbers are in another order and know nothing of the variables.
_ASK_CUDA = """
import json, uuid
from cuda.bindings import driver
def check(result, call):
    if int(result[0]):
        raise SystemExit(f"{call}: {result[0].name}")
    return result[1] if len(result) > 1 else None
check(driver.cuInit(0), "cuInit")
device = check(driver.cuDeviceGet(0), "cuDeviceGet(0)")
name = getattr(driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid)  # of an instance its own, also before CUDA 13
bus = check(driver.cuDeviceGetPCIBusId(32, device), "cuDeviceGetPCIBusId")
raw = bytes(check(name(device), "cuDeviceGetUuid").bytes)
print(json.dumps([str(uuid.UUID(bytes=raw)), bus.split(b"\\0")[0].decode()]))
"""


def environment_of(pid: int, proc: Path = PROC) -> dict[str, str]:
    """What a process was started with. Raises RuntimeError if the system does not tell."""
    try:
        raw = (proc / str(pid) / "environ").read_bytes()
    except OSError as error:
        raise RuntimeError(f"the environment of process {pid} cannot be read: {error}") from error
    pairs = (entry.partition("=") for entry in raw.decode(errors="replace").split("\0") if entry)
    return {name: value for name, _, value in pairs}


def first_gpu(environment: Mapping[str, str]) -> Gpu:
    """The GPU that CUDA gives a process with this environment as its device 0, which is the engine's.

    CUDA_VISIBLE_DEVICES may hold numbers, UUIDs or instances of MIG: CUDA itself is asked. Raises RuntimeError.
    """
    chosen = {name: environment[name] for name in CHOICE if name in environment}
    told = ", ".join(f"{n}={chosen[n]}" for n in chosen) or f"{CHOICE[0]} not set"
    passed = {name: value for name, value in os.environ.items() if name not in CHOICE} | chosen
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_CUDA], capture_output=True, text=True, timeout=CUDA_TIMEOUT_S, env=passed,
            check=False,
        )  # fmt: skip
        if done.returncode == 0:
            return Gpu(*json.loads(done.stdout))
        why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
        why = f"{type(error).__name__}: {error}"
    raise RuntimeError(f"which GPU is the engine's cannot be told ({told}): {why}")


def gpu_processes(gpu: Gpu) -> list[int]:
    """Process ids that have a context on this GPU, sorted, as NVML gives them; those of other GPUs are none of them.

    Of an instance only its own processes. Raises RuntimeError where NVML does not tell, or knows no such GPU.
    """
    try:
        import pynvml
    except ImportError:
        return _from_nvidia_smi(gpu)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise RuntimeError(f"NVML does not start: {error}") from error
    try:
        handle = _handle(pynvml, gpu)
        found: list[Any] = [*pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        with suppress(pynvml.NVMLError):  # not every GPU has graphics, or MPS
            found += pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
        with suppress(pynvml.NVMLError):
            found += pynvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)
        return sorted({int(process.pid) for process in found})
    except pynvml.NVMLError as error:
        raise RuntimeError(f"NVML does not list the processes of {gpu}: {error}") from error
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _handle(nvml: Any, gpu: Gpu) -> Any:
    """NVML's handle of a GPU or of an instance: the UUID says which, but not what of the two it is."""
    for prefix in ("GPU", "MIG"):
        with suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(f"{prefix}-{gpu.uuid}".encode())
    # Some virtual machines give CUDA and NVML different UUIDs; of a whole GPU the address is enough, but an instance
    # shares it with others, whose processes would be taken for foreign ones.
    handle = nvml.nvmlDeviceGetHandleByPciBusId(gpu.bus.encode())
    divided = 0
    with suppress(nvml.NVMLError):  # a GPU that cannot be divided
        divided = int(nvml.nvmlDeviceGetMigMode(handle)[0])
    if divided:
        raise RuntimeError(f"{gpu} is divided (MIG), and NVML knows no instance of this UUID")
    return handle


def _from_nvidia_smi(gpu: Gpu) -> list[int]:
    """The same from NVML's own command, where its Python module is not installed; it lists no instances."""
    command = ["nvidia-smi", "-i", f"GPU-{gpu.uuid}", "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True)
        return sorted({int(line) for line in done.stdout.split()})
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"nvidia-smi does not list the processes of {gpu}: {error}") from error
