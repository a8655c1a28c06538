"""Matrix products against a fixed weight: fast, or with bits that depend on neither batch nor row.

**What batch invariance relies upon.** A BLAS picks its kernel, its blocking and so its order of additions by the shape
of the product, and some kernels also by the row: OpenBLAS 0.3.31 on Haswell kernels gave one row up to four different
results by its place in a GEMM of 12, 24, 32 ... 128 rows, while 4 and 8 rows gave one; its AVX-512 kernels give one
result at any place, but another one for matrices small enough for its small-matrix kernel, and a one-row product
(GEMV) always differs. So the invariant mode computes every row in a tile of a fixed number of rows, padded with zeros,
and relies upon:

1. equal shapes and equal operands give equal bits (no order that depends on data, timing or alignment);
2. in a tile of the base size a row's result depends on neither its place nor the other rows;
3. larger tiles, used for speed, give the base tile's bits.

2 and 3 are measured per weight shape by :func:`invariant_tiles` when a model is loaded, under the thread count of that
process. A larger tile that differs is not used. Where neither 4 nor 8 rows will do (OpenBLAS's Sandy Bridge kernels,
for a few small shapes) the tile is a single row, slow but right by 1 alone; a BLAS that breaks 1 as well is refused.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

BASE_TILES = (4, 8, 1)  # in order of preference
LARGER_TILES = (8, 16, 32, 48, 64, 96, 128, 192, 256)
POOL_ROWS = 8  # rows that the check moves about; a multiple of every base tile
# Below this many rows, one GEMV each beats a GEMM, which first packs the whole weight (measured: 5 against 8 ms).
GEMV_ROWS = 2
# OpenBLAS's AVX-512 kernels multiply matrices of up to 10^6 multiply-adds in place, without packing: for a few rows it
# pays to cut the weight into such strips (SmolLM2's products, ms: 112 -> 86 at 3 rows, 100 -> 84 at 8, none at 12).
STRIP_ROWS = 8
STRIP_PRODUCTS = 1_000_000


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A projection, stored transposed: ``kn`` float32 [in, out], C-contiguous.

    ``tiles``: row counts of the invariant mode, none in fast mode. ``bias``: float32 [out], added last. [in, out]
    because that is the faster layout for GEMV (1.5 times at 576 x 3072) and no slower for GEMM.
    """

    kn: F32
    tiles: tuple[int, ...] = ()
    bias: F32 | None = None


def multiply(x: F32, weight: LinearWeight) -> F32:
    """``x @ weight + bias``: float32 [T, in] -> [T, out]; in tiles if the weight has them, else by the fastest way."""
    rows = x.shape[0]
    out = np.empty((rows, weight.kn.shape[1]), dtype=np.float32)
    if weight.tiles:
        start = 0
        while start < rows:
            tile = _pick(weight.tiles, rows - start)
            stop = min(rows, start + tile)
            if stop - start == tile:
                np.matmul(x[start:stop], weight.kn, out=out[start:stop])
            else:
                padded = np.zeros((tile, x.shape[1]), dtype=np.float32)
                padded[: stop - start] = x[start:stop]
                out[start:stop] = np.matmul(padded, weight.kn)[: stop - start]
            start = stop
    elif rows <= GEMV_ROWS:
        for row in range(rows):
            np.matmul(x[row], weight.kn, out=out[row])
    elif rows <= STRIP_ROWS and multiplies_in_place():
        width = max(16, STRIP_PRODUCTS // (rows * x.shape[1]) // 16 * 16)
        for at in range(0, out.shape[1], width):
            np.matmul(x, weight.kn[:, at : at + width], out=out[:, at : at + width])
    else:
        np.matmul(x, weight.kn, out=out)
    if weight.bias is not None:
        out += weight.bias
    return out


@functools.cache
def multiplies_in_place() -> bool:
    """Whether NumPy's BLAS is an OpenBLAS that runs its AVX-512 kernels here: told by name and processor, not by time,
    so that equal machines choose alike."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return "openblas" in _blas_name().lower() and {"avx512f", "avx512bw", "avx512vl"} <= set(flags.split())


def _pick(tiles: tuple[int, ...], rows: int) -> int:
    """The tile for the next of ``rows`` rows; any is right. A little padding is cheaper than packing the weight."""
    above = [t for t in tiles if t >= rows]
    below = [t for t in tiles if t <= rows]
    if above and (not below or rows <= 32 or above[0] <= 1.25 * rows):
        return above[0]
    return below[-1]


def invariant_tiles(kn: F32) -> tuple[int, ...]:
    """Row counts in which a row of ``x @ kn`` has the same bits at any place and beside any rows, ascending.

    Measured on this weight. Raises BatchInvarianceError if no base tile is usable on this machine's BLAS, which means
    that not even equal products of one row give equal bits.
    """
    pool = np.random.default_rng(0x626C696E).standard_normal((POOL_ROWS, kn.shape[0]), dtype=np.float32)
    for base in BASE_TILES:
        expected = np.concatenate([pool[i : i + base] @ kn for i in range(0, POOL_ROWS, base)])
        if _any_place(kn, pool, expected, base, POOL_ROWS) and _any_neighbours(kn, pool[0], expected[0], base):
            larger = [t for t in LARGER_TILES if t > base and _any_place(kn, pool, expected, t, 1)] if base > 1 else []
            return (base, *larger)
    from blink_core.models.errors import BatchInvarianceError  # models import this module

    raise BatchInvarianceError(
        f"batch-invariant mode is not available on this machine: its BLAS ({_blas_name()}) gives a row different bits "
        "by its place, its neighbours or from call to call in products of "
        f"{', '.join(map(str, BASE_TILES))} rows with a weight of {kn.shape[0]} x {kn.shape[1]}; load the model "
        "without batch_invariant, or choose another BLAS"
    )


def _any_place(kn: F32, pool: F32, expected: F32, tile: int, shifts: int) -> bool:
    """Whether the rows of ``pool``, repeated to fill a tile, have the bits of ``expected`` at every place.

    One shift puts some row at each place, POOL_ROWS shifts put each row at each place.
    """
    for shift in range(shifts):
        index = (np.arange(tile) + shift) % POOL_ROWS
        # Rows start at any multiple of 4 bytes, as slices of a batch do.
        memory = np.empty(tile * pool.shape[1] + shift, dtype=np.float32)
        x = memory[shift:].reshape(tile, -1)
        x[:] = pool[index]
        if not np.array_equal((x @ kn).view(np.uint32), expected[index].view(np.uint32)):
            return False
    return True


def _any_neighbours(kn: F32, row: F32, expected: F32, tile: int) -> bool:
    """Whether ``row`` keeps its bits at every place beside zeros (the padding of a tile) and beside large values."""
    for value in (0.0, 1e4):
        for place in range(tile):
            x = np.full((tile, row.size), value, dtype=np.float32)
            x[place] = row
            if not np.array_equal((x @ kn)[place].view(np.uint32), expected.view(np.uint32)):
                return False
    return True


def _blas_name() -> str:
    info: object = np.show_config(mode="dicts")
    blas = info.get("Build Dependencies", {}).get("blas", {}) if isinstance(info, dict) else {}
    return f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()
