"""The ring protocol in Spin: it holds in every reachable state, and each wrong variant fails by its clause."""

from __future__ import annotations

import pytest

from verification.certificate.recorder import Recorder
from verification.plugin_session import leave_out
from verification.result import JSON, CheckResult, Measurement, Verdict
from verification.ring_model import spin
from verification.ring_model.variants import CORRECT, LARGE, VARIANTS, Search

PROPERTY = "ring-model"
pytestmark = [pytest.mark.blink_property(PROPERTY), pytest.mark.capability("cpu")]


@pytest.fixture
def checker(request: pytest.FixtureRequest) -> None:
    """Spin and a C compiler; a machine without them leaves these tests out."""
    try:
        spin.tools()
    except spin.SpinMissing as missing:
        leave_out(request.node, str(missing))


def _check(search: Search, record: Recorder) -> None:
    outcome = spin.run(search)
    record.cases()
    fails = search.fails
    clause = outcome.clause or ("variant" if fails else "protocol")
    measured = {
        "states": Measurement(outcome.states, "states"),
        "depth": Measurement(outcome.depth, "steps", spin.DEPTH),
        "seconds": Measurement(outcome.seconds, "s"),
    }
    witness: dict[str, JSON] = (
        {}
        if outcome.ok
        else {"search": str(search), "found": outcome.clause, "wanted": list(fails), "trail": list(outcome.trail)}
    )
    if outcome.ok:
        verdict = Verdict.VALID
    elif outcome.trouble or not (fails or outcome.clause):  # the checker broke, or was cut short
        verdict = Verdict.UNKNOWN
    else:
        verdict = Verdict.INVALID
    record.check(CheckResult(verdict, PROPERTY, clause, outcome.line(), witness, measured))


@pytest.mark.blink_profile("nightly", "full")
@pytest.mark.parametrize("search", CORRECT, ids=str)
def test_protocol(checker: None, record: Recorder, search: Search) -> None:
    """Every state within the bounds.

    Catches: an order of writes, reads and looks by which the protocol breaks a clause.
    """
    _check(search, record)


@pytest.mark.blink_profile("full")
@pytest.mark.parametrize("search", LARGE, ids=str)
def test_protocol_at_larger_bounds(checker: None, record: Recorder, search: Search) -> None:
    """Catches: what needs two requests at once, or a lapse of the lease beside them."""
    _check(search, record)


@pytest.mark.blink_profile("nightly", "full")
@pytest.mark.parametrize("search", VARIANTS, ids=str)
def test_wrong_variant(checker: None, record: Recorder, search: Search) -> None:
    """A protocol with one thing wrong. Catches: a model that would hold whatever the order."""
    _check(search, record)
