"""The engine's sampler against the suite's own, over all parameters at once; distribution and independence of draws."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blink_core.abi.enums import StepStatus
from blink_core.ops.logits import SamplingRow
from blink_core.ops.sampling import Sampled, sample
from verification.oracles.sampler import Agreement, SampledRow, alternatives, compare, distribution, log_probabilities
from verification.oracles.sampler_statistics import (
    independence,
    pooled_cells,
    uniform_scores,
    uniformity,
)
from verification.thresholds import default_thresholds

ERROR_RATE = default_thresholds().sampling.error_rate

VOCAB = 61
EOS = (7, 40)


def bits(mask: frozenset[int] | None) -> np.ndarray[Any, np.dtype[np.uint32]] | None:
    if mask is None:
        return None
    words = np.zeros(-(-VOCAB // 32), np.uint32)
    for token in mask:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


def engine_row(row: SampledRow, logprobs: int = 0) -> SamplingRow:
    """The same request as the model step states it."""
    barred = (*row.eos, *row.stop_ids) if len(row.output) < row.min_tokens else ()
    return SamplingRow(
        temperature=float(np.float32(row.temperature)),
        top_k=row.top_k,
        top_p=float(np.float32(row.top_p)),
        min_p=float(np.float32(row.min_p)),
        seed=row.seed,
        choice=row.choice,
        position=row.position,
        repetition_penalty=float(np.float32(row.repetition_penalty)),
        presence_penalty=float(np.float32(row.presence_penalty)),
        frequency_penalty=float(np.float32(row.frequency_penalty)),
        prompt=np.array(row.prompt, np.int32),
        output=np.array(row.output, np.int32),
        bias_ids=np.array([token for token, _ in row.logit_bias], np.int32),
        bias=np.array([bias for _, bias in row.logit_bias], np.float32),
        barred=np.array(barred, np.int32),
        mask=bits(row.mask),
        logprobs=logprobs,
    )


def emitted(rows: list[SampledRow]) -> Sampled:
    return sample(np.stack([row.logits for row in rows]), [engine_row(row) for row in rows])


ids = st.integers(0, VOCAB - 1)
id_lists = st.lists(ids, max_size=12).map(tuple)


@st.composite
def any_row(draw: st.DrawFn) -> SampledRow:
    """Any combination of parameters; logits of few levels, so that ties are common, or of many."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    levels = draw(st.sampled_from([0, 3, 9]))
    logits = rng.integers(-levels, levels + 1, VOCAB) if levels else rng.normal(0, 3, VOCAB)
    prompt, output = draw(id_lists), draw(id_lists)
    biased = draw(st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=5))
    return SampledRow(
        logits=logits.astype(np.float32),
        token=-1,
        temperature=draw(st.sampled_from([0.0, 1e-30, 0.3, 1.0, 2.0])),
        top_p=draw(st.sampled_from([1e-30, 0.2, 0.5, 0.9, 0.99999994, 1.0])),
        seed=draw(st.integers(0, 2**64 - 1)),
        choice=draw(st.integers(0, 2**32 - 1)),
        position=len(prompt) + len(output),
        top_k=draw(st.sampled_from([0, 1, 2, 7, VOCAB - 1, VOCAB, 10**6])),
        min_p=draw(st.sampled_from([0.0, 1e-30, 0.05, 0.5, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 1.3, 100.0])),
        presence_penalty=draw(st.sampled_from([0.0, -2.0, 0.4, 2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, -2.0, 0.4, 2.0])),
        prompt=prompt,
        output=output,
        logit_bias=tuple(biased.items()),
        min_tokens=draw(st.sampled_from([0, 3, 99])),
        stop_ids=draw(st.lists(ids, max_size=8).map(tuple)),
        eos=EOS,
        mask=draw(st.none() | st.frozensets(ids, max_size=20)),
    )


@settings(max_examples=400)
@given(row=any_row())
def test_every_combination_agrees(row: SampledRow) -> None:
    """Catches: a parameter ignored, applied in another order, to the wrong ids, or with another rule at its edge."""
    result = emitted([row])
    expected, agreement = compare(replace(row, token=int(result.tokens[0])))
    assert agreement is not Agreement.WRONG, f"engine {result.tokens[0]}, oracle {expected}"
    assert (result.status[0] == StepStatus.OK) == (expected >= 0)


def test_rounding_is_the_exception() -> None:
    """Catches: a sampler that lives on the oracle's allowance for rounding."""
    rng = np.random.default_rng(4)
    rows = []
    for i in range(1500):
        output = tuple(rng.integers(0, VOCAB, 6).tolist())
        rows.append(
            SampledRow(
                logits=rng.normal(0, 2, VOCAB).astype(np.float32),
                token=-1,
                temperature=0.9,
                top_p=0.9,
                seed=int(rng.integers(0, 2**63)),
                choice=i % 4,
                position=10 + len(output),
                top_k=20,
                min_p=0.02,
                repetition_penalty=1.2,
                presence_penalty=0.3,
                frequency_penalty=0.2,
                prompt=tuple(rng.integers(0, VOCAB, 4).tolist()),
                output=output,
            )
        )
    result = emitted(rows)
    counts = Counter(compare(replace(r, token=int(t)))[1] for r, t in zip(rows, result.tokens, strict=True))
    assert counts[Agreement.SAME] >= 1499, counts


FAULTS: dict[str, dict[str, Any]] = {
    "top_k one more": {"top_k": 6},
    "top_k ignored": {"top_k": 0},
    "top_p ignored": {"top_p": 1.0},
    "min_p ignored": {"min_p": 0.0},
    "repetition ignored": {"repetition_penalty": 1.0},
    "prompt not counted": {"prompt": ()},
    "presence ignored": {"presence_penalty": 0.0},
    "frequency ignored": {"frequency_penalty": 0.0},
    "bias ignored": {"logit_bias": ()},
    "min_tokens ignored": {"min_tokens": 0},
    "mask ignored": {"mask": None},
    "seed ignored": {"seed": 0},
    "choice ignored": {"choice": 0},
    "position off by one": {"position": 13},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault: str) -> None:
    """Catches: an oracle that is blind to one of the parameters."""
    rng = np.random.default_rng(8)
    wrong = 0
    for i in range(150):
        asked: dict[str, Any] = {
            "logits": rng.normal(1, 1, VOCAB).astype(np.float32),
            "token": -1,
            "temperature": 1.2,
            "top_p": 0.5 if "top_p" in fault else 0.95,
            "seed": 1000 + i,
            "choice": 3,
            "position": 12,
            "top_k": 5 if "top_k" in fault else 0,
            "min_p": 0.05,
            "repetition_penalty": 1.5,
            "presence_penalty": 0.8,
            "frequency_penalty": 0.8,
            "prompt": tuple(range(30)),
            "output": tuple(rng.integers(20, VOCAB, 20).tolist()),
            "logit_bias": ((11, 3.0), (12, -9.0), (13, 2.0)),
            "min_tokens": 30,
            "stop_ids": (13,),
            "eos": EOS,
            "mask": frozenset(range(0, VOCAB, 2)) | {11, 13},
        }
        if fault == "min_p ignored":
            asked |= {"top_p": 1.0, "min_p": 0.3}
        token = int(emitted([SampledRow(**{**asked, **FAULTS[fault]})]).tokens[0])
        wrong += compare(SampledRow(**{**asked, "token": token}))[1] is Agreement.WRONG
    assert wrong >= 5, f"{wrong} of 150 noticed"


def test_log_probabilities_and_alternatives() -> None:
    """Catches: reported probabilities of other logits than the raw ones, or alternatives in another order."""
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 4, (40, VOCAB)).astype(np.float32)
    logits[:, 20:30] = 3.0
    rows = [SamplingRow(temperature=0.8, seed=i, position=i, top_k=9, logprobs=20) for i in range(40)]
    result = sample(logits, rows)
    for i in range(40):
        np.testing.assert_allclose(result.logprobs[i], log_probabilities(logits[i])[result.tokens[i]], rtol=1e-6)
        tokens, logprobs = zip(*alternatives(logits[i], 20), strict=True)
        assert result.top_tokens[i].tolist() == list(tokens)
        np.testing.assert_allclose(result.top_logprobs[i], logprobs, rtol=1e-6)


# ---- statistics


def draws(count: int, **fields: Any) -> list[SampledRow]:
    """Rows whose logits change with every second, one draw each; positions and choices as `fields` says by row."""
    logits = np.random.default_rng(17).normal(0, 1.5, (-(-count // 2), VOCAB)).astype(np.float32)
    rows = []
    for i in range(count):
        row: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "top_k": 30, "min_p": 0.01, "seed": 5}
        row |= {name: value(i) for name, value in fields.items()}
        rows.append(SampledRow(logits=logits[i // 2], token=-1, **row))
    return rows


def scores_of(rows: list[SampledRow]) -> Any:
    tokens = emitted(rows).tokens.tolist()
    return uniform_scores([distribution(row) for row in rows], tokens, seed=1)


def test_draws_follow_their_distributions() -> None:
    """Catches: a biased race, or renormalisation after a filter that is off. Error rate: the registered one, each."""
    rows = draws(4000, position=lambda i: i, choice=lambda i: 0)
    tokens = emitted(rows).tokens.tolist()
    distributions = [distribution(row) for row in rows]
    assert pooled_cells(distributions, tokens) > ERROR_RATE
    assert uniformity(uniform_scores(distributions, tokens, seed=1)) > ERROR_RATE


@pytest.mark.parametrize("pairs", ["positions", "choices", "seeds"])
def test_draws_are_independent(pairs: str) -> None:
    """Catches: numbers shared between neighbouring positions, the n choices of a prompt, or neighbouring seeds."""

    def words(i: int) -> dict[str, int]:
        first, second = divmod(i, 2)
        return {
            "positions": {"seed": 3, "choice": 0, "position": i},
            "choices": {"seed": 3, "choice": second, "position": first},
            "seeds": {"seed": second, "choice": 0, "position": first},
        }[pairs]

    rows = draws(6000, **{name: (lambda i, name=name: words(i)[name]) for name in ("seed", "choice", "position")})
    scores = scores_of(rows)
    assert independence(scores[0::2], scores[1::2]) > ERROR_RATE
    if pairs == "positions":
        assert independence(scores[1:-1:2], scores[2::2]) > ERROR_RATE


def test_statistics_see_planted_faults() -> None:
    """Catches: tests without power: a temperature of 1.25, a shared number, a score that leans."""
    rows = draws(4000, position=lambda i: i, choice=lambda i: 0)
    warm = emitted([replace(row, temperature=1.25) for row in rows])
    sharp = [distribution(row) for row in rows]
    inside = [(p, int(t)) for p, t in zip(sharp, warm.tokens, strict=True) if p[t] > 0]
    assert pooled_cells([p for p, _ in inside], [t for _, t in inside]) < ERROR_RATE
    same = draws(3000, position=lambda i: i // 2, choice=lambda i: 0)
    scores = scores_of(same)
    assert independence(scores[0::2], scores[1::2]) < ERROR_RATE
    assert uniformity(np.random.default_rng(1).random(4000) ** 1.25) < ERROR_RATE


def test_statistics_refuse_what_they_cannot_judge() -> None:
    """Catches: a p-value made of nothing, or a token without probability that is smoothed over."""
    p = np.array([0.5, 0.5, 0.0])
    with pytest.raises(ValueError, match="token 2 has no probability"):
        uniform_scores([p], [2], seed=1)
    with pytest.raises(ValueError, match="2 distributions for 1 tokens"):
        uniform_scores([p, p], [0], seed=1)
    with pytest.raises(ValueError, match="3 draws fill fewer than two cells"):
        uniformity(np.array([0.1, 0.2, 0.3]))
