"""Which tests are blocked when one of the rigs breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from verification.run_context import RunContext

SUITE = """
import pytest
from verification.certificate.outcomes import RigBroken

@pytest.fixture(scope="session")
def rig(): return "rig"
@pytest.fixture(scope="session")
def engine(rig): return rig
@pytest.fixture(scope="session")
def client(rig): return rig
@pytest.fixture(scope="session", params=["a", "b"])
def tiny(request): return request.param

def breaks(which):
    if which == BROKEN:
        raise RigBroken(f"{which} died")

def test_1_tiny_breaks(tiny): breaks("tiny")
def test_2_tiny_half(tiny): breaks(f"tiny-{tiny}")
def test_1_rig_breaks(engine): breaks("rig")
def test_2_model(engine): pass
def test_2_tiny(tiny): pass
def test_2_nothing(): pass
def test_2_model_by_client(client): pass
"""


@pytest.mark.parametrize(("broken", "blocked"), [("rig", "model"), ("tiny", "tiny")])
def test_only_tests_of_the_broken_rig_are_blocked(suite: Callable[..., Any], broken: str, blocked: str) -> None:
    """Catches: a tiny model's dead engine that blocks the model's tests, or the other way round; tests of the dead one
    that run on and blame the product."""
    text = SUITE.replace("BROKEN", repr(broken))
    report = suite(text, "--rig", "local", "--out", "out").report
    outcomes = {entry["id"].partition("/")[2]: entry["outcome"] for entry in report["tests"] if "mini/" in entry["id"]}
    expected = dict.fromkeys(outcomes, "passed")
    expected |= {name: "blocked" for name in outcomes if name.startswith("2_") and blocked in name}
    if broken == "rig":
        expected["1_rig_breaks"] = "infrastructure"
    else:
        # Each parameter has an engine of its own, which breaks for itself.
        expected |= {"1_tiny_breaks[a]": "infrastructure", "1_tiny_breaks[b]": "infrastructure"}
    assert len(outcomes) > 6
    assert outcomes == expected


def test_one_broken_tiny_engine_leaves_the_other_alone(suite: Callable[..., Any]) -> None:
    """Catches: one tiny model's dead engine that blocks the tests of all tiny models."""
    report = suite(SUITE.replace("BROKEN", repr("tiny-a")), "--rig", "local", "--out", "out").report
    outcomes = {entry["id"].partition("/")[2]: entry["outcome"] for entry in report["tests"]}
    assert outcomes["2_tiny_half[a]"] == "infrastructure"
    assert (outcomes["2_tiny[a]"], outcomes["2_tiny[b]"]) == ("blocked", "passed")


def test_first_reason_stays_for_each_rig() -> None:
    """Catches: a later symptom reported in place of the cause, and a rig blamed for another's end."""
    run = RunContext("r", "local", "smoke", None, 1, "given", None)
    run.break_rig("cause")
    run.break_rig("symptom")
    run.break_rig("other", fixture="tiny")
    assert run.broken == {"rig": "cause", "tiny": "other"}
