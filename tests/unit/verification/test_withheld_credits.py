"""Fault `withheld-credits`: what is asked of the engine while the rows pause."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from blink_core.abi.params import SamplingParams
from verification.faults import rings
from verification.faults.model import End, Site
from verification.faults.rings import BESIDE_TOKENS, WithheldCredits
from verification.faults.traffic import Call
from verification.program import RequestSpec

VICTIM = Call("victim-0", RequestSpec((1, 2, 3), SamplingParams(200, min_tokens=100)))


def wrong(monkeypatch: pytest.MonkeyPatch, end: End, rows: tuple[int, int]) -> tuple[list[Call], str | None]:
    """What the fault finds if a request beside the pause ends so, and so many of so many rows pause then."""
    started: list[Call] = []

    class Lane:
        def __init__(self, rig: object) -> None: ...

        def start(self, call: Call) -> None:
            started.append(call)
            if end is not End.OPEN:
                call.finish(end, "planted")

    site = SimpleNamespace(victims=(VICTIM,), rig=None, ring_lane=lambda: None, state=lambda: None)
    monkeypatch.setattr(rings, "HttpLane", Lane)
    monkeypatch.setattr(rings, "await_calls", lambda calls, lane, deadline: calls[0].end is not End.OPEN)
    monkeypatch.setattr(rings, "paused_rows", lambda state, ring: rows)
    return started, WithheldCredits().wrong(cast(Site, cast(Any, site)))


def test_another_ring_is_served_while_the_rows_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a pause beside which nobody runs, so that no step ever leaves a row out and the situation
    `credits-withheld` hangs on how fast the bystanders were."""
    started, found = wrong(monkeypatch, End.FINISHED, (2, 2))
    assert found is None
    assert [call.spec.params.max_tokens for call in started] == [BESIDE_TOKENS]


@pytest.mark.parametrize(
    ("end", "rows", "words"),
    [
        (End.OPEN, (2, 2), "had not ended after 20 s, while the rows paused"),
        (End.ERROR, (2, 2), "while the rows paused: planted"),
        (End.FINISHED, (1, 2), "1 of 2 rows pause, without any credits"),
        (End.FINISHED, (0, 0), "0 of 0 rows pause"),
    ],
)
def test_what_goes_wrong_meanwhile_is_told(
    monkeypatch: pytest.MonkeyPatch, end: End, rows: tuple[int, int], words: str
) -> None:
    """Catches: another ring that is held up by the rows that pause, or rows that go on without credits, and nobody says
    so."""
    found = wrong(monkeypatch, end, rows)[1]
    assert found is not None
    assert words in found
