"""Matrix products on the GPU: own kernels for few rows and for float32, cuBLASLt for the rest (design section 7).

Weights are [out, in], as HuggingFace stores them. cuBLASLt comes through nvmath's bindings with an explicit workspace,
so that it can be captured.

In batch-invariant mode a row has the same bits in a product of any number of rows. float32's kernel has that by itself.
For 16-bit types gemm_skinny.cu takes up to 16 rows and gemm_fixed.cu, which adds in the same order, all others.
cuBLASLt, whose order depends on the shape, takes none, and no product norms its input: that norm has its own order.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import cupy as cp
import numpy as np

from blink_core.ops.cuda_modules import Kernels, multiprocessors, pointer

SKINNY_ROWS = 8  # up to here the own kernel is no slower than cuBLASLt, and starts beside its predecessor
SKINNY_THREADS = 256
SKINNY_K = 32
SKINNY_RING, SKINNY_NORM_RING = 8 * 20 * 1024, 8 * 16 * 1024
GROUPED_THREADS, GROUPED_RING = 128, 4 * 12 * 1024
SKINNY_PAD = 32  # elements
SKINNY_STATIC = 12 * 1024  # shared memory beside the dynamic, at most
MAX_SHARED_ATTRIBUTE = 97  # cudaDevAttrMaxSharedMemoryPerBlockOptin
NORM_ROWS = 8  # rows whose norm the product itself can compute
TILE_SHARED = 4 * (64 + 128) * (32 + 8) * 2
FIXED_SHARED = 48 << 10  # gemm_fixed.cu, all shapes
FIXED_ROWS = 16  # in batch-invariant mode the skinny kernel takes up to so many
WORKSPACE = 64 << 20
HEURISTICS = 12
LEAST_PIECE = 256  # rows: with fewer, reading the weight again costs more than can be gained
CLEARLY = 0.98  # of another choice's time: what counts as faster
ONE_PIECE = -1
RESULT_BYTES = 96  # cublasLtMatmulHeuristicResult_t, whose first field is the algorithm


class MatmulParams(ctypes.Structure):
    """``MatmulParams`` of device/kernels/matmul.cuh."""

    _fields_ = [
        *((n, ctypes.c_void_p) for n in ("weight", "x", "out", "bias", "residual")),
        *((n, ctypes.c_int) for n in ("rows", "n", "k", "out_float")),
        *((n, ctypes.c_void_p) for n in ("n_blocks", "blocks", "gather", "scatter")),
    ]


class SkinnyParams(ctypes.Structure):
    """``SkinnyParams`` of device/kernels/gemm_skinny.cu."""

    _fields_ = [
        ("matmul", MatmulParams), ("norm", ctypes.c_void_p), ("eps", ctypes.c_float), ("normed", ctypes.c_void_p),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm of the rows of x before a product: ``weight`` [in] of the element type."""

    weight: cp.ndarray
    eps: float


@dataclass(frozen=True, slots=True)
class CudaWeight:
    """A projection on the GPU: ``nk`` [out, in] of the element type, C-contiguous; ``bias`` [out] or None.

    For experts ``nk`` is [experts, out, in]. Gate and up projections are one weight, the gate's rows first.
    """

    nk: cp.ndarray
    bias: cp.ndarray | None = None


@dataclass(slots=True)
class Gemm:
    """Products of one element type. Not safe for use from several threads."""

    kernels: Kernels
    sm_count_target: int = 0  # of cuBLASLt's kernels, 0: all
    skinny_rows: int = SKINNY_ROWS
    invariant: bool = False  # batch-invariant mode
    _lt: CublasLt | None = field(default=None, repr=False)

    def __call__(
        self,
        x: cp.ndarray,
        weight: CudaWeight,
        out: cp.ndarray,
        *,
        residual: cp.ndarray | None = None,
        norm: Norm | None = None,
        normed: cp.ndarray | None = None,
    ) -> None:
        """``out = x weight^T + bias + residual``: x [rows, in], out [rows, out] of x's type or float32.

        ``residual`` [rows, out] of the element type may be ``out`` itself. ``norm``: only where :meth:`norms` says so;
        what it makes of x also goes to ``normed`` [rows, in], if given.
        """
        rows, k = x.shape
        n = weight.nk.shape[0]
        if self._skinny(rows, k):
            self._own(x, weight, out, residual, silu=False, norm=norm, normed=normed)
        elif norm is not None:
            raise ValueError(f"no product of {rows} rows of {k} norms its input")
        elif self.kernels.dtype == "float32":
            kernel = self.kernels.get("gemm_tile.cu", "tile")
            kernel.launch(kernel.places(256), 256, _params(x, weight, out, residual, n))
        elif self.invariant:
            self.fixed(x, weight, out, residual)
        else:
            self.library()(x, weight, out, residual)

    def pieces(self, x: cp.ndarray, weight: CudaWeight, out: cp.ndarray) -> list[slice]:
        """Rows of x that cuBLASLt takes at once in the product, as it was tuned; all, where own kernels take it."""
        rows = x.shape[0]
        own = self.kernels.dtype == "float32" or self.invariant or self._skinny(*x.shape)
        count = 1 if own else self.library().plan(x, weight, out).pieces
        return [slice(i * rows // count, (i + 1) * rows // count) for i in range(count)]

    def library(self) -> CublasLt:
        """cuBLASLt's products, made on first use; for as many multiprocessors as the kernels may use now."""
        if self._lt is None:
            self._lt = CublasLt(self.kernels.dtype)
        reserved = self.kernels.reserved
        self._lt.target = self.sm_count_target or (multiprocessors(reserved) if reserved else 0)
        return self._lt

    def silu(self, x: cp.ndarray, weight: CudaWeight, out: cp.ndarray, norm: Norm | None = None) -> bool:
        """``out = silu(gate) * up`` in one kernel, where there is one; else nothing, and False."""
        if not self._skinny(x.shape[0], x.shape[1]):
            if self.invariant and self.kernels.dtype != "float32":
                self.fixed(x, weight, out, None, silu=True)
                return True
            return False
        self._own(x, weight, out, None, silu=True, norm=norm, normed=None)
        return True

    def adds_residual(self, rows: int) -> bool:
        """Whether a product of ``rows`` rows should add its residual itself: own kernels do so for nothing, and a
        product that norms its input needs it done; with cuBLASLt the norm that follows does it at less cost."""
        return self.kernels.dtype == "float32" or self.invariant or rows <= self.skinny_rows

    def norms(self, rows: int, k: int) -> bool:
        """Whether products of ``rows`` rows of ``k`` can norm their input themselves."""
        if self.invariant or not self._skinny(rows, k) or rows > NORM_ROWS:
            return False
        limit: int = cp.cuda.runtime.deviceGetAttribute(MAX_SHARED_ATTRIBUTE, cp.cuda.Device().id)
        return SKINNY_NORM_RING + rows * (k + SKINNY_PAD) * 2 + SKINNY_STATIC <= limit

    def tile(self, x: cp.ndarray, weight: CudaWeight, out: cp.ndarray, residual: cp.ndarray | None = None) -> None:
        """The same product by the own tile kernel: a row has the same bits in any batch. Raises as :meth:`fixed`."""
        self._whole_steps(weight)
        shared, threads = (0, 256) if self.kernels.dtype == "float32" else (TILE_SHARED, 128)
        kernel = self.kernels.get("gemm_tile.cu", "tile", shared)
        kernel.launch(kernel.places(threads), threads, _params(x, weight, out, residual, weight.nk.shape[0]))

    def fixed(
        self, x: cp.ndarray, weight: CudaWeight, out: cp.ndarray, residual: cp.ndarray | None, *, silu: bool = False
    ) -> None:
        """The product of any number of rows with the bits of the skinny kernel (16-bit types). ``silu``: :meth:`silu`.

        Raises ValueError unless the inputs are a multiple of 32.
        """
        rows = x.shape[0]
        self._whole_steps(weight)
        width = "32" if rows <= 32 else "64" if rows <= 64 else "many"
        kernel = self.kernels.get("gemm_fixed.cu", f"fixed_{'silu_' if silu else ''}{width}", FIXED_SHARED)
        n = weight.nk.shape[0] // (2 if silu else 1)
        kernel.launch(kernel.places(128), 128, _params(x, weight, out, residual, n))

    def _whole_steps(self, weight: CudaWeight) -> None:
        k = weight.nk.shape[-1]
        if self.kernels.dtype != "float32" and k % SKINNY_K:
            raise ValueError(f"own {self.kernels.dtype} products take a multiple of {SKINNY_K} inputs, got {k}")

    def _skinny(self, rows: int, k: int) -> bool:
        most = FIXED_ROWS if self.invariant else min(self.skinny_rows, FIXED_ROWS)
        return self.kernels.dtype != "float32" and rows <= most and k % SKINNY_K == 0

    def _own(
        self,
        x: cp.ndarray,
        weight: CudaWeight,
        out: cp.ndarray,
        residual: cp.ndarray | None,
        *,
        silu: bool,
        norm: Norm | None,
        normed: cp.ndarray | None,
    ) -> None:
        rows, k = x.shape
        n = weight.nk.shape[0] // (2 if silu else 1)
        width = 8 if rows <= 8 else 16
        if norm is not None and not self.norms(rows, k):
            raise ValueError(f"no product of {rows} rows of {k} norms its input")
        sms = multiprocessors(self.kernels.reserved)
        # 16-row tiles a block takes at once: the fewest rounds, then the best reuse of x.
        unit = 8 if silu else 16  # outputs of a 16-row tile
        choices = (2,) if silu else (1, 2)
        reuse = 1.0 if rows <= 2 else 1.05
        tiles = min(choices, key=lambda t: _ceil(_ceil(n, t * unit), sms) * t * (reuse if t == 1 else 1.0))
        shared = SKINNY_RING if norm is None else SKINNY_NORM_RING + rows * (k + SKINNY_PAD) * 2
        name = f"skinny_{'norm_' if norm is not None else ''}{'silu_' if silu else ''}{width}_{tiles}"
        kernel = self.kernels.get("gemm_skinny.cu", name, shared)
        params = SkinnyParams(_params(x, weight, out, residual, n), 0, 0.0, pointer(normed))
        if norm is not None:
            params.norm, params.eps = pointer(norm.weight), norm.eps
        kernel.launch(min(_ceil(n, tiles * unit), sms), SKINNY_THREADS, params)

    def grouped(
        self,
        x: cp.ndarray,
        weight: CudaWeight,
        out: cp.ndarray,
        blocks: tuple[cp.ndarray, cp.ndarray],
        width: int,
        *,
        silu: bool = False,
        gather: cp.ndarray | None = None,
        scatter: cp.ndarray | None = None,
    ) -> None:
        """One product an expert: weight [experts, out, in], rows sorted by expert in ``blocks`` (count, int4 list).

        ``width``: rows of a block at most, 8 (own skinny kernel) or 64 (tiles). ``gather``: row of x of each sorted
        row; ``scatter``: row of out. With ``silu`` the weight is [experts, 2 * out, in]. Raises ValueError in 16-bit
        types unless the inputs are a multiple of 32: their kernels take so many at once and would drop the rest.
        """
        self._whole_steps(weight)
        n = weight.nk.shape[1] // (2 if silu else 1)
        p = _params(x, weight, out, None, n)
        p.n_blocks, p.blocks = pointer(blocks[0]), pointer(blocks[1])
        p.gather, p.scatter = pointer(gather), pointer(scatter)
        suffix = "_silu" if silu else ""
        if width == 8:
            kernel = self.kernels.get("gemm_skinny.cu", f"grouped_skinny{suffix}_8", GROUPED_RING)
            kernel.launch(kernel.places(GROUPED_THREADS), GROUPED_THREADS, SkinnyParams(p, 0, 0.0, 0))
            return
        if self.kernels.dtype == "float32":
            kernel, threads = self.kernels.get("gemm_tile.cu", "grouped_tile"), 256
        elif self.invariant:
            kernel, threads = self.kernels.get("gemm_fixed.cu", f"grouped_fixed{suffix}", FIXED_SHARED), 128
        else:
            kernel, threads = self.kernels.get("gemm_tile.cu", f"grouped_tile{suffix}", TILE_SHARED), 128
        kernel.launch(kernel.places(threads), threads, p)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _params(x: cp.ndarray, weight: CudaWeight, out: cp.ndarray, residual: cp.ndarray | None, n: int) -> MatmulParams:
    k = weight.nk.shape[-1]
    if x.shape[-1] != k or out.shape[-1] != n or not (x.flags.c_contiguous and out.flags.c_contiguous):
        raise ValueError(f"x {list(x.shape)} and out {list(out.shape)} do not fit a weight {list(weight.nk.shape)}")
    if k % 8:
        raise ValueError(f"a weight needs a multiple of 8 inputs, got {k}")
    return MatmulParams(
        pointer(weight.nk), pointer(x), pointer(out), pointer(weight.bias), pointer(residual),
        x.shape[0], n, k, int(out.dtype == cp.float32), 0, 0, 0, 0,
    )  # fmt: skip


class CublasLt:
    """Products by cuBLASLt, one plan for each shape. Sums are float32."""

    def __init__(self, dtype: str, sm_count_target: int = 0) -> None:
        from nvmath.bindings import cublasLt

        self._lt = cublasLt
        self._handle = cublasLt.create()
        self._type = {"bfloat16": 14, "float16": 2}[dtype]  # cudaDataType
        self.target = sm_count_target
        self._workspace = cp.empty(WORKSPACE, cp.uint8)
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._one, self._zero = np.array([1], np.float32), np.array([0], np.float32)

    def __call__(
        self,
        x: cp.ndarray,
        weight: CudaWeight,
        out: cp.ndarray,
        residual: cp.ndarray | None,
        algorithm: int | None = None,
    ) -> None:
        """As :class:`Gemm`. ``algorithm``: place in the heuristic's list, by default the tuned one or the first, in as
        many pieces as were found the fastest; ``ONE_PIECE``: that one, all rows at once."""
        plan = self.plan(x, weight, out)
        if algorithm is None and plan.pieces > 1:
            each = x.shape[0] // plan.pieces
            for i in range(plan.pieces):
                rows = slice(i * each, (i + 1) * each)
                self(x[rows], weight, out[rows], None if residual is None else residual[rows], ONE_PIECE)
            return
        beta, c = (self._zero, out) if residual is None else (self._one, residual)
        if residual is not None and out.dtype == cp.float32:
            raise ValueError("a residual needs an output of the element type")
        if weight.bias is not None:
            self._set(plan.desc, self._lt.MatmulDescAttribute.BIAS_POINTER, pointer(weight.bias), np.uint64)
        choice = plan.best if algorithm is None or algorithm == ONE_PIECE else algorithm
        self._lt.matmul(
            self._handle, plan.desc, self._one.ctypes.data, pointer(weight.nk), plan.a, pointer(x), plan.b,
            beta.ctypes.data, pointer(c), plan.c, pointer(out), plan.c,
            plan.results.ctypes.data + choice * RESULT_BYTES, pointer(self._workspace), WORKSPACE,
            cp.cuda.get_current_stream().ptr,
        )  # fmt: skip

    def tune(self, x: cp.ndarray, weights: list[CudaWeight], out: cp.ndarray, repeats: int = 7) -> list[float]:
        """Time each algorithm over ``weights`` (several, so that they do not stay in L2) and keep the fastest; with
        many rows also that of halves and quarters of them, one after the other.

        Returns microseconds of each algorithm for all rows at once.
        """
        plan = self._tune_algorithm(x, weights, out, repeats)
        times = plan.times
        plan.pieces, fastest = 1, times[plan.best]
        for pieces in (2, 4):
            rows = x.shape[0] // pieces
            if rows < LEAST_PIECE or x.shape[0] % pieces:
                continue
            self._tune_algorithm(x[:rows], weights, out[:rows], repeats)
            before, plan.pieces = plan.pieces, pieces
            found = self._time(x, weights, out, None, repeats)
            if found < CLEARLY * fastest:
                fastest = found
            else:
                plan.pieces = before
        return times

    def _tune_algorithm(self, x: cp.ndarray, weights: list[CudaWeight], out: cp.ndarray, repeats: int) -> _Plan:
        """Find the fastest algorithm for all rows at once."""
        plan = self.plan(x, weights[0], out)
        if not plan.times:
            plan.times = [self._time(x, weights, out, i, repeats) for i in range(plan.count)]
            best = int(np.argmin(plan.times))
            # The heuristic's own first choice stays unless another is clearly faster.
            plan.best = best if plan.times[best] < CLEARLY * plan.times[0] else 0
        return plan

    def _time(
        self, x: cp.ndarray, weights: list[CudaWeight], out: cp.ndarray, algorithm: int | None, repeats: int
    ) -> float:
        """Microseconds of a product: the least of ``repeats``."""
        stream = cp.cuda.Stream(non_blocking=True)
        cp.cuda.Device().synchronize()
        with stream:
            self(x, weights[0], out, None, algorithm)
            stream.begin_capture()
            for w in weights:
                self(x, w, out, None, algorithm)
            graph = stream.end_capture()
            graph.launch(stream)
            runs = []
            for _ in range(repeats):
                begin, end = cp.cuda.Event(), cp.cuda.Event()
                begin.record(stream)
                graph.launch(stream)
                end.record(stream)
                end.synchronize()
                runs.append(cp.cuda.get_elapsed_time(begin, end) * 1e3 / len(weights))
        return float(min(runs))

    def plan(self, x: cp.ndarray, weight: CudaWeight, out: cp.ndarray) -> _Plan:
        """Descriptors and algorithms for a shape, made on first use."""
        (m, k), n = x.shape, weight.nk.shape[0]
        key = (m, n, k, out.dtype == cp.float32, weight.bias is not None, self.target)
        if key not in self._plans:
            self._plans[key] = self._make(
                m, n, k, 0 if out.dtype == cp.float32 else self._type, weight.bias is not None
            )
        return self._plans[key]

    def _make(self, m: int, n: int, k: int, out_type: int, bias: bool) -> _Plan:
        lt, attribute = self._lt, self._lt.MatmulDescAttribute
        desc = lt.matmul_desc_create(68, 0)  # CUBLAS_COMPUTE_32F, float32 scale
        self._set(desc, attribute.TRANSA, 1, np.int32)
        if bias:
            self._set(desc, attribute.EPILOGUE, int(lt.Epilogue.BIAS), np.int32)
            self._set(desc, attribute.BIAS_DATA_TYPE, self._type, np.int32)
        if self.target:
            self._set(desc, attribute.SM_COUNT_TARGET, self.target, np.int32)
        a = lt.matrix_layout_create(self._type, k, n, k)
        b = lt.matrix_layout_create(self._type, k, m, k)
        c = lt.matrix_layout_create(out_type, n, m, n)
        preference = lt.matmul_preference_create()
        size = np.array([WORKSPACE], np.uint64)
        lt.matmul_preference_set_attribute(
            preference, lt.MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES, size.ctypes.data, size.nbytes
        )
        results, count = np.zeros((HEURISTICS, RESULT_BYTES), np.uint8), np.zeros(1, np.int32)
        lt.matmul_algo_get_heuristic(
            self._handle, desc, a, b, c, c, preference, HEURISTICS, results.ctypes.data, count.ctypes.data
        )
        lt.matmul_preference_destroy(preference)
        if count[0] == 0:
            raise ValueError(f"cuBLASLt has no algorithm for {m} x {n} x {k}")
        return _Plan(desc, a, b, c, results, int(count[0]))

    def _set(self, desc: Any, attribute: Any, value: int, dtype: type[np.generic]) -> None:
        data = np.array([value], dtype)
        self._lt.matmul_desc_set_attribute(desc, attribute, data.ctypes.data, data.nbytes)


@dataclass(slots=True)
class _Plan:
    desc: Any
    a: Any
    b: Any
    c: Any
    results: np.ndarray[Any, np.dtype[np.uint8]]
    count: int
    best: int = 0
    pieces: int = 1
    times: list[float] = field(default_factory=list)  # microseconds of each algorithm, once tuned
