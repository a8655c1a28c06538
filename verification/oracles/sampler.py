"""The sampler's rule in float64, written from the design alone (section 7): which token must a sampled row give?

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) keyed by the request's seed, and
the exponential race: of the nucleus the id with the largest p / -log(u) wins. Nothing here comes from the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

U32 = NDArray[np.uint32]
F64 = NDArray[np.float64]

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF

# An engine that computes its probabilities in float32 may be off by about 2^-23 times the largest scaled logit, a few
# 1e-5 in relation; two candidates nearer than this cannot be told apart.
NEAR = 1e-4


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
    """One sampled row: the engine's logits float32 [V], the token it emitted there, and what had been asked for."""

    logits: NDArray[np.float32]
    token: int
    temperature: float
    top_p: float
    seed: int
    choice: int
    position: int


class Agreement(StrEnum):
    """How an emitted token stands to the rule. NEAR and EDGE are within rounding and are counted."""

    SAME = "same"
    NEAR = "near"  # its race score is within NEAR of the winner's
    EDGE = "edge"  # it wins with a top_p within NEAR of the one asked for
    WRONG = "wrong"


def probabilities(logits: ArrayLike, temperature: float) -> F64:
    """Softmax float64 [V] of logits / temperature (as float32, as the descriptor carries it)."""
    values = np.asarray(logits, np.float64)
    with np.errstate(over="ignore"):
        weights = np.exp((values - values.max()) / float(np.float32(temperature)))
    p: F64 = weights / weights.sum()
    return p


def nucleus(p: F64, top_p: float) -> NDArray[np.bool_]:
    """Smallest set of most probable ids that sums to `top_p` or more, ties to the lower id: bool [V]."""
    inside = np.zeros(len(p), np.bool_)
    order = np.argsort(-p, kind="stable")
    inside[order[: int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1]] = True
    return inside


def race(row: SampledRow) -> tuple[F64, F64]:
    """Probabilities and race scores p / -log(u), each float64 [V]."""
    p = probabilities(row.logits, row.temperature)
    return p, p / -np.log(uniforms(len(p), seed=row.seed, choice=row.choice, position=row.position))


def compare(row: SampledRow) -> tuple[int, Agreement]:
    """The token that the rule gives (-1 for logits that are not finite), and how the emitted one stands to it."""
    if not np.isfinite(np.max(row.logits)):
        return -1, Agreement.WRONG
    p, scores = race(row)
    top_p = float(np.float32(row.top_p))

    def winner(limit: float) -> int:
        return int(np.where(nucleus(p, limit), scores, -1.0).argmax()) if limit < 1 else int(scores.argmax())

    expected = winner(top_p)
    if row.token == expected:
        return expected, Agreement.SAME
    if not 0 <= row.token < len(p):
        return expected, Agreement.WRONG
    inside = top_p >= 1 or bool(nucleus(p, top_p)[row.token])
    if inside and scores[row.token] >= scores[expected] * (1 - NEAR):
        return expected, Agreement.NEAR
    if top_p < 1 and row.token in (winner(top_p * (1 - NEAR)), winner(min(1.0, top_p * (1 + NEAR)))):
        return expected, Agreement.EDGE
    return expected, Agreement.WRONG
