"""Choosing the fastest of several ways by measurement, on a stand-in for a GPU whose time is counted."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from blink_core.ops.tuning import (
    DUEL_ROUNDS,
    DUELS,
    LEAST,
    LONG_ROUNDS,
    SHORTLIST,
    Combination,
    Duel,
    Sample,
    Tuned,
    fastest,
    together,
)

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

    def choose(self, warm_us: float = 0.0, limit_us: float = LIMIT_US, kinds: Sequence[int] = ()) -> Tuned:
        return fastest(kinds or [0] * len(self.us), self.quick, self.long, warm_us=warm_us, limit_us=limit_us)


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
    assert gpu.runs[0] == gpu.runs[-1] == 2
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
        fastest([], Gpu([]).quick, Gpu([]).long, warm_us=0, limit_us=1)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_one_that_takes_long_does_not_cut_the_list(place: int) -> None:
    """Catches: how many are looked at told from the time of one, be it the library's first, that takes far longer."""
    us = [100.0 + i for i in range(40)]
    us[place], us[30] = 8_000.0, 50.0
    gpu = Gpu(us)
    assert gpu.choose().best == 30
    assert all(gpu.runs)
    assert gpu.now <= 1.5 * LIMIT_US


def test_the_best_of_each_kind_is_measured_for_long() -> None:
    """Catches: an own kernel that is a little slower alone, and so never compared in its place in the step."""
    us = [112.0, 109.0, 110.0, *[100.0 + i / 10 for i in range(20)]]
    gpu = Gpu(us)
    tuned = gpu.choose(kinds=[1, 1, 1, *[0] * 20])
    assert tuned.best == 3
    assert gpu.short == [1, 3, 4, 5, 6, 7]
    hopeless = Gpu([200.0, *us[3:]])
    assert 0 not in hopeless.choose(kinds=[1, *[0] * 20]).us


# -- whole steps -------------------------------------------------------------------------------------------------------


class Steps:
    """Steps of combinations, ``us`` long each, times ``noise`` of the number of runs so far."""

    def __init__(self, us: Callable[[Combination], float], noise: Callable[[int], float] = lambda run: 1.0) -> None:
        self.us, self.noise = us, noise
        self.ran: list[Combination] = []
        self.now = 0.0

    def run(self, order: Sequence[Combination]) -> list[float]:
        found = []
        for combination in order:
            found.append(self.us(combination) * self.noise(len(self.ran)))
            self.ran.append(combination)
        self.now += sum(found)
        return found

    def choose(self, products: int = 3, limit_us: float = 1e6) -> tuple[Combination, list[Duel]]:
        alone, other = (0,) * products, (1,) * products
        return together([2] * products, [alone, other], self.run, limit_us)


def test_what_is_faster_in_the_step_is_taken() -> None:
    """Catches: the choice of each product alone kept where a neighbour makes another one faster; a product never tried
    for itself."""
    steps = Steps(lambda c: 4_650.0 - 32.0 * c[0] + 20.0 * c[1] + 9.0 * c[2])
    best, duels = steps.choose()
    assert best == (1, 0, 0)
    assert [d.other for d in duels if d.won] == [(1, 0, 0)]
    assert next(d for d in duels if d.won).gain_us == pytest.approx(32.0)


def test_what_gains_only_with_all_others_is_found() -> None:
    """Catches: a search of one product at a time alone, for which a gain that takes all of them is out of reach."""
    steps = Steps(lambda c: 4_610.0 + 5.0 * (0 < sum(c) < 3) - 16.0 * (sum(c) == 3))
    assert steps.choose()[0] == (1, 1, 1)


def test_a_step_of_equals_keeps_what_was_chosen_alone() -> None:
    """Catches: choices among equals by noise, other ones at every start."""
    for seed in range(40):
        rng = random.Random(seed)
        steps = Steps(lambda c: 4_650.0 - c[0], lambda run, rng=rng: rng.gauss(1.0, 0.004))  # type: ignore[misc]
        assert steps.choose()[0] == (0, 0, 0)


def test_noise_does_not_hide_a_gain() -> None:
    """Catches: outliers, which come in a few runs of a hundred, that decide; a gain of 0.7 % not seen beside them."""
    found = []
    for seed in range(40):
        rng = random.Random(seed)

        def noise(run: int, rng: random.Random = rng) -> float:
            return rng.gauss(1.0, 0.001) * (1.1 if rng.random() < 0.03 else 1.0)

        found.append(Steps(lambda c: 4_650.0 - 32.0 * c[0], noise).choose(1)[0])
    assert found.count((1,)) == 40


@pytest.mark.parametrize("slope", [0.02, -0.02])
def test_steps_drift_alike(slope: float) -> None:
    """Catches: all runs of one step before those of the other, while the chip heats up or cools."""
    steps = Steps(lambda c: 4_650.0 - 20.0 * c[0], lambda run: 1.0 + slope * min(1.0, run / 100))
    assert steps.choose()[0][0] == 1
    level = Steps(lambda c: 4_650.0, lambda run: 1.0 + slope * min(1.0, run / 100))
    assert level.choose()[0] == (0, 0, 0)


@pytest.mark.parametrize("each", [100.0, 4_650.0, 30_000.0])
def test_the_time_of_steps_is_bounded(each: float) -> None:
    """Catches: a start that takes minutes because a model's step is long or its products are many."""
    steps = Steps(lambda c: each)
    steps.choose(5, limit_us=1.2e6)
    assert steps.now <= 1.2e6 + max(2 * (DUEL_ROUNDS[0] + 2) * each, 1.2e6 / DUELS + 4 * each)  # the last one's
    assert steps.now <= 6 * 2 * (DUEL_ROUNDS[1] + 2) * each
