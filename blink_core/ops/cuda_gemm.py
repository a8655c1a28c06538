"""Matrix products on the GPU: own kernels for few rows and for float32, cuBLASLt for the rest (design section 7).

Weights are [out, in], as HuggingFace stores them. Which of several ways is the fastest for a shape is measured at start
(:meth:`Gemm.tune`).

In batch-invariant mode a row has the same bits in a product of any number of rows. float32's kernel has that by itself.
For 16-bit types gemm_skinny.cu takes up to 16 rows and gemm_fixed.cu, which adds in the same order, all others.
cuBLASLt, whose order depends on the shape, takes none, and no product norms its input: that norm has its own order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cupy as cp

from blink_core.ops.cublaslt import Choice, CublasLt
from blink_core.ops.cuda_capture import captured, in_turn
from blink_core.ops.cuda_modules import Kernels, multiprocessors, pointer
from blink_core.ops.tuning import Combination, Duel, fastest, together

SKINNY_ROWS = 8  # up to here the own kernel is no slower than cuBLASLt, and starts beside its predecessor
MOST_SKINNY_ROWS = 32  # up to here it may be the own kernel's, if that was found faster
SILU_ROWS = 16  # up to here the own kernel has one with SwiGLU
SKINNY_THREADS = 256
SKINNY_K = 32
GROUPED_THREADS, GROUPED_RING = 128, 4 * 12 * 1024
SKINNY_PAD = 32  # elements
SKINNY_STATIC = 12 * 1024  # shared memory beside the dynamic, at most
MAX_SHARED_ATTRIBUTE = 97  # cudaDevAttrMaxSharedMemoryPerBlockOptin
NORM_ROWS = 8  # rows whose norm the product itself can compute
TILE_SHARED = 4 * (64 + 128) * (32 + 8) * 2
FIXED_SHARED = 48 << 10  # gemm_fixed.cu, all shapes
FIXED_ROWS = 16  # in batch-invariant mode the skinny kernel takes up to so many
# Tuning. Products of so many operations are limited by the GPU's power, and are measured under lasting load.
HEAVY = 2e10
WARM_US = 150_000.0
QUICK_WEIGHTS = 2  # of a heavy product's first runs: activations keep these out of the L2
LIMITS_US = (60_000.0, 1_200_000.0)  # of a shape's measurements, least and most; between them by its operations:
LIMIT_FLOPS = 4e5  # a microsecond for so many, about 2,000 times what the product takes
TOGETHER_US = 1_200_000.0  # of runs of whole steps of one size; the comparison under way is finished


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

    For experts ``nk`` is [experts, out, in]. Gate and up projections are one weight, the gate's rows first. ``part``:
    which product of a layer it is. Each has a choice of its own how it is made, also among equals in shape: one may end
    with SwiGLU, and another's residual be added by the norm behind it.
    """

    nk: cp.ndarray
    bias: cp.ndarray | None = None
    part: str = ""


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was chosen for a shape, and microseconds of a product by each choice of the short list. ``take``: chooses
    another one."""

    choice: Choice
    us: dict[Choice, float]
    take: Callable[[Choice], None] = field(default=lambda choice: None, repr=False, compare=False)

    @property
    def options(self) -> tuple[Choice, ...]:
        """The choice, and the best of the other kind, own kernel or cuBLASLt, if one is on the short list."""
        others = [c for c in self.us if (c.tiles > 0) != (self.choice.tiles > 0)]
        return (self.choice, *sorted(others, key=lambda c: self.us[c])[:1])

    @property
    def line(self) -> str:
        """For tables: the choice, then the others, the fastest first."""
        others = sorted((c for c in self.us if c != self.choice), key=lambda c: self.us[c])
        return ", ".join(f"{c.name} {self.us[c]:.1f}" for c in (self.choice, *others)) + " us"


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
        if self._skinny(x, weight, out):
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

    def by_pieces(self, x: cp.ndarray, weight: CudaWeight, out: cp.ndarray) -> Iterator[slice]:
        """The product without a residual, as many rows at once as were found the fastest; the rows of each launch."""
        if self.kernels.dtype == "float32" or self.invariant or self._skinny(x, weight, out):
            self(x, weight, out)
            yield slice(0, x.shape[0])
        else:
            yield from self.library().by_pieces(x, weight, out, None)

    def library(self) -> CublasLt:
        """cuBLASLt's products, made on first use; for as many multiprocessors as the kernels may use now."""
        if self._lt is None:
            self._lt = CublasLt(self.kernels.dtype)
        reserved = self.kernels.reserved
        self._lt.target = self.sm_count_target or (multiprocessors(reserved) if reserved else 0)
        return self._lt

    def silu(self, x: cp.ndarray, weight: CudaWeight, out: cp.ndarray, norm: Norm | None = None) -> bool:
        """``out = silu(gate) * up`` in one kernel, where there is one; else nothing, and False."""
        if not self.fuses_silu(x, weight, out):
            return False
        if x.shape[0] <= SILU_ROWS and self._skinny(x, weight, out):
            self._own(x, weight, out, None, silu=True, norm=norm, normed=None)
        else:
            self.fixed(x, weight, out, None, silu=True)
        return True

    def fuses_silu(self, x: cp.ndarray, weight: CudaWeight, out: cp.ndarray) -> bool:
        """Whether :meth:`silu` has a kernel for the product."""
        if self.invariant:
            return self.kernels.dtype != "float32"
        return x.shape[0] <= SILU_ROWS and self._skinny(x, weight, out)

    def adds_residual(self, x: cp.ndarray, weight: CudaWeight, out: cp.ndarray) -> bool:
        """Whether the product should add its residual itself: own kernels do so for nothing, and a product that norms
        its input needs it done; with cuBLASLt the norm that follows does it at less cost."""
        return self.kernels.dtype == "float32" or self.invariant or self._skinny(x, weight, out)

    def norms(self, rows: int, k: int) -> bool:
        """Whether products of ``rows`` rows of ``k`` can norm their input themselves."""
        if self.invariant or not self._always_skinny(rows, k) or rows > NORM_ROWS:
            return False
        limit: int = cp.cuda.runtime.deviceGetAttribute(MAX_SHARED_ATTRIBUTE, cp.cuda.Device().id)
        return self._ring(rows, k, normed=True) + SKINNY_STATIC <= limit

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

    def _always_skinny(self, rows: int, k: int) -> bool:
        most = FIXED_ROWS if self.invariant else min(self.skinny_rows, MOST_SKINNY_ROWS)
        return rows <= most and self._fits(k)

    def _fits(self, k: int) -> bool:
        return self.kernels.dtype != "float32" and k % SKINNY_K == 0

    def _ring(self, rows: int, k: int, *, normed: bool) -> int:
        """Bytes of the own kernel's rings, and of what a norm makes of x."""
        kib = self.kernels.variants.rings(rows)["NORM_RING" if normed else "RING"] * SKINNY_THREADS // 32
        return kib * 1024 + (rows * (k + SKINNY_PAD) * 2 if normed else 0)

    def _skinny(self, x: cp.ndarray, weight: CudaWeight, out: cp.ndarray) -> bool:
        """Whether the own kernel takes the product: always with few rows, with some more as it was tuned."""
        rows, k = x.shape
        if self._always_skinny(rows, k):
            return True
        if self.invariant or rows > MOST_SKINNY_ROWS or not self._fits(k):
            return False
        return self.library().plan(x, weight, out).choice.tiles > 0

    def _tiles(self, x: cp.ndarray, weight: CudaWeight, out: cp.ndarray, silu: bool) -> int:
        """16-row tiles that a block of the own kernel takes at once: as tuned, or the fewest rounds, then the best
        reuse of x."""
        rows, k = x.shape
        if silu:
            return 2
        if not self._always_skinny(rows, k):
            return self.library().plan(x, weight, out).choice.tiles
        sms = multiprocessors(self.kernels.reserved)
        n = weight.nk.shape[0]

        def cost(tiles: int) -> float:
            if rows > 16:  # a tile's weights, and x, which is as much as two
                return _ceil(_ceil(n, tiles * 16), sms) * (tiles + 2)
            return _ceil(_ceil(n, tiles * 16), sms) * tiles * (1.05 if tiles == 1 and rows > 2 else 1.0)

        return min(tiles_of(rows), key=cost)

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
        width = 8 if rows <= 8 else 16 if rows <= 16 else 32
        if norm is not None and not self.norms(rows, k):
            raise ValueError(f"no product of {rows} rows of {k} norms its input")
        tiles = self._tiles(x, weight, out, silu)
        unit = 8 if silu else 16  # outputs of a 16-row tile
        shared = self._ring(rows, k, normed=norm is not None)
        if width == 32:  # the warps' sums
            shared += SKINNY_THREADS // 32 * width * (tiles * 16 + 4) * 4
        name = f"skinny_{'norm_' if norm is not None else ''}{'silu_' if silu else ''}{width}_{tiles}"
        kernel = self.kernels.get("gemm_skinny.cu", name, shared, **self.kernels.variants.skinny(rows))
        params = SkinnyParams(_params(x, weight, out, residual, n), 0, 0.0, pointer(normed))
        if norm is not None:
            params.norm, params.eps = pointer(norm.weight), norm.eps
        blocks = min(_ceil(n, tiles * unit), multiprocessors(self.kernels.reserved))
        kernel.launch(blocks, SKINNY_THREADS, params)

    def tune(
        self,
        x: cp.ndarray,
        weights: Sequence[CudaWeight],
        out: cp.ndarray,
        work: Callable[[CudaWeight], object] | None = None,
        *,
        silu: bool = False,
    ) -> Tuning | None:
        """Measures every way to make the product and takes the fastest for its shape from now on, and for as many
        multiprocessors as the kernels may use now. None where there is nothing to choose.

        ``weights``: alike, and several, so that they do not stay in the L2. ``x``: values as they are in a step, as
        what a heavy product costs the GPU in power depends on them. ``work``: what is timed, by default the product;
        ``silu``: it ends with SwiGLU. Takes some 0.1 s, up to 1.5 s for the heaviest products. An algorithm that is
        refused, be it only under capture, is left out. Raises ValueError if nothing is left.
        """
        rows, k = x.shape
        if self.kernels.dtype == "float32" or self.invariant or self._always_skinny(rows, k):
            return None
        library = self.library()
        plan = library.plan(x, weights[0], out)
        own: list[Choice] = []
        if rows <= (SILU_ROWS if silu else MOST_SKINNY_ROWS) and self._fits(k):
            own = [Choice(tiles) for tiles in ((2,) if silu else tiles_of(rows))]
        flops = 2.0 * rows * weights[0].nk.size
        heavy = flops >= HEAVY
        do = (lambda w: self(x, w, out)) if work is None else work
        stream = cp.cuda.Stream(non_blocking=True)
        cp.cuda.Device().synchronize()  # what the default stream prepared

        def products(count: int) -> None:
            for w in weights[:count]:
                do(w)

        before = plan.choice
        choices: list[Choice] = []
        quick: dict[int, Any] = {}
        long: dict[int, Any] = {}
        try:
            for choice in own + library.choices(x, weights[0], out):
                plan.choice = choice
                try:
                    with stream:
                        do(weights[0])  # loads its kernels
                    whole = captured(stream, partial(products, len(weights)))
                    some = captured(stream, partial(products, QUICK_WEIGHTS)) if heavy else whole
                except library.refusal:  # the heuristic's list is no promise
                    continue
                quick[len(choices)], long[len(choices)] = some, whole
                choices.append(choice)
            tuned = fastest(
                [c.tiles > 0 for c in choices], in_turn(stream, quick), lambda short: in_turn(stream, long),
                warm_us=WARM_US if heavy else 0.0,
                limit_us=min(max(LIMITS_US[0], flops / LIMIT_FLOPS), LIMITS_US[1]),
            )  # fmt: skip
            before = choices[tuned.best]
        finally:
            plan.choice = before
        us = {choices[i]: us / len(weights) for i, us in tuned.us.items()}
        return Tuning(plan.choice, us, partial(setattr, plan, "choice"))

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
            file, defines = "gemm_skinny.cu", self.kernels.variants.skinny(width)
            kernel = self.kernels.get(file, f"grouped_skinny{suffix}_8", GROUPED_RING, **defines)
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


def tiles_of(rows: int) -> tuple[int, ...]:
    """The own kernel's variants for so many rows."""
    return (1, 2) if rows <= 16 else (1, 2, 3)


def tune_step(tunings: Sequence[Tuning], step: Callable[[], object], limit_us: float = TOGETHER_US) -> list[Duel]:
    """Measures the products of a step in their place in it, and takes what makes the whole step the shortest: their
    neighbours start beside own kernels, so that what is the fastest alone may lose. Only those for which there are an
    own kernel and cuBLASLt to choose from. Returns every comparison; options are those of :attr:`Tuning.options`.

    ``step``: launches it; it may be captured, and every choice in it was run before.
    """
    open_ = [t for t in tunings if len(t.options) > 1]
    if not open_:
        return []
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    graphs: dict[Combination, Any] = {}

    def take(combination: Combination) -> None:
        for tuning, option in zip(open_, combination, strict=True):
            tuning.take(tuning.options[option])

    def run(order: Sequence[Combination]) -> list[float]:
        for combination in order:
            if combination not in graphs:
                take(combination)
                with stream:
                    step()  # loads its kernels
                graphs[combination] = captured(stream, step)
        return in_turn(stream, graphs)(order)

    def all_of(own: bool) -> Combination:
        return tuple(next(i for i, c in enumerate(t.options) if (c.tiles > 0) == own) for t in open_)

    best = (0,) * len(open_)
    try:
        best, duels = together([len(t.options) for t in open_], [best, all_of(True), all_of(False)], run, limit_us)
    finally:
        take(best)
    return duels


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
