"""Matrix products by cuBLASLt through nvmath's bindings, with an explicit workspace, so that they can be captured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cupy as cp
import numpy as np

from blink_core.ops.cuda_modules import pointer

if TYPE_CHECKING:
    from blink_core.ops.cuda_gemm import CudaWeight

WORKSPACE = 64 << 20
HEURISTICS = 24
PIECES = (1, 2, 4)
LEAST_PIECE = 256  # rows: with fewer, reading the weight again costs more than can be gained
RESULT_BYTES = 96  # cublasLtMatmulHeuristicResult_t, whose first field is the algorithm


@dataclass(frozen=True, slots=True)
class Choice:
    """How a product is made: by the own kernel with so many 16-row ``tiles`` of a block at once, or (0) by cuBLASLt,
    the rows in so many ``pieces``, each by the ``algorithm`` at that place of the heuristic's list."""

    tiles: int = 0
    pieces: int = 1
    algorithm: int = 0

    @property
    def name(self) -> str:
        """For tables."""
        if self.tiles:
            return f"own {self.tiles}"
        return f"algo {self.algorithm}" if self.pieces == 1 else f"algo {self.algorithm} 1/{self.pieces}"


@dataclass(slots=True)
class _Plan:
    desc: Any
    a: Any
    b: Any
    c: Any
    results: np.ndarray[Any, np.dtype[np.uint8]]
    count: int
    choice: Choice = Choice()


class CublasLt:
    """Products by cuBLASLt, one plan for each shape. Sums are float32."""

    def __init__(self, dtype: str, sm_count_target: int = 0) -> None:
        from nvmath.bindings import cublasLt

        self._lt = cublasLt
        self.refusal: type[Exception] = cublasLt.cuBLASLtError
        self._handle = cublasLt.create()
        self._type = {"bfloat16": 14, "float16": 2}[dtype]  # cudaDataType
        self.target = sm_count_target
        self._workspace = cp.empty(WORKSPACE, cp.uint8)
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._one, self._zero = np.array([1], np.float32), np.array([0], np.float32)

    def __call__(self, x: cp.ndarray, weight: CudaWeight, out: cp.ndarray, residual: cp.ndarray | None) -> None:
        """As :class:`Gemm`: by the heuristic's first algorithm, or as the shape was tuned."""
        for _ in self.by_pieces(x, weight, out, residual):
            pass

    def by_pieces(
        self, x: cp.ndarray, weight: CudaWeight, out: cp.ndarray, residual: cp.ndarray | None
    ) -> Iterator[slice]:
        """The product's launches, one after the other: the rows of each."""
        choice = self.plan(x, weight, out).choice
        each = x.shape[0] // choice.pieces
        for i in range(choice.pieces):
            rows = slice(i * each, (i + 1) * each)
            self.launch(x[rows], weight, out[rows], None if residual is None else residual[rows], choice)
            yield rows

    def launch(
        self, x: cp.ndarray, weight: CudaWeight, out: cp.ndarray, residual: cp.ndarray | None, choice: Choice
    ) -> None:
        """The product of the rows of a piece, by the choice's algorithm."""
        plan = self.plan(x, weight, out)
        beta, c = (self._zero, out) if residual is None else (self._one, residual)
        if residual is not None and out.dtype == cp.float32:
            raise ValueError("a residual needs an output of the element type")
        if weight.bias is not None:
            self._set(plan.desc, self._lt.MatmulDescAttribute.BIAS_POINTER, pointer(weight.bias), np.uint64)
        self._lt.matmul(
            self._handle, plan.desc, self._one.ctypes.data, pointer(weight.nk), plan.a, pointer(x), plan.b,
            beta.ctypes.data, pointer(c), plan.c, pointer(out), plan.c,
            plan.results.ctypes.data + choice.algorithm * RESULT_BYTES, pointer(self._workspace), WORKSPACE,
            cp.cuda.get_current_stream().ptr,
        )  # fmt: skip

    def choices(self, x: cp.ndarray, weight: CudaWeight, out: cp.ndarray) -> list[Choice]:
        """Every algorithm for all rows at once, and with many rows for halves and quarters of them; the heuristic's
        order, in which those that it thinks the best come first."""
        counts = {}
        for pieces in PIECES:
            rows = x.shape[0] // pieces
            if pieces == 1 or (rows >= LEAST_PIECE and x.shape[0] % pieces == 0):
                counts[pieces] = self.plan(x[:rows], weight, out[:rows]).count
        return [
            Choice(0, pieces, algorithm)
            for algorithm in range(max(counts.values()))
            for pieces, count in counts.items()
            if algorithm < count
        ]

    def plan(self, x: cp.ndarray, weight: CudaWeight, out: cp.ndarray) -> _Plan:
        """Descriptors and algorithms for a shape, made on first use; and the choice, one for each part of a layer."""
        (m, k), n = x.shape, weight.nk.shape[0]
        key = (m, n, k, out.dtype == cp.float32, weight.bias is not None, self.target, weight.part)
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
