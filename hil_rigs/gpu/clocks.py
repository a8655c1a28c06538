"""What the chip allows itself while something runs: SM clock, power, and whether the power cap holds the clock down.

Power is NVML's, which on an H100 or H200 is the mean of the last second: of less load than that it says little.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from statistics import median
from types import TracebackType
from typing import Any, Self

EVERY_S, STOP_S = 0.01, 5.0
POWER_CAP = 0x4  # nvmlClocksEventReasonSwPowerCap


@dataclass(slots=True)
class Clocks:
    """Samples NVML on a thread of its own between entry and exit of a `with`; nothing where NVML is not there.

    bus: PCI address of the GPU. samples: (MHz, watts, whether the power cap was active), every `EVERY_S`.
    """

    bus: str
    samples: list[tuple[int, float, bool]] = field(default_factory=list)
    missing: str = ""
    _over: threading.Event = field(default_factory=threading.Event, repr=False)
    _thread: threading.Thread | None = field(default=None, repr=False)

    def __enter__(self) -> Self:
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(self.bus.encode())
        except Exception as error:  # also that the package is not there: a measurement needs none of this
            self.missing = f"{type(error).__name__}: {error}"
            return self
        self._thread = threading.Thread(target=self._watch, args=(pynvml, handle), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def _watch(self, nvml: Any, handle: Any) -> None:
        try:
            while not self._over.is_set():
                clock = int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
                watts = nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
                reasons = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
                self.samples.append((clock, watts, bool(reasons & POWER_CAP)))
                self._over.wait(EVERY_S)
        except Exception as error:  # as above: NVML's, or a function that this version of the package has not
            self.missing = f"{type(error).__name__}: {error}"

    @property
    def line(self) -> str:
        """For a table's head."""
        if not self.samples:
            return f"clock unknown ({self.missing or 'no sample'})"
        clocks, watts, capped = zip(*self.samples, strict=True)
        share = 100 * sum(capped) / len(capped)
        return (
            f"SM clock {min(clocks)} to {max(clocks)} MHz, median {median(clocks):.0f}; {median(watts):.0f} W; power "
            f"cap active in {share:.0f} % of {len(capped)} samples"
        )
