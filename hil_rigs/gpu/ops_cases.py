"""Each GPU operation against its NumPy twin over drawn shapes, offsets and page layouts (design sections 7 and 9).

Inputs are rounded to the element type first, so that only the operation's own error is measured. A result is compared
by the norm of the error over the norm of the reference; a NaN never passes. Outputs and pools are poisoned beforehand,
in turn with NaN and with noise of standard deviation 100.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cupy as cp
import numpy as np
import numpy.typing as npt

from blink_core.ops.cuda_gemm import SKINNY_ROWS
from blink_core.ops.cuda_moe import CudaMoe
from blink_core.ops.cuda_ops import (
    AttentionShape,
    CudaAttentionPlan,
    CudaOps,
    CudaWeight,
    Norm,
    StepArrays,
    to_device,
    to_host,
)
from blink_core.ops.numpy_ops import NumpyOps

F32 = npt.NDArray[np.float32]

# Error over reference, by element type. float32: a few roundings; 16-bit: the output's own rounding (2^-9 and 2^-12 at
# most) and, in attention, that of the weights before the second product.
LIMITS = {"float32": 2e-6, "bfloat16": 2.5e-3, "float16": 3.2e-4}
ATTENTION_LIMITS = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4}
RATIOS = ((4, 4), (9, 3), (32, 8), (40, 8), (28, 4), (64, 8), (20, 1))
PAGE = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """One comparison. ``error`` is NaN when the output holds one."""

    op: str
    case: str
    dtype: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        """Whether the error is within the limit."""
        return bool(self.error <= self.limit)


def error_of(out: npt.NDArray[Any], reference: npt.NDArray[Any]) -> float:
    """Norm of the difference over the norm of the reference, in float64."""
    a, b = out.astype(np.float64), reference.astype(np.float64)
    return float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(b)), 1e-30)


def drawn(rng: np.random.Generator, dtype: str, *shape: int, scale: float = 1.0) -> tuple[cp.ndarray, F32]:
    """Normal values of the element type on the device, and the same as float32 here."""
    device = to_device((rng.standard_normal(shape) * scale).astype(np.float32), dtype)
    return device, to_host(device, dtype)


def poisoned(ops: CudaOps, *shape: int) -> cp.ndarray:
    """An array of NaN."""
    return to_device(np.full(shape, np.nan, np.float32), ops.dtype)


def rows(ops: CudaOps, rng: np.random.Generator) -> Iterator[Outcome]:
    """Embedding, gather, norms, residual, SwiGLU."""
    numpy = NumpyOps()
    limit = LIMITS[ops.dtype]
    for tokens, hidden in ((1, 576), (3, 4096), (17, 5120), (130, 2048), (5, 16384)):
        case = f"{tokens}x{hidden}"
        table, table_host = drawn(rng, ops.dtype, 61, hidden)
        ids = rng.integers(0, 61, tokens).astype(np.int32)
        out = ops.embedding(table, cp.asarray(ids), poisoned(ops, tokens, hidden))
        yield Outcome("embedding", case, ops.dtype, error_of(to_host(out, ops.dtype), table_host[ids]), 0.0)
        x, x_host = drawn(rng, ops.dtype, tokens, hidden)
        delta, delta_host = drawn(rng, ops.dtype, tokens, hidden)
        weight, weight_host = drawn(rng, ops.dtype, hidden)
        out = ops.rms_norm(x, weight, 1e-5, poisoned(ops, tokens, hidden))
        expected = numpy.rms_norm(x_host, weight_host, 1e-5)
        yield Outcome("rms_norm", case, ops.dtype, error_of(to_host(out, ops.dtype), expected), limit)
        out = ops.add_rms_norm(x, delta, weight, 1e-5, poisoned(ops, tokens, hidden))
        total = to_host(to_device(x_host + delta_host, ops.dtype), ops.dtype)
        yield Outcome("add (residual)", case, ops.dtype, error_of(to_host(x, ops.dtype), total), 0.0)
        expected = numpy.rms_norm(total, weight_host, 1e-5)
        yield Outcome("add_rms_norm", case, ops.dtype, error_of(to_host(out, ops.dtype), expected), limit)
        both, both_host = drawn(rng, ops.dtype, tokens, 2 * hidden, scale=4.0)
        out = ops.silu_mul(both, poisoned(ops, tokens, hidden))
        yield Outcome("silu_mul", case, ops.dtype, error_of(to_host(out, ops.dtype), numpy.silu_mul(both_host)), limit)
    x, x_host = drawn(rng, ops.dtype, 7, 5, 128)
    weight, weight_host = drawn(rng, ops.dtype, 5, 128)
    out = ops.rms_norm(x, weight, 1e-6)
    yield Outcome(
        "rms_norm a head",
        "7x5x128",
        ops.dtype,
        error_of(to_host(out, ops.dtype), numpy.rms_norm(x_host, weight_host, 1e-6)),
        limit,
    )


def products(ops: CudaOps, rng: np.random.Generator) -> Iterator[Outcome]:
    """Products of each path, with bias and residual, and the fused gate and up."""
    numpy = NumpyOps()
    limit = LIMITS[ops.dtype] * (4 if ops.dtype == "float32" else 1)
    for tokens in (1, 2, 7, 8, 9, 16, 17, 31, 64, 130):
        for n, k in ((1000, 576), (512, 1536), (1536, 4096)):
            x, x_host = drawn(rng, ops.dtype, tokens, k)
            w, w_host = drawn(rng, ops.dtype, n, k, scale=k**-0.5)
            bias, bias_host = drawn(rng, ops.dtype, n)
            residual, residual_host = drawn(rng, ops.dtype, tokens, n)
            expected = x_host.astype(np.float64) @ w_host.T.astype(np.float64)
            case = f"{tokens}x{n}x{k}"

            def outcome(op: str, out: cp.ndarray, reference: npt.NDArray[Any], case: str = case) -> Outcome:
                got = cp.asnumpy(out) if out.dtype == cp.float32 else to_host(out, ops.dtype)
                return Outcome(op, case, ops.dtype, error_of(got, reference), limit)

            yield outcome("linear", ops.linear(x, CudaWeight(w), poisoned(ops, tokens, n)), expected)
            full = cp.full((tokens, n), cp.nan, cp.float32)
            yield outcome("linear to float32", ops.linear(x, CudaWeight(w), full), expected)
            out = ops.linear(x, CudaWeight(w, bias), residual, residual)
            yield outcome("linear bias residual", out, expected + bias_host + residual_host)
            if ops.dtype != "float32":
                own = poisoned(ops, tokens, n)
                ops.gemm.tile(x, CudaWeight(w), own)
                yield outcome("linear (tile)", own, expected)
            if tokens <= 16 and ops.dtype != "float32":
                ops.gemm.skinny_rows = 16
                out = ops.linear(x, CudaWeight(w, bias), poisoned(ops, tokens, n))
                yield outcome("linear (skinny)", out, expected + bias_host)
            if n % 16 == 0:
                out = ops.gate_up_silu(x, CudaWeight(w, bias), poisoned(ops, tokens, n // 2))
                gated = numpy.silu_mul((expected + bias_host).astype(np.float32))
                error = error_of(to_host(out, ops.dtype), gated)
                # Beyond the own kernel's rows the projection is rounded before SwiGLU.
                yield Outcome("gate_up_silu", case, ops.dtype, error, limit * 2)
            ops.gemm.skinny_rows = SKINNY_ROWS
            norm, norm_host = drawn(rng, ops.dtype, k)
            normed = to_host(to_device(numpy.rms_norm(x_host, norm_host, 1e-5), ops.dtype), ops.dtype)
            through = normed.astype(np.float64) @ w_host.T
            out = ops.linear(x, CudaWeight(w), poisoned(ops, tokens, n), norm=Norm(norm, 1e-5))
            # A norm that falls on the other side of a rounding edge is a rounding of x.
            yield Outcome("linear normed", case, ops.dtype, error_of(to_host(out, ops.dtype), through), limit * 1.5)
            if n % 16 == 0:
                out = ops.gate_up_silu(x, CudaWeight(w), poisoned(ops, tokens, n // 2), norm=Norm(norm, 1e-5))
                gated = numpy.silu_mul(through.astype(np.float32))
                yield Outcome(
                    "gate_up_silu normed", case, ops.dtype, error_of(to_host(out, ops.dtype), gated), limit * 2
                )


def invariance(ops: CudaOps, rng: np.random.Generator) -> Iterator[Outcome]:
    """A row of the own products has the same bits alone and in any batch."""
    k, n = 1536, 512
    x, _ = drawn(rng, ops.dtype, 32, k)
    w, _ = drawn(rng, ops.dtype, n, k, scale=k**-0.5)
    for name in ("skinny", "tile"):
        if name == "skinny" and ops.dtype == "float32":
            continue
        alone = []
        for tokens in (1, 5, 8, 16):
            out = poisoned(ops, tokens, n)
            if name == "skinny":
                ops.gemm.skinny_rows = 16
                ops.linear(x[:tokens], CudaWeight(w), out)
                ops.gemm.skinny_rows = SKINNY_ROWS
            else:
                ops.gemm.tile(x[:tokens], CudaWeight(w), out)
            alone.append(cp.asnumpy(out[0]))
        same = all(np.array_equal(a, alone[0]) for a in alone)
        yield Outcome(f"same bits in any batch ({name})", "1..16 rows", ops.dtype, 0.0 if same else 1.0, 0.0)


def rope(ops: CudaOps, rng: np.random.Generator) -> Iterator[Outcome]:
    """Fused norm, rotation and append: queries, pages, and nothing else written."""
    numpy = NumpyOps()
    for head_dim, half, heads, kv_heads, normed in (
        (64, 32, 9, 3, False), (96, 48, 8, 8, False), (128, 64, 32, 8, True), (128, 48, 40, 8, False),
        (128, 64, 5, 1, True),
    ):  # fmt: skip
        tokens, pages = int(rng.integers(1, 40)), 13
        shape = AttentionShape(heads, kv_heads, head_dim, PAGE)
        qkv, host = drawn(rng, ops.dtype, tokens, heads + 2 * kv_heads, head_dim)
        norm, norm_host = drawn(rng, ops.dtype, heads + kv_heads, head_dim)
        positions = rng.integers(0, 500, tokens).astype(np.int32)
        slots = rng.permutation(np.arange(2 * PAGE, pages * PAGE))[:tokens].astype(np.int64)
        angles = rng.uniform(0, 6, (500, half)).astype(np.float32)
        cos, sin = np.cos(angles), np.sin(angles)
        k, v = poisoned(ops, pages, PAGE, kv_heads, head_dim), poisoned(ops, pages, PAGE, kv_heads, head_dim)
        qk = host[:, : heads + kv_heads]
        if normed:
            qk = numpy.rms_norm(qk, norm_host, 1e-6)
        qk = numpy.rotary(qk, cos[positions][:, None], sin[positions][:, None])
        ops.rope_append(
            qkv, shape, cp.asarray(positions), cp.asarray(slots), (cp.asarray(cos), cp.asarray(sin)), k, v,
            norm=norm if normed else None, eps=1e-6,
        )  # fmt: skip
        case = f"{tokens} tokens {heads}/{kv_heads}x{head_dim} rotated {2 * half}{' normed' if normed else ''}"
        q_out = to_host(qkv, ops.dtype)[:, :heads]
        yield Outcome("rope: queries", case, ops.dtype, error_of(q_out, qk[:, :heads]), LIMITS[ops.dtype])
        flat_k, flat_v = (to_host(a, ops.dtype).reshape(-1, kv_heads, head_dim) for a in (k, v))
        yield Outcome("rope: keys", case, ops.dtype, error_of(flat_k[slots], qk[:, heads:]), LIMITS[ops.dtype])
        yield Outcome("rope: values", case, ops.dtype, error_of(flat_v[slots], host[:, heads + kv_heads :]), 0.0)
        rest = np.setdiff1d(np.arange(pages * PAGE), slots)
        untouched = bool(np.isnan(flat_k[rest]).all() and np.isnan(flat_v[rest]).all())
        yield Outcome("rope: rest untouched", case, ops.dtype, 0.0 if untouched else 1.0, 0.0)
        x, x_host = drawn(rng, ops.dtype, tokens, heads, head_dim)
        c, s = cp.asarray(cos[positions][:, None]), cp.asarray(sin[positions][:, None])
        out = to_host(ops.rotary(x, c, s), ops.dtype)
        expected = numpy.rotary(x_host, cos[positions][:, None], sin[positions][:, None])
        yield Outcome("rotary", case, ops.dtype, error_of(out, expected), LIMITS[ops.dtype])
        values, values_host = drawn(rng, ops.dtype, tokens, kv_heads, head_dim)
        ops.append_kv(v, cp.asarray(slots), values)
        flat_v = to_host(v, ops.dtype).reshape(-1, kv_heads, head_dim)
        yield Outcome("append_kv", case, ops.dtype, error_of(flat_v[slots], values_host), 0.0)


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
        ops.kernels, step.shape, rows_, tokens, window=window, fixed_chunk=fixed_chunk, max_context=4096
    )
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


def append(ops: CudaOps, rng: np.random.Generator) -> Iterator[Outcome]:
    """Attention right behind the kernel that writes the new tokens' keys and values, which were poison before: it
    starts early and fetches old keys ahead, and must not fetch these."""
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
        for pages, values in zip((step.k, step.v), new, strict=True):
            ops.append_kv(pages, index, values)
        ops.paged_attention(step.q, step.k, step.v, plan, out, prefill=False)
        error = error_of(to_host(out, ops.dtype), expected)
        yield Outcome("attention behind append", f"window {window}", ops.dtype, error, ATTENTION_LIMITS[ops.dtype])


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


def moe(ops: CudaOps, rng: np.random.Generator) -> Iterator[Outcome]:
    """Routing, and the whole mixture with padding tokens, by the skinny and by the tile path."""
    numpy = NumpyOps()
    for tokens, experts, top_k in ((1, 128, 8), (9, 60, 4), (70, 128, 8), (300, 16, 2)):
        hidden, inner, padding = 256, 96, 5
        logits = (rng.standard_normal((tokens + padding, experts)) * 2).astype(np.float32)
        logits[0, : experts // 2] = 1.5  # equals: the lower index wins
        index, weight = ops.route(cp.asarray(logits), top_k, normalize=True)
        expected_index, expected_weight = numpy.route(logits, top_k, normalize=True)
        case = f"{tokens} tokens {top_k} of {experts}"
        same = np.array_equal(cp.asnumpy(index), expected_index)
        yield Outcome("route: experts", case, ops.dtype, 0.0 if same else 1.0, 0.0)
        yield Outcome("route: weights", case, ops.dtype, error_of(cp.asnumpy(weight), expected_weight), 1e-6)
        x, x_host = drawn(rng, ops.dtype, tokens + padding, hidden)
        router, router_host = drawn(rng, ops.dtype, experts, hidden, scale=0.2)
        gate_up, gate_up_host = drawn(rng, ops.dtype, experts, 2 * inner, hidden, scale=hidden**-0.5)
        down, down_host = drawn(rng, ops.dtype, experts, hidden, inner, scale=inner**-0.5)
        mixture = CudaMoe(ops.kernels, ops.gemm, experts, top_k, hidden, inner, tokens + padding, ops.storage)
        sizes = cp.asarray(np.array([1, tokens, 0, 0], np.int32))
        out = poisoned(ops, tokens + padding, hidden)
        mixture(x, CudaWeight(router), CudaWeight(gate_up), CudaWeight(down), sizes, out, normalize=True)
        got_index, got_weight = cp.asnumpy(mixture.index[:tokens]), cp.asnumpy(mixture.weight[:tokens])
        expected = np.zeros((tokens, hidden), np.float32)
        for t in range(tokens):
            for j in np.argsort(got_index[t]):
                e = got_index[t, j]
                act = numpy.silu_mul(x_host[t : t + 1] @ gate_up_host[e].T)
                expected[t] += (act @ down_host[e].T)[0] * got_weight[t, j]
        ideal, _ = numpy.route(x_host[:tokens] @ router_host.T, top_k, normalize=True)
        agree = np.mean(np.sort(ideal, axis=1) == np.sort(got_index, axis=1))
        yield Outcome("moe: same experts", case, ops.dtype, 1.0 - float(agree), 0.01)
        error = error_of(to_host(out, ops.dtype)[:tokens], expected)
        yield Outcome("moe", case, ops.dtype, error, LIMITS[ops.dtype] * 2)
        if ops.gemm.norms(tokens + padding, hidden):
            norm = Norm(to_device(np.ones(hidden, np.float32), ops.dtype), 1e-5)
            h, plain = poisoned(ops, tokens + padding, hidden), ops.rms_norm(x, norm.weight, norm.eps)
            fused, apart = poisoned(ops, tokens + padding, hidden), poisoned(ops, tokens + padding, hidden)
            weights = (CudaWeight(router), CudaWeight(gate_up), CudaWeight(down), sizes)
            mixture(x, *weights, fused, normalize=True, norm=norm, normed=h)
            yield Outcome(
                "moe: norm",
                case,
                ops.dtype,
                error_of(to_host(h, ops.dtype), to_host(plain, ops.dtype)),
                LIMITS[ops.dtype],
            )
            mixture(h, *weights, apart, normalize=True)
            same = np.array_equal(cp.asnumpy(fused[:tokens]), cp.asnumpy(apart[:tokens]))
            yield Outcome("moe: normed = apart", case, ops.dtype, 0.0 if same else 1.0, 0.0)


CASES: dict[str, Callable[[CudaOps, np.random.Generator], Iterator[Outcome]]] = {
    "rows": rows,
    "products": products,
    "invariance": invariance,
    "rope": rope,
    "attention": attention,
    "append": append,
    "torch": beside_torch,
    "moe": moe,
}
