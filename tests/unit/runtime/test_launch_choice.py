"""By which launch a step of each size runs: the decision, from measured times; the measurement needs a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from blink_core.runtime.launch_choice import TAIL_GAP_US, TAIL_TOKENS, LaunchChoice, Measured, to_measure


@dataclass(frozen=True)
class Size:
    """A bucket, as far as the choice looks at it."""

    tokens: int
    decode: bool
    samples: int = 8


@pytest.mark.parametrize(
    ("beside", "alone", "tail"),
    [
        (1000.0, 1000.0, False),  # nothing to gain
        (1000.0, 1000.0 - TAIL_GAP_US, False),  # the gain is the gap's length
        (1000.0, 999.0 - TAIL_GAP_US, True),
        (50_000.0, 41_000.0, True),
    ],
)
def test_the_gap_of_a_tail_launch_is_counted(beside: float, alone: float, tail: bool) -> None:
    """Catches: a step that makes the scheduler leave although that costs more than it gains, and the converse."""
    assert Measured(256, False, (beside,) * 3, (alone,) * 3).tail is tail


def test_one_slow_sample_decides_nothing() -> None:
    """Catches: a choice by means or extremes, which one interrupted run turns over."""
    assert not Measured(256, False, (500.0, 9000.0, 500.0), (500.0, 500.0, 500.0)).tail
    assert not Measured(256, False, (500.0, 500.0, 500.0), (10.0, 500.0, 500.0)).tail


def test_measured_sizes_overrule_the_rule() -> None:
    """Catches: a measurement that is made and not used, or used for buckets of another size or kind."""
    choice = LaunchChoice([Measured(128, False, (900.0,), (500.0,)), Measured(1024, False, (900.0,), (900.0,))])
    assert choice.tail(Size(128, False, samples=128))  # type: ignore[arg-type]
    assert not choice.tail(Size(1024, False))  # type: ignore[arg-type]
    assert not choice.tail(Size(128, True))  # type: ignore[arg-type]
    assert choice.tail(Size(2048, False))  # type: ignore[arg-type]


def test_without_measurements_the_rule_decides() -> None:
    """Catches: checks in float32, which measure nothing, whose launches differ from one start to the next."""
    choice = LaunchChoice()
    assert [choice.tail(Size(n, False)) for n in (1, TAIL_TOKENS - 1, TAIL_TOKENS)] == [False, False, True]  # type: ignore[arg-type]


def test_a_size_is_measured_once() -> None:
    """Catches: a start that times small steps, or each size as often as it has buckets."""
    sizes = [
        Size(64, True),
        Size(128, True),
        Size(64, False),
        Size(128, False),
        Size(128, False, 128),
        Size(512, False),
    ]
    assert to_measure(sizes) == [sizes[1], sizes[3], sizes[5]]  # type: ignore[arg-type, comparison-overlap]
