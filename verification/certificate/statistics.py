"""Exact confidence bounds of the report."""

from __future__ import annotations

from verification.criterion.yardstick import clopper_pearson

CONFIDENCE = 0.95


def rate_interval(events: int, n: int) -> tuple[float, float] | None:
    """Exact (Clopper-Pearson) two-sided 95 % interval of a rate: `events` in `n` independent cases; None for n = 0.

    Raises `ValueError` when `events` is not in 0..n.
    """
    interval = clopper_pearson(events, n, CONFIDENCE)
    return None if n == 0 else interval
