"""The layer operations in NumPy float32: the reference that other targets are compared with (design section 7).

Everything but the matrix products is elementwise or reduces within one token's row, where NumPy's order of operations
depends on the row's length alone; the batch-invariant mode relies on that, on one SIMD lane computing what another
does, and on what :mod:`blink_core.ops.gemm` and :mod:`blink_core.ops.attention` say about products.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from blink_core.ops.attention import AttentionPlan, invariant_unit, paged_attention, plan_attention
from blink_core.ops.gemm import LinearWeight, invariant_tiles, multiply
from blink_core.ops.rope import RotaryTable

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

__all__ = ["AttentionPlan", "LinearWeight", "NumpyOps", "RotaryTable"]


@dataclass(slots=True)
class NumpyOps:
    """The operations in one of two modes.

    ``batch_invariant``: a request's result has the same bits alone, in any batch, at any row and for any chunks of its
    prompt, and decode gives what prefill gives. Otherwise the fastest products are used. Inputs and outputs are
    float32, sums are accumulated in float32.
    """

    batch_invariant: bool = False
    _tiles: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict, repr=False)

    def prepare_linear(self, kn: F32, bias: F32 | None = None) -> LinearWeight:
        """Make float32 [in, out] and ``bias`` [out] a weight for :meth:`linear`, without copying it.

        In batch-invariant mode the products are first checked on this weight, once for each shape; raises
        BatchInvarianceError if this machine's BLAS cannot.
        """
        if kn.dtype != np.float32 or kn.ndim != 2 or not kn.flags.c_contiguous:
            raise ValueError(f"a weight must be C-contiguous float32 [in, out], got {kn.dtype} {list(kn.shape)}")
        if not self.batch_invariant:
            return LinearWeight(kn, bias=bias)
        if kn.shape not in self._tiles:
            self._tiles[kn.shape] = invariant_tiles(kn)
        return LinearWeight(kn, self._tiles[kn.shape], bias)

    def begin_run(self, token_ids: I32, positions: I32, row_starts: I32, context_lens: I32, origin: I32 | None) -> None:
        """Tells what the operations to come compute, in the terms of ``StepBatch``; for ops that watch, as those of the
        KV sanitizer do."""

    def embedding(self, table: F32, token_ids: I32) -> F32:
        """Rows of ``table`` [vocab, hidden] (any strides: a tied table is a transposed view) -> [T, hidden]."""
        return np.ascontiguousarray(table[token_ids])

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        """Root-mean-square norm over the last axis: x [..., n], weight [n] or one a head [heads, n] -> like x."""
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

        ``cos`` and ``sin`` [T, 1, rotated/2] from :class:`RotaryTable`; element i pairs with i + rotated/2; those from
        ``rotated`` on (partial rotary embedding) pass unchanged.
        """
        half = cos.shape[-1]
        first, second = x[..., :half], x[..., half : 2 * half]
        out = np.empty(x.shape, dtype=np.float32)
        np.subtract(first * cos, second * sin, out=out[..., :half])
        np.add(second * cos, first * sin, out=out[..., half : 2 * half])
        if 2 * half < x.shape[-1]:
            out[..., 2 * half :] = x[..., 2 * half :]
        return out

    def silu_mul(self, gate_up: F32) -> F32:
        """silu(gate) * up: [T, 2 * inner], gate in the first half -> [T, inner]."""
        inner = gate_up.shape[-1] // 2
        gate = np.ascontiguousarray(gate_up[:, :inner])
        with np.errstate(over="ignore"):  # exp of a very negative gate: inf, and the quotient the right zero
            out: F32 = np.divide(gate, np.float32(1) + np.exp(-gate), dtype=np.float32)
        out *= gate_up[:, inner:]
        return out

    def route(self, logits: F32, top_k: int, *, normalize: bool) -> tuple[npt.NDArray[np.intp], F32]:
        """Experts of each token: router ``logits`` [T, experts] -> ``(index [T, top_k], weight [T, top_k])``.

        Softmax over all experts, then the ``top_k`` likeliest, most likely first (the lower index among equals);
        ``normalize`` divides their weights by their sum.
        """
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        weights /= np.add.reduce(weights, axis=-1, keepdims=True)
        index = np.argsort(-weights, axis=-1, kind="stable")[:, :top_k]
        chosen: F32 = np.take_along_axis(weights, index, axis=-1)
        if normalize:
            chosen /= np.add.reduce(chosen, axis=-1, keepdims=True)
        return index, chosen

    def append_kv(self, pages: F32, kv_slots: I64, values: F32) -> None:
        """Write new keys or values [T, kv_heads, head_dim] into one layer's pages.

        ``pages`` [pages, page_size, kv_heads, head_dim]; ``kv_slots`` int64 [T]: page * page_size + offset.
        """
        page, offset = np.divmod(kv_slots, pages.shape[1])
        pages[page, offset] = values

    def plan_attention(
        self, row_starts: I32, context_lens: I32, block_tables: I32, page_size: int, window: int | None = None
    ) -> AttentionPlan:
        """Work list of a step for :meth:`paged_attention`: see :func:`blink_core.ops.attention.plan_attention`."""
        unit = invariant_unit(page_size) if self.batch_invariant else page_size
        return plan_attention(row_starts, context_lens, block_tables, page_size, window=window, unit=unit)

    def paged_attention(self, q: F32, k_pages: F32, v_pages: F32, plan: AttentionPlan) -> F32:
        """Causal attention over the pages: q [T, heads, head_dim] -> [T, heads * head_dim]."""
        return paged_attention(q, k_pages, v_pages, plan, batch_invariant=self.batch_invariant)
