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

from blink_core.abi.enums import StepStatus
from blink_core.ops.logits import SamplingRow, allowed
from blink_core.ops.philox import philox4x32
from blink_core.ops.sampling import NO_TOKEN, Sampled, greatest, nucleus, sample, uniforms

F32 = npt.NDArray[np.float32]


def alone(logits: Any, **fields: Any) -> tuple[int, int]:
    """(token, status) of one row; `fields` of SamplingRow, sequences as lists."""
    kinds = {"bias": np.float32, "mask": np.uint32}
    arrays: dict[str, Any] = {
        k: np.array(v, kinds.get(k, np.int32)) if isinstance(v, list) else v for k, v in fields.items()
    }
    result = sample(np.array([logits], np.float32), [SamplingRow(**arrays)])
    return int(result.tokens[0]), int(result.status[0])


def run(logits: Any, temperature: Any, top_p: Any = 1.0, seed: Any = 0, choice: Any = 0, position: Any = 0) -> Any:
    """``sample`` with scalars spread over the rows."""
    logits = np.atleast_2d(np.asarray(logits, np.float32))
    rows = logits.shape[0]
    columns = [np.broadcast_to(np.asarray(v, d), rows) for v, d in ((temperature, np.float32), (top_p, np.float32))]
    whole = [np.broadcast_to(np.asarray(v, np.uint64), rows) for v in (seed, choice, position)]
    made = [
        SamplingRow(temperature=float(t), top_p=float(p), seed=int(s), choice=int(c), position=int(at))
        for t, p, s, c, at in zip(*columns, *whole, strict=True)
    ]
    result = sample(logits, made)
    return result.tokens, result.logprobs, result.status == StepStatus.OK


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
    "change",
    [
        {"temperature": -0.5},
        {"temperature": np.nan},
        {"temperature": np.inf},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": np.nan},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"min_p": np.nan},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": np.inf},
        {"presence_penalty": np.nan},
        {"frequency_penalty": -np.inf},
        {"bias_ids": [1], "bias": [np.nan]},
    ],
)
def test_bad_parameters_fail_their_row_alone(change: dict[str, Any]) -> None:
    """Catches: a parameter outside its range that is used, or that fails the requests beside it."""
    kinds = {"bias": np.float32, "bias_ids": np.int32}
    fields: dict[str, Any] = {k: np.array(v, kinds[k]) if k in kinds else v for k, v in change.items()}
    rows = [SamplingRow(), SamplingRow(**{"temperature": 1.0, **fields}), SamplingRow(temperature=1.0, seed=3)]
    logits = np.random.default_rng(1).standard_normal((3, 9), dtype=np.float32)
    result = sample(logits, rows)
    assert result.status.tolist() == [StepStatus.OK, StepStatus.FAILED, StepStatus.OK]
    assert result.tokens[1] == NO_TOKEN
    assert result.tokens[[0, 2]].tolist() == sample(logits[[0, 2]], [rows[0], rows[2]]).tokens.tolist()


def test_bad_shapes() -> None:
    """Catches: broadcasting of misshapen input, and float64 logits accepted."""
    rows = [SamplingRow(), SamplingRow()]
    with pytest.raises(ValueError, match="logits must be float32"):
        sample(np.zeros((2, 4)), rows)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="logits must be float32"):
        sample(np.zeros((2, 0), np.float32), rows)
    with pytest.raises(ValueError, match="2 sampling rows for 3 rows of logits"):
        sample(np.zeros((3, 4), np.float32), rows)


# ---- bias, mask, barred ids


def test_bias_moves_and_bars() -> None:
    """Catches: a bias on another id, set instead of added, or applied before the raw log probability is taken."""
    assert alone([1, 2, 3], bias_ids=[0], bias=[1.5])[0] == 2
    assert alone([1, 2, 3], bias_ids=[0], bias=[2.5])[0] == 0
    assert alone([1, 2, 3], bias_ids=[2, 1], bias=[-100, -100])[0] == 0
    raw = np.array([[1, 2, 3]], np.float32)
    biased = sample(raw, [SamplingRow(bias_ids=np.array([0], np.int32), bias=np.array([50], np.float32), logprobs=2)])
    np.testing.assert_allclose(biased.logprobs[0], 1 - math.log(math.e + math.e**2 + math.e**3), rtol=1e-6)
    assert biased.top_tokens[0].tolist() == [2, 1]


def test_mask_allows_only_its_bits() -> None:
    """Catches: a mask read with another bit or word order, applied before the bias, or bits beyond the vocabulary."""
    logits = np.arange(70, dtype=np.float32)
    words = [0, 1 << 5 | 1 << 31, 0xFFFFFFC0]  # ids 37 and 63, and bits from 70 on
    assert alone(logits, mask=words) == (63, StepStatus.OK)
    assert alone(logits, mask=words, bias_ids=[69, 37], bias=[1000, 100])[0] == 37
    assert np.flatnonzero(allowed(np.array(words, np.uint32), 70)).tolist() == [37, 63]
    for seed in range(20):
        assert alone(logits, mask=words, temperature=100.0, seed=seed)[0] in (37, 63)


def test_nothing_left_to_choose() -> None:
    """Catches: an id chosen although none is allowed, NaN from a softmax over nothing, a neighbour that fails too."""
    for temperature in (0.0, 1.0):
        assert alone([1, 2], mask=[0], temperature=temperature) == (NO_TOKEN, StepStatus.NO_TOKEN)
        assert alone([1, 2], barred=[0, 1], temperature=temperature, top_k=1) == (NO_TOKEN, StepStatus.NO_TOKEN)
        # What the model itself rules out counts as well.
        assert alone([1, -np.inf], barred=[0], temperature=temperature) == (NO_TOKEN, StepStatus.NO_TOKEN)
    assert alone([np.nan, 1], mask=[2]) == (NO_TOKEN, StepStatus.NAN_LOGITS)


def test_barred_ids_outrank_bias() -> None:
    """Catches: an end-of-sequence id that a bias brings back before min_tokens."""
    assert alone([1, 2, 3], barred=[2], bias_ids=[2], bias=[100])[0] == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_foreign_ids_are_ignored(temperature: float) -> None:
    """Catches: an index error, or a write to another row's logits, from ids of a successor's record."""
    foreign = [-1, 5, 2**31 - 1, -(2**31)]
    fields: dict[str, Any] = {"repetition_penalty": 2.0, "frequency_penalty": 1.0, "presence_penalty": 1.0}
    clean = alone([1, 2, 3, 4, 5], temperature=temperature, prompt=[0], output=[1], **fields)
    dirty = alone(
        [1, 2, 3, 4, 5],
        temperature=temperature,
        prompt=[*foreign, 0],
        output=[1, *foreign],
        barred=foreign,
        bias_ids=foreign,
        bias=[9.0] * 4,
        **fields,
    )
    assert dirty == clean


# ---- penalties


def test_repetition_penalty_divides_or_multiplies_once() -> None:
    """Catches: a negative logit made more likely, an id penalised once for each occurrence, or the prompt left out."""
    assert alone([4, 3], repetition_penalty=2.0, prompt=[0])[0] == 1
    assert alone([-4, -5], repetition_penalty=2.0, output=[0])[0] == 1
    assert alone([4, 1.5], repetition_penalty=2.0, prompt=[0, 0], output=[0])[0] == 0
    assert alone([4, 3], repetition_penalty=0.5, output=[1])[0] == 1


def test_presence_and_frequency_penalties_count_the_output() -> None:
    """Catches: the prompt counted, presence counted more than once, frequency counted once, or a wrong sign."""
    assert alone([3, 2], presence_penalty=2.0, prompt=[0])[0] == 0
    assert alone([3, 2], presence_penalty=2.0, output=[0])[0] == 1
    assert alone([3, 2], presence_penalty=0.75, output=[0, 0, 0])[0] == 0
    assert alone([3, 2], frequency_penalty=0.75, output=[0])[0] == 0
    assert alone([3, 2], frequency_penalty=0.75, output=[0, 0])[0] == 1
    assert alone([3, 2], frequency_penalty=-2.0, output=[1])[0] == 1


def test_repetition_comes_before_presence() -> None:
    """Catches: the two penalties in the other order: 4 / 2 - 1 = 1, but (4 - 1) / 2 = 1.5."""
    fields: dict[str, Any] = {"repetition_penalty": 2.0, "presence_penalty": 1.0, "output": [0]}
    assert alone([4, 1.25], **fields)[0] == 1
    assert alone([4, 0.75], **fields)[0] == 0


# ---- top-k, top-p, min-p


def drawn(logits: Any, **fields: Any) -> set[int]:
    return {alone(logits, seed=seed, temperature=fields.pop("temperature", 1.0), **fields)[0] for seed in range(300)}


def test_top_k_keeps_k_and_the_lower_of_equals() -> None:
    """Catches: one id too many or too few, ties kept beyond k or given to the higher id."""
    logits = [0.0, 1.0, 1.0, 1.0, 0.5]
    assert drawn(logits, top_k=1) == {1}
    assert drawn(logits, top_k=2) == {1, 2}
    assert drawn(logits, top_k=4) == {1, 2, 3, 4}
    for everything in (0, 5, 6, 2**32 - 1):
        assert drawn(logits, top_k=everything) == {0, 1, 2, 3, 4}


def test_top_p_is_of_what_top_k_left() -> None:
    """Catches: the nucleus summed over ids that top-k removed: 0.4 of 0.7 reaches 0.5, 0.4 of 1 does not."""
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert drawn(logits, top_k=2, top_p=0.5) == {0}
    assert drawn(logits, top_p=0.5) == {0, 1}


def test_min_p_is_relative_to_the_greatest() -> None:
    """Catches: an absolute limit, a strict comparison, or one before the temperature."""
    logits = np.log2([8, 4, 2, 1]) * math.log(2)
    assert drawn(logits, min_p=0.24) == {0, 1, 2}
    assert drawn(logits, min_p=1.0) == {0}
    assert drawn([3, 3, 2], min_p=1.0) == {0, 1}
    # At temperature 2 the relations are their square roots: 1, 0.71, 0.5, 0.35.
    assert drawn(logits, min_p=0.4, temperature=2.0) >= {0, 1}
    cold = {alone(logits, seed=seed, temperature=2.0, min_p=0.4)[0] for seed in range(300)}
    assert cold == {0, 1, 2}


@given(
    values=hnp.arrays(np.float32, st.integers(1, 300), elements=st.integers(-3, 3)),
    data=st.data(),
)
def test_greatest_is_a_prefix_of_the_sorted_ids(values: F32, data: st.DataObject) -> None:
    """Catches: a partition that keeps too many of equal values, or the higher ids of them."""
    count = data.draw(st.integers(1, len(values)))
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert greatest(values, count).tolist() == sorted(order[:count])


# ---- log probabilities


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_alternatives_are_the_most_probable_by_raw_logits(temperature: float) -> None:
    """Catches: alternatives after temperature, penalty or top-k; ties to the higher id; another row's count."""
    logits = np.array([[0, 2, 1, 2, -np.inf], [5, 1, 0, 0, 0]], np.float32)
    rows = [SamplingRow(temperature=temperature, top_k=1, logprobs=5), SamplingRow(logprobs=1)]
    result: Sampled = sample(logits, rows)
    assert result.top_tokens.tolist() == [[1, 3, 2, 0, 4], [0, -1, -1, -1, -1]]
    raw = logits.astype(np.float64)
    norm = np.log(np.exp(raw).sum(axis=1))
    np.testing.assert_allclose(result.top_logprobs[0], raw[0, [1, 3, 2, 0, 4]] - norm[0], rtol=1e-6)
    np.testing.assert_allclose(result.logprobs[1], result.top_logprobs[1, 0])
    assert result.top_logprobs[1, 1:].tolist() == [-np.inf] * 4


def test_more_alternatives_than_ids() -> None:
    """Catches: an index beyond the vocabulary of a tiny model, or a width that a wish exceeds."""
    result = sample(np.zeros((1, 3), np.float32), [SamplingRow(logprobs=20)], width=4)
    assert result.top_tokens.tolist() == [[0, 1, 2, -1]]
    assert sample(np.zeros((1, 3), np.float32), [SamplingRow(logprobs=20)], width=0).top_tokens.shape == (1, 0)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}])
def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]) -> None:
    """Catches: an id, a term of the sum or the race's winner lost at the edge of a block of ids."""
    logits = np.random.default_rng(3).standard_normal((40, 301), dtype=np.float32)
    rows = [SamplingRow(seed=seed, **fields) for seed in range(40)]
    whole = sample(logits, rows)
    for block in (1, 7, 43, 300, 301):
        monkeypatch.setattr("blink_core.ops.sampling.BLOCK", block)
        cut = sample(logits, rows)
        assert cut.tokens.tolist() == whole.tokens.tolist()
        np.testing.assert_allclose(cut.logprobs, whole.logprobs, rtol=1e-6)
