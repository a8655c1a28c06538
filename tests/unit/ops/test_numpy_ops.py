"""The elementwise operations and the matrix products, each against a float64 restatement or bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blink_core.models import BatchInvarianceError
from blink_core.ops import gemm
from blink_core.ops.numpy_ops import NumpyOps, RotaryTable, inverse_frequencies

OPS = NumpyOps()


def random(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def test_rms_norm() -> None:
    """Catches: a mean over the wrong axis, eps outside the root, a missing weight."""
    x, weight = random(5, 33) * 0.01, random(33, seed=1)
    exact = x.astype(np.float64) / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(OPS.rms_norm(x, weight, 1e-5), exact, rtol=1e-6)


def test_silu_mul() -> None:
    """Catches: gate and up swapped, and overflow for very negative gates."""
    x = random(4, 14)
    x[0, 0] = -1000
    gate, up = x[:, :7].astype(np.float64), x[:, 7:]
    with np.errstate(all="raise", under="ignore"):
        got = OPS.silu_mul(x)
    np.testing.assert_allclose(got, gate / (1 + np.exp(np.minimum(-gate, 700))) * up, rtol=1e-6, atol=1e-30)


def test_embedding_of_a_transposed_table() -> None:
    """Catches: a tied table read by columns, or a result that is not C-contiguous for the products that follow."""
    table = random(9, 4)
    ids = np.array([8, 0, 8, 3], np.int32)
    for given_table in (table, np.asfortranarray(table)):
        got = OPS.embedding(given_table, ids)
        assert got.flags.c_contiguous
        np.testing.assert_array_equal(got, table[[8, 0, 8, 3]])


def test_append_kv_writes_only_its_slots() -> None:
    """Catches: a slot split wrongly into page and offset, and neighbours overwritten."""
    pages = np.full((5, 4, 2, 3), np.nan, np.float32)
    values = random(3, 2, 3)
    OPS.append_kv(pages, np.array([19, 0, 6]), values)
    assert np.isfinite(pages).all(axis=(2, 3)).sum() == 3
    for (page, offset), value in zip(((4, 3), (0, 0), (1, 2)), values, strict=True):
        np.testing.assert_array_equal(pages[page, offset], value)


@pytest.mark.parametrize("theta", [1e4, 1e5, 5e5, 1e6])
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
def test_inverse_frequencies_match_torch(theta: float, dim: int) -> None:
    """Catches: frequencies rounded otherwise than HuggingFace's: at most one may differ, by the last bit."""
    import torch  # the reference of this test only

    theirs = (1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).to(dtype=torch.float) / dim))).numpy()
    ours = inverse_frequencies(theta, dim)
    assert np.count_nonzero(ours != theirs) <= 1
    assert np.abs(ours.view(np.int32) - theirs.view(np.int32)).max() <= 1


def test_rotary_table_and_rotation() -> None:
    """Catches: interleaved instead of halved pairs, a wrong sign, a table that is wrong where it was extended."""
    table = RotaryTable(1e4, 8)
    positions = np.array([3, 0, 1023, 1024, 2500], np.int32)
    table(positions[:2])  # the first chunk, so that the next call extends the table
    cos, sin = table(positions)
    x = random(5, 2, 8)
    angle = positions[:, None] * inverse_frequencies(1e4, 8).astype(np.float64)
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angle)[:, None, :]
    # The angle is rounded to float32 as in HuggingFace: half a unit in the last place of 2500 is 1.2e-4.
    np.testing.assert_allclose(
        OPS.rotary(x, cos, sin), np.concatenate((turned.real, turned.imag), -1), rtol=0, atol=6e-4
    )
    np.testing.assert_array_equal(table(positions[3:4])[0][0], cos[3])


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 31, 33, 65, 100, 300])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_linear(rows: int, batch_invariant: bool) -> None:
    """Catches: rows lost or doubled at a tile's edge, and a transposed weight."""
    x, w = random(rows, 70), random(70, 90, seed=1)
    ops = NumpyOps(batch_invariant=batch_invariant)
    got = ops.linear(x, ops.prepare_linear(w))
    np.testing.assert_allclose(got, x.astype(np.float64) @ w, rtol=0, atol=1e-4)


@settings(max_examples=60)
@given(
    inside=st.integers(1, 300),
    outside=st.integers(1, 300),
    rows=st.integers(1, 140),
    seed=st.integers(0, 1000),
)
def test_invariant_linear_is_bitwise(inside: int, outside: int, rows: int, seed: int) -> None:
    """Catches: a tile in which a row's bits depend on its place, its neighbours, or the tile's size."""
    rng = np.random.default_rng(seed)
    ops = NumpyOps(batch_invariant=True)
    weight = ops.prepare_linear(rng.standard_normal((inside, outside), dtype=np.float32))
    x = rng.standard_normal((rows, inside), dtype=np.float32)
    together = ops.linear(x, weight)
    order = rng.permutation(rows)
    assert ops.linear(x[order], weight).tobytes() == together[order].tobytes()
    for row in rng.choice(rows, min(rows, 5), replace=False):
        assert ops.linear(x[row : row + 1], weight)[0].tobytes() == together[row].tobytes()


def test_invariant_mode_drops_a_tile_that_differs() -> None:
    """Catches: a load-time check that lets a tile through whose rows depend on their place."""
    real = np.matmul

    class Broken(np.ndarray):
        """A weight whose products of some row counts add up the last row in another order, as a BLAS might."""

        def __rmatmul__(self, x: Any, /) -> Any:
            out = real(x, self.view(np.ndarray))
            if x.shape[0] in broken_rows:
                out[-1] = np.nextafter(out[-1], np.float32(np.inf) * next(signs))
            return out

    weight = random(60, 40).view(Broken)
    signs: Iterator[int] = itertools.repeat(1)
    broken_rows = {16}
    tiles = gemm.invariant_tiles(weight)
    assert 16 not in tiles
    assert tiles[0] == 4
    broken_rows = {4}
    assert gemm.invariant_tiles(weight)[0] == 8
    broken_rows = {4, 8}
    assert gemm.invariant_tiles(weight) == (1,)
    # One-row products are wrong only if they differ from call to call.
    broken_rows, signs = {1, 4, 8}, itertools.cycle((1, -1))
    with pytest.raises(BatchInvarianceError, match=r"products of 4, 8, 1 rows with a weight of 60 x 40"):
        gemm.invariant_tiles(weight)


def test_weight_layout_is_checked() -> None:
    """Catches: a strided weight, which would be copied at every product."""
    with pytest.raises(ValueError, match="C-contiguous"):
        OPS.prepare_linear(random(4, 6).T)
