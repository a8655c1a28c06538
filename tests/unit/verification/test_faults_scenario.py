"""What a fault's scenario measures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from verification.faults import scenario
from verification.faults.scenario import Scenario
from verification.stalls import Stalls


def test_only_stalls_until_the_last_victim_was_told_are_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a client that hears late of its engine's death on an idle machine, excused by what the machine was busy
    with afterwards, while the others' requests went on."""
    now = [100.0]
    stalls = Stalls(lambda: now[0])  # whose thread does not run
    struck, victims = 100.0, [SimpleNamespace(name="a", ended_at=101.5), SimpleNamespace(name="b", ended_at=102.0)]

    def awaited(*_: object) -> bool:
        """Looks at the clock as it should until 103, then not before 106."""
        while now[0] < 106.0:
            now[0] = 106.0 if now[0] >= 103.0 else now[0] + Stalls.TICK_S
            stalls._look()
        return True

    monkeypatch.setattr(scenario, "await_calls", awaited)
    monkeypatch.setattr(scenario, "_untouched", lambda fault: ())
    fault = SimpleNamespace(
        stalls_on=lambda description: False, proof=lambda site: "", wrong=lambda site: None, ends=(),
        told_after_heal=False, heal=lambda site: None, void=lambda site: None,
    )  # fmt: skip
    run: Any = SimpleNamespace(fault=fault, faulted={}, plan=SimpleNamespace(bystanders=()), told_s=None, stalled_s=0.0)
    made: Any = object.__new__(Scenario)
    made.rig, made.ring = SimpleNamespace(description=None), None
    for name in ("_probe", "_idle"):
        monkeypatch.setattr(Scenario, name, lambda *_: None)
    monkeypatch.setattr(Scenario, "_strike", lambda *_: (victims, struck))
    made._faulted(run, SimpleNamespace(lane=None), stalls)
    assert stalls.seconds > 2.9
    assert (run.told_s, run.stalled_s) == (2.0, 0.0)
