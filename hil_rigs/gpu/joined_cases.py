"""Decode attention's variants on the GPU, joined with what comes before it, with blocks that leave: the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import cupy as cp
import numpy as np

from blink_core.ops.cuda_ops import AttentionShape, CudaAttentionPlan, CudaOps, to_device, to_host
from blink_core.ops.cuda_variants import Variants
from blink_core.ops.numpy_ops import NumpyOps
from hil_rigs.gpu.attention_cases import dawdle, expected_attention, paged_step
from hil_rigs.gpu.comparison import ATTENTION_LIMITS, PAGE, Outcome, drawn, error_of, poisoned

VARIANTS = {
    "apart": Variants(join_rows=0),
    "leave": Variants(attention_stages=(2, 2), leave=True, join_rows=0),
    "joined": Variants(join_rows=64),
    "joined, three tiles": Variants(attention_stages=(3, 3), join_rows=64),
    "joined leave": Variants(attention_stages=(2, 2), leave=True, join_rows=64),
}


def joined(ops: CudaOps, rng: np.random.Generator) -> Iterator[Outcome]:
    """One decode step's attention from the QKV product on, which is poison until the kernel just before has written it,
    behind one that takes long: output, keys and values of every variant are the first one's, and NumPy's."""
    if ops.dtype == "float32":
        return
    numpy = NumpyOps()
    for heads, kv_heads, head_dim, half, normed, rows in (
        (32, 8, 128, 64, False, 40), (32, 4, 128, 64, True, 1), (32, 4, 128, 64, True, 9), (20, 1, 64, 16, True, 7),
        (9, 3, 96, 48, False, 5),
    ):  # fmt: skip
        shape = AttentionShape(heads, kv_heads, head_dim, PAGE)
        lengths = [(1, int(c)) for c in rng.choice(np.array([1, 16, 17, 64, 65, 192, 900, 2500]), rows)]
        step = paged_step(ops, rng, shape, lengths, noise=bool(rows % 2))
        product, host = drawn(rng, ops.dtype, rows, heads + 2 * kv_heads, head_dim)
        norm, norm_host = drawn(rng, ops.dtype, heads + kv_heads, head_dim)
        positions = step.context_lens - 1
        angles = rng.uniform(0, 6, (2600, half)).astype(np.float32)
        cos, sin = np.cos(angles), np.sin(angles)
        slots = step.tables[np.arange(rows), positions // PAGE].astype(np.int64) * PAGE + positions % PAGE
        index, where, order = cp.asarray(slots), cp.asarray(positions), cp.arange(rows, dtype=cp.int32)
        tables = (cp.asarray(cos), cp.asarray(sin))
        qk = host[:, : heads + kv_heads]
        qk = numpy.rms_norm(qk, norm_host, 1e-6) if normed else qk
        qk = numpy.rotary(qk, cos[positions][:, None], sin[positions][:, None])
        qk = to_host(to_device(qk, ops.dtype), ops.dtype)
        step.q_host = qk[:, :heads]
        for pages, values in ((step.k_host, qk[:, heads:]), (step.v_host, host[:, heads + kv_heads :])):
            pages.reshape(-1, kv_heads, head_dim)[slots] = values
        expected = expected_attention(step, None)
        first: list[bytes] | None = None
        for name, variant in VARIANTS.items():
            mine = CudaOps(ops.dtype)
            mine.kernels.variants = variant
            plan = CudaAttentionPlan(mine.kernels, shape, rows, rows)
            for cold in (True, False):  # the second time every kernel has been loaded, and they do start early
                k, v = step.k.copy(), step.v.copy()
                for pages in (k, v):
                    pages.reshape(-1, kv_heads, head_dim)[index] = poisoned(mine, rows, kv_heads, head_dim)
                qkv = poisoned(mine, rows, heads + 2 * kv_heads, head_dim)
                out = poisoned(mine, rows, heads * head_dim)
                plan.make(step.arrays)
                held = dawdle(mine)
                mine.embedding(product.reshape(rows, -1), order, qkv.reshape(rows, -1))
                mine.rope_attention(
                    qkv, plan, where, index, tables, k, v, out, norm=norm if normed else None, eps=1e-6, prefill=False
                )
                parts = (out, k, v)
                bits = [cp.asnumpy(part).tobytes() for part in parts]
                del held
                first = first or bits
                case = f"{name} {rows} rows {heads}/{kv_heads}x{head_dim}{' cold' if cold else ''}"
                yield Outcome(
                    "joined attention", case, ops.dtype, error_of(to_host(out, ops.dtype), expected),
                    ATTENTION_LIMITS[ops.dtype],
                )  # fmt: skip
                for part, a, b in zip(("output", "keys", "values"), bits, first, strict=True):
                    yield Outcome(f"joined attention: same {part}", case, ops.dtype, float(a != b), 0.0)
