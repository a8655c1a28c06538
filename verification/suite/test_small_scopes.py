"""Small scopes, exhaustively: every interleaving of what front ends, NIC, clock, host and scheduler may do."""

from __future__ import annotations

import pytest

from verification.certificate.recorder import Recorder
from verification.explore.run import explore, same_verdict
from verification.explore.scope import Scope
from verification.explore.scopes import SCOPES, of_profile
from verification.plugin import context_of

pytestmark = [pytest.mark.blink_property("small-scopes"), pytest.mark.capability("cpu")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The scopes that the run's profile must finish."""
    if "scope" in metafunc.fixturenames:
        context = context_of(metafunc.config)
        scopes = SCOPES if context is None else of_profile(context.profile_name)
        metafunc.parametrize("scope", scopes, ids=[scope.name for scope in scopes])


def test_scope(scope: Scope, record: Recorder) -> None:
    """One named scope, finished with and without symmetry reduction.

    Catches: a deadlock, a livelock, and any state in which a safety clause of the rules is broken, however rare the
    interleaving that leads to it; a scope that no longer meets what it was made for.
    """
    searches = []
    for symmetry in (True, False):
        search = explore(scope, symmetry=symmetry, progress=lambda line: print(line, flush=True))
        record.cases(search.figures["states"])
        record.check(search.check())
        searches.append(search)
    record.check(same_verdict(*searches))
