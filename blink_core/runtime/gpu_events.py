"""What the driver reports of a GPU: Xid errors, from NVML or from a recording.

A recording is a text file, one JSON object a line: `{"after_s": 0.5, "gpu": "0000:01:00.0", "xid": 79}`, seconds since
the recording's begin, not decreasing. Engines write what they see in this form to `gpu-events.jsonl` in their folder.
Numbers: NVIDIA, "Xid Errors", GPU deployment and management documentation.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

log = logging.getLogger("blink.watchdog")

# After these no work runs on the GPU, whoever caused them.
FATAL_XIDS: Final = MappingProxyType(
    {
        46: "the GPU stopped processing",
        48: "uncorrectable memory error",
        61: "the GPU's internal microcontroller was halted for a breakpoint or warning",
        62: "the GPU's internal microcontroller was halted",
        79: "the GPU has fallen off the bus",
        95: "uncontained memory error",
        119: "the GPU's system processor does not answer",
        120: "error of the GPU's system processor",
        140: "unrecovered memory error",
    }
)
# NVML's names of errors that say the same. Any other one, UNKNOWN among them, says something of NVML alone.
LOST_ERRORS: Final = ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED")
NVML_WAIT_MS = 200  # of one call of NVML, so that a close is seen
NVML_CLOSE_S = 5.0  # for the call under way
# These end one process's work; NVML does not say whose. The engine learns from CUDA whether it was its own.
OTHER_XIDS: Final = MappingProxyType(
    {
        13: "graphics engine exception",
        31: "memory page fault",
        43: "a process's work was stopped",
        45: "a process's work was cleaned up",
        63: "a memory row is to be remapped",
        64: "a memory row could not be remapped",
        69: "graphics engine class error",
        74: "NVLink error",
        92: "many corrected memory errors",
        94: "contained memory error",
    }
)


class EventError(RuntimeError):
    """The events of a GPU cannot be had: no NVML, no permission, or a recording that does not hold."""


class GpuLost(RuntimeError):
    """NVML itself no longer reaches the GPU."""


@dataclass(frozen=True, slots=True)
class GpuEvent:
    """An Xid error of a GPU, named by its PCI address. after_s: seconds since the source was opened."""

    gpu: str
    xid: int
    after_s: float

    @property
    def fatal(self) -> bool:
        """Whether no work runs on that GPU any more."""
        return self.xid in FATAL_XIDS

    def __str__(self) -> str:
        what = FATAL_XIDS.get(self.xid) or OTHER_XIDS.get(self.xid)
        return f"Xid {self.xid} of GPU {self.gpu}" + (f": {what}" if what else "")

    def to_json(self) -> str:
        return json.dumps({"after_s": round(self.after_s, 3), "gpu": self.gpu, "xid": self.xid})


class EventSource(Protocol):
    """Where events come from."""

    def wait(self, seconds: float) -> GpuEvent | None:
        """The next event; None when none came within `seconds`.

        Raises GpuLost, and EventError when no more events can be had; both are the last word.
        """
        ...

    def close(self) -> None: ...


class RecordedEvents:
    """The events of a recording, at the times it gives."""

    def __init__(self, path: Path) -> None:
        """Reads the whole file. Raises EventError with the line that does not hold."""
        self._begun = time.monotonic()
        self._left: list[GpuEvent] = []
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise EventError(f"recording {path}: {error}") from error
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                raw = json.loads(line)
                event = GpuEvent(str(raw["gpu"]), int(raw["xid"]), float(raw["after_s"]))
            except (ValueError, KeyError, TypeError) as error:
                raise EventError(f"{path}, line {number}: {type(error).__name__}: {error}") from error
            if event.after_s < (self._left[-1].after_s if self._left else 0.0):
                raise EventError(f"{path}, line {number}: after_s is {event.after_s:g}, below the line before it")
            self._left.append(event)
        self._closed = threading.Event()

    def wait(self, seconds: float) -> GpuEvent | None:
        """See `EventSource.wait`."""
        due = self._left[0].after_s - (time.monotonic() - self._begun) if self._left else seconds
        if due > 0:
            self._closed.wait(min(due, seconds))
        if not self._left or time.monotonic() - self._begun < self._left[0].after_s:
            return None
        return self._left.pop(0)

    def close(self) -> None:
        """Ends a `wait`."""
        self._closed.set()


class NvmlEvents:
    """The driver's own reports, through NVML, of one GPU.

    NVML is asked on a thread of its own, for a driver in trouble may not come back from a call: who waits here goes on.
    """

    def __init__(self, pci_bus_id: str) -> None:
        """pci_bus_id: as CUDA gives it, "0000:01:00.0". Raises EventError."""
        try:
            import pynvml
        except ImportError as error:
            raise EventError(f"nvidia-ml-py is not installed: {error}") from error
        self._nvml: Any = pynvml
        self._gpu, self._begun = pci_bus_id, time.monotonic()
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise EventError(f"NVML does not start: {error}") from error
        try:
            device = pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id.encode())
            self._set = pynvml.nvmlEventSetCreate()
            pynvml.nvmlDeviceRegisterEvents(device, pynvml.nvmlEventTypeXidCriticalError, self._set)
        except pynvml.NVMLError as error:
            pynvml.nvmlShutdown()
            raise EventError(f"NVML gives no Xid events of GPU {pci_bus_id}: {error}") from error
        self._lost_errors = [getattr(pynvml, name) for name in LOST_ERRORS]
        self._seen: queue.SimpleQueue[GpuEvent | GpuLost | EventError] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="blink-nvml", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> GpuEvent | None:
        """See `EventSource.wait`."""
        try:
            seen = self._seen.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(seen, GpuEvent):
            return seen
        raise seen

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if (event := self._ask()) is not None:
                    self._seen.put(event)
        except (GpuLost, EventError) as error:
            self._seen.put(error)
        except Exception as error:
            log.exception("the wait for NVML failed")
            self._seen.put(EventError(f"NVML, GPU {self._gpu}: {type(error).__name__}: {error}"))
        finally:  # here, because after a loss these calls may not come back either
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(self._set)
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _ask(self) -> GpuEvent | None:
        nvml = self._nvml
        try:
            data = nvml.nvmlEventSetWait_v2(self._set, NVML_WAIT_MS)
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_TIMEOUT:
                return None
            if error.value in self._lost_errors:
                raise GpuLost(f"NVML no longer reaches GPU {self._gpu}: {error}") from error
            raise EventError(f"NVML gives no more Xid events of GPU {self._gpu}: {error}") from error
        if data.eventType != nvml.nvmlEventTypeXidCriticalError:
            return None
        return GpuEvent(self._gpu, int(data.eventData), time.monotonic() - self._begun)

    def close(self) -> None:
        """Gives NVML back; if it does not answer in time, the process's end does."""
        self._stop.set()
        self._thread.join(NVML_CLOSE_S)
        if self._thread.is_alive():
            log.error("NVML has not answered within %g s; it is given back by the end of the process", NVML_CLOSE_S)
