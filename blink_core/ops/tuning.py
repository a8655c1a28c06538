"""Which of several ways to do the same is the fastest, on a GPU that is noisy, warms up and is limited in power.

All are measured in turn, there and back, so that whatever drifts hits them alike, without gaps, so that the GPU stays
in the state of a step: first all of them quickly, then the few best for long. Medians decide.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Sample = Callable[[Sequence[int]], Sequence[float]]  # runs candidates in this order; microseconds of each run

LEAST = 4  # candidates that are looked at however long they take
ROUGHLY = 1.5  # times the fastest first run: what is worth a second one
QUICK_ROUNDS = 3
SHORTLIST = 6
LONG_ROUNDS = (5, 41)  # at least, at most
EQUAL = 1.005  # times the least median: no worse, and the earlier candidate is preferred


@dataclass(frozen=True, slots=True)
class Tuned:
    """``best``: the candidate to take. ``us``: of a long run of each on the short list."""

    best: int
    us: dict[int, float]


def fastest(
    count: int, quick: Sample, long: Callable[[Sequence[int]], Sample], *, warm_us: float, limit_us: float
) -> Tuned:
    """The fastest of ``count`` candidates, the earlier of equals.

    ``quick`` runs any of them; ``long`` makes what runs those of a short list, for longer each. ``warm_us``: of load
    before anything counts. ``limit_us``: of measuring beside that; a single run of LEAST candidates, or 5 rounds of the
    short list, may take longer.
    """
    if count < 1:
        raise ValueError("there is nothing to choose from")
    quick([0])
    each = quick([0])[0]
    everyone = range(min(count, max(LEAST, int(limit_us / 8 / each))))
    quick(everyone)  # the first run of each loads what it needs, too
    rough = quick(everyone)
    if warm_us > 0:
        quick([0] * math.ceil(warm_us / each))
    alive = [i for i in everyone if rough[i] <= ROUGHLY * min(rough)]
    rounds = int(limit_us / 4 / sum(rough[i] for i in alive))
    medians = _medians(alive, quick, max(1, min(QUICK_ROUNDS, rounds)))
    short = sorted(sorted(alive, key=lambda i: (medians[i], i))[:SHORTLIST])
    run = long(short)
    run(short)  # making them took time in which the GPU rested
    rounds = int(limit_us / 2 / sum(run(short)))
    medians = _medians(short, run, max(LONG_ROUNDS[0], min(LONG_ROUNDS[1], rounds)))
    least = min(medians.values())
    return Tuned(next(i for i in short if medians[i] <= EQUAL * least), medians)


def _medians(candidates: list[int], run: Sample, rounds: int) -> dict[int, float]:
    order = [i for r in range(rounds) for i in (candidates if r % 2 == 0 else candidates[::-1])]
    times = run(order)
    return {i: statistics.median(t for j, t in zip(order, times, strict=True) if j == i) for i in candidates}
