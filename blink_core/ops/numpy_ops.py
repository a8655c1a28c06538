"""The layer operations in NumPy float32: the reference that other targets are compared with (design section 7).

Everything but the matrix products is elementwise or reduces within one token's row, where NumPy's order of operations
depends on the row's length alone; the batch-invariant mode relies on that, on one SIMD lane computing what another
does, and on what :mod:`blink_core.ops.gemm` and :mod:`blink_core.ops.attention` say about products.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from blink_core.ops.attention import AttentionPlan, paged_attention, plan_attention
from blink_core.ops.gemm import LinearWeight, invariant_tiles, multiply

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

__all__ = ["AttentionPlan", "LinearWeight", "NumpyOps", "RotaryTable", "inverse_frequencies"]


def inverse_frequencies(rope_theta: float, head_dim: int) -> F32:
    """Rotary frequencies of each pair, float32 [head_dim/2]: ``1 / theta ** (2i / head_dim)``.

    As HuggingFace computes them: exponent, power and reciprocal each rounded to float32. The power is taken in float64
    and rounded, which matches torch's in all but rare last bits; NumPy's own float32 power does not.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    power = np.power(np.float64(rope_theta), exponent.astype(np.float64)).astype(np.float32)
    return np.float32(1) / power


class RotaryTable:
    """Cosines and sines by position, computed once for each position, CHUNK positions at a time as they are needed."""

    CHUNK = 1024

    def __init__(self, rope_theta: float, head_dim: int) -> None:
        self._frequencies = inverse_frequencies(rope_theta, head_dim)
        self._cos = np.empty((0, head_dim // 2), dtype=np.float32)
        self._sin = np.empty((0, head_dim // 2), dtype=np.float32)

    def __call__(self, positions: I32) -> tuple[F32, F32]:
        """``(cos, sin)`` of int32 positions [T], each float32 [T, 1, head_dim/2].

        The angle is rounded to float32 as in HuggingFace; its cosine and sine are correct to the last bit.
        """
        needed = int(positions.max(initial=0)) + 1
        while self._cos.shape[0] < needed:
            start = self._cos.shape[0]
            at = np.arange(start, start + self.CHUNK, dtype=np.float32)
            angles = (at[:, None] * self._frequencies).astype(np.float64)
            self._cos = np.concatenate((self._cos, np.cos(angles).astype(np.float32)))
            self._sin = np.concatenate((self._sin, np.sin(angles).astype(np.float32)))
        return self._cos[positions][:, None, :], self._sin[positions][:, None, :]


@dataclass(slots=True)
class NumpyOps:
    """The operations in one of two modes.

    ``batch_invariant``: a request's result has the same bits alone, in any batch, at any row and for any chunks of its
    prompt, and decode gives what prefill gives. Otherwise the fastest products are used. Inputs and outputs are
    float32, sums are accumulated in float32.
    """

    batch_invariant: bool = False
    _tiles: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict, repr=False)

    def prepare_linear(self, kn: F32) -> LinearWeight:
        """Make float32 [in, out] a weight for :meth:`linear`, without copying it.

        In batch-invariant mode the products are first checked on this weight, once for each shape; raises
        BatchInvarianceError if this machine's BLAS cannot.
        """
        if kn.dtype != np.float32 or kn.ndim != 2 or not kn.flags.c_contiguous:
            raise ValueError(f"a weight must be C-contiguous float32 [in, out], got {kn.dtype} {list(kn.shape)}")
        if not self.batch_invariant:
            return LinearWeight(kn)
        if kn.shape not in self._tiles:
            self._tiles[kn.shape] = invariant_tiles(kn)
        return LinearWeight(kn, self._tiles[kn.shape])

    def embedding(self, table: F32, token_ids: I32) -> F32:
        """Rows of ``table`` [vocab, hidden] (any strides: a tied table is a transposed view) -> [T, hidden]."""
        return np.ascontiguousarray(table[token_ids])

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        """Root-mean-square norm over the last axis: x [T, hidden], weight [hidden] -> [T, hidden]."""
        mean = np.add.reduce(x * x, axis=-1, keepdims=True) / np.float32(x.shape[-1])
        scale = np.float32(1) / np.sqrt(mean + np.float32(eps))
        out: F32 = np.multiply(x, scale, dtype=np.float32)
        out *= weight
        return out

    def linear(self, x: F32, weight: LinearWeight) -> F32:
        """x [T, in] -> [T, out]."""
        return multiply(x, weight)

    def rotary(self, x: F32, cos: F32, sin: F32) -> F32:
        """Rotary embedding in HuggingFace's rotate-half layout: x [T, heads, head_dim] -> the same shape.

        ``cos`` and ``sin`` [T, 1, head_dim/2] from :class:`RotaryTable`; element i pairs with i + head_dim/2.
        """
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        out = np.empty(x.shape, dtype=np.float32)
        np.subtract(first * cos, second * sin, out=out[..., :half])
        np.add(second * cos, first * sin, out=out[..., half:])
        return out

    def silu_mul(self, gate_up: F32) -> F32:
        """silu(gate) * up: [T, 2 * inner], gate in the first half -> [T, inner]."""
        inner = gate_up.shape[-1] // 2
        gate = np.ascontiguousarray(gate_up[:, :inner])
        with np.errstate(over="ignore"):  # exp of a very negative gate: inf, and the quotient the right zero
            out: F32 = np.divide(gate, np.float32(1) + np.exp(-gate), dtype=np.float32)
        out *= gate_up[:, inner:]
        return out

    def append_kv(self, pages: F32, kv_slots: I64, values: F32) -> None:
        """Write new keys or values [T, kv_heads, head_dim] into one layer's pages.

        ``pages`` [pages, page_size, kv_heads, head_dim]; ``kv_slots`` int64 [T]: page * page_size + offset.
        """
        page, offset = np.divmod(kv_slots, pages.shape[1])
        pages[page, offset] = values

    def plan_attention(self, row_starts: I32, context_lens: I32, block_tables: I32, page_size: int) -> AttentionPlan:
        """Work list of a step for :meth:`paged_attention`: see :func:`blink_core.ops.attention.plan_attention`."""
        return plan_attention(row_starts, context_lens, block_tables, page_size)

    def paged_attention(self, q: F32, k_pages: F32, v_pages: F32, plan: AttentionPlan) -> F32:
        """Causal attention over the pages: q [T, heads, head_dim] -> [T, heads * head_dim]."""
        return paged_attention(q, k_pages, v_pages, plan, batch_invariant=self.batch_invariant)
