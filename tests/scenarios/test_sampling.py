"""Corpus rows L: logits and sampling, on the sampler of the host."""

from __future__ import annotations

import numpy as np
import pytest

from blink_core.abi.enums import StepStatus
from blink_core.ops.logits import SamplingRow
from blink_core.ops.sampling import NO_TOKEN, nucleus, sample


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_l01_a_row_of_nan_among_good_ones() -> None:
    """L01. Catches: an id that was never written used as an index, because no candidate was found.

    Condition: rows of NaN, of infinities and of -inf alone, greedy and sampled, between good rows.
    """
    logits = np.random.default_rng(0).standard_normal((8, 300), dtype=np.float32)
    rows = [SamplingRow(temperature=0.9 * (i % 2), seed=i, top_p=0.9, top_k=40, logprobs=2) for i in range(8)]
    clean = sample(logits, rows)
    logits[1], logits[2], logits[4, 3], logits[5] = np.nan, -np.inf, np.nan, np.inf
    result = sample(logits, rows)
    bad = [1, 2, 4, 5]
    assert np.flatnonzero(result.status != StepStatus.OK).tolist() == bad
    assert result.tokens[bad].tolist() == [NO_TOKEN] * 4
    good = [0, 3, 6, 7]
    for got, want in ((result.tokens, clean.tokens), (result.top_tokens, clean.top_tokens)):
        np.testing.assert_array_equal(got[good], want[good])


def test_l03_draws_stay_in_the_nucleus() -> None:
    """L03. Catches: an invalid id in one draw of ten thousand, where the sum never reaches what was drawn.

    Condition: 10,000 draws with top_p from almost 0 to 1, flat and peaked distributions, each held to the nucleus.
    """
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((20, 50)) * np.linspace(0, 4, 20)[:, None]).astype(np.float32)
    limits = rng.uniform(1e-6, 1.0, 500).astype(np.float32)
    for at, row in enumerate(values):
        exact = np.exp(row.astype(np.float64) - row.max())
        exact /= exact.sum()
        rows = [SamplingRow(temperature=1.0, top_p=float(p), seed=at, position=i) for i, p in enumerate(limits)]
        tokens = sample(np.tile(row, (500, 1)), rows).tokens
        assert tokens.min() >= 0
        order = np.argsort(-exact, kind="stable")
        before = np.cumsum(exact[order]) - exact[order]  # mass in front of each id
        rank = np.empty(50, int)
        rank[order] = np.arange(50)
        assert (before[rank[tokens]] < limits + 1e-9).all()


def test_l04_top_p_just_below_one_over_a_flat_vocabulary() -> None:
    """L04. Catches: a search for the nucleus that runs off the end, because the sum in float32 stays below top_p.

    Condition: a flat distribution over a real vocabulary, whose float32 sum does stay below; top_p = 0.9999999.
    """
    vocab, top_p = 128_256, float(np.float32(0.9999999))
    assert np.cumsum(np.full(vocab, np.float32(1) / np.float32(vocab), np.float32))[-1] != 1.0
    assert nucleus(np.full(vocab, 1 / vocab), top_p).size in range(vocab - 1, vocab + 1)
    below = np.full(vocab, (1 - 1e-6) / vocab)  # a sum that never reaches it
    assert below.sum() < top_p
    assert nucleus(below, top_p).tolist() == list(range(vocab))
    flat = np.zeros((3, vocab), np.float32)
    rows = [SamplingRow(temperature=1.0, top_p=top_p, seed=s) for s in range(3)]
    tokens = sample(flat, rows).tokens
    assert ((tokens >= 0) & (tokens < vocab)).all()


def test_l06_l07_l10_a_seeded_row_in_any_place_and_company() -> None:
    """L06, L07, L10. Catches: a seed that neighbours, their order or the row's place change.

    Condition: the row at each of eight places, beside greedy, seeded and penalised neighbours that change each time.
    """
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((8, 200), dtype=np.float32) * 2
    mine, row = logits[0].copy(), SamplingRow(temperature=1.0, seed=1234, position=7, top_p=0.95, logprobs=3)
    alone = sample(mine[None], [row])
    for place in range(8):
        table = rng.standard_normal((8, 200), dtype=np.float32)
        table[place] = mine
        others = [
            SamplingRow(temperature=float(i % 3), seed=int(rng.integers(2**63)), presence_penalty=0.5, output=ids(i))
            for i in range(8)
        ]
        others[place] = row
        together = sample(table, others)
        assert together.tokens[place] == alone.tokens[0]
        assert together.logprobs[place].tobytes() == alone.logprobs[0].tobytes()
    assert len({int(sample(mine[None], [SamplingRow(temperature=1.0, seed=s)]).tokens[0]) for s in range(40)}) > 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_l12_l13_q13_penalties_are_each_row_s_own(temperature: float) -> None:
    """L12, L13, Q13. Catches: padding of unlike lengths that is penalised, counts of another row or of a former owner,
    a row without penalties that fails or is penalised beside one with them.

    Condition: rows with penalties, with other lengths, and without any, in one batch; the penalised choice differs.
    """
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((6, 40), dtype=np.float32) * np.float32(0.1)
    logits[:, 0] += 12  # the id that padding would have, and the most probable one
    logits[:, 7] += 9
    histories = [ids(7), ids(), ids(0, 0, 7, 9, 9), ids(0), ids(*range(10, 30)), ids(0)]
    rows = [
        SamplingRow(temperature=temperature, seed=i, frequency_penalty=4.0 * (i < 5), output=h)
        for i, h in enumerate(histories)
    ]
    together = sample(logits, rows)
    for i, row in enumerate(rows):
        alone = sample(logits[i : i + 1], [row])
        assert together.tokens[i] == alone.tokens[0]
    if temperature == 0:
        assert together.tokens.tolist() == [0, 0, 7, 7, 0, 0], "the penalties of rows 2 and 3 change their choice"


def test_l15_greedy_beside_sampled() -> None:
    """L15. Catches: temperature 0 divided by, clamped or taken for 1 as soon as a neighbour samples.

    Condition: temperatures 0 and 0.9 in turn, the two most probable ids so close that sampling would choose either.
    """
    logits = np.zeros((20, 50), np.float32)
    logits[:, 30], logits[:, 10] = 2.0, 1.9999
    rows = [SamplingRow(temperature=0.9 * (i % 2), seed=i) for i in range(20)]
    tokens = sample(logits, rows).tokens
    assert (tokens[::2] == 30).all()
    assert set(tokens[1::2].tolist()) != {30}, "the sampled rows are as good as greedy"
