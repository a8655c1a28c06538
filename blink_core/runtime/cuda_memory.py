"""Memory that host and GPU share: pinned memfds and segments, and CuPy views of any address a kernel can reach."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np

from blink_core.runtime.memory import OwnedMemory
from blink_core.transport.shm import Segment

MAPPED = 2  # cudaHostRegisterMapped


class Pinned:
    """Host memory registered with CUDA: kernels reach it at `device`. Unregistered by `close`."""

    def __init__(self, memory: OwnedMemory | Segment) -> None:
        """Raises cupy's CUDARuntimeError when it cannot be pinned."""
        self.memory = memory
        cp.cuda.runtime.hostRegister(memory.address, memory.nbytes, MAPPED)
        # With unified addressing a registered range has the host's own addresses on the device.
        self.device = memory.address

    def close(self) -> None:
        """Idempotent. Call it when no kernel uses the memory any more."""
        if self.device:
            cp.cuda.runtime.hostUnregister(self.memory.address)
            self.device = 0


def device_view(address: int, shape: tuple[int, ...], dtype: Any) -> cp.ndarray:
    """A CuPy array over memory that somebody else owns."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = cp.cuda.UnownedMemory(address, max(1, nbytes), None, device_id=cp.cuda.Device().id)
    return cp.ndarray(shape, dtype, cp.cuda.MemoryPointer(memory, 0))
