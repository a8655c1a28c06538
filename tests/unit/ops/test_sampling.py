"""Sampling: independence of rows, the nucleus, degenerate parameters and NaN, against a plain restatement."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from blink_core.ops.philox import philox4x32
from blink_core.ops.sampling import NO_TOKEN, nucleus, sample, uniforms

F32 = npt.NDArray[np.float32]


def run(logits: Any, temperature: Any, top_p: Any = 1.0, seed: Any = 0, choice: Any = 0, position: Any = 0) -> Any:
    """``sample`` with scalars spread over the rows."""
    logits = np.atleast_2d(np.asarray(logits, np.float32))
    rows = logits.shape[0]
    given_values = ((temperature, np.float32), (top_p, np.float32), (seed, np.uint64), (choice, np.uint32))
    columns = [np.broadcast_to(np.asarray(v, d), rows).copy() for v, d in (*given_values, (position, np.uint32))]
    return sample(logits, *columns)


def restated(logits: F32, temperature: float, top_p: float, seed: int, choice: int, position: int) -> int:
    """The sampler said again, token by token in Python floats."""
    scaled = [float(x) / float(np.float32(temperature)) for x in logits]
    weights = [math.exp(x - max(scaled)) for x in scaled]
    p = [w / math.fsum(weights) for w in weights]
    kept, mass = set(), 0.0
    for token in sorted(range(len(p)), key=lambda t: (-p[t], t)):
        kept.add(token)
        mass += p[token]
        if mass >= float(np.float32(top_p)) and top_p < 1:
            break
    best, best_time = -1, math.inf
    for token in sorted(kept):
        counter = np.array([token >> 2, position, choice, 0], np.uint32)
        word = int(philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))[token & 3])
        time = -math.log((word + 0.5) / 2**32) / p[token] if p[token] > 0 else math.inf
        if time < best_time:
            best, best_time = token, time
    return best


seeds = st.integers(0, 2**64 - 1)
words = st.integers(0, 2**32 - 1)


@given(
    logits=hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-12, 12, width=32)),
    temperature=st.floats(0.0625, 3, width=32),
    top_p=st.floats(0.0625, 1, width=32),
    seed=seeds,
    choice=words,
    position=words,
)
def test_matches_restatement(
    logits: F32, temperature: float, top_p: float, seed: int, choice: int, position: int
) -> None:
    """Catches: a wrong key, counter word, lane, race, temperature or nucleus rule."""
    tokens, logprobs, ok = run(logits, temperature, top_p, seed, choice, position)
    assert ok.tolist() == [True]
    assert tokens[0] == restated(logits, temperature, top_p, seed, choice, position)
    raw = logits.astype(np.float64)
    np.testing.assert_allclose(
        logprobs[0], raw[tokens[0]] - raw.max() - math.log(np.exp(raw - raw.max()).sum()), rtol=1e-5, atol=1e-6
    )


@given(data=st.data(), seed=seeds, row=st.integers(0, 6), top_p=st.sampled_from([0.3, 0.9, 0.99999994, 1.0]))
def test_row_is_independent_of_neighbours(data: st.DataObject, seed: int, row: int, top_p: float) -> None:
    """Catches: randomness keyed by slot or row, or consumed from a shared stream by greedy or unseeded neighbours."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = rng.standard_normal((7, 300), dtype=np.float32) * 3
    temperature = rng.choice(np.array([0, 0.5, 1], np.float32), 7)
    temperature[row] = 0.8
    others = rng.integers(0, 2**63, 7, dtype=np.uint64)
    others[row] = seed
    positions = rng.integers(0, 1000, 7, dtype=np.uint32)
    together = run(logits, temperature, top_p, others, 0, positions)
    alone = run(logits[row], 0.8, top_p, np.uint64(seed), 0, positions[row])
    for many, one in zip(together, alone, strict=True):
        assert many[row].tobytes() == one[0].tobytes()


@given(
    weights=hnp.arrays(np.int64, st.integers(1, 2000), elements=st.integers(0, 5)).filter(lambda w: w.sum() > 0),
    top_p=st.floats(2**-10, 1, exclude_max=True, width=32),
)
def test_nucleus_is_smallest_prefix(weights: npt.NDArray[np.int64], top_p: float) -> None:
    """Catches: an unstable sort among ties, one token too many or too few, a bound lost in the candidate search."""
    p = weights / weights.sum()
    order = sorted(range(len(p)), key=lambda t: (-p[t], t))
    mass = np.cumsum(p[order])
    expected = order[: next((i + 1 for i, m in enumerate(mass) if m >= top_p), len(p))]
    assert nucleus(p, top_p).tolist() == sorted(expected)


@pytest.mark.parametrize(
    ("top_p", "expected"), [(0.5, [1]), (0.75, [0, 1]), (0.7500001, [0, 1, 2]), (0.875, [0, 1, 2])]
)
def test_nucleus_reached_exactly(top_p: float, expected: list[int]) -> None:
    """Catches: one token too many where the sum equals top_p exactly."""
    assert nucleus(np.array([0.25, 0.5, 0.125, 0.125]), top_p).tolist() == expected


def test_top_p_extremes() -> None:
    """Catches: an empty nucleus for a tiny top_p, and rounding that loses the search for a top_p just below 1."""
    logits = np.random.default_rng(0).standard_normal((3, 5000), dtype=np.float32)
    tiny = np.nextafter(np.float32(0), np.float32(1))
    assert run(logits, 1.0, tiny)[0].tolist() == logits.argmax(1).tolist()
    below_one = np.nextafter(np.float32(1), np.float32(0))
    uniform = np.full(5000, 1 / 5000)
    assert 4999 <= nucleus(uniform, float(below_one)).size <= 5000
    # The least representable step below 1 in float64: the sum of 5,000 rounded terms may not reach it.
    assert 4999 <= nucleus(uniform, float(np.nextafter(1.0, 0.0))).size <= 5000
    tokens, _, ok = run(logits, 1.0, below_one)
    assert ok.all()
    assert ((tokens >= 0) & (tokens < 5000)).all()


def test_nan_row_alone_fails() -> None:
    """Catches: a NaN that is sampled, or that spoils its neighbours."""
    logits = np.random.default_rng(0).standard_normal((6, 50), dtype=np.float32)
    clean = run(logits, [0, 1, 0, 1, 0, 1])
    logits[0, 7] = np.nan
    logits[1, 0] = np.nan
    logits[2] = -np.inf
    logits[3, 3] = np.inf
    tokens, logprobs, ok = run(logits, [0, 1, 0, 1, 0, 1])
    assert ok.tolist() == [False, False, False, False, True, True]
    assert tokens[:4].tolist() == [NO_TOKEN] * 4
    assert np.isnan(logprobs[:4]).all()
    for got, expected in zip((tokens, logprobs), clean[:2], strict=True):
        assert got[4:].tobytes() == expected[4:].tobytes()


def test_greedy_takes_lowest_of_equals() -> None:
    """Catches: a tie broken by the highest id, and masked (-inf) tokens chosen."""
    tokens, logprobs, ok = run([[1, 5, 5, -np.inf], [-np.inf, -np.inf, 2, 2]], 0.0)
    assert tokens.tolist() == [1, 2]
    assert ok.all()
    np.testing.assert_allclose(logprobs[1], -math.log(2), rtol=1e-6)


def test_greedy_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: random numbers computed for greedy rows, which would cost a whole vocabulary each step."""
    drawn = []

    def record(ids: Any, seed: int, choice: int, position: int) -> Any:
        drawn.append(seed)
        return uniforms(ids, seed, choice, position)

    monkeypatch.setattr("blink_core.ops.sampling.uniforms", record)
    run(np.zeros((3, 8)), [0, 0.7, 0], 1.0, [11, 12, 13])
    assert drawn == [12]


def test_temperature_extremes() -> None:
    """Catches: overflow for a denormal temperature, and a huge one that is not uniform."""
    logits = np.array([3.0, 4.0, -1.0], np.float32)
    with np.errstate(all="raise", under="ignore"):
        assert run(logits, np.float32(1e-45))[0][0] == 1
    tokens = run(np.tile(logits, (3000, 1)), 1e30, 1.0, np.arange(3000))[0]
    assert np.bincount(tokens, minlength=3).min() > 900  # 1000 expected, sd 26


def test_frequencies_follow_probabilities() -> None:
    """Catches: a biased race. Chi-square of 6,000 draws over 8 tokens, bound at about 1e-6."""
    p = np.array([0.4, 0.2, 0.15, 0.1, 0.05, 0.05, 0.03, 0.02])
    tokens = run(np.tile(np.log(p), (6000, 1)), 1.0, 1.0, 99, 0, np.arange(6000))[0]
    expected = p * 6000
    assert ((np.bincount(tokens, minlength=8) - expected) ** 2 / expected).sum() < 40.5


@given(ids=st.sets(st.integers(0, 5000), min_size=1, max_size=60), seed=seeds)
def test_uniforms_of_a_subset(ids: set[int], seed: int) -> None:
    """Catches: a token's number that depends on which other tokens are candidates."""
    chosen = np.array(sorted(ids))
    u = uniforms(chosen, seed, 1, 2)
    assert ((u > 0) & (u < 1)).all()
    np.testing.assert_array_equal(u, uniforms(np.arange(5001), seed, 1, 2)[chosen])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": -0.5}, "temperature must be"),
        ({"temperature": np.nan}, "temperature must be"),
        ({"temperature": np.inf}, "temperature must be"),
        ({"top_p": 0.0}, "top_p must be"),
        ({"top_p": 1.5}, "top_p must be"),
        ({"top_p": np.nan}, "top_p must be"),
    ],
)
def test_bad_parameters(change: dict[str, float], message: str) -> None:
    """Catches: a parameter outside its range that is used."""
    with pytest.raises(ValueError, match=message):
        run(np.zeros((2, 4)), **({"temperature": 1.0} | change))


def test_bad_shapes() -> None:
    """Catches: broadcasting of misshapen input, and float64 logits accepted."""
    one = np.ones(2, np.float32)
    ints = (np.ones(2, np.uint64), np.ones(2, np.uint32), np.ones(2, np.uint32))
    with pytest.raises(ValueError, match="logits must be float32"):
        sample(np.zeros((2, 4)), one, one, *ints)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="logits must be float32"):
        sample(np.zeros((2, 0), np.float32), one, one, *ints)
    with pytest.raises(ValueError, match=r"temperature must be float32 \[2\]"):
        sample(np.zeros((2, 4), np.float32), np.ones(1, np.float32), one, *ints)
    with pytest.raises(ValueError, match=r"seed must be uint64 \[2\]"):
        sample(np.zeros((2, 4), np.float32), one, one, np.ones(2, np.int64), *ints[1:])
