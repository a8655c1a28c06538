"""HuggingFace float32's own error as the unit of error, and exact intervals for rates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Float = NDArray[np.float64]

UNIT_ROUNDOFF = 2.0**-24  # of float32


@dataclass(frozen=True, slots=True)
class Yardstick:
    """Error that one correct float32 run makes on a set of rows.

    value: ``max(percentile, floor)``, the unit of the criterion. percentile: of the row errors. floor: rounding of a
    correct result to float32; no float32 output can be asked to be nearer than that. low, high: distribution-free
    interval of the percentile. rows: number of errors measured.
    """

    value: float
    percentile: float
    floor: float
    low: float
    high: float
    rows: int


def row_rms(error: ArrayLike) -> Float:
    """RMS over the last axis, in float64. Shape [..., D] -> [...]."""
    values = np.asarray(error, dtype=np.float64)
    return np.asarray(np.sqrt(np.mean(np.square(values), axis=-1)))


def measure_yardstick(
    errors: ArrayLike, reference_rms: float, *, percentile: float = 99.0, confidence: float = 0.95
) -> Yardstick:
    """Yardstick from row errors of HuggingFace float32 (any shape, at least one; ``ValueError`` for none).

    reference_rms: RMS of the reference values, which sets the floor. The interval takes the ranks of the sorted errors
    from the binomial distribution, clipped to the sample.
    """
    ordered = np.sort(np.ravel(np.asarray(errors, dtype=np.float64)))
    if ordered.size == 0:
        raise ValueError("no rows to measure a yardstick on")
    share = percentile / 100.0
    low, high = stats.binom.interval(confidence, ordered.size, share)
    observed = float(np.quantile(ordered, share))
    floor = UNIT_ROUNDOFF * reference_rms
    return Yardstick(
        value=max(observed, floor),
        percentile=observed,
        floor=floor,
        low=float(ordered[min(max(int(low) - 1, 0), ordered.size - 1)]),
        high=float(ordered[min(int(high), ordered.size - 1)]),
        rows=ordered.size,
    )


def ratio(errors: Float, yardstick: float | Float) -> Float:
    """Errors in yardsticks (broadcast). A yardstick of zero, of an all-zero reference, admits an exact zero only."""
    scale = np.broadcast_to(np.asarray(yardstick, dtype=np.float64), errors.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((errors == 0) & (scale == 0), 0.0, errors / scale)


def clopper_pearson(events: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Exact two-sided interval of a binomial rate; (0, 1) for no trials."""
    if not 0 <= events <= trials:
        raise ValueError(f"{events} events in {trials} trials")
    if trials == 0:
        return 0.0, 1.0
    interval = stats.binomtest(events, trials).proportion_ci(confidence, method="exact")
    return float(interval.low), float(interval.high)
