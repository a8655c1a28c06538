"""What the suite asks of each family: planted faults that are killed, and sequences that are long enough."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.tiny_models import tiny_oracles
from verification.certificate.recorder import Recorder
from verification.models.sensitivity import PROBES, faults_of
from verification.result import CheckResult, Verdict
from verification.suite.planted import REORDERED, Power, check_power, measure_power
from verification.suite.situations import Lengths
from verification.thresholds import default_thresholds


def _subject(name: str, longest: int = 160, replayed: object = None) -> Any:
    """As much of a subject as `Lengths` looks at."""
    return SimpleNamespace(oracles=tiny_oracles(name), shape=SimpleNamespace(longest=longest), replayed=replayed)


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("llama-gqa3", {}),
        ("mistral-window", {"beyond-window": 24}),
        ("mistral-full", {}),
        ("llama-rope-llama3", {"beyond-rope-maximum": 32}),
        ("phi4-longrope", {"beyond-rope-maximum": 96}),
    ],
)
def test_lengths_are_the_models_own(name: str, limits: dict[str, int]) -> None:
    """Catches: a window or a RoPE switch that is not asked for, or one that the model has not."""
    lengths, record = Lengths(_subject(name)), Recorder()
    assert lengths.limits == limits
    assert lengths.reached is not bool(limits)
    for limit in limits.values():
        lengths.add(limit)  # not beyond it
        assert lengths.check(record, "p").verdict is Verdict.UNKNOWN
        lengths.add(limit + 1)
        lengths.add(1)
    assert lengths.check(record, "p").verdict is Verdict.VALID
    assert record.as_dict()["situations"] == dict.fromkeys(limits, True)


def test_lengths_out_of_reach_are_not_asked_for() -> None:
    """Catches: a replayed program, or a short engine, that ends undecided for want of a length that it cannot have."""
    assert Lengths(_subject("phi4-longrope", longest=97)).limits == {}
    assert Lengths(_subject("mistral-window", replayed=object())).limits == {}


def test_every_fault_of_a_family_is_planted() -> None:
    """Catches: a window, or pages in another order, that the criterion is never tried on."""
    power = measure_power(*tiny_oracles("mistral-window"), 3, default_thresholds())
    faults = faults_of(tiny_oracles("mistral-window")[1].config)
    assert "ignored-window" in faults
    assert power.by_tokens == dict.fromkeys(faults, PROBES)
    assert power.by_kv == dict.fromkeys((*faults, REORDERED), PROBES)
    assert [result.verdict for result in power.clean] == [Verdict.VALID, Verdict.VALID]


def test_a_fault_let_pass_is_told() -> None:
    """Catches: kills that are counted and decide nothing."""
    good = CheckResult(Verdict.VALID, "p", "c", "")
    power = Power((good, good), {"a": PROBES, "b": PROBES - 1}, {"a": PROBES})
    record = Recorder()
    result = check_power("m", power, record, 1.0, "p")
    assert (result.verdict, result.message) == (
        Verdict.UNKNOWN,
        f"m: planted faults that the criterion let pass: b by tokens: {PROBES - 1} of {PROBES}",
    )
    assert check_power("m", power, record, 0.5, "p").verdict is Verdict.VALID
