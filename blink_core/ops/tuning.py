"""Which of several ways to do the same is the fastest, on a GPU that is noisy, warms up and is limited in power.

All are measured in turn, there and back, so that whatever drifts hits them alike, without gaps, so that the GPU stays
in the state of a step: first as many as there is time for, quickly, then the few best for long. Medians decide
(:func:`fastest`). What is the fastest alone may lose beside its neighbours: :func:`together` compares whole steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Sample = Callable[[Sequence[int]], Sequence[float]]  # runs candidates in this order; microseconds of each run
Combination = tuple[int, ...]  # one option for each product

LEAST = 4  # candidates that are looked at however long they take; and so many are, between two looks at the time
ROUGHLY = 1.5  # times the fastest first run: what is worth a second one
QUICK_ROUNDS = 3
SHORTLIST = 6
LONG_ROUNDS = (5, 41)  # at least, at most
EQUAL = 1.005  # times the least median: no worse, and the earlier candidate is preferred

DUEL_ROUNDS = (9, 25)  # of two steps, each run once
DUELS = 8  # about so many share the time
SURELY = 4.0  # standard errors of the median difference
WORTH = 0.001  # of a step: less is not worth another choice than that of each product alone
ERROR_OF_MEDIAN = 1.2533 * 1.4826  # times the median absolute deviation, over the root of the count


@dataclass(frozen=True, slots=True)
class Tuned:
    """``best``: the candidate to take. ``us``: of a long run of each on the short list."""

    best: int
    us: dict[int, float]


def fastest(
    kinds: Sequence[int], quick: Sample, long: Callable[[Sequence[int]], Sample], *, warm_us: float, limit_us: float
) -> Tuned:
    """The fastest of as many candidates as there are ``kinds``, the earlier of equals.

    ``quick`` runs any of them; ``long`` makes what runs those of a short list, for longer each. On that list is the
    best of each kind, unless it is ROUGHLY times slower than another. ``warm_us``: of load before anything counts.
    ``limit_us``: of measuring beside that; two runs of LEAST candidates, or 5 rounds of the short list, may take
    longer. Raises ValueError if there is no candidate.
    """
    if not kinds:
        raise ValueError("there is nothing to choose from")
    rough = _rough(len(kinds), quick, limit_us / 4)
    if warm_us > 0:
        first = min(rough, key=lambda i: (rough[i], i))
        quick([first] * math.ceil(warm_us / rough[first]))
    alive = [i for i in rough if rough[i] <= ROUGHLY * min(rough.values())]
    rounds = int(limit_us / 4 / sum(rough[i] for i in alive))
    medians = _medians(alive, quick, max(1, min(QUICK_ROUNDS, rounds)))
    short = _short(sorted(alive, key=lambda i: (medians[i], i)), kinds)
    run = long(short)
    run(short)  # the first run of each loads what it needs
    rounds = int(limit_us / 2 / sum(run(short)))
    medians = _medians(short, run, max(LONG_ROUNDS[0], min(LONG_ROUNDS[1], rounds)))
    least = min(medians.values())
    return Tuned(next(i for i in short if medians[i] <= EQUAL * least), medians)


def _rough(count: int, quick: Sample, limit_us: float) -> dict[int, float]:
    """Microseconds of the better of two runs of candidates, in their order, LEAST of them at a time until the time is
    spent: one that takes long costs the others no more than that."""
    rough: dict[int, float] = {}
    spent = 0.0
    while len(rough) < count and (not rough or spent < limit_us):
        some = range(len(rough), min(count, len(rough) + LEAST))
        first, second = quick(some), quick(some)  # the first run of each may also load what it needs
        spent += sum(first) + sum(second)
        rough |= {i: min(times) for i, *times in zip(some, first, second, strict=True)}
    return rough


def _short(ranked: list[int], kinds: Sequence[int]) -> list[int]:
    """The first SHORTLIST of the ranked, and the first of each kind; in the candidates' order."""
    firsts = {kinds[i]: i for i in reversed(ranked)}
    others = [i for i in ranked if i not in firsts.values()]
    return sorted([*firsts.values(), *others[: max(0, SHORTLIST - len(firsts))]])


def _medians(candidates: list[int], run: Sample, rounds: int) -> dict[int, float]:
    order = [i for r in range(rounds) for i in (candidates if r % 2 == 0 else candidates[::-1])]
    times = run(order)
    return {i: statistics.median(t for j, t in zip(order, times, strict=True) if j == i) for i in candidates}


# -- products in their step --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Duel:
    """Two whole steps, run in turn: the one taken so far, and another. Microseconds, a pair for each round."""

    taken: Combination
    other: Combination
    us: tuple[tuple[float, float], ...]

    @property
    def gain_us(self) -> float:
        """By how much a step is shorter with the other combination: the median of the rounds."""
        return statistics.median(a - b for a, b in self.us)

    @property
    def noise_us(self) -> float:
        """SURELY standard errors of that median."""
        spread = statistics.median(abs(a - b - self.gain_us) for a, b in self.us)
        return SURELY * ERROR_OF_MEDIAN * spread / math.sqrt(len(self.us))

    @property
    def won(self) -> bool:
        """Whether the other combination gains more than noise, and enough to matter."""
        return self.gain_us > max(self.noise_us, WORTH * statistics.median(a for a, _ in self.us))


def together(
    options: Sequence[int],
    starts: Sequence[Combination],
    run: Callable[[Sequence[Combination]], Sequence[float]],
    limit_us: float,
) -> tuple[Combination, list[Duel]]:
    """The combination of products' options whose step is the fastest, and every comparison made.

    ``options``: how many each product has. The first of ``starts`` is kept until another gains more than noise: first
    the other starts, then the best so far with another option of one product, each product in turn. ``run`` runs steps
    in an order, microseconds each. ``limit_us``: after it nothing new is begun.
    """
    best, spent = starts[0], 0.0
    duels: list[Duel] = []
    lost: set[Combination] = set()

    def challengers() -> Iterator[Combination]:
        yield from starts[1:]
        for product, count in enumerate(options):
            for option in range(count):
                yield (*best[:product], option, *best[product + 1 :])

    for other in challengers():
        if other == best or other in lost:
            continue
        if spent >= limit_us:
            break
        first = sum(run([best, other]))  # loads what it needs
        each = sum(run([other, best]))
        rounds = max(DUEL_ROUNDS[0], min(DUEL_ROUNDS[1], int(limit_us / DUELS / each)))
        order = [c for r in range(rounds) for c in ((best, other) if r % 2 == 0 else (other, best))]
        times = run(order)
        spent += first + each + sum(times)
        pairs = [
            (times[i], times[i + 1]) if order[i] == best else (times[i + 1], times[i]) for i in range(0, len(order), 2)
        ]
        duels.append(Duel(best, other, tuple(pairs)))
        lost.add(best if duels[-1].won else other)
        best = other if duels[-1].won else best
    return best, duels
