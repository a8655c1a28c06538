"""Operations of batch-invariant mode: right beside NumPy, and a token's bits the same in any step (design section 7).

Each case computes rows together and alone, or a request's tokens by decode and by prefill in any chunks, and counts the
rows whose bits differ. `differing` is what the normal mode shows in the same cases: the check's own control.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import cupy as cp
import numpy as np
import numpy.typing as npt

from blink_core.ops.cuda_attention import AttentionShape, CudaAttentionPlan, StepArrays
from blink_core.ops.cuda_gemm import CudaWeight
from blink_core.ops.cuda_modules import multiprocessors
from blink_core.ops.cuda_moe import CudaMoe
from blink_core.ops.cuda_ops import CudaOps, to_device
from hil_rigs.gpu.ops_cases import (
    SMALL_MOE_CASES,
    Outcome,
    PagedStep,
    attention,
    drawn,
    moe,
    paged_step,
    poisoned,
    products,
)

COUNTS = (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 300)
SHAPES = ((1008, 576), (512, 1536), (1536, 4096), (64, 96))  # outputs, inputs


def values(ops: CudaOps, rng: np.random.Generator) -> Iterator[Outcome]:
    """The cases of every operation, in this mode: a reduction order must not cost the right result."""
    yield from products(ops, rng)
    yield from attention(ops, rng)
    yield from moe(ops, rng, SMALL_MOE_CASES)  # the others are of kernels for one token, which this mode does not use


def bits(ops: CudaOps, rng: np.random.Generator) -> Iterator[Outcome]:
    """Rows whose bits depend on the step, of each operation; the limit is none."""
    yield from _products(ops, rng)
    yield from _norms(ops, rng)
    yield from _attention(ops, rng)
    yield from _moe(ops, rng)


def fixed(ops: CudaOps, rng: np.random.Generator) -> Iterator[Outcome]:
    """Products and mixtures of this mode in 16-bit types, whatever the mode of ``ops``: of the same bits in any batch
    and on few multiprocessors, where a block makes several tiles, and right."""
    if ops.dtype == "float32":
        return
    ops = CudaOps(ops.dtype, batch_invariant=True)
    yield from _products(ops, rng)
    yield from _moe(ops, rng)
    yield from _several_tiles(ops, rng)
    yield from products(ops, rng)
    yield from moe(ops, rng, SMALL_MOE_CASES)


def differing(ops: CudaOps, rng: np.random.Generator) -> int:
    """Rows of all cases whose bits depend on the step."""
    return int(sum(outcome.error for outcome in bits(ops, rng)))


def _counted(ops: CudaOps, op: str, case: str, got: list[npt.NDArray[Any]], alone: npt.NDArray[Any]) -> Outcome:
    """got: arrays of rows, each the first of `alone` [rows, ...]."""
    wrong = sum(int(np.any(_bits(g) != _bits(alone[: len(g)]), axis=1).sum()) for g in got)
    return Outcome(f"same bits: {op}", case, ops.dtype, float(wrong), 0.0)


def _bits(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    flat = np.ascontiguousarray(array).reshape(len(array), -1)
    return flat.view(np.uint32 if flat.itemsize == 4 else np.uint16)


def _products(ops: CudaOps, rng: np.random.Generator) -> Iterator[Outcome]:
    most = max(COUNTS)
    for n, k in SHAPES:
        x, _ = drawn(rng, ops.dtype, most, k)
        w, _ = drawn(rng, ops.dtype, n, k, scale=k**-0.5)
        bias, _ = drawn(rng, ops.dtype, n)
        residual, _ = drawn(rng, ops.dtype, most, n)
        plain, full = CudaWeight(w), CudaWeight(w, bias)

        def linear(rows: slice, w: CudaWeight = full, x: cp.ndarray = x, r: cp.ndarray = residual) -> cp.ndarray:
            return ops.linear(x[rows], w, poisoned(ops, len(x[rows]), w.nk.shape[0]), r[rows])

        def logits(rows: slice, w: CudaWeight = plain, x: cp.ndarray = x) -> cp.ndarray:
            return ops.linear(x[rows], w, cp.full((len(x[rows]), w.nk.shape[0]), cp.nan, cp.float32))

        def acted(rows: slice, w: CudaWeight = full, x: cp.ndarray = x) -> cp.ndarray:
            scratch = poisoned(ops, len(x[rows]), w.nk.shape[0])
            return ops.gate_up_silu(x[rows], w, poisoned(ops, len(x[rows]), w.nk.shape[0] // 2), scratch)

        for name, product in (("linear", linear), ("logits", logits), ("gate and up", acted)):
            alone = np.concatenate([cp.asnumpy(product(slice(i, i + 1))) for i in range(most)])
            got = [cp.asnumpy(product(slice(0, count))) for count in COUNTS]
            yield _counted(ops, name, f"{n}x{k}", got, alone)
            # The same rows further on: another place in a tile.
            moved = [cp.asnumpy(product(slice(5, 5 + count))) for count in COUNTS if 5 + count <= most]
            yield _counted(ops, f"{name}, moved", f"{n}x{k}", moved, alone[5:])


def _several_tiles(ops: CudaOps, rng: np.random.Generator) -> Iterator[Outcome]:
    n, k = 1536, 576
    w, _ = drawn(rng, ops.dtype, n, k, scale=k**-0.5)
    for rows in (20, 40, 300):
        x, _ = drawn(rng, ops.dtype, rows, k)
        whole, few = poisoned(ops, rows, n), poisoned(ops, rows, n)
        ops.linear(x, CudaWeight(w), whole)
        ops.kernels.reserved = multiprocessors() - 1
        try:
            ops.linear(x, CudaWeight(w), few)
        finally:
            ops.kernels.reserved = 0
        yield _counted(ops, "linear, several tiles a block", f"{rows}x{n}x{k}", [cp.asnumpy(few)], cp.asnumpy(whole))


def _norms(ops: CudaOps, rng: np.random.Generator) -> Iterator[Outcome]:
    for hidden in (576, 4096):
        x, _ = drawn(rng, ops.dtype, 300, hidden)
        weight, _ = drawn(rng, ops.dtype, hidden)
        alone = cp.asnumpy(ops.rms_norm(x[:1], weight, 1e-5))
        rest = [cp.asnumpy(ops.rms_norm(x[i : i + 1], weight, 1e-5)) for i in range(1, 300)]
        got = [cp.asnumpy(ops.rms_norm(x[:count], weight, 1e-5)) for count in COUNTS]
        yield _counted(ops, "rms_norm", f"{hidden}", got, np.concatenate([alone, *rest]))


def _attention(ops: CudaOps, rng: np.random.Generator) -> Iterator[Outcome]:
    """One context of 1,100 tokens, three pieces: its last 90, on both sides of the second edge, as decode rows, alone
    or 17 together, and in chunks."""
    context, new = 1100, 90
    for heads, kv_heads in ((9, 3), (32, 8), (20, 1)):
        for head_dim in (64, 128):
            shape = AttentionShape(heads, kv_heads, head_dim, 16)
            step = paged_step(ops, rng, shape, [(new, context)], noise=True)
            for window in (None, 100):
                alone = np.concatenate([_part(ops, step, window, [(at, at + 1)]) for at in range(new)])
                ways = [[(0, new)], [(0, 3), (3, 20), (20, 21), (21, new)], [(i, i + 1) for i in range(17)]]
                got = [_part(ops, step, window, way) for way in ways]
                got.append(_part(ops, step, window, ways[-1], cut=False))
                yield _counted(ops, "attention", f"{heads}/{kv_heads}x{head_dim} window {window}", got, alone)


def _part(
    ops: CudaOps, step: PagedStep, window: int | None, chunks: list[tuple[int, int]], *, cut: bool = True
) -> npt.NDArray[Any]:
    """Attention of some of the new tokens, a row for each chunk, all in one step. ``cut``: pieces of a single token's
    context may have blocks of their own."""
    first, last = chunks[0][0], chunks[-1][1]
    before = int(step.context_lens[0]) - int(step.row_starts[-1])
    table_row = int(step.arrays.table_rows[0])
    arrays = StepArrays(
        sizes=cp.asarray(np.array([len(chunks), last - first, 0, 0], np.int32)),
        row_starts=cp.asarray(np.array([a - first for a, _ in chunks] + [last - first], np.int32)),
        context_lens=cp.asarray(np.array([before + b for _, b in chunks], np.int32)),
        block_tables=step.arrays.block_tables,
        table_rows=cp.full(len(chunks), table_row, cp.int32),
    )
    plan = CudaAttentionPlan(
        ops.kernels, step.shape, len(chunks), last - first, window=window, invariant=ops.batch_invariant,
        max_context=4096,
    )  # fmt: skip
    if not cut:
        plan._params.max_pieces = 1
    plan.make(arrays)
    out = poisoned(ops, last - first, step.shape.heads * step.shape.head_dim)
    ops.paged_attention(step.q[first:last], step.k, step.v, plan, out)
    if int(plan.counts[2]) or int(cp.count_nonzero(plan.arrived)) or int(cp.count_nonzero(plan.tickets)):
        raise AssertionError("the work list overflowed, or a piece was not added up")
    result: npt.NDArray[Any] = cp.asnumpy(out)
    return result


def _moe(ops: CudaOps, rng: np.random.Generator) -> Iterator[Outcome]:
    tokens, hidden, inner, experts, top_k = 200, 256, 96, 16, 3
    x, _ = drawn(rng, ops.dtype, tokens, hidden)
    router = CudaWeight(to_device((rng.standard_normal((experts, hidden)) * 0.2).astype(np.float32), ops.dtype))
    gate_up = CudaWeight(drawn(rng, ops.dtype, experts, 2 * inner, hidden, scale=hidden**-0.5)[0])
    down = CudaWeight(drawn(rng, ops.dtype, experts, hidden, inner, scale=inner**-0.5)[0])
    mixture = CudaMoe(ops.kernels, ops.gemm, experts, top_k, hidden, inner, tokens, ops.storage)

    def mixed(first: int, count: int) -> npt.NDArray[Any]:
        sizes, out = cp.asarray(np.array([1, count, 0, 0], np.int32)), poisoned(ops, count, hidden)
        mixture(x[first : first + count], router, gate_up, down, sizes, out, normalize=True)
        result: npt.NDArray[Any] = cp.asnumpy(out)
        return result

    alone = np.concatenate([mixed(i, 1) for i in range(tokens)])
    yield _counted(ops, "moe", f"{top_k} of {experts}", [mixed(0, c) for c in COUNTS if c <= tokens], alone)


def shared_weights(network: Any, ops: CudaOps) -> Any:
    """The network with other operations of the same element type; its weights are not copied."""
    if network.ops.dtype != ops.dtype:
        raise ValueError(f"weights are {network.ops.dtype}, not {ops.dtype}")
    return replace(network, ops=ops)
