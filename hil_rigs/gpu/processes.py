"""What the system knows of a process, and NVML of the GPU: evidence that a frozen engine really does nothing."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROC = Path("/proc")
SMI_TIMEOUT_S = 20.0


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


def gpu_processes(device: int = 0) -> list[int]:
    """Process ids that have a context on a GPU, sorted, as NVML gives them. Raises RuntimeError where it does not."""
    try:
        import pynvml
    except ImportError:
        return _from_nvidia_smi(device)
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise RuntimeError(f"NVML does not start: {error}") from error
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(device)
        found: list[Any] = [*pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        with suppress(pynvml.NVMLError):  # not every GPU has graphics, or MPS
            found += pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
        with suppress(pynvml.NVMLError):
            found += pynvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)
        return sorted({int(process.pid) for process in found})
    except pynvml.NVMLError as error:
        raise RuntimeError(f"NVML does not list the GPU's processes: {error}") from error
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _from_nvidia_smi(device: int) -> list[int]:
    """The same from NVML's own command, where its Python module is not installed."""
    command = ["nvidia-smi", "-i", str(device), "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True)
        return sorted({int(line) for line in done.stdout.split()})
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise RuntimeError(f"nvidia-smi does not list the GPU's processes: {error}") from error
