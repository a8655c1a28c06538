"""The layer operations on the GPU (design section 7): names and meaning of ops.numpy_ops, over CuPy arrays.

Every operation runs on CuPy's current stream and may be captured: give ``out`` there, as nothing else may allocate. The
element type is float32 (strict: products without TF32, for checks), bfloat16 or float16; sums are float32. CuPy arrays
of bfloat16 are uint16 here, see :func:`to_device` and :func:`to_host`.

Beside NumpyOps' operations there are fused ones, which a CUDA forward pass uses: :meth:`CudaOps.add_rms_norm`,
:meth:`CudaOps.rope_append`, :meth:`CudaOps.gate_up_silu`, and ``residual`` of :meth:`CudaOps.linear`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import cupy as cp
import numpy as np
import numpy.typing as npt

from blink_core.ops.cuda_attention import AttentionShape, CudaAttentionPlan, RopeParams, StepArrays
from blink_core.ops.cuda_gemm import CudaWeight, Gemm, Norm
from blink_core.ops.cuda_modules import Kernels, pointer
from blink_core.ops.cuda_moe import CudaMoe
from blink_core.ops.cuda_sampling import CudaSampler

__all__ = [
    "AttentionShape",
    "CudaAttentionPlan",
    "CudaMoe",
    "CudaOps",
    "CudaSampler",
    "CudaWeight",
    "Norm",
    "StepArrays",
    "random_normal",
    "to_device",
    "to_host",
]

STORAGE: dict[str, Any] = {"float32": cp.float32, "bfloat16": cp.uint16, "float16": cp.float16}
THREADS = 256


def to_device(values: npt.NDArray[np.float32] | cp.ndarray, dtype: str) -> cp.ndarray:
    """float32 values as the element type, rounded to nearest even; bfloat16 comes as uint16."""
    array = cp.ascontiguousarray(cp.asarray(values, dtype=cp.float32))
    if dtype != "bfloat16":
        return array.astype(STORAGE[dtype])
    bits = array.view(cp.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(cp.uint16)
    return cp.where(cp.isnan(array), cp.uint16(0x7FC0), rounded)


def to_host(array: cp.ndarray, dtype: str) -> npt.NDArray[np.float32]:
    """The element type as float32 in host memory."""
    host: npt.NDArray[Any] = cp.asnumpy(array)
    values: npt.NDArray[np.float32] = (
        (host.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else host.astype(np.float32)
    )
    return values


def random_normal(dtype: str, rows: int, n: int) -> cp.ndarray:
    """Activations for measurements [rows, n], normally distributed; made some rows at a time to spare memory."""
    out = cp.empty((rows, n), STORAGE[dtype])
    for begin in range(0, rows, 256):
        part = out[begin : begin + 256]
        part[...] = to_device(cp.random.standard_normal(part.shape, dtype=cp.float32), dtype)
    return out


class CudaOps:
    """The operations of one element type. Not safe for use from several threads."""

    def __init__(self, dtype: str = "bfloat16", *, sm_count_target: int = 0, batch_invariant: bool = False) -> None:
        """``sm_count_target``: multiprocessors that cuBLASLt's kernels may fill, 0 for all (design section 6).
        ``batch_invariant``: a token's results have the same bits whatever else is in the step."""
        self.dtype, self.batch_invariant = dtype, batch_invariant
        self.kernels = Kernels(dtype)
        self.gemm = Gemm(self.kernels, sm_count_target, invariant=batch_invariant)
        self.storage = STORAGE[dtype]
        self._vector: int = 16 // np.dtype(self.storage).itemsize

    def empty(self, *shape: int) -> cp.ndarray:
        """Uninitialised array of the element type."""
        return cp.empty(shape, self.storage)

    def prepare_linear(self, kn: npt.NDArray[np.float32], bias: npt.NDArray[np.float32] | None = None) -> CudaWeight:
        """Make float32 [in, out] and ``bias`` [out] a weight for :meth:`linear`."""
        if kn.dtype != np.float32 or kn.ndim != 2:
            raise ValueError(f"a weight must be float32 [in, out], got {kn.dtype} {list(kn.shape)}")
        nk = to_device(np.ascontiguousarray(kn.T), self.dtype)
        return CudaWeight(nk, None if bias is None else to_device(bias, self.dtype))

    # -- rows ----------------------------------------------------------------------------------------------------------

    def embedding(self, table: cp.ndarray, token_ids: cp.ndarray, out: cp.ndarray | None = None) -> cp.ndarray:
        """Rows of ``table`` [vocab, hidden] -> [T, hidden]; ``token_ids`` int32 [T]."""
        n = self._width(table)
        out = self.empty(token_ids.shape[0], n) if out is None else out
        kernel = self.kernels.get("elementwise.cu", "embedding")
        kernel.launch(token_ids.shape[0], self._threads(n), table, token_ids, out, n)
        return out

    def rms_norm(self, x: cp.ndarray, weight: cp.ndarray, eps: float, out: cp.ndarray | None = None) -> cp.ndarray:
        """Root-mean-square norm over the last axis: x [..., n], weight [n] or one a head [heads, n] -> like x."""
        return self._norm(x, None, weight, eps, out)

    def add_rms_norm(
        self,
        x: cp.ndarray,
        delta: cp.ndarray,
        weight: cp.ndarray,
        eps: float,
        out: cp.ndarray | None = None,
    ) -> cp.ndarray:
        """``x += delta`` in place, then the norm of x; delta like x."""
        return self._norm(x, delta, weight, eps, out)

    def chosen_rms_norm(
        self, x: cp.ndarray, delta: cp.ndarray | None, rows: cp.ndarray, weight: cp.ndarray, eps: float, out: cp.ndarray
    ) -> cp.ndarray:
        """The norm of ``x + delta`` in ``rows`` int32 [S] alone: x, delta [T, n] -> out [S, n]; x stays as it is."""
        if x.ndim != 2 or out.shape != (rows.shape[0], x.shape[1]):
            raise ValueError(f"rows {list(rows.shape)} of {list(x.shape)} do not fit {list(out.shape)}")
        return self._norm(x, delta, weight, eps, out, rows)

    def _norm(
        self,
        x: cp.ndarray,
        delta: cp.ndarray | None,
        weight: cp.ndarray,
        eps: float,
        out: cp.ndarray | None,
        chosen: cp.ndarray | None = None,
    ) -> cp.ndarray:
        n = self._width(x)
        out = cp.empty_like(x) if out is None else out
        groups = weight.shape[0] if weight.ndim == 2 else 1
        rows = out.size // n
        # Few rows: all threads that can help; many: four vectors a thread, so that more rows are under way. The order
        # of the sum follows from it, so where bits count (float32 is for checks) it does not depend on the rows.
        wide = rows <= 256 or self.batch_invariant or self.dtype == "float32"
        threads = min(1024, max(32, -(-n // ((1 if wide else 4) * self._vector) // 32) * 32))
        if n > 4 * threads * self._vector:
            raise ValueError(f"a norm over {n} elements, expected at most {4 * 1024 * self._vector}")
        kernel = self.kernels.get("elementwise.cu", "rms_norm")
        kernel.launch(rows, threads, x, delta, weight, out, n, groups, eps, chosen)
        return out

    # -- products ------------------------------------------------------------------------------------------------------

    def linear(
        self,
        x: cp.ndarray,
        weight: CudaWeight,
        out: cp.ndarray | None = None,
        residual: cp.ndarray | None = None,
        *,
        norm: Norm | None = None,
        normed: cp.ndarray | None = None,
    ) -> cp.ndarray:
        """x [T, in] -> [T, out], plus ``residual`` [T, out], which may be ``out``.

        ``norm``: of x before the product, in the same kernel where one can, else into ``normed`` [T, in] (needed under
        capture).
        """
        out = self.empty(x.shape[0], weight.nk.shape[0]) if out is None else out
        if norm is not None and not self.gemm.norms(*x.shape):
            x, norm = self.rms_norm(x, norm.weight, norm.eps, normed), None
        self.gemm(x, weight, out, residual=residual, norm=norm, normed=None if norm is None else normed)
        return out

    def silu_mul(self, gate_up: cp.ndarray, out: cp.ndarray | None = None) -> cp.ndarray:
        """silu(gate) * up: [T, 2 * inner], gate in the first half -> [T, inner]."""
        tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
        if inner % self._vector:
            raise ValueError(f"{inner} inner elements are not a multiple of {self._vector}")
        out = self.empty(tokens, inner) if out is None else out
        kernel = self.kernels.get("elementwise.cu", "silu_multiply")
        parts = -(-inner // (2 * THREADS * self._vector))
        kernel.launch(tokens * parts, THREADS, gate_up, out, inner, parts)
        return out

    def gate_up_silu(
        self,
        x: cp.ndarray,
        weight: CudaWeight,
        out: cp.ndarray | None = None,
        scratch: cp.ndarray | None = None,
        *,
        norm: Norm | None = None,
        normed: cp.ndarray | None = None,
    ) -> cp.ndarray:
        """``silu_mul(linear(x, weight))``: x [T, in], weight [2 * inner, in] -> [T, inner]; one kernel for few rows.

        ``scratch`` [T, 2 * inner]: needed under capture with many rows. ``norm``, ``normed``: see :meth:`linear`.
        """
        out = self.empty(x.shape[0], weight.nk.shape[0] // 2) if out is None else out
        if norm is not None and not self.gemm.norms(*x.shape):
            x, norm = self.rms_norm(x, norm.weight, norm.eps, normed), None
        if self.gemm.silu(x, weight, out, norm):
            return out
        scratch = self.empty(x.shape[0], weight.nk.shape[0]) if scratch is None else scratch
        # Piece by piece where the product is faster so: then its output is still in the L2 when it is read.
        for rows in self.gemm.by_pieces(x, weight, scratch):
            self.silu_mul(scratch[rows], out[rows])
        return out

    def route(self, logits: cp.ndarray, top_k: int, *, normalize: bool) -> tuple[cp.ndarray, cp.ndarray]:
        """Experts of each token: float32 [T, experts] -> int32 and float32 [T, top_k]; see NumpyOps.route."""
        tokens, experts = logits.shape
        index, weight = cp.empty((tokens, top_k), cp.int32), cp.empty((tokens, top_k), cp.float32)
        kernel = self.kernels.get("moe.cu", "moe_route")
        kernel.launch(-(-tokens // 4), 128, logits, index, weight, tokens, experts, top_k, normalize)
        return index, weight

    # -- attention -----------------------------------------------------------------------------------------------------

    def rope_append(
        self,
        qkv: cp.ndarray,
        shape: AttentionShape,
        positions: cp.ndarray,
        kv_slots: cp.ndarray,
        tables: tuple[cp.ndarray, cp.ndarray],
        k_pages: cp.ndarray,
        v_pages: cp.ndarray,
        *,
        norm: cp.ndarray | None = None,
        eps: float = 0.0,
    ) -> None:
        """Per-head norm, rotary embedding and KV append in one pass; queries are rotated in place.

        ``qkv`` [T, heads + 2 * kv_heads, head_dim]; ``positions`` int32 [T]; ``kv_slots`` int64 [T]; ``tables``:
        cosines and sines float32 [positions, rotated / 2]; ``norm`` [heads + kv_heads, head_dim] of the element type.
        """
        half = tables[0].shape[1]
        if half % self._vector or 2 * half > shape.head_dim:
            raise ValueError(f"{half} rotated pairs, expected a multiple of {self._vector} up to {shape.head_dim // 2}")
        tokens = positions.shape[0]
        kernel = self.kernels.get("rope_kv.cu", "rope_append", HEAD_DIM=shape.head_dim)
        work = tokens * (shape.heads + 2 * shape.kv_heads)
        kernel.launch(
            self._head_blocks(work, shape.head_dim), 128, qkv, positions, kv_slots, tables[0], tables[1], norm, k_pages,
            v_pages, tokens, shape.heads, shape.kv_heads, half, eps,
        )  # fmt: skip

    def rope_attention(
        self,
        qkv: cp.ndarray,
        plan: CudaAttentionPlan,
        positions: cp.ndarray,
        kv_slots: cp.ndarray,
        tables: tuple[cp.ndarray, cp.ndarray],
        k_pages: cp.ndarray,
        v_pages: cp.ndarray,
        out: cp.ndarray,
        *,
        norm: cp.ndarray | None = None,
        eps: float = 0.0,
        decode: bool = True,
        prefill: bool = True,
    ) -> None:
        """:meth:`rope_append`, then :meth:`paged_attention` into ``out``: one kernel where there is one, which leaves
        the queries in ``qkv`` as they are. ``positions`` and ``kv_slots`` are older than the plan."""
        shape, half = plan.shape, tables[0].shape[1]
        if not plan.joins(decode=decode, prefill=prefill) or half % self._vector or 2 * half > shape.head_dim:
            self.rope_append(qkv, shape, positions, kv_slots, tables, k_pages, v_pages, norm=norm, eps=eps)
            self.paged_attention(qkv, k_pages, v_pages, plan, out, decode=decode, prefill=prefill)
            return
        rope = RopeParams(
            *(pointer(a) for a in (*tables, positions, kv_slots, norm, k_pages, v_pages)), shape.heads, shape.kv_heads,
            half, eps,
        )  # fmt: skip
        stride = qkv.strides[0] // qkv.itemsize
        plan.attend(qkv, stride, k_pages, v_pages, out, decode=True, prefill=False, rope=rope)

    def rotary(self, x: cp.ndarray, cos: cp.ndarray, sin: cp.ndarray, out: cp.ndarray | None = None) -> cp.ndarray:
        """Rotary embedding, rotate-half layout: x [T, heads, head_dim] -> the same shape; float32 cos and sin
        [T, 1, rotated / 2]. Not for captures: :meth:`rope_append` is."""
        tokens, heads, head_dim = x.shape
        half = cos.shape[-1]
        if out is None:
            out = x.copy()
        else:
            out[...] = x
        kernel = self.kernels.get("rope_kv.cu", "rope_append", HEAD_DIM=head_dim)
        positions = cp.arange(tokens, dtype=cp.int32)
        kernel.launch(
            self._head_blocks(tokens * heads, head_dim), 128, out, positions, None, cp.ascontiguousarray(cos),
            cp.ascontiguousarray(sin), None, None, None, tokens, heads, 0, half, 0.0,
        )  # fmt: skip
        return out

    def append_kv(self, pages: cp.ndarray, kv_slots: cp.ndarray, values: cp.ndarray) -> None:
        """Write [T, kv_heads, head_dim] into one layer's pages; ``kv_slots`` int64 [T]: page * page_size + offset."""
        tokens, kv_heads, head_dim = values.shape
        kernel = self.kernels.get("rope_kv.cu", "append_kv", HEAD_DIM=head_dim)
        stride = ctypes.c_longlong(values.strides[0] // values.itemsize)
        kernel.launch(
            -(-tokens * kv_heads * head_dim // (128 * self._vector)),
            128,
            values,
            stride,
            kv_slots,
            pages,
            tokens,
            kv_heads,
        )

    def paged_attention(
        self,
        q: cp.ndarray,
        k_pages: cp.ndarray,
        v_pages: cp.ndarray,
        plan: CudaAttentionPlan,
        out: cp.ndarray | None = None,
        *,
        decode: bool = True,
        prefill: bool = True,
    ) -> cp.ndarray:
        """Causal attention over the pages: q [T, heads (or more), head_dim] -> [T, heads * head_dim].

        ``decode``, ``prefill``: see :meth:`CudaAttentionPlan.attend`. Tokens of padding get no output.
        """
        out = self.empty(q.shape[0], plan.shape.heads * plan.shape.head_dim) if out is None else out
        plan.attend(q, q.strides[0] // q.itemsize, k_pages, v_pages, out, decode=decode, prefill=prefill)
        return out

    # ------------------------------------------------------------------------------------------------------------------

    def _width(self, x: cp.ndarray) -> int:
        n = int(x.shape[-1])
        if n % self._vector or not x.flags.c_contiguous or x.dtype != self.storage:
            raise ValueError(
                f"rows must be contiguous {np.dtype(self.storage)} with a multiple of {self._vector} elements, "
                f"got {x.dtype} {list(x.shape)}"
            )
        return n

    def _head_blocks(self, heads: int, head_dim: int) -> int:
        """Blocks of 128 threads of rope_kv.cu, where each head takes LANES of them."""
        vectors = head_dim // self._vector
        lanes = 4 if vectors <= 8 else 8 if vectors <= 16 else 16
        return -(-heads * lanes // 128)

    def _threads(self, n: int) -> int:
        return min(512, max(32, -(-n // self._vector // 32) * 32))
