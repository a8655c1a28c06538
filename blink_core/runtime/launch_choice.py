"""Which steps run beside the resident scheduler, and for which it makes room: measured at start, for each size of step.

Fire-and-forget has the shorter gap, but the scheduler's block then keeps part of a multiprocessor, which slows large
products [design 6]. So the step of a bucket is timed both ways, beside a block that stands in for the scheduler and
with the GPU to itself, on the empty plan: its products are whole, attention has nothing to do.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import cupy as cp

    from blink_core.runtime.cuda_step import Bucket, CudaStep

TAIL_TOKENS = 512  # where nothing is measured: steps from here on have lost a third beside a resident block
MEASURED_TOKENS = 128  # smaller steps: a resident block costs them less than the longer gap of a tail launch
# By how much a tail launch's gap is longer, us: behind it the boundary is not prepared while the step runs. Decode at
# 128 rows of the Llama-3-8B shape: 68.2 tail-launched, 15.2 at 32 rows by fire-and-forget (hil_rigs.gpu.bench, H200).
TAIL_GAP_US = 50.0
SAMPLES = 3
LIMIT_NS = 60_000_000_000  # of the stand-in: it ends by itself
START_US = 2_000_000  # until it runs


@dataclass(frozen=True, slots=True)
class Measured:
    """Microseconds of the steps of one size: beside a resident block, and alone."""

    tokens: int
    decode: bool
    beside_us: tuple[float, ...]
    alone_us: tuple[float, ...]

    @property
    def tail(self) -> bool:
        """Whether the step gains more from the whole GPU than the longer gap of a tail launch costs."""
        return statistics.median(self.alone_us) + TAIL_GAP_US < statistics.median(self.beside_us)

    def record(self) -> dict[str, Any]:
        """For the engine's report."""
        return {
            "tokens": self.tokens, "decode": self.decode, "tail": self.tail,
            "beside_us": [round(t, 1) for t in self.beside_us], "alone_us": [round(t, 1) for t in self.alone_us],
        }  # fmt: skip


class LaunchChoice:
    """The choice for every bucket: as measured; where nothing was, by TAIL_TOKENS."""

    def __init__(self, measured: Iterable[Measured] = ()) -> None:
        self.measured = tuple(measured)
        self._tail = {(m.tokens, m.decode): m.tail for m in self.measured}

    def tail(self, bucket: Bucket) -> bool:
        """Whether steps of the bucket are launched by tail launch."""
        return self._tail.get((bucket.tokens, bucket.decode), bucket.tokens >= TAIL_TOKENS)


def to_measure(buckets: Iterable[Bucket]) -> list[Bucket]:
    """One bucket of each size that is worth measuring: the first, which samples the fewest rows."""
    found: dict[tuple[int, bool], Bucket] = {}
    for bucket in buckets:
        if bucket.tokens >= MEASURED_TOKENS:
            found.setdefault((bucket.tokens, bucket.decode), bucket)
    return list(found.values())


def measure(step: CudaStep, buckets: Iterable[Bucket]) -> LaunchChoice:
    """Times the buckets' steps. They write to the page of padding rows. Raises CudaError."""
    import cupy as cp
    from cuda.bindings import driver

    from blink_core.ops.cuda_modules import Kernel, check
    from blink_core.ops.cuda_sources import source

    module = cp.RawModule(code=source("resident_stand_in.cu"), backend="nvrtc", options=("--std=c++17",))
    function = module.get_function("resident_stand_in")
    function.preferred_shared_memory_carveout = 100  # as the scheduler's
    kernel = Kernel("resident_stand_in", function)
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    found = []
    for bucket in to_measure(buckets):
        step.tune(bucket, resident=True)
        step.tune(bucket, resident=False)
        # Both ready before the stand-in runs: nothing may be loaded or allocated beside it.
        alone, beside = (_ready(stream, partial(step.run, bucket, resident=resident)) for resident in (False, True))
        alone_us = _times(stream, alone)
        with stand_in(kernel):
            beside_us = _times(stream, beside)
        for _, executable in (alone, beside):
            check(driver.cuGraphExecDestroy(executable), "cuGraphExecDestroy")
        found.append(Measured(bucket.tokens, bucket.decode, beside_us, alone_us))
    return LaunchChoice(found)


@contextmanager
def stand_in(kernel: Any) -> Iterator[None]:
    """The block runs while inside. Raises CudaError if it does not start, or ended before it was told to."""
    import cupy as cp
    import numpy as np

    from blink_core import _native
    from blink_core.ops.cuda_modules import CudaError

    memory = cp.cuda.alloc_pinned_memory(16)
    words = np.frombuffer(memory, np.uint64, 2)
    words[:] = 0
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        kernel.launch(1, 256, ctypes.c_void_p(memory.ptr), ctypes.c_uint64(LIMIT_NS), dependent=False)
    try:
        if _native.wait_word(memory.ptr + 8, 0, START_US) == 0:
            raise CudaError(f"a block of 256 threads did not start within {START_US / 1e6:.0f} s")
        yield
    finally:
        _native.store_release(memory.ptr, 1)
        stream.synchronize()
    if int(words[1]) != 1:
        raise CudaError(f"the steps measured beside a resident block took longer than {LIMIT_NS / 1e9:.0f} s")


def _ready(stream: cp.cuda.Stream, work: Callable[[], None]) -> tuple[Any, Any]:
    """A graph of the work and its executable; the work has run once, which loads its kernels."""
    from blink_core.ops.cuda_capture import captured
    from blink_core.runtime.cuda_graphs import instantiate

    with stream:
        work()
    stream.synchronize()
    graph = captured(stream, work)
    return graph, instantiate(graph, stream, device=False)


def _times(stream: cp.cuda.Stream, ready: tuple[Any, Any]) -> tuple[float, ...]:
    """Microseconds of SAMPLES runs after a warm one."""
    import cupy as cp
    from cuda.bindings import driver

    from blink_core.ops.cuda_modules import check

    found = []
    for _ in range(SAMPLES + 1):
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        begin.record(stream)
        check(driver.cuGraphLaunch(ready[1], driver.CUstream(stream.ptr)), "cuGraphLaunch")
        end.record(stream)
        end.synchronize()
        found.append(cp.cuda.get_elapsed_time(begin, end) * 1e3)
    return tuple(found[1:])
