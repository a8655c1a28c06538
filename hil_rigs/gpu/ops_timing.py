"""Timings of the GPU operations at Llama-3-8B and Qwen3-30B-A3B shapes, from CUDA events around graph replays.

Every figure keeps its samples. Data is far larger than the L2, or rotated so that it is not found there.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial

import cupy as cp
import numpy as np

from blink_core.ops.cublaslt import Choice
from blink_core.ops.cuda_capture import captured
from blink_core.ops.cuda_gemm import MOST_SKINNY_ROWS, SILU_ROWS, SKINNY_ROWS, tune_step
from blink_core.ops.cuda_ops import AttentionShape, CudaAttentionPlan, CudaOps, CudaWeight, StepArrays, random_normal
from blink_core.ops.tuning import Combination
from blink_core.runtime.cuda_step import PARTS, enough
from hil_rigs.gpu.stack import LLAMA_3_8B, PAGE, QWEN3_30B_A3B, Stack, Step, random_weight

READ = r"""
extern "C" __global__ void read(const uint4* x, long long n, unsigned* out) {
  unsigned sum = 0;
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x, stride = (long long)gridDim.x * blockDim.x;
  for (; i + 3 * stride < n; i += 4 * stride) {
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = x[i + j * stride];
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (sum == 0x12345678u) *out = sum;
}
"""


@dataclass(frozen=True, slots=True)
class Timing:
    """``samples``: microseconds of each replay, by the repeats in it. ``bytes_read``, ``flops``: of one repeat."""

    name: str
    samples: list[float]
    bytes_read: float = 0.0
    flops: float = 0.0
    target_us: float = 0.0
    note: str = ""

    @property
    def median(self) -> float:
        """Microseconds."""
        return float(np.median(self.samples))

    @property
    def line(self) -> str:
        """One row of the table."""
        text = f"{self.name:58s} {self.median:10.2f} us  [{min(self.samples):.2f}, {max(self.samples):.2f}]"
        if self.bytes_read:
            text += f"  {self.bytes_read / self.median / 1e6:6.2f} TB/s"
        if self.flops:
            text += f"  {self.flops / self.median / 1e6:6.0f} TFLOP/s"
        if self.target_us:
            text += f"  target {self.target_us:.0f}: {'met' if self.median <= self.target_us else 'MISSED'}"
        return text + (f"  {self.note}" if self.note else "")

    def record(self) -> dict[str, object]:
        """For the JSON file."""
        return asdict(self)


def timed(
    work: Callable[[], None],
    repeats: int = 1,
    samples: int = 15,
    during: AbstractContextManager[object] = nullcontext(),  # noqa: B008
) -> list[float]:
    """Microseconds of one of ``repeats`` calls captured in a graph: ``samples`` replays after two warm ones.
    ``during``: entered for the replays alone, which the first call and the capture leave the GPU idle before."""
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()  # what the default stream prepared

    def repeated() -> None:
        for _ in range(repeats):
            work()

    with stream:
        work()
        stream.synchronize()
        graph = captured(stream, repeated)
        result = []
        with during:
            for i in range(samples + 2):
                begin, end = cp.cuda.Event(), cp.cuda.Event()
                begin.record(stream)
                graph.launch(stream)
                end.record(stream)
                end.synchronize()
                if i >= 2:
                    result.append(cp.cuda.get_elapsed_time(begin, end) * 1e3 / repeats)
    return result


def bandwidth() -> Timing:
    """Reading 4 GiB."""
    data = cp.ones(1 << 30, cp.uint32)
    out = cp.zeros(1, cp.uint32)
    kernel = cp.RawModule(code=READ, backend="nvrtc", options=("--std=c++17",)).get_function("read")
    best: list[float] = []
    for grid in (132 * 4, 132 * 8, 132 * 16):
        n = np.int64(data.nbytes // 16)
        samples = timed(partial(kernel, (grid,), (512,), (data, n, out)), samples=7)
        if not best or np.median(samples) < np.median(best):
            best = samples
    return Timing("read 4 GiB", best, data.nbytes)


def decode_attention(ops: CudaOps, tbps: float, rows: int = 64, context: int = 2048) -> Iterator[Timing]:
    """Decode attention over 4 layers' pages in turn."""
    shape = AttentionShape(32, 8, 128, PAGE)
    each = context // PAGE
    pages = rows * each + 2
    pools = [random_weight(ops, 2, pages, PAGE, 8, 128) for _ in range(4)]
    tables = np.random.default_rng(0).permutation(np.arange(2, pages)).reshape(rows, each).astype(np.uint32)
    arrays = StepArrays(
        cp.asarray(np.array([rows, rows, rows, 0], np.int32)), cp.arange(rows + 1, dtype=cp.int32),
        cp.full(rows, context, cp.int32), cp.asarray(tables), cp.arange(rows, dtype=cp.int32),
    )  # fmt: skip
    q = random_weight(ops, rows, 32, 128)
    out = ops.empty(rows, 4096)
    plan = CudaAttentionPlan(ops.kernels, shape, rows, rows)
    plan.make(arrays)

    def work() -> None:
        for pool in pools:
            ops.paged_attention(q, pool[0], pool[1], plan, out, prefill=False)

    size = rows * context * 8 * 128 * 2 * 2
    samples = [t / 4 for t in timed(work)]
    share = size / float(np.median(samples)) / 1e6 / tbps
    target = size / (0.75 * tbps) / 1e6 if (rows, context) == (64, 2048) else 0.0
    yield Timing(
        f"decode attention {rows} x {context}", samples, size, target_us=target,
        note=f"{share:.1%} of read bandwidth",
    )  # fmt: skip
    yield Timing("attention plan", timed(lambda: plan.make(arrays), 8))


def prefill_attention(ops: CudaOps, new: int = 2048, before: int = 0) -> Iterator[Timing]:
    """Attention of a chunk of ``new`` tokens of one row behind ``before`` others, Llama-3-8B's heads."""
    shape = AttentionShape(32, 8, 128, PAGE)
    context = before + new
    pages = context // PAGE + 2
    pool = random_weight(ops, 2, pages, PAGE, 8, 128)
    arrays = StepArrays(
        cp.asarray(np.array([1, new, 0, 0], np.int32)), cp.asarray(np.array([0, new], np.int32)),
        cp.full(1, context, cp.int32), cp.arange(2, pages, dtype=cp.uint32).reshape(1, -1), cp.zeros(1, cp.int32),
    )  # fmt: skip
    q, out = random_weight(ops, new, 32, 128), ops.empty(new, 4096)
    plan = CudaAttentionPlan(ops.kernels, shape, 1, new)
    plan.make(arrays)

    def work() -> None:
        ops.paged_attention(q, pool[0], pool[1], plan, out, decode=False)

    samples = timed(work, 4)
    yield Timing(f"prefill attention {new} behind {before}", samples, flops=4.0 * 4096 * new * (before + new / 2))


def products(ops: CudaOps, batches: tuple[int, ...] = (1, 8, 16, 32, 128)) -> Iterator[Timing]:
    """The projections of Llama-3-8B by each path, weights rotated over 600 MB and more."""
    for name, n, k in (
        ("qkv", 6144, 4096), ("o", 4096, 4096), ("gate_up", 28672, 4096), ("down", 4096, 14336), ("head", 128256, 4096),
    ):  # fmt: skip
        weights = [CudaWeight(random_weight(ops, n, k)) for _ in range(max(2, int(6e8 / (n * k * 2))))]
        for rows in batches:
            yield from product(ops, name, weights, rows)
        del weights
        free()


def product(ops: CudaOps, name: str, weights: list[CudaWeight], rows: int) -> Iterator[Timing]:
    """One projection of ``rows`` rows: cuBLASLt's first algorithm, what tuning chose, and the own kernels."""
    n, k = weights[0].nk.shape
    x = random_normal(ops.dtype, rows, k)
    out = cp.empty((rows, n), cp.float32) if name == "head" else ops.empty(rows, n)
    label = f"{name} {n}x{k} rows {rows}"

    def rotated(path: str, call: Callable[[CudaWeight], object], note: str = "") -> Timing:
        def work() -> None:
            for weight in weights:
                call(weight)

        samples = [t / len(weights) for t in timed(work, samples=9)]
        return Timing(f"{label} {path}", samples, n * k * 2, note=note)

    lt = ops.gemm.library()
    yield rotated("cuBLASLt first", lambda w: lt.launch(x, w, out, None, Choice()))
    if tuning := ops.gemm.tune(x, weights, out):
        yield rotated("tuned", lambda w: ops.gemm(x, w, out), tuning.line)
    if rows > MOST_SKINNY_ROWS:
        return
    ops.gemm.skinny_rows = MOST_SKINNY_ROWS
    yield rotated("own", lambda w: ops.gemm(x, w, out))
    if name == "gate_up" and rows <= SILU_ROWS:
        half = ops.empty(rows, n // 2)
        yield rotated("own with silu", lambda w: ops.gemm.silu(x, w, half))
    ops.gemm.skinny_rows = SKINNY_ROWS


def tune(ops: CudaOps, stack: Stack, step: Step) -> list[str]:
    """Choose how the products of a step are made, as the engine does: each alone, then all in the step. A line for each
    product, and for each comparison of two whole steps."""
    lines, tunings = [], {}
    acted = ops.empty(step.tokens, max(8, stack.shape.inner))
    for part in (*PARTS, "head"):
        weights = [stack.head] if part == "head" else [getattr(layer, part) for layer in stack.layers]
        if weights[0].nk.ndim != 2:
            continue
        n, k = weights[0].nk.shape
        rows = step.logits.shape[0] if part == "head" else step.tokens
        x, out = random_normal(ops.dtype, rows, k), step.logits if part == "head" else ops.empty(rows, n)

        def gated(weight: CudaWeight, x: cp.ndarray = x, out: cp.ndarray = out) -> None:
            ops.gate_up_silu(x, weight, acted, out)

        silu = part == "gate_up"
        begin = time.monotonic()
        tuning = ops.gemm.tune(x, enough(weights), out, gated if silu else None, silu=silu)
        if tuning is not None:
            tunings[part] = tuning
            seconds = time.monotonic() - begin
            lines.append(f"{part} {rows}x{n}x{k}{' with SwiGLU' * silu}: {tuning.line}; tuned in {seconds:.2f} s")
    begin = time.monotonic()
    duels = tune_step(list(tunings.values()), step.run)
    names = {part: [c.name for c in t.options] for part, t in tunings.items() if len(t.options) > 1}

    def named(combination: Combination) -> str:
        return ", ".join(f"{part} {names[part][option]}" for part, option in zip(names, combination, strict=True))

    for d in duels:
        word = "faster" if d.won else "not faster"
        lines.append(f"in the step {word} by {d.gain_us:.1f} us, noise {d.noise_us:.1f}: {named(d.other)}")
    if duels:
        lines.append(f"{len(duels)} comparisons of whole steps in {time.monotonic() - begin:.2f} s")
    return lines


def llama_steps(ops: CudaOps) -> Iterator[Timing]:
    """Whole decode steps of Llama-3-8B, 192 tokens of context (128 in, 129 out on average), and a prefill chunk."""
    stack = Stack(ops, LLAMA_3_8B, 128 * 17 + 200)
    targets = {1: 4400, 8: 4500, 32: 4900, 128: 6500}
    everything = frozenset(("attention", "small", "products", "sampler"))
    for rows, target in targets.items():
        step = Step(stack, [(1, 192)] * rows)
        for line in tune(ops, stack, step):
            print(line, flush=True)
        samples = timed(step.run, samples=21)
        note = f"{stack.weight_bytes / float(np.median(samples)) / 1e6:.2f} TB/s of weights"
        yield Timing(f"Llama-3-8B decode step batch {rows}", samples, target_us=target, note=note)
        for part in ("attention", "small", "products", "sampler"):
            left = timed(partial(step.run, frozenset((part,))), samples=7)
            yield Timing(f"  without {part}", left, note=f"costs {np.median(samples) - np.median(left):.0f} us")
        alone = timed(partial(step.run, everything - {"products"}), samples=7)
        yield Timing("  products alone", alone)
        if len({int(t) for t in step.results_host()["status"]}) != 1:
            yield Timing("  STATUS DIFFERS", [float("nan")])
    for rows, new in ((1, 128), (1, 2048)):
        step = Step(stack, [(new, new)] * rows)
        for line in tune(ops, stack, step):
            print(line, flush=True)
        target = 48000 if new == 2048 else 8000
        samples = timed(step.run, samples=9)
        flops = 2.0 * new * (stack.weight_bytes - stack.head.nk.nbytes) / 2
        yield Timing(f"Llama-3-8B prefill chunk {new}", samples, flops=flops, target_us=target)
        for part in ("attention", "small", "products"):
            left = timed(partial(step.run, frozenset((part,))), samples=5)
            yield Timing(f"  without {part}", left, note=f"costs {np.median(samples) - np.median(left):.0f} us")


def moe_steps(ops: CudaOps) -> Iterator[Timing]:
    """Whole decode steps of Qwen3-30B-A3B."""
    stack = Stack(ops, QWEN3_30B_A3B, 400)
    for rows in (1, 8):
        step = Step(stack, [(1, 192)] * rows)
        samples = timed(step.run, samples=15)
        yield Timing(f"Qwen3-30B-A3B decode step batch {rows}", samples, target_us=2200 if rows == 1 else 0)
        for part in ("attention", "small", "products", "sampler"):
            left = timed(partial(step.run, frozenset((part,))), samples=5)
            yield Timing(f"  without {part}", left, note=f"costs {np.median(samples) - np.median(left):.0f} us")


def free() -> None:
    """Give memory back before the next model."""
    gc.collect()
    cp.get_default_memory_pool().free_all_blocks()
