"""Compiles the model kernels with NVRTC through CuPy and launches them, also under graph capture (design section 6)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import cupy as cp
import numpy as np
from cuda.bindings import driver

from blink_core.ops.cuda_sources import DTYPES, options, source
from blink_core.ops.cuda_variants import DEFAULT, Variants


class CudaError(RuntimeError):
    """A CUDA driver call failed; the message names the call and the error."""


def check(result: tuple[Any, ...], call: str) -> Any:
    """The value of a cuda-bindings driver call. Raises CudaError if it failed."""
    if int(result[0]) != 0:
        raise CudaError(f"{call}: {result[0].name}")
    return result[1] if len(result) == 2 else result[1:]


@dataclass(slots=True)
class Kernel:
    """One compiled kernel. ``shared``: bytes of dynamic shared memory of each launch."""

    name: str
    function: Any
    shared: int = 0
    owner: Kernels | None = field(default=None, repr=False)
    _places: dict[int, int] = field(default_factory=dict, repr=False)

    def places(self, threads: int) -> int:
        """Blocks of ``threads`` that the GPU holds at once, on the multiprocessors that are the kernels' to use."""
        if threads not in self._places:
            handle = driver.CUfunction(self.function.kernel.ptr)
            blocks = check(
                driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(handle, threads, self.shared),
                f"occupancy {self.name}",
            )
            self._places[threads] = max(1, blocks)
        return self._places[threads] * multiprocessors(0 if self.owner is None else self.owner.reserved)

    def launch(self, grid: int, threads: int, *args: Any, dependent: bool = True) -> None:
        """Launch on CuPy's current stream; may be captured.

        ``args``: CuPy arrays and None as pointers, ctypes scalars and structures by value, Python int as int32, float
        as float32. ``dependent``: programmatic dependent launch, that is the kernel may start before the one ahead of
        it in the stream has ended; all model kernels wait for it themselves.
        """
        values = [_argument(a) for a in args]
        pointers = (ctypes.c_void_p * max(1, len(values)))(*[ctypes.addressof(v) for v in values])
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self.shared
        config.hStream = driver.CUstream(cp.cuda.get_current_stream().ptr)
        if dependent and (self.owner is None or self.owner.dependent):
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        handle = driver.CUfunction(self.function.kernel.ptr)
        check(driver.cuLaunchKernelEx(config, handle, ctypes.addressof(pointers), 0), f"launch {self.name}")


def multiprocessors(reserved: int = 0) -> int:
    """Multiprocessors of the current device, ``reserved`` of them left out."""
    return max(1, int(cp.cuda.Device().attributes["MultiProcessorCount"]) - reserved)


def _argument(value: Any) -> Any:
    if value is None:
        return ctypes.c_void_p(0)
    if isinstance(value, cp.ndarray):
        return ctypes.c_void_p(value.data.ptr)
    if isinstance(value, bool | int | np.integer):
        return ctypes.c_int(int(value))
    if isinstance(value, float | np.floating):
        return ctypes.c_float(float(value))
    return value


def pointer(array: cp.ndarray | None) -> int:
    """Device address of ``array``, 0 for None: a field of a parameter structure."""
    return 0 if array is None else int(array.data.ptr)


@dataclass(slots=True)
class Kernels:
    """The kernels of one element type, compiled on first use.

    Compile and launch each once before any capture or resident kernel: a kernel loaded lazily beside a spinning one
    never starts. ``dtype``: float32, bfloat16 or float16. ``reserved``: multiprocessors that launches leave alone,
    because a resident block fills one: a grid of one block each would wait for the last of them. ``dependent``: whether
    launches use programmatic dependence. ``variants``: how they are laid out.
    """

    dtype: str
    reserved: int = 0
    dependent: bool = True
    variants: Variants = DEFAULT
    _modules: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False)
    _kernels: dict[tuple[Any, ...], Kernel] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")

    def get(self, file: str, name: str, shared: int = 0, **defines: int) -> Kernel:
        """Kernel ``name`` of ``file``, compiled with ``defines`` as macros."""
        key = (file, *sorted(defines.items()))
        if (key, name, shared) not in self._kernels:
            if key not in self._modules:
                flags = options(self.dtype, **defines)
                self._modules[key] = cp.RawModule(code=source(file), backend="nvrtc", options=flags)
            function = self._modules[key].get_function(name)
            if shared > max(48 * 1024 - 1, function.max_dynamic_shared_size_bytes):
                function.max_dynamic_shared_size_bytes = shared
            # One split of L1 and shared memory for all: a multiprocessor must be empty to change it, which would keep a
            # kernel from starting beside its predecessor.
            function.preferred_shared_memory_carveout = 100
            self._kernels[key, name, shared] = Kernel(name, function, shared, self)
        return self._kernels[key, name, shared]
