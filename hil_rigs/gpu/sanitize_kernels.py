"""Kernels that no serve of `sanitize_serve` comes to, launched by themselves on small arrays, for compute-sanitizer.

Serves are of few rows and tune nothing, so most variants of the own products are not in their steps, nor is the
router's kernel of a mixture whose blocks cannot share it out. Here each is launched as the step launches it: outputs
that end inside a tile, several tiles a block, warps without inputs, sums behind the ring. bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import cupy as cp
import numpy as np
import numpy.typing as npt

from blink_core.ops.cublaslt import Choice
from blink_core.ops.cuda_gemm import CudaWeight, Gemm, Norm, tiles_of
from blink_core.ops.cuda_modules import multiprocessors
from blink_core.ops.cuda_moe import CudaMoe
from blink_core.ops.cuda_ops import CudaOps
from blink_core.ops.numpy_ops import NumpyOps

F32 = npt.NDArray[np.float32]
LIMIT = 0.01  # of a result: a few roundings of bfloat16; that it was launched right, not how well it adds
ENDS_INSIDE = 40  # outputs: no multiple of 16, 32 or 48
SHORT, LONG = 96, 288  # inputs: fewer chunks of 32 than a block has warps, and one more


@dataclass(frozen=True, slots=True)
class Launched:
    """What a kernel made, and what it should have."""

    case: str
    out: cp.ndarray
    expected: F32

    @property
    def error(self) -> float:
        """Relative; NaN where there is one."""
        bits = cp.asnumpy(self.out)
        got = bits if bits.dtype == np.float32 else (bits.astype(np.uint32) << 16).view(np.float32)
        difference = float(np.linalg.norm(got.astype(np.float64) - self.expected))
        return difference / float(np.linalg.norm(self.expected))


class Tuned:
    """In the place of cuBLASLt's plans: products of 9 to 32 rows are the own kernel's, by so many tiles."""

    def __init__(self) -> None:
        self.target, self.choice = 0, Choice()

    def plan(self, x: cp.ndarray, weight: CudaWeight, out: cp.ndarray) -> Tuned:
        return self


def halves(rng: np.random.Generator, *shape: int) -> tuple[cp.ndarray, F32]:
    """bfloat16 values of 0.008 to 0.06, on the device and here; made here, so that no other kernel runs."""
    bits = (rng.integers(0, 1 << 16, shape).astype(np.uint16) & 0x80FF) + 0x3C00
    return cp.asarray(bits), (bits.astype(np.uint32) << 16).view(np.float32)


def all_launched(ops: CudaOps, invariant: CudaOps) -> Iterator[Launched]:
    """Every kernel of this module, one after the other. ``invariant``: in batch-invariant mode. Nothing is waited
    for."""
    rng = np.random.default_rng(2)
    yield from _own(ops, rng)
    yield from _fixed(invariant.gemm, rng)
    for hidden in (256, 2304):  # the router's kernel holds 2,048 elements of a token in registers, or 4,096
        yield from _router(ops, rng, hidden)
    yield from _append(ops, rng)


def _own(ops: CudaOps, rng: np.random.Generator) -> Iterator[Launched]:
    gemm, tuned = ops.gemm, Tuned()
    gemm._lt = tuned  # type: ignore[assignment]
    for rows in (9, 16, 17, 32):
        for tiles in tiles_of(rows):
            tuned.choice = Choice(tiles)
            for k in (SHORT, LONG):
                yield _product(gemm, rng, rows, ENDS_INSIDE, k, f"{tiles} tiles")
            yield _product(gemm, rng, rows, 16 * tiles * (multiprocessors() + 1), 32, f"{tiles} tiles, two a block")
    tuned.choice = Choice(2)
    yield _gated(gemm, rng, 16, SHORT)
    # Up to 8 rows: one tile at a time, or two where that saves a round of blocks; and with a norm.
    many = 16 * (multiprocessors() + 8)
    for n, k in ((ENDS_INSIDE, LONG), (many, 64)):
        yield _product(gemm, rng, 3, n, k, "few rows")
        yield _product(gemm, rng, 3, n, k, "few rows, normed", normed=True)
    yield _gated(gemm, rng, 8, LONG)
    yield _gated(gemm, rng, 8, LONG, normed=True)


def _fixed(gemm: Gemm, rng: np.random.Generator) -> Iterator[Launched]:
    for rows in (20, 40, 70):
        yield _product(gemm, rng, rows, ENDS_INSIDE, LONG, "fixed order")
        yield _gated(gemm, rng, rows, LONG)


def _normed(x: F32, weight: F32) -> F32:
    out = NumpyOps().rms_norm(x, weight, 1e-5)
    rounded = (out.view(np.uint32) + 0x7FFF + (out.view(np.uint32) >> 16 & 1)) >> 16 << 16
    return rounded.astype(np.uint32).view(np.float32)


def _product(
    gemm: Gemm, rng: np.random.Generator, rows: int, n: int, k: int, what: str, *, normed: bool = False
) -> Launched:
    (x, x_host), (w, w_host), (bias, bias_host) = halves(rng, rows, k), halves(rng, n, k), halves(rng, n)
    (residual, residual_host), (norm, norm_host) = halves(rng, rows, n), halves(rng, k)
    out = cp.zeros((rows, n), np.uint16)
    gemm(x, CudaWeight(w, bias), out, residual=residual, norm=Norm(norm, 1e-5) if normed else None)
    host = _normed(x_host, norm_host) if normed else x_host
    return Launched(f"{rows}x{n}x{k}, {what}", out, host @ w_host.T + bias_host + residual_host)


def _gated(gemm: Gemm, rng: np.random.Generator, rows: int, k: int, *, normed: bool = False) -> Launched:
    (x, x_host), (w, w_host), (norm, norm_host) = halves(rng, rows, k), halves(rng, 2 * 24, k), halves(rng, k)
    out = cp.zeros((rows, 24), np.uint16)
    if not gemm.silu(x, CudaWeight(w), out, Norm(norm, 1e-5) if normed else None):
        raise ValueError(f"no product of {rows} rows ends with SwiGLU")
    host = _normed(x_host, norm_host) if normed else x_host
    return Launched(f"{rows}x24x{k}, SwiGLU{', normed' if normed else ''}", out, NumpyOps().silu_mul(host @ w_host.T))


def _router(ops: CudaOps, rng: np.random.Generator, hidden: int) -> Iterator[Launched]:
    """One token of a mixture whose router has a kernel of its own."""
    experts, top_k, inner = 8, 2, 32
    (x, x_host), (norm, norm_host) = halves(rng, 1, hidden), halves(rng, hidden)
    router, router_host = halves(rng, experts, hidden)
    (gate_up, _), (down, _) = halves(rng, experts, 2 * inner, hidden), halves(rng, experts, hidden, inner)
    moe = CudaMoe(ops.kernels, ops.gemm, experts, top_k, hidden, inner, 1, ops.storage)
    moe.join_router = False
    h, sizes = cp.zeros((1, hidden), np.uint16), cp.asarray(np.array([1, 1, 0, 0], np.int32))
    moe(
        x, CudaWeight(router), CudaWeight(gate_up), CudaWeight(down), sizes, x, normalize=True, residual=x,
        norm=Norm(norm, 1e-5), normed=h,
    )  # fmt: skip
    yield Launched(f"router of {hidden}", moe.logits, _normed(x_host, norm_host) @ router_host.T)


def _append(ops: CudaOps, rng: np.random.Generator) -> Iterator[Launched]:
    (values, host), slots = halves(rng, 5, 2, 64), np.array([33, 34, 63, 64, 16], np.int64)
    pages = cp.zeros((5, 16, 2, 64), np.uint16)
    ops.append_kv(pages, cp.asarray(slots), values)
    expected = np.zeros((80, 2, 64), np.float32)
    expected[slots] = host
    yield Launched("append_kv", pages, expected.reshape(5, 16, 2, 64))
