"""Engine-owned memory: anonymous files that other processes of the same user may map read-only for verification.

Rings live in named POSIX shared memory (`transport.shm`). State, log, plan and KV pool live in memfds: they have no
size limit but the machine's memory, vanish with the process, and are reached as files of the engine process.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from blink_core.abi.dtypes import Array


class OwnedMemory:
    """`nbytes` zero bytes (at least one page) in a memfd."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.nbytes = max(nbytes, mmap.PAGESIZE)
        self.fd = os.memfd_create(f"blink-{name}", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.nbytes)
        self.buffer = mmap.mmap(self.fd, self.nbytes)
        self.address = int(np.frombuffer(self.buffer, np.uint8).ctypes.data)

    def array(self, dtype: np.dtype[Any] | type, shape: tuple[int, ...]) -> Array:
        """Zero-copy array over the first bytes."""
        count = int(np.prod(shape))
        return np.frombuffer(self.buffer, dtype, count).reshape(shape)


class MappedMemory:
    """Read-only mapping of another process's `OwnedMemory`."""

    def __init__(self, pid: int, fd: int, nbytes: int) -> None:
        """Raises OSError when the process is gone or belongs to somebody else."""
        handle = os.open(Path("/proc") / str(pid) / "fd" / str(fd), os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(handle).st_size
            if size < nbytes:
                raise OSError(f"memory of process {pid} has {size} bytes, expected {nbytes}")
            self.buffer = mmap.mmap(handle, size, prot=mmap.PROT_READ)
        finally:
            os.close(handle)
