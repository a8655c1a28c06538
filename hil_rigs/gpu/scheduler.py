"""The scheduler's calls on the GPU, one kernel launch each: 256 threads behind the native module's interface.

For tests that give one history to the host's scheduler and to the GPU's. The regions stay the caller's: each call
copies them to the device and back.
"""

from __future__ import annotations

import ctypes
from typing import Any

import cupy as cp
import numpy as np

from blink_core.abi.config import EngineConfig
from blink_core.ops.cuda_modules import Kernel
from blink_core.ops.cuda_sources import source
from blink_core.runtime.nvrtc import DEVICE, cccl_include

THREADS = 256


class GpuScheduler:
    """`_native.Scheduler` on the GPU. Addresses are of host memory.

    group_size: threads of the block; the shipped number and no other, for callers have a default of their own.
    """

    def __init__(self, shared: int, state: int, log: int, plan: int, group_size: int) -> None:
        if group_size != THREADS:
            raise ValueError(f"a group of {group_size} threads on the GPU: the scheduler's block has {THREADS}")
        config = EngineConfig.unpack(ctypes.string_at(shared, 256))
        layouts = config.layouts()
        sizes = (config.shared_nbytes(), *(layouts[name].nbytes for name in ("State", "Log", "Plan")))
        self._host = [
            np.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(at))
            for at, n in zip((shared, state, log, plan), sizes, strict=True)
        ]
        self._device = [cp.zeros(n, cp.uint8) for n in sizes]
        self._result = cp.zeros(1, cp.uint32)
        self._threads = group_size
        options = ("--std=c++20", f"-I{cccl_include()}")
        module = cp.RawModule(code=source("scheduler_kernel.cu", DEVICE), backend="nvrtc", options=options)
        names = ("blink_init", "blink_boundary", "blink_poll")
        self._kernels = {n: Kernel(n, module.get_function(n)) for n in names}

    def _call(self, name: str, *arguments: Any) -> None:
        for device, host in zip(self._device, self._host, strict=True):
            device.set(host)
        self._kernels[name].launch(1, self._threads, *self._device, *arguments, dependent=False)
        for device, host in zip(self._device, self._host, strict=True):
            host[:] = device.get()

    def init(self) -> None:
        self._call("blink_init")

    def boundary(self, now_us: int = 0) -> bool:
        self._call("blink_boundary", ctypes.c_uint64(now_us), self._result)
        return bool(self._result.get()[0])

    def poll(self, now_us: int = 0) -> int:
        self._call("blink_poll", ctypes.c_uint64(now_us), self._result)
        return int(self._result.get()[0])


class GpuNative:
    """Takes the native module's place where only `Scheduler` is used of it."""

    Scheduler = GpuScheduler
    mutants = False
