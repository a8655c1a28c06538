"""Choosing the fastest of several ways by measurement, on a stand-in for a GPU whose time is counted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from blink_core.ops.tuning import LEAST, LONG_ROUNDS, SHORTLIST, Sample, Tuned, fastest

LIMIT_US = 100_000.0


class Gpu:
    """Runs of candidates that take ``us`` each, times ``factor`` of (microseconds so far, candidate)."""

    def __init__(self, us: Sequence[float], factor: Callable[[float, int], float] = lambda now, i: 1.0) -> None:
        self.us, self.factor = us, factor
        self.now = 0.0
        self.runs = [0] * len(us)
        self.short: list[int] = []

    def quick(self, order: Sequence[int]) -> list[float]:
        found = []
        for i in order:
            found.append(self.us[i] * self.factor(self.now, i))
            self.now += found[-1]
            self.runs[i] += 1
        return found

    def long(self, short: Sequence[int]) -> Sample:
        self.short = list(short)
        return lambda order: [sum(self.quick([i] * 4)) for i in order]

    def choose(self, warm_us: float = 0.0, limit_us: float = LIMIT_US) -> Tuned:
        return fastest(len(self.us), self.quick, self.long, warm_us=warm_us, limit_us=limit_us)


@pytest.mark.parametrize("seed", range(20))
def test_noise_does_not_choose(seed: int) -> None:
    """Catches: a choice by the least or the only run, which noise of a few percent and rare outliers decide."""
    rng = random.Random(seed)
    us = [100.0 + 3.0 * i for i in range(24)]
    rng.shuffle(us)

    def noise(now: float, i: int) -> float:
        return rng.gauss(1.0, 0.02) * (1.8 if rng.random() < 0.02 else 0.8 if rng.random() < 0.02 else 1.0)

    gpu = Gpu(us, noise)
    assert us[gpu.choose(limit_us=1e6).best] == 100.0


@pytest.mark.parametrize("slope", [0.3, -0.3])
@pytest.mark.parametrize("place", [0, 3, 11])
def test_drift_hits_all_alike(slope: float, place: int) -> None:
    """Catches: candidates measured one after the other, or always in one order, while the chip heats up: the first ones
    (or, as it cools, the last ones) win."""
    us = [101.0] * 12
    us[place] = 100.0
    gpu = Gpu(us, lambda now, i: 1.0 + slope * min(1.0, now / 150_000))
    assert gpu.choose().best == place


def test_the_state_under_load_counts() -> None:
    """Catches: the algorithm that is the fastest on a cool chip taken for a product that heats it."""
    gpu = Gpu([80.0, 90.0], lambda now, i: 1.4 if i == 0 and now > 20_000 else 1.0)
    assert gpu.choose(warm_us=50_000).best == 1


def test_a_slow_start_of_one_is_not_held_against_it() -> None:
    """Catches: the best candidate dropped because its first run also loaded its kernel."""
    us = [100.0, 100.0, 90.0]
    gpu = Gpu(us)
    gpu.factor = lambda now, i: 5.0 if gpu.runs[i] == 0 else 1.0
    assert gpu.choose().best == 2


def test_equals_give_the_same_choice_at_every_start() -> None:
    """Catches: a choice among equals by noise, which makes two starts of an engine run different kernels."""
    for seed in range(20):
        rng = random.Random(seed)
        gpu = Gpu([101.0, 100.1, 100.0, 100.2, 130.0], lambda now, i, rng=rng: rng.gauss(1.0, 0.001))  # type: ignore[misc]
        assert gpu.choose().best == 1


def test_only_the_best_are_measured_for_long() -> None:
    """Catches: the time spent on candidates that have no chance, and a short list without the fastest."""
    gpu = Gpu([200.0, *[100.0 + i for i in range(20)], 400.0])
    tuned = gpu.choose()
    assert gpu.short == list(range(1, 1 + SHORTLIST))
    assert set(tuned.us) == set(gpu.short)
    assert gpu.runs[0] == gpu.runs[-1] + 2 == 4
    assert gpu.runs[1] >= 4 * LONG_ROUNDS[0]
    assert tuned.us[1] == pytest.approx(400.0)


@pytest.mark.parametrize("each", [1.0, 80.0, 1_500.0, 4_000.0])
@pytest.mark.parametrize("count", [1, 2, 72])
def test_the_time_is_bounded(each: float, count: int) -> None:
    """Catches: a start that takes minutes because a model's products are large or its algorithms many."""
    gpu = Gpu([each * (1 + i / 10) for i in range(count)])
    gpu.choose(limit_us=400_000, warm_us=50_000)
    least = 4 * each * 1.5 * SHORTLIST * (LONG_ROUNDS[0] + 2)  # of the short list's rounds, however long they take
    assert gpu.now <= 50_000 + 1.5 * 400_000 + max(0.0, least - 200_000)


def test_what_does_not_fit_is_left_out() -> None:
    """Catches: nothing measured at all where a single run of all candidates takes longer than there is."""
    gpu = Gpu([5e5] * 20)
    assert gpu.choose().best == 0
    assert sum(r > 0 for r in gpu.runs) == LEAST


def test_nothing_to_choose_from_is_an_error() -> None:
    """Catches: a library without an algorithm, found only when the first step runs."""
    with pytest.raises(ValueError, match="nothing to choose"):
        fastest(0, Gpu([]).quick, Gpu([]).long, warm_us=0, limit_us=1)
