"""The histories that the linearisability checker draws, on the product as it is."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from blink_core import _native
from verification.linearisability.check import check
from verification.mutants.checkers import linearisable
from verification.result import Verdict


@pytest.mark.parametrize("seed", ["linearisability/1337928251/45"])
def test_a_submission_that_could_not_be_made_leaves_no_generation_behind(seed: str) -> None:
    """Catches: a false alarm (V8): a client that jumps to a far generation and then cannot submit, and whose next
    "older" request is newer than all that was judged."""
    histories = linearisable._run(SimpleNamespace(native=_native), random.Random(seed))  # type: ignore[arg-type]
    assert histories
    for history in histories:
        decision = check(history)
        assert decision.verdict is not Verdict.INVALID, decision.message
