"""Choosing each row's next token: greedy, or temperature and top-p by an exponential race (design section 7).

The race draws token i of a row with probability p_i: every token gets an independent exponential time -log(u_i) / p_i
and the first wins. u_i comes from Philox keyed by the request's seed with the token id and the position in the counter,
so a seeded request gives the same tokens alone and in any batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from blink_core.ops.philox import philox4x32

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
IDS = npt.NDArray[np.intp]

NO_TOKEN = -1  # token of a row whose logits are not usable
FIRST_CANDIDATES = 256


def sample(
    logits: F32,
    temperature: F32,
    top_p: F32,
    seed: npt.NDArray[np.uint64],
    choice: npt.NDArray[np.uint32],
    position: npt.NDArray[np.uint32],
) -> tuple[npt.NDArray[np.int32], F32, npt.NDArray[np.bool_]]:
    """Next token of each of S rows.

    ``logits`` float32 [S, V] with V the true vocabulary; ``temperature`` float32 [S] >= 0, 0 is greedy (the lowest id
    wins ties); ``top_p`` float32 [S] in (0, 1]; ``seed`` uint64 [S]; ``choice`` uint32 [S]; ``position`` uint32 [S], of
    the new token in its sequence. Random numbers are only computed for rows with temperature above 0.

    Returns ``(tokens int32 [S], logprobs float32 [S], ok bool [S])``; ``logprobs`` is the log softmax of the raw logits
    at the token. A row with a NaN, with +inf, or without any finite logit gets ``ok`` False, token -1 and logprob NaN;
    other rows are not affected. Raises ValueError for wrong shapes or dtypes and for parameters outside their range.
    """
    rows = _validate(logits, temperature, top_p, seed, choice, position)
    tokens = np.full(rows, NO_TOKEN, dtype=np.int32)
    logprobs = np.full(rows, np.nan, dtype=np.float32)
    ok = np.zeros(rows, dtype=np.bool_)
    for row in range(rows):
        values = logits[row]
        peak = np.max(values)  # NaN if any is
        if not np.isfinite(peak):
            continue
        if temperature[row] == 0:
            token = int(np.argmax(values))
        else:
            token = _race(values, float(peak), row, temperature, top_p, seed, choice, position)
        shifted = values.astype(np.float64) - float(peak)
        tokens[row] = token
        logprobs[row] = shifted[token] - np.log(np.sum(np.exp(shifted)))
        ok[row] = True
    return tokens, logprobs, ok


def _race(
    values: F32,
    peak: float,
    row: int,
    temperature: F32,
    top_p: F32,
    seed: npt.NDArray[np.uint64],
    choice: npt.NDArray[np.uint32],
    position: npt.NDArray[np.uint32],
) -> int:
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the peak to -inf, which is right
        weights = np.exp((values.astype(np.float64) - peak) / float(temperature[row]))
    probabilities = weights / np.sum(weights)
    ids = nucleus(probabilities, float(top_p[row])) if top_p[row] < 1 else np.arange(values.shape[0])
    u = uniforms(ids, int(seed[row]), int(choice[row]), int(position[row]))
    # Ids ascend, and argmax takes the first of equals: the lowest id.
    return int(ids[np.argmax(probabilities[ids] / -np.log(u))])


def nucleus(probabilities: F64, top_p: float) -> IDS:
    """Smallest set of most probable ids whose probabilities sum to at least ``top_p``, ascending; at least one id.

    ``probabilities`` float64 [V] summing to 1. Among equals the lower id is more probable.
    """
    size = probabilities.shape[0]
    count = min(FIRST_CANDIDATES, size)
    while True:
        # The candidates are all ids at least as probable as the count-th: a full sort is rarely needed.
        least = np.partition(probabilities, size - count)[size - count]
        candidates = np.flatnonzero(probabilities >= least)
        order = candidates[np.argsort(-probabilities[candidates], kind="stable")]
        reached = np.flatnonzero(np.cumsum(probabilities[order]) >= top_p)
        if reached.size:
            return np.sort(order[: reached[0] + 1])
        if count == size:  # rounding kept the whole sum below a top_p next to 1
            return np.arange(size)
        count = min(count * 8, size)


def uniforms(ids: IDS, seed: int, choice: int, position: int) -> F64:
    """The number in (0, 1) of each token id, float64 [N] for ascending ``ids`` [N], N >= 1.

    Philox key (seed low, seed high), counter (id >> 2, position, choice, 0), word id & 3; u = (x + 0.5) / 2**32.
    """
    block = ids >> 2
    first = np.concatenate(([True], block[1:] != block[:-1]))  # one counter serves up to four neighbouring ids
    index = np.cumsum(first) - 1
    counter = np.zeros((int(index[-1]) + 1, 4), dtype=np.uint32)
    counter[:, 0] = block[first]
    counter[:, 1] = position
    counter[:, 2] = choice
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
    u: F64 = (words[index, ids & 3].astype(np.float64) + 0.5) * 2.0**-32
    return u


def _validate(logits: F32, *per_row: npt.NDArray[Any]) -> int:
    if logits.dtype != np.float32 or logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits must be float32 [S, V], got {logits.dtype} {list(logits.shape)}")
    rows = int(logits.shape[0])
    kinds = (np.float32, np.float32, np.uint64, np.uint32, np.uint32)
    for name, array, kind in zip(("temperature", "top_p", "seed", "choice", "position"), per_row, kinds, strict=True):
        if array.dtype != kind or array.shape != (rows,):
            raise ValueError(f"{name} must be {np.dtype(kind)} [{rows}], got {array.dtype} {list(array.shape)}")
    temperature, top_p = per_row[0], per_row[1]
    if not np.all((temperature >= 0) & (temperature < np.inf)):
        raise ValueError(f"temperature must be at least 0 and finite, got {temperature.tolist()}")
    if not np.all((top_p > 0) & (top_p <= 1)):
        raise ValueError(f"top_p must be in (0, 1], got {top_p.tolist()}")
    return rows
