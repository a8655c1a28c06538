"""The sampler's rule in float64, written from the design (section 7) and published definitions: which token must a row
give?

Order: logit bias, grammar mask, ids barred by min_tokens, repetition penalty, presence and frequency penalty,
temperature, top-k, top-p, min-p. Then the exponential race: of the ids that are left the one with the largest
p / -log(u) wins, u from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) keyed by
the request's seed. Nothing here comes from the engine.

Repetition penalty: Keskar et al., "CTRL" (2019), in the sign-aware form of HuggingFace and vLLM. Presence and frequency
penalty, logit bias: the OpenAI API reference. Nucleus: Holtzman et al. (2020). Min-p: Nguyen et al. (2024).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from blink_core.abi.params import SamplingParams

from verification.thresholds import SamplingThresholds, default_thresholds

U32 = NDArray[np.uint32]
F64 = NDArray[np.float64]
BOOL = NDArray[np.bool_]

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF


def philox4x32_10(counter: ArrayLike, key: tuple[int, int]) -> U32:
    """Random words uint32 [N, 4] of counters uint32 [N, 4] under a key of two 32-bit words."""
    words = np.atleast_2d(np.asarray(counter, dtype=np.uint64))
    k0, k1 = key[0] & MASK, key[1] & MASK
    for _ in range(ROUNDS):
        first, second = words[:, 0] * np.uint64(MULTIPLIERS[0]), words[:, 2] * np.uint64(MULTIPLIERS[1])
        words = np.stack(
            [
                (second >> np.uint64(32)) ^ words[:, 1] ^ np.uint64(k0),
                second & np.uint64(MASK),
                (first >> np.uint64(32)) ^ words[:, 3] ^ np.uint64(k1),
                first & np.uint64(MASK),
            ],
            axis=1,
        )
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return words.astype(np.uint32)


def uniforms(vocabulary: int, *, seed: int, choice: int, position: int) -> F64:
    """u in (0, 1) of every token id, float64 [vocabulary]: counter (id >> 2, position, choice, 0), word id & 3."""
    counter = np.zeros((-(-vocabulary // 4), 4), np.uint32)
    counter[:, 0] = np.arange(len(counter))
    counter[:, 1], counter[:, 2] = position, choice
    words = philox4x32_10(counter, (seed & MASK, seed >> 32 & MASK)).reshape(-1)[:vocabulary]
    u: F64 = (words.astype(np.float64) + 0.5) * 2.0**-32
    return u


@dataclass(frozen=True, slots=True)
class SampledRow:
    """One row: the engine's raw logits float32 [V], the token it emitted there (-1: it says that there is none), and
    what had been asked for; field meanings are those of `blink_core.abi.params.SamplingParams`.

    position: of this token in its sequence. prompt, output: ids before it. eos: end-of-sequence ids. mask: ids that a
    grammar allows, None for all.
    """

    logits: NDArray[np.float32]
    token: int
    temperature: float
    top_p: float
    seed: int
    choice: int
    position: int
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    eos: tuple[int, ...] = ()
    mask: frozenset[int] | None = None

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        logits: NDArray[np.float32],
        token: int,
        *,
        prompt: tuple[int, ...],
        output: tuple[int, ...],
        eos: tuple[int, ...],
        mask: frozenset[int] | None = None,
    ) -> SampledRow:
        """The row behind `prompt` and `output` of a request with these parameters."""
        return cls(
            logits=logits,
            token=token,
            temperature=params.temperature,
            top_p=params.top_p,
            seed=params.seed,
            choice=params.choice,
            position=len(prompt) + len(output),
            top_k=params.top_k,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            prompt=prompt,
            output=output,
            logit_bias=params.logit_bias,
            min_tokens=params.min_tokens,
            stop_ids=params.stop_token_ids,
            eos=eos,
            mask=mask,
        )


class Agreement(StrEnum):
    """How an emitted token stands to the rule. NEAR and EDGE are within rounding (thresholds.yaml) and are counted."""

    SAME = "same"
    NEAR = "near"  # its race score, or its logit where greedy, is within rounding of the winner's
    EDGE = "edge"  # it wins if an edge of top_k, top_p or min_p is moved by `near`
    WRONG = "wrong"


def single(value: float) -> float:
    """A parameter as the descriptor carries it, in float32."""
    return float(np.float32(value))


def adjusted(row: SampledRow) -> F64:
    """Logits float64 [V] after bias, mask, min_tokens and penalties; -inf where an id may not be chosen."""
    values = np.asarray(row.logits, np.float64).copy()
    for token, bias in row.logit_bias:
        values[token] += single(bias)
    if row.mask is not None:
        values[[token not in row.mask for token in range(len(values))]] = -np.inf
    if len(row.output) < row.min_tokens:
        for token in (*row.eos, *row.stop_ids):
            values[token] = -np.inf
    penalty = single(row.repetition_penalty)
    for token in {*row.prompt, *row.output}:
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token, times in Counter(row.output).items():
        values[token] -= times * single(row.frequency_penalty) + single(row.presence_penalty)
    return values


def is_plain(row: SampledRow) -> bool:
    """Whether the raw logits decide, so that a greedy choice leaves no room for rounding."""
    penalised = row.repetition_penalty != 1.0 or row.presence_penalty != 0.0 or row.frequency_penalty != 0.0
    return not (penalised or row.logit_bias or row.mask is not None or row.min_tokens > len(row.output))


def raw_greedy(row: SampledRow) -> bool:
    """Whether the token is the argmax of the raw logits."""
    return row.temperature == 0.0 and is_plain(row)


def probabilities(logits: ArrayLike, temperature: float) -> F64:
    """Softmax float64 [V] of logits / temperature (as float32, as the descriptor carries it)."""
    values = np.asarray(logits, np.float64)
    with np.errstate(over="ignore"):
        weights = np.exp((values - values.max()) / single(temperature))
    p: F64 = weights / weights.sum()
    return p


def ranked(p: F64) -> NDArray[np.intp]:
    """Ids from the most probable on; of equals the lower id first."""
    return np.argsort(-p, kind="stable")


def nucleus(p: F64, top_p: float) -> BOOL:
    """Smallest set of most probable ids that sums to `top_p` or more, ties to the lower id: bool [V]."""
    inside = np.zeros(len(p), np.bool_)
    order = ranked(p)
    inside[order[: int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1]] = True
    return inside


def kept(row: SampledRow, p: F64) -> BOOL:
    """Ids that top_k, top_p and min_p leave of probabilities `p` (after the temperature): bool [V].

    top_k keeps exactly k ids, ties to the lower id; top_p is of what top_k left, taken as 1.
    """
    inside = p > 0
    if 0 < row.top_k < len(p):
        inside &= np.isin(np.arange(len(p)), ranked(p)[: row.top_k])
    if single(row.top_p) < 1:
        left = np.where(inside, p, 0.0)
        inside &= nucleus(left / left.sum(), single(row.top_p))
    inside &= p >= single(row.min_p) * p.max()
    return inside


def bounds(row: SampledRow, p: F64, near: float) -> tuple[BOOL, BOOL]:
    """(ids kept wherever the edges lie within `near` of where they should, ids kept for some such edge), bool [V]."""
    sure, possible = p > 0, p > 0
    order = ranked(p)
    mass = 1.0
    if 0 < row.top_k < len(p):
        last, beyond = p[order[row.top_k - 1]], p[order[row.top_k]]
        mass = float(p[order[: row.top_k]].sum())
        inside = np.isin(np.arange(len(p)), order[: row.top_k])
        sure &= inside & (p > beyond * (1 + near))
        possible &= p >= last * (1 - near)
    if single(row.top_p) < 1:
        before = np.zeros(len(p))  # mass of the ids ranked ahead
        before[order] = np.concatenate(([0.0], np.cumsum(p[order])[:-1])) / mass
        least = p[before < single(row.top_p) * (1 + near)].min()
        possible &= p >= least * (1 - near)
        tight = before < single(row.top_p) * (1 - near)
        # Of equals at the edge another order keeps another one.
        outside = p[~tight].max(initial=0.0)
        sure &= tight & (p > outside * (1 + near))
    limit = single(row.min_p) * p.max()
    return sure & (p >= limit * (1 + near)), possible & (p >= limit * (1 - near))


def race(row: SampledRow) -> tuple[F64, F64]:
    """Probabilities after the temperature and race scores p / -log(u), each float64 [V]."""
    p = probabilities(adjusted(row), row.temperature)
    return p, p / -np.log(uniforms(len(p), seed=row.seed, choice=row.choice, position=row.position))


def distribution(row: SampledRow) -> F64:
    """What the emitted token is a draw from: float64 [V], summing to 1; for a temperature above 0."""
    p = probabilities(adjusted(row), row.temperature)
    left = np.where(kept(row, p), p, 0.0)
    q: F64 = left / left.sum()
    return q


def compare(row: SampledRow, limits: SamplingThresholds | None = None) -> tuple[int, Agreement]:
    """The token that the rule gives, and how the emitted one stands to it. limits: the registered ones by default.

    The rule gives -1 where raw logits are not finite or nothing may be chosen; an engine that says so agrees.
    """
    if not np.isfinite(np.max(row.logits)):
        return -1, Agreement.SAME if row.token == -1 else Agreement.WRONG
    limits = limits or default_thresholds().sampling
    values = adjusted(row)
    if values.max() == -np.inf:
        return -1, Agreement.SAME if row.token == -1 else Agreement.WRONG
    if single(row.temperature) == 0:
        expected = int(values.argmax())
    else:
        p, scores = race(row)
        expected = int(np.where(kept(row, p), scores, -1.0).argmax())
    if row.token == expected:
        return expected, Agreement.SAME
    if not 0 <= row.token < len(values) or values[row.token] == -np.inf:
        return expected, Agreement.WRONG
    if single(row.temperature) == 0:
        slack = 0.0 if is_plain(row) else limits.near_logit * max(1.0, float(np.abs(values[np.isfinite(values)]).max()))
        near = slack > 0 and values[row.token] >= values[expected] - slack
        return expected, Agreement.NEAR if near else Agreement.WRONG
    if kept(row, p)[row.token] and scores[row.token] >= scores[expected] * (1 - limits.near):
        return expected, Agreement.NEAR
    sure, possible = bounds(row, p, limits.near)
    rival = float(np.where(sure, scores, -1.0).max())
    if possible[row.token] and scores[row.token] >= rival * (1 - limits.near):
        return expected, Agreement.EDGE
    return expected, Agreement.WRONG


def log_probabilities(logits: ArrayLike) -> F64:
    """Natural-log softmax float64 [V] of raw logits: what an emitted token's `logprob` must be."""
    values = np.asarray(logits, np.float64)
    shifted = values - values.max()
    result: F64 = shifted - np.log(np.exp(shifted).sum())
    return result


def alternatives(logits: ArrayLike, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` most probable (id, logprob) by the raw logits, best first, ties to the lower id."""
    values = log_probabilities(logits)
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))[:count]
    return tuple((token, float(values[token])) for token in order)
