"""Which model families a test gets, by profile and by its own wish; and whose engine breaks whose tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verification.models.variants import tiny_names
from verification.plugin_selection import SMOKE_FAMILIES, TINY

Suite = Callable[..., Any]

ALL = """
import pytest
@pytest.fixture(scope="session")
def family(request): return request.param
def test_each(family): pass
@pytest.mark.parametrize("family", ["qwen2"], indirect=True)
def test_own(family): assert family == "qwen2"
@pytest.mark.parametrize(("n", "family"), [(1, "phi3")], indirect=["family"])
def test_own_among_others(n, family): assert (n, family) == (1, "phi3")
"""


def _names(report: Any) -> set[str]:
    return {entry["id"].partition("/")[2] for entry in report["tests"] if entry["outcome"] == "passed"}


def test_profile_decides_the_families(suite: Suite) -> None:
    """Catches: a nightly run of the families of smoke, a smoke run of all, and a test whose own choice is overruled."""
    own = {"own[qwen2]", "own_among_others[1-phi3]"}
    smoke = suite(ALL, "--rig", "local", "--out", "out").report
    assert _names(smoke) == own | {f"each[{name}]" for name in SMOKE_FAMILIES}
    nightly = suite(ALL, "--rig", "local", "--profile", "nightly", "--out", "out").report
    assert _names(nightly) == own | {f"each[{name}]" for name in tiny_names()}
    assert set(SMOKE_FAMILIES) < set(tiny_names())


def test_a_family_left_out_is_filtered_with_its_reason(suite: Suite) -> None:
    """Catches: a family for which a test makes no sense reported as a skip, which is a hole."""
    text = """
import pytest
from verification.plugin_session import leave_out
@pytest.fixture
def sharing(request): leave_out(request.node, "it shares nothing")
@pytest.mark.blink_property("kv-content")
def test_shared(sharing): pass
@pytest.mark.blink_property("kv-content")
def test_other(): pass
"""
    done = suite(text, "--rig", "local", "--out", "out")
    (entry,) = [entry for entry in done.report["tests"] if entry["id"] == "kv-content/shared"]
    assert (entry["outcome"], entry["message"]) == ("filtered", "filtered: it shares nothing")
    assert (done.code, done.report["verdict"]["word"]) == (0, "passed")


def test_the_engine_that_two_fixtures_share_breaks_for_both(suite: Suite) -> None:
    """Catches: tests that run on, and fail, on an engine that another fixture has found dead."""
    text = f"""
import pytest
from verification.certificate.outcomes import RigBroken
@pytest.fixture(scope="session")
def tiny(): return "tiny"
@pytest.fixture(scope="session")
def family(request): return request.param
@pytest.mark.parametrize("family", ["qwen2", "{TINY}"], indirect=True)
def test_1_breaks(family):
    if family == "{TINY}": raise RigBroken("it died")
def test_2_tiny(tiny): pass
@pytest.mark.parametrize("family", ["qwen2"], indirect=True)
def test_3_family(family): pass
"""
    report = suite(text, "--rig", "local", "--out", "out").report
    outcomes = {entry["id"].partition("/")[2]: entry["outcome"] for entry in report["tests"]}
    assert outcomes == {
        "1_breaks[qwen2]": "passed",
        f"1_breaks[{TINY}]": "infrastructure",
        "2_tiny": "blocked",
        "3_family[qwen2]": "passed",
    }
