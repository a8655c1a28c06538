"""Attention on the GPU against its NumPy twin: rows of every kind on scattered pages, behind an append, on far pages,
and beside torch's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import cupy as cp
import numpy as np
import numpy.typing as npt

from blink_core.ops.cuda_ops import (
    AttentionShape,
    CudaAttentionPlan,
    CudaOps,
    StepArrays,
    to_device,
    to_host,
)
from blink_core.ops.numpy_ops import NumpyOps
from hil_rigs.gpu.comparison import ATTENTION_LIMITS, F32, PAGE, Outcome, drawn, error_of, poisoned

RATIOS = ((4, 4), (9, 3), (32, 8), (40, 8), (28, 4), (64, 8), (20, 1))


@dataclass(slots=True)
class PagedStep:
    """A drawn step: rows with contexts in scattered pages; what no row may read is poison."""

    shape: AttentionShape
    q: cp.ndarray
    q_host: F32
    k: cp.ndarray
    v: cp.ndarray
    k_host: F32
    v_host: F32
    arrays: StepArrays
    row_starts: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    tables: npt.NDArray[np.int32]


def paged_step(
    ops: CudaOps,
    rng: np.random.Generator,
    shape: AttentionShape,
    lengths: list[tuple[int, int]],
    *,
    noise: bool,
    padding: int = 0,
) -> PagedStep:
    """``lengths``: (new tokens, context) of each row; ``padding``: rows and tokens beyond them. ``noise``: poison is
    noise of standard deviation 100, else NaN."""
    rows_ = len(lengths)
    needed = [-(-context // shape.page_size) for _, context in lengths]
    pages = sum(needed) + 2 + 7
    free = rng.permutation(np.arange(2, pages))
    width = max(needed) + 3
    tables = np.full((rows_ + 4, width), pages - 1 if noise else 0, np.uint32)
    table_rows = rng.permutation(rows_ + 4)[:rows_].astype(np.int32)
    pool = (pages, shape.page_size, shape.kv_heads, shape.head_dim)
    fill = (
        (rng.standard_normal((2, *pool)) * 100).astype(np.float32) if noise else np.full((2, *pool), np.nan, np.float32)
    )
    at = 0
    for r, (_, context) in enumerate(lengths):
        mine = free[at : at + needed[r]]
        at += needed[r]
        tables[table_rows[r], : needed[r]] = mine
        for i in range(2):
            flat = fill[i].reshape(-1, shape.kv_heads, shape.head_dim)
            slots = (mine[:, None] * shape.page_size + np.arange(shape.page_size)).ravel()[:context]
            flat[slots] = rng.standard_normal((context, shape.kv_heads, shape.head_dim))
    k, v = to_device(fill[0], ops.dtype), to_device(fill[1], ops.dtype)
    starts = np.cumsum([0, *(n for n, _ in lengths)]).astype(np.int32)
    tokens = int(starts[-1])
    q, q_host = drawn(rng, ops.dtype, tokens + padding, shape.heads, shape.head_dim)
    contexts = np.array([c for _, c in lengths], np.int32)
    arrays = StepArrays(
        sizes=cp.asarray(np.array([rows_, tokens, 0, 0], np.int32)),
        row_starts=cp.asarray(np.concatenate((starts, np.full(padding, tokens, np.int32)))),
        context_lens=cp.asarray(np.concatenate((contexts, np.zeros(padding, np.int32)))),
        block_tables=cp.asarray(tables),
        table_rows=cp.asarray(np.concatenate((table_rows, np.zeros(padding, np.int32)))),
    )
    return PagedStep(
        shape, q, q_host, k, v, to_host(k, ops.dtype), to_host(v, ops.dtype), arrays, starts, contexts,
        tables[table_rows].astype(np.int32),
    )  # fmt: skip


def attend(ops: CudaOps, step: PagedStep, window: int | None, fixed_chunk: int | None = None) -> F32:
    """The step's attention on the GPU, float32 [tokens, heads * head_dim]."""
    rows_, tokens = step.arrays.context_lens.shape[0], step.q.shape[0]
    plan = CudaAttentionPlan(
        ops.kernels, step.shape, rows_, tokens, window=window, fixed_chunk=fixed_chunk,
        invariant=ops.batch_invariant, max_context=4096,
    )  # fmt: skip
    plan.make(step.arrays)
    out = poisoned(ops, tokens, step.shape.heads * step.shape.head_dim)
    ops.paged_attention(step.q, step.k, step.v, plan, out)
    if int(plan.counts[2]) or int(cp.count_nonzero(plan.arrived)) or int(cp.count_nonzero(plan.tickets)):
        raise AssertionError("the work list overflowed, or a split was not added up")
    return to_host(out, ops.dtype)[: int(step.row_starts[-1])]


def expected_attention(step: PagedStep, window: int | None) -> F32:
    """The same by NumpyOps."""
    numpy = NumpyOps()
    plan = numpy.plan_attention(step.row_starts, step.context_lens, step.tables, step.shape.page_size, window)
    tokens = int(step.row_starts[-1])
    return numpy.paged_attention(step.q_host[:tokens], step.k_host, step.v_host, plan)


def drawn_lengths(rng: np.random.Generator) -> list[tuple[int, int]]:
    """Rows of decode and prefill, their lengths biased to boundaries of pages, tiles and splits."""
    edges = np.array([1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 640, 1000])
    lengths = [(1, int(c)) for c in rng.choice(edges, 7)]
    for new in rng.choice(np.array([2, 3, 16, 17, 31, 45, 64, 70, 129]), 4):
        before = int(rng.choice(np.array([0, 1, 16, 33, 64, 200])))
        lengths.append((int(new), before + int(new)))
    return [lengths[i] for i in rng.permutation(len(lengths))]


def attention(ops: CudaOps, rng: np.random.Generator) -> Iterator[Outcome]:
    """Decode and prefill rows together: every ratio of heads, head dim, window and kind of poison; padding rows."""
    for number, (heads, kv_heads) in enumerate(RATIOS):
        for head_dim in (64, 96, 128):
            shape = AttentionShape(heads, kv_heads, head_dim, PAGE)
            noise = bool(number % 2)
            step = paged_step(ops, rng, shape, drawn_lengths(rng), noise=noise, padding=3)
            for window in (None, int(rng.choice(np.array([1, 16, 40, 100, 300])))):
                case = f"{heads}/{kv_heads}x{head_dim} window {window} {'noise' if noise else 'NaN'}"
                expected = expected_attention(step, window)
                limit = ATTENTION_LIMITS[ops.dtype]
                yield Outcome("attention", case, ops.dtype, error_of(attend(ops, step, window), expected), limit)
            if head_dim == 128:
                got = attend(ops, step, None, fixed_chunk=128)
                yield Outcome(
                    "attention fixed splits", case, ops.dtype, error_of(got, expected_attention(step, None)), limit
                )
    shape = AttentionShape(8, 2, 64, 8)
    step = paged_step(ops, rng, shape, drawn_lengths(rng), noise=False)
    got, expected = attend(ops, step, None), expected_attention(step, None)
    yield Outcome("attention", "8/2x64 pages of 8", ops.dtype, error_of(got, expected), ATTENTION_LIMITS[ops.dtype])


def dawdle(ops: CudaOps) -> list[cp.ndarray]:
    """Launches a kernel of one block that lets what follows start at once and itself takes a millisecond or so: what
    follows, and reads before it waits, reads before anything in between has written. Returns arrays to be kept."""
    pairs, width = 1 << 21, 64  # all of one expert: one counter
    index, listed, tokens = (cp.zeros(pairs, cp.int32) for _ in range(3))
    count, blocks = cp.zeros(1, cp.int32), cp.zeros((pairs // width + 8, 4), cp.int32)
    sizes = cp.asarray(np.array([1, pairs, 0, 0], np.int32))
    kernel = ops.kernels.get("moe.cu", "moe_sort")
    kernel.launch(1, 1024, sizes, index, count, blocks, listed, tokens, 8, 1, width)
    return [sizes, index, count, blocks, listed, tokens]


def append(ops: CudaOps, rng: np.random.Generator) -> Iterator[Outcome]:
    """Attention right behind the kernel that writes the new tokens' keys and values, which were poison before: it
    starts early and fetches old keys ahead, and must not fetch these. From the second round on every kernel has been
    loaded, and attention does start while a kernel before them still runs."""
    for number, window in enumerate((None, None, 40)):
        shape = AttentionShape(32, 8, 128, PAGE)
        lengths = [(1, int(c)) for c in rng.integers(1, 900, 40)] + [(1, 16), (1, 17), (1, 64), (1, 65)]
        step = paged_step(ops, rng, shape, lengths, noise=bool(number % 2))
        expected = expected_attention(step, window)
        last = step.context_lens - 1
        slots = step.tables[np.arange(last.size), last // PAGE].astype(np.int64) * PAGE + last % PAGE
        index = cp.asarray(slots)
        new = []
        for pages in (step.k, step.v):
            flat = pages.reshape(-1, shape.kv_heads, shape.head_dim)
            new.append(flat[index])
            flat[index] = poisoned(ops, last.size, shape.kv_heads, shape.head_dim)
        plan = CudaAttentionPlan(ops.kernels, shape, len(lengths), len(lengths), window=window)
        plan.make(step.arrays)
        out = poisoned(ops, len(lengths), shape.heads * shape.head_dim)
        held = dawdle(ops)
        for pages, values in zip((step.k, step.v), new, strict=True):
            ops.append_kv(pages, index, values)
        ops.paged_attention(step.q, step.k, step.v, plan, out, prefill=False)
        error = error_of(to_host(out, ops.dtype), expected)
        yield Outcome("attention behind append", f"window {window}", ops.dtype, error, ATTENTION_LIMITS[ops.dtype])
        del held


def far(ops: CudaOps, rng: np.random.Generator) -> Iterator[Outcome]:
    """Pages behind the first 2^32 elements of a pool, written and read; what lies 2^32 before them is NaN. Left out in
    float32, and where the device has no room for two such pools."""
    shape = AttentionShape(32, 8, 128, PAGE)
    first = (1 << 32) // (PAGE * shape.kv_heads * shape.head_dim)
    if ops.dtype == "float32":
        return
    step = paged_step(ops, rng, shape, [(1, 1), (1, 40), (1, 700), (45, 61), (3, 3)], noise=False)
    expected = expected_attention(step, None)
    size = (first + len(step.k)) * step.k[0].nbytes
    cp.get_default_memory_pool().free_all_blocks()
    if cp.cuda.runtime.memGetInfo()[0] < 2 * size + (1 << 30):
        print(f"left out: attention on far pages needs 2 * {size} bytes of free memory", flush=True)
        return
    slots = cp.arange(len(step.k) * PAGE, dtype=cp.int64)
    pools = []
    for pages in (step.k, step.v):
        pool = cp.empty((first + len(pages), *pages.shape[1:]), pages.dtype)
        pool.view(cp.uint16)[:] = 0xFFFF  # NaN in both types
        ops.append_kv(pool, slots + first * PAGE, pages.reshape(-1, shape.kv_heads, shape.head_dim))
        pools.append(pool)
    arrays = replace(step.arrays, block_tables=step.arrays.block_tables + cp.uint32(first))
    got = attend(ops, replace(step, k=pools[0], v=pools[1], arrays=arrays), None)
    error = error_of(got, expected)
    yield Outcome("attention on far pages", f"page {first}", ops.dtype, error, ATTENTION_LIMITS[ops.dtype])
    del pools, pool
    cp.get_default_memory_pool().free_all_blocks()


def beside_torch(ops: CudaOps, rng: np.random.Generator) -> Iterator[Outcome]:
    """16-bit attention beside torch's on the same inputs: error to float64 at most 1.10 times torch's (design [9])."""
    if ops.dtype == "float32":
        return
    import torch

    kind = {"bfloat16": torch.bfloat16, "float16": torch.float16}[ops.dtype]
    for heads, kv_heads, head_dim in ((32, 8, 128), (28, 4, 128), (9, 3, 64), (8, 8, 96)):
        shape = AttentionShape(heads, kv_heads, head_dim, PAGE)
        lengths = [(1, 900), (1, 3001), (77, 500), (300, 300)]
        step = paged_step(ops, rng, shape, lengths, noise=True)
        got = attend(ops, step, None)
        for r, (new, context) in enumerate(lengths):
            slots = (step.tables[r][:, None] * PAGE + np.arange(PAGE)).ravel()[:context]
            begin = int(step.row_starts[r])

            def tensor(values: F32) -> Any:
                return torch.from_numpy(np.ascontiguousarray(values.swapaxes(0, 1)))[None].cuda()

            q = tensor(step.q_host[begin : begin + new])
            k, v = (
                tensor(a.reshape(-1, kv_heads, head_dim)[slots]).repeat_interleave(heads // kv_heads, 1)
                for a in (step.k_host, step.v_host)
            )
            mask = torch.ones(new, context, dtype=torch.bool).tril(context - new).cuda()
            exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask)
            theirs = torch.nn.functional.scaled_dot_product_attention(
                q.to(kind), k.to(kind), v.to(kind), attn_mask=mask
            )
            reference = exact[0].swapaxes(0, 1).reshape(new, -1).cpu().numpy()
            their_error = error_of(theirs[0].swapaxes(0, 1).reshape(new, -1).float().cpu().numpy(), reference)
            ratio = error_of(got[begin : begin + new], reference) / their_error
            case = f"{heads}/{kv_heads}x{head_dim} {new} of {context}"
            yield Outcome("attention error / torch's", case, ops.dtype, ratio, 1.10)
