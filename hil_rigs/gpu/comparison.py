"""What the cases of ops_check share: an outcome, drawn and poisoned arrays, errors and their limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cupy as cp
import numpy as np
import numpy.typing as npt

from blink_core.ops.cuda_ops import CudaOps, to_device, to_host

F32 = npt.NDArray[np.float32]

# Error over reference, by element type. float32: a few roundings; 16-bit: the output's own rounding (2^-9 and 2^-12 at
# most) and, in attention, that of the weights before the second product.
LIMITS = {"float32": 2e-6, "bfloat16": 2.5e-3, "float16": 3.2e-4}
ATTENTION_LIMITS = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4}
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


LARGE = 1 << 24  # values; beyond, single precision is drawn, in a quarter of the time


def drawn(rng: np.random.Generator, dtype: str, *shape: int, scale: float = 1.0) -> tuple[cp.ndarray, F32]:
    """Normal values of the element type on the device, and the same as float32 here."""
    large = np.prod(shape, dtype=np.int64) > LARGE
    values = rng.standard_normal(shape, np.float32) if large else rng.standard_normal(shape)
    device = to_device((values * np.float32(scale) if large else values * scale).astype(np.float32, copy=False), dtype)
    return device, to_host(device, dtype)


def poisoned(ops: CudaOps, *shape: int) -> cp.ndarray:
    """An array of NaN."""
    return to_device(np.full(shape, np.nan, np.float32), ops.dtype)
