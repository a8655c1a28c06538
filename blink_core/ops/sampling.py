"""Choosing each row's next token (design section 7): greedy, or an exponential race among the ids that temperature,
top-k, top-p and min-p leave, in this order and after what `ops.logits` does.

The race draws token i of a row with probability p_i: every token gets an independent exponential time -log(u_i) / p_i
and the first wins. u_i comes from Philox keyed by the request's seed with the token id, the position and the choice in
the counter, so a seeded request gives the same tokens alone and in any batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from blink_core.abi.enums import StepStatus
from blink_core.ops.logits import SamplingRow, processed
from blink_core.ops.philox import philox4x32

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
IDS = npt.NDArray[np.intp]

NO_TOKEN = -1  # token of a row for which none was chosen
FIRST_CANDIDATES = 256
BLOCK = 8192  # ids worked on at once: temporaries of a whole vocabulary would cost a page fault every 4 KiB


@dataclass(frozen=True, slots=True)
class Sampled:
    """Results of S rows.

    tokens int32 [S]; logprobs float32 [S], log softmax of the raw logits at the token; status uint32 [S], StepStatus.
    top_tokens int32 [S, K], top_logprobs float32 [S, K]: the ids most probable by the raw logits, best first and the
    lower of equals first, as many as the row asked for; -1 and -inf behind them.
    Unless its status is OK a row has token -1 and logprob NaN.
    """

    tokens: I32
    logprobs: F32
    status: npt.NDArray[np.uint32]
    top_tokens: I32
    top_logprobs: F32


def sample(logits: F32, rows: Sequence[SamplingRow], width: int | None = None) -> Sampled:
    """Next token of each of S rows; no row's result depends on another row.

    logits: float32 [S, V] with V the true vocabulary. rows: S of them. width: K of the result, by default the most
    alternatives that a row asks for; a row that asks for more gets K.

    Status of a row: NAN_LOGITS if its raw logits hold a NaN or +inf or no finite value; NO_TOKEN if bias, mask and
    barred ids leave nothing; FAILED if a parameter is outside its range. Raises ValueError for wrong shapes or dtypes.
    """
    if logits.dtype != np.float32 or logits.ndim != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits must be float32 [S, V], got {logits.dtype} {list(logits.shape)}")
    count = int(logits.shape[0])
    if len(rows) != count:
        raise ValueError(f"{len(rows)} sampling rows for {count} rows of logits")
    width = max((row.logprobs for row in rows), default=0) if width is None else width
    result = Sampled(
        tokens=np.full(count, NO_TOKEN, np.int32),
        logprobs=np.full(count, np.nan, np.float32),
        status=np.full(count, StepStatus.OK, np.uint32),
        top_tokens=np.full((count, width), NO_TOKEN, np.int32),
        top_logprobs=np.full((count, width), -np.inf, np.float32),
    )
    for i, row in enumerate(rows):
        values = logits[i]
        peak = np.max(values)  # NaN if any is
        if not np.isfinite(peak):
            result.status[i] = StepStatus.NAN_LOGITS
            continue
        token, status = choose(values, row)
        result.status[i] = status
        if status != StepStatus.OK:
            continue
        norm = log_sum_exp(values, float(peak))
        result.tokens[i], result.logprobs[i] = token, float(values[token]) - norm
        wanted = min(row.logprobs, width, values.shape[0])
        if wanted > 0:
            top = greatest(values, wanted)
            top = top[np.argsort(-values[top], kind="stable")]
            result.top_tokens[i, :wanted] = top
            result.top_logprobs[i, :wanted] = values[top].astype(np.float64) - norm
    return result


def choose(logits: F32, row: SamplingRow) -> tuple[int, StepStatus]:
    """The token of one row with usable raw logits float32 [V], or -1, and its status."""
    if not row.usable():
        return NO_TOKEN, StepStatus.FAILED
    if row.plain and row.temperature == 0:
        return int(np.argmax(logits)), StepStatus.OK
    values = logits.astype(np.float64) if row.plain else processed(logits, row)
    best = int(np.argmax(values))
    peak = float(values[best])
    if peak == -np.inf:
        return NO_TOKEN, StepStatus.NO_TOKEN
    if row.temperature == 0:
        return best, StepStatus.OK
    ids, weights = candidates(values, peak, row)
    winner, best_score = best, -1.0
    for start in range(0, ids.shape[0], BLOCK):
        block = ids[start : start + BLOCK]
        scores = weights[start : start + BLOCK] / -np.log(uniforms(block, row.seed, row.choice, row.position))
        first = int(np.argmax(scores))
        if scores[first] > best_score:  # ids ascend: of equals the lowest stays
            winner, best_score = int(block[first]), float(scores[first])
    return winner, StepStatus.OK


def log_sum_exp(values: F32, peak: float) -> float:
    """log(sum(exp(values))) in float64; `peak` is the maximum of `values` float32 [V]."""
    total = 0.0
    for start in range(0, values.shape[0], BLOCK):
        shifted = values[start : start + BLOCK].astype(np.float64)
        shifted -= peak
        total += float(np.sum(np.exp(shifted, out=shifted)))
    return peak + math.log(total)


def candidates(values: F64, peak: float, row: SamplingRow) -> tuple[IDS, F64]:
    """Ids that temperature, top-k, top-p and min-p leave, ascending, and their weights, the greatest weight being 1.

    values: processed logits float64 [V] with maximum `peak`, finite.
    """
    size = values.shape[0]
    ids: IDS | None = greatest(values, row.top_k) if 0 < row.top_k < size else None
    weights = (values if ids is None else values[ids]) - peak
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the peak to -inf, which is right
        weights /= row.temperature
    np.exp(weights, out=weights)
    if row.top_p < 1.0:  # of what top-k left, as if that were all
        kept = nucleus(weights / np.sum(weights), row.top_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    if row.min_p > 0.0:
        kept = np.flatnonzero(weights >= row.min_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    return np.arange(size) if ids is None else ids, weights


def greatest(values: F32 | F64, count: int) -> IDS:
    """Ids of the `count` greatest values, ascending; of equals the lower ids. 1 <= count <= len(values), no NaN."""
    size = values.shape[0]
    least = np.partition(values, size - count)[size - count]
    above = np.flatnonzero(values > least)
    equal = np.flatnonzero(values == least)[: count - above.size]
    return np.sort(np.concatenate((above, equal)))


def nucleus(probabilities: F64, top_p: float) -> IDS:
    """Smallest set of most probable ids whose probabilities sum to at least ``top_p``, ascending; at least one id.

    ``probabilities`` float64 [V] summing to 1. Among equals the lower id is more probable.
    """
    size = probabilities.shape[0]
    count = min(FIRST_CANDIDATES, size)
    while True:
        # The candidates are all ids at least as probable as the count-th: a full sort is rarely needed.
        least = np.partition(probabilities, size - count)[size - count]
        found = np.flatnonzero(probabilities >= least)
        order = found[np.argsort(-probabilities[found], kind="stable")]
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
