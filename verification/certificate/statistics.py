"""Exact confidence bounds of the report."""

from __future__ import annotations

from scipy.stats import binomtest

CONFIDENCE = 0.95


def rate_interval(events: int, n: int) -> tuple[float, float] | None:
    """Exact (Clopper-Pearson) two-sided 95 % interval of a rate: `events` in `n` independent cases; None for n = 0.

    Raises `ValueError` when `events` is not in 0..n.
    """
    if not 0 <= events <= n:
        raise ValueError(f"{events} events in {n} cases")
    if n == 0:
        return None
    interval = binomtest(events, n).proportion_ci(confidence_level=CONFIDENCE, method="exact")
    return float(interval.low), float(interval.high)
