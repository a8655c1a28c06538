"""What is there on this machine for a rig, and so which properties can run [design 10: `blink rig probe`]."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from hil_rigs.capabilities import PROPERTY_NEEDS
from hil_rigs.description import RigDescription
from hil_rigs.limits import MEMORY_MINIMUM_BYTES, MIB, SHM_MINIMUM_BYTES


@dataclass(frozen=True, slots=True)
class Finding:
    """One capability: whether it is there, and the evidence or the reason why not."""

    name: str
    available: bool
    detail: str


@dataclass(frozen=True, slots=True)
class PropertyReadiness:
    """One property: what it needs, and which of that is missing on this rig."""

    name: str
    needs: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def runnable(self) -> bool:
        return not self.missing


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """The result of probing one rig."""

    rig: str
    machine: dict[str, str | int]
    capabilities: tuple[Finding, ...]
    properties: tuple[PropertyReadiness, ...]

    @property
    def ready(self) -> bool:
        """Whether every capability that the rig's description names is there."""
        return all(finding.available for finding in self.capabilities)

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable form."""
        return {**asdict(self), "ready": self.ready}


Probe = Callable[[], tuple[bool, str]]


def probe_cpu(minimum: int = MEMORY_MINIMUM_BYTES, module: str = "blink_core._native") -> tuple[bool, str]:
    """Whether the native module is built and imports, and there is memory for the weights and the oracle's copies."""
    try:
        native = importlib.import_module(module)
    except ImportError as error:
        return False, f"{module} does not import ({error}); install with `pip install .`, or `make certify`"
    available = psutil.virtual_memory().available
    if available < minimum:
        return False, f"{available / MIB:.0f} MiB of memory available, at least {minimum / MIB:.0f} MiB needed"
    built = os.path.basename(str(native.__file__))
    return True, f"{built}; {available / MIB:.0f} MiB of memory available"


def probe_gpu() -> tuple[bool, str]:
    """Whether there is a GPU that the engine can use, with what `hil_rigs.gpu.machine` reads of it."""
    missing = _not_importable("cupy", "nvmath", "cuda.bindings")
    if missing:
        return False, f"not installed: {', '.join(missing)}; install with `pip install '.[gpu]'`"
    from hil_rigs.gpu.machine import GpuUnusable, gpu_facts

    try:
        return True, ", ".join(f"{name} {value}" for name, value in gpu_facts().items())
    except GpuUnusable as error:
        return False, str(error)


def probe_shared_memory(path: str = "/dev/shm", minimum: int = SHM_MINIMUM_BYTES) -> tuple[bool, str]:
    """Whether `path` is writable and has at least `minimum` bytes free."""
    try:
        stat = os.statvfs(path)
    except OSError as error:
        return False, f"{path}: {error.strerror}"
    free = stat.f_bavail * stat.f_frsize
    if not os.access(path, os.W_OK):
        return False, f"{path} is not writable for this user"
    if free < minimum:
        return False, f"{free / MIB:.0f} MiB free in {path}, at least {minimum / MIB:.0f} MiB needed"
    return True, f"{free / MIB:.0f} MiB free in {path}"


def probe_http() -> tuple[bool, str]:
    """Whether the server's packages are there and a loopback port can be bound."""
    missing = _not_importable("starlette", "uvicorn", "tokenizers")
    if missing:
        return False, f"not installed: {', '.join(missing)}; install with `pip install .`"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
    except OSError as error:
        return False, f"cannot bind a port on 127.0.0.1: {error.strerror}"
    return True, f"bound 127.0.0.1:{port}"


def probe_oracle() -> tuple[bool, str]:
    """Whether the oracle's packages are installed; they are not imported here, that takes seconds."""
    missing = _not_importable("torch", "transformers")
    if missing:
        return False, f"not installed: {', '.join(missing)}; install with `pip install '.[verify]'`"
    return True, ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))


def _not_importable(*names: str) -> list[str]:
    def there(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # of a package that is not there itself
            return False

    return [name for name in names if not there(name)]


PROBES: Mapping[str, Probe] = {
    "cpu": probe_cpu,
    "gpu": probe_gpu,
    "kv-sanitizer": probe_cpu,
    "shared-memory": probe_shared_memory,
    "http": probe_http,
    "oracle": probe_oracle,
}


def probe_rig(rig: RigDescription, probes: Mapping[str, Probe] = PROBES) -> ProbeReport:
    """Probe every capability that the rig's description names, and derive what each property would need."""
    findings = []
    for name in rig.capabilities:
        available, detail = probes[name]()
        findings.append(Finding(name, available, detail))
    there = {finding.name for finding in findings if finding.available}
    properties = tuple(
        PropertyReadiness(name, needs, tuple(need for need in needs if need not in there))
        for name, needs in PROPERTY_NEEDS.items()
    )
    return ProbeReport(rig.name, machine_facts(), tuple(findings), properties)


def machine_facts() -> dict[str, str | int]:
    """Facts of the machine that a report quotes. Memory in bytes."""
    return {
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
