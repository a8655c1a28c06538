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
from blink_core.ops.numpy_ops import NumpyOps
from blink_core.ops.rope import (
    RotaryTable,
    factored_frequencies,
    inverse_frequencies,
    llama3_frequencies,
    yarn_frequencies,
)

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
    table = RotaryTable(inverse_frequencies(1e4, 8))
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


def test_rotation_of_a_part() -> None:
    """Catches: pairs made over the whole head where only its first elements turn, or a rest that is left unwritten."""
    table = RotaryTable(inverse_frequencies(1e4, 6))
    x = random(3, 2, 10)
    cos, sin = table(np.array([0, 5, 9], np.int32))
    got = OPS.rotary(x, cos, sin)
    np.testing.assert_array_equal(got[..., 6:], x[..., 6:])
    np.testing.assert_array_equal(got[..., :6], OPS.rotary(np.ascontiguousarray(x[..., :6]), cos, sin))


def test_scaled_rotary_table() -> None:
    """Catches: the factor of YaRN and LongRoPE left out, or applied to the angle."""
    frequencies, positions = inverse_frequencies(1e4, 8), np.array([3, 1030], np.int32)
    plain, scaled = RotaryTable(frequencies)(positions), RotaryTable(frequencies, 1.25)(positions)
    for a, b in zip(plain, scaled, strict=True):
        np.testing.assert_array_equal(a * np.float32(1.25), b)


def _huggingface_frequencies(kind: str, dim: int, **rope: Any) -> npt.NDArray[np.float32]:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=dim,
        num_attention_heads=1,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": kind, "rope_theta": 5e5, "original_max_position_embeddings": 1024, **rope},
    )
    found: npt.NDArray[np.float32] = ROPE_INIT_FUNCTIONS[kind](config, None)[0].numpy()
    return found


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_scaled_frequencies_match_huggingface(dim: int) -> None:
    """Catches: another rounding, a band edge on the wrong side, or a ramp over elements instead of pairs."""
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    yarn = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
    factors = np.linspace(1, 40, dim // 2).astype(np.float32)
    tables = {"short_factor": factors.tolist(), "long_factor": (2 * factors).tolist(), "factor": 4.0}
    for ours, theirs in (
        (llama3_frequencies(inverse_frequencies(5e5, dim), 8.0, 1.0, 4.0, 1024), ("llama3", llama3)),
        (yarn_frequencies(5e5, dim, 4.0, 1024, 32.0, 1.0), ("yarn", yarn)),
        (yarn_frequencies(5e5, dim, 4.0, 1024, 32.0, 1.0, truncate=False), ("yarn", {**yarn, "truncate": False})),
        (factored_frequencies(5e5, dim, factors), ("longrope", tables)),
    ):
        want = _huggingface_frequencies(theirs[0], dim, **theirs[1])
        assert ours.dtype == np.float32
        assert np.count_nonzero(ours != want) <= max(2, dim // 16), theirs[0]
        np.testing.assert_allclose(ours, want, rtol=4e-7)


def test_routing() -> None:
    """Catches: top-k before the softmax, weights normalised unasked, ties broken by chance, probabilities over few."""
    logits = random(7, 9) * 3
    logits[2] = 1.0
    exact = np.exp(logits.astype(np.float64))
    exact /= exact.sum(1, keepdims=True)
    for normalize in (False, True):
        index, weight = OPS.route(logits, 3, normalize=normalize)
        assert index[2].tolist() == [0, 1, 2]
        for row in range(7):
            chosen = sorted(range(9), key=lambda i: (-logits[row, i], i))[:3]
            assert index[row].tolist() == chosen
            want = exact[row, chosen] / (exact[row, chosen].sum() if normalize else 1)
            np.testing.assert_allclose(weight[row], want, rtol=1e-6)


def test_bias() -> None:
    """Catches: a bias added to some rows only: each way of multiplying has its own path."""
    kn, bias = random(12, 20), random(20, seed=2)
    for ops in (NumpyOps(), NumpyOps(batch_invariant=True)):
        weight = ops.prepare_linear(kn, bias)
        for rows in (1, 2, 3, 4, 9, 17):
            x = random(rows, 12, seed=rows)
            np.testing.assert_allclose(ops.linear(x, weight), x.astype(np.float64) @ kn + bias, rtol=1e-4, atol=1e-5)
