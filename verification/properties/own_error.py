"""What float32 loses in a row, measured on HuggingFace alone, over several orders of addition.

A row that is ill-conditioned is off by the luck of one run: SmolLM2 has keys near the layer's p99 in one HuggingFace
float32 run and many times it in another, which had the same tokens and other matrix kernels (position 1 of a prompt of
`certify --profile smoke --seed 601`). One run says too little of it, so rows in which the engine is much further off
than that run are measured again (`HFOracle.in_other_orders`), and the largest error counts. The engine's values choose
which rows are measured, never what they are measured to be; a few rows a request only, as a fault that moves many is no
row's luck.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from blink_core.abi.dtypes import Array
from verification.criterion import KVScores, TokenScores
from verification.criterion.yardstick import Float, row_rms
from verification.oracles.hf import HFOracle

SUSPECT = 4.0  # times the larger of the row's own error and the request's p99; the criteria's factor is 8
MOST = 8  # positions of one request


def suspects(engine: Float, own: Float, positions: int) -> NDArray[np.int64]:
    """Positions to measure again. engine, own: row errors [..., positions, heads]; the p99 is taken over the last two
    axes. None where there are more than MOST; a row that is not finite is nobody's rounding."""
    usual = np.quantile(own, 0.99, axis=(-2, -1), keepdims=True)
    far = np.isfinite(engine) & (engine > SUSPECT * np.maximum(own, usual))
    found = np.flatnonzero(far.reshape(-1, positions, own.shape[-1]).any(axis=(0, 2)))
    return found if len(found) <= MOST else found[:0]


def measured_kv(scores: KVScores, ids: Sequence[int], hf64: HFOracle, hf32: HFOracle) -> KVScores:
    """The scores of one request with its suspects' own errors over several orders."""
    own = scores.hf32_rms.copy()
    reference = hf64.kv(ids)
    for at in suspects(scores.engine_rms, own, own.shape[2]):
        for run in hf32.in_other_orders(ids, int(at)):
            for kind, (values, right) in enumerate(zip((run.k, run.v), reference, strict=True)):
                error = row_rms(values[:, 0].astype(np.float64) - right[:, at].astype(np.float64))
                own[kind, :, at] = np.maximum(own[kind, :, at], error)
    return replace(scores, hf32_rms=own)


def measured_tokens(
    scores: TokenScores, ids: Sequence[int], start: int, logits64: Array, hf32: HFOracle
) -> TokenScores:
    """The scores of one request, whose row i is of position start + i, with its suspects' own errors and bounds over
    several orders. logits64: float64 [rows, vocab]."""
    own, bound = scores.hf32_rms.copy(), scores.bound.copy()
    for at in suspects(scores.engine_rms[:, None], own[:, None], len(own)):
        for run in hf32.in_other_orders(ids, start + int(at)):
            error = run.logits[0].astype(np.float64) - logits64[at]
            own[at] = max(own[at], float(row_rms(error)))
            bound[at] = max(bound[at], float(np.abs(error).max()))
    return replace(scores, hf32_rms=own, bound=bound)
