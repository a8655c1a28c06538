"""Each GPU operation against its NumPy twin over drawn shapes, offsets and page layouts (design sections 7 and 9).

Inputs are rounded to the element type first, so that only the operation's own error is measured. A result is compared
by the norm of the error over the norm of the reference; a NaN never passes. Outputs and pools are poisoned beforehand,
in turn with NaN and with noise of standard deviation 100.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import cupy as cp
import numpy as np
import numpy.typing as npt

from blink_core.ops.cublaslt import Choice
from blink_core.ops.cuda_gemm import SKINNY_ROWS, tiles_of, tune_step
from blink_core.ops.cuda_moe import CudaMoe
from blink_core.ops.cuda_ops import AttentionShape, CudaOps, CudaWeight, Norm, to_device, to_host
from blink_core.ops.numpy_ops import NumpyOps
from hil_rigs.gpu.attention_cases import PagedStep, append, attention, beside_torch, far, paged_step
from hil_rigs.gpu.comparison import LIMITS, PAGE, Outcome, drawn, error_of, poisoned
from hil_rigs.gpu.joined_cases import joined
from hil_rigs.gpu.moe_cases import one_token

__all__ = [
    "CASES",
    "SMALL_MOE_CASES",
    "Outcome",
    "PagedStep",
    "attention",
    "drawn",
    "moe",
    "paged_step",
    "poisoned",
    "products",
]


def rows(ops: CudaOps, rng: np.random.Generator) -> Iterator[Outcome]:
    """Embedding, norms, residual, SwiGLU."""
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
        chosen = rng.integers(0, tokens, 4).astype(np.int32)  # some twice
        before = x.copy()
        for what, summand in (("chosen_rms_norm", None), ("chosen add_rms_norm", delta)):
            out = ops.chosen_rms_norm(x, summand, cp.asarray(chosen), weight, 1e-5, poisoned(ops, 4, hidden))
            total = x_host if summand is None else to_host(to_device(x_host + delta_host, ops.dtype), ops.dtype)
            expected = numpy.rms_norm(total[chosen], weight_host, 1e-5)
            yield Outcome(what, case, ops.dtype, error_of(to_host(out, ops.dtype), expected), limit)
            yield Outcome(f"{what}: x stays", case, ops.dtype, float(cp.count_nonzero(x != before)), 0.0)
        out = ops.add_rms_norm(x, delta, weight, 1e-5, poisoned(ops, tokens, hidden))
        total = to_host(to_device(x_host + delta_host, ops.dtype), ops.dtype)
        yield Outcome("add (residual)", case, ops.dtype, error_of(to_host(x, ops.dtype), total), 0.0)
        expected = numpy.rms_norm(total, weight_host, 1e-5)
        got = to_host(out, ops.dtype)
        yield Outcome("add_rms_norm", case, ops.dtype, error_of(got, expected), limit)
        if ops.dtype != "float32":  # from a residual that was not rounded, every third element or so is another
            rounded = to_host(to_device(expected, ops.dtype), ops.dtype)
            yield Outcome("add_rms_norm: other bits", case, ops.dtype, float(np.mean(got != rounded)), 0.02)
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
                if tokens % 2 == 0 and not ops.batch_invariant:
                    halves, library = poisoned(ops, tokens, n), ops.gemm.library()
                    plan = library.plan(x, CudaWeight(w), halves)
                    plan.choice = Choice(pieces=2)
                    library(x, CudaWeight(w), halves, None)
                    plan.choice = Choice()
                    yield outcome("linear (two pieces)", halves, expected)
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


def own_products(ops: CudaOps, rng: np.random.Generator) -> Iterator[Outcome]:
    """Every variant of the own kernel for 9 to 32 rows, chosen as tuning does: outputs that end inside a tile, blocks
    that take several tiles, warps without inputs; bias, residual, float32 out, SwiGLU; and the bits of 8 rows."""
    if ops.dtype == "float32" or ops.batch_invariant:
        return
    numpy, limit = NumpyOps(), LIMITS[ops.dtype]
    for tokens in (9, 16, 17, 23, 24, 25, 31, 32):
        for n, k in ((1000, 96), (8216, 576), (1536, 4096)):
            x, x_host = drawn(rng, ops.dtype, tokens, k)
            w, w_host = drawn(rng, ops.dtype, n, k, scale=k**-0.5)
            bias, bias_host = drawn(rng, ops.dtype, n)
            residual, residual_host = drawn(rng, ops.dtype, tokens, n)
            expected = x_host.astype(np.float64) @ w_host.T.astype(np.float64)
            few = poisoned(ops, 8, n)
            ops.gemm(x[:8], CudaWeight(w), few)
            for tiles in tiles_of(tokens):
                case = f"{tokens}x{n}x{k} by {tiles} tiles"

                def by_own(weight: CudaWeight, out: cp.ndarray, tiles: int = tiles, x: cp.ndarray = x) -> cp.ndarray:
                    ops.gemm.library().plan(x, weight, out).choice = Choice(tiles)
                    return out

                plain = by_own(CudaWeight(w), poisoned(ops, tokens, n))
                ops.linear(x, CudaWeight(w), plain)
                error = error_of(to_host(plain, ops.dtype), expected)
                yield Outcome("linear (own)", case, ops.dtype, error, limit)
                same = np.array_equal(cp.asnumpy(plain[:8]), cp.asnumpy(few))
                yield Outcome("own: bits of 8 rows", case, ops.dtype, 0.0 if same else 1.0, 0.0)
                full = by_own(CudaWeight(w), cp.full((tokens, n), cp.nan, cp.float32))
                ops.linear(x, CudaWeight(w), full)
                yield Outcome("own: to float32", case, ops.dtype, error_of(cp.asnumpy(full), expected), limit)
                out = by_own(CudaWeight(w, bias), residual.copy())
                adds = ops.gemm.adds_residual(x, CudaWeight(w, bias), out)
                yield Outcome("own: adds its residual", case, ops.dtype, float(not adds), 0.0)
                ops.linear(x, CudaWeight(w, bias), out, out)
                error = error_of(to_host(out, ops.dtype), expected + bias_host + residual_host)
                yield Outcome("own: bias residual", case, ops.dtype, error, limit)
                if n % 16 == 0:
                    half = by_own(CudaWeight(w, bias), poisoned(ops, tokens, n // 2))
                    ops.gate_up_silu(x, CudaWeight(w, bias), half)
                    gated = numpy.silu_mul((expected + bias_host).astype(np.float32))
                    error = error_of(to_host(half, ops.dtype), gated)
                    yield Outcome("own: gate_up_silu", case, ops.dtype, error, limit * 2)
    yield from _tuned(ops, rng)


def _tuned(ops: CudaOps, rng: np.random.Generator) -> Iterator[Outcome]:
    """What tuning leaves behind makes the same product, whatever it chose."""
    for tokens in (16, 32, 512):
        n, k = 1536, 1024
        x, x_host = drawn(rng, ops.dtype, tokens, k)
        w, w_host = drawn(rng, ops.dtype, n, k, scale=k**-0.5)
        out, weight = poisoned(ops, tokens, n), CudaWeight(w)
        tuning = ops.gemm.tune(x, [weight] * 4, out)
        assert tuning is not None
        tune_step([tuning], partial(ops.linear, x, weight, out))
        out = ops.linear(x, weight, poisoned(ops, tokens, n))
        error = error_of(to_host(out, ops.dtype), x_host.astype(np.float64) @ w_host.T)
        yield Outcome("linear (tuned)", f"{tokens}x{n}x{k} {tuning.choice.name}", ops.dtype, error, LIMITS[ops.dtype])


def invariance(ops: CudaOps, rng: np.random.Generator) -> Iterator[Outcome]:
    """A row of the own products has the same bits alone and in any batch."""
    k, n = 1536, 512
    x, _ = drawn(rng, ops.dtype, 32, k)
    w, _ = drawn(rng, ops.dtype, n, k, scale=k**-0.5)
    for name in ("skinny", "tile"):
        if name == "skinny" and ops.dtype == "float32":
            continue
        alone = []
        for tokens in (1, 5, 8, 16, 17, 32):
            out = poisoned(ops, tokens, n)
            if name == "skinny":
                ops.gemm.skinny_rows = 32
                ops.linear(x[:tokens], CudaWeight(w), out)
                ops.gemm.skinny_rows = SKINNY_ROWS
            else:
                ops.gemm.tile(x[:tokens], CudaWeight(w), out)
            alone.append(cp.asnumpy(out[0]))
        same = all(np.array_equal(a, alone[0]) for a in alone)
        yield Outcome(f"same bits in any batch ({name})", "1..32 rows", ops.dtype, 0.0 if same else 1.0, 0.0)


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


MOE_CASES = (  # tokens, experts, of a token, hidden, inner, tokens of padding
    (1, 128, 8, 256, 96, 5), (9, 60, 4, 256, 96, 5), (70, 128, 8, 256, 96, 5), (300, 16, 2, 256, 96, 5),
    (1, 128, 8, 2048, 768, 0), (1, 60, 4, 256, 96, 0), (1, 129, 16, 608, 288, 0), (1, 8, 1, 4096, 512, 0),
    (1, 512, 2, 2080, 64, 0),
)  # fmt: skip
SMALL_MOE_CASES = tuple(case for case in MOE_CASES if case[1] * case[3] * case[4] <= 1 << 22)


def moe(ops: CudaOps, rng: np.random.Generator, cases: tuple[tuple[int, ...], ...] = MOE_CASES) -> Iterator[Outcome]:
    """Routing, and the whole mixture: padding tokens by the skinny and by the tile path; a single token by its own
    kernels, with rows that fill a warp's reads and others, and few, many and odd numbers of experts."""
    numpy = NumpyOps()
    for tokens, experts, top_k, hidden, inner, padding in cases:
        logits = (rng.standard_normal((tokens + padding, experts)) * 2).astype(np.float32)
        logits[0, : experts // 2] = 1.5  # equals: the lower index wins
        index, weight = ops.route(cp.asarray(logits), top_k, normalize=True)
        expected_index, expected_weight = numpy.route(logits, top_k, normalize=True)
        case = f"{tokens} tokens {top_k} of {experts}, {hidden} to {inner}"
        same = np.array_equal(cp.asnumpy(index), expected_index)
        yield Outcome("route: experts", case, ops.dtype, 0.0 if same else 1.0, 0.0)
        yield Outcome("route: weights", case, ops.dtype, error_of(cp.asnumpy(weight), expected_weight), 1e-6)
        x, x_host = drawn(rng, ops.dtype, tokens + padding, hidden)
        rows_of_router = (rng.standard_normal((experts, hidden)) * 0.2).astype(np.float32)
        rows_of_router[1 : experts // 2 * 2 : 2] = rows_of_router[: experts // 2 * 2 : 2]  # equals here too
        router = to_device(rows_of_router, ops.dtype)
        router_host = to_host(router, ops.dtype)
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
        if not mixture.takes_one(tokens + padding, hidden):
            listed = cp.asnumpy(mixture._blocks)[: int(mixture._count[0]), 2].sum()
            yield Outcome("moe: pairs of padding", case, ops.dtype, float(listed - tokens * top_k), 0.0)
        logits = cp.asnumpy(mixture.logits[:tokens])
        ideal = x_host[:tokens].astype(np.float64) @ router_host.T
        yield Outcome("moe: logits", case, ops.dtype, error_of(logits, ideal), LIMITS["float32"] * 4)
        index, weight = numpy.route(logits, top_k, normalize=True)
        same = np.array_equal(index, got_index)
        yield Outcome("moe: experts", case, ops.dtype, 0.0 if same else 1.0, 0.0)
        yield Outcome("moe: weights", case, ops.dtype, error_of(got_weight, weight), 1e-6)
        error = error_of(to_host(out, ops.dtype)[:tokens], expected)
        yield Outcome("moe", case, ops.dtype, error, LIMITS[ops.dtype] * (4 if ops.dtype == "float32" else 2))
        if ops.gemm.norms(tokens + padding, hidden):
            norm = Norm(drawn(rng, ops.dtype, hidden)[0], 1e-5)
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
    "own": own_products,
    "invariance": invariance,
    "rope": rope,
    "attention": attention,
    "append": append,
    "far": far,
    "joined": joined,
    "torch": beside_torch,
    "moe": moe,
    "one": one_token,
}
