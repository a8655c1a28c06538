"""Fault scenarios against an engine with one thing wrong: they must name what the fault brought to light.

And a fault under a test's own load, which must leave an engine for the tests that come after.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from blink_core.abi.params import SamplingParams
from hil_rigs.description import RigDescription, load_rig
from hil_rigs.local import LocalOptions, LocalRig
from tests.planted.engine import MUTANT
from verification.certificate.outcomes import PropertyUnknown, PropertyViolation
from verification.faults.bench import FaultBench
from verification.faults.judge import check
from verification.faults.model import live_requests
from verification.faults.scenario import Scenario, draw_plan
from verification.mutants import weave
from verification.program import Program, RequestSpec, Shape
from verification.result import Verdict
from verification.run_context import RunContext
from verification.serving import FAULT_SIZES, options_of, shape_of
from verification.subject import EngineLost, Subject

ENGINE = Path(__file__).parents[1] / "planted" / "engine.py"


@pytest.mark.parametrize(
    ("mutant", "verdict"), [("", Verdict.VALID), ("leak-page-on-cancel", Verdict.INVALID)], ids=["clean", "leak"]
)
def test_leak_on_cancel_is_found(
    mutant: str, verdict: Verdict, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: scenarios that pass an engine which leaks pages under a fault; ones that fail without any reason."""
    weave.build()  # here, so that the engine's start does not wait for it
    monkeypatch.setenv(MUTANT, mutant)
    description = load_rig("local").model_copy(update={"engine_command": (str(ENGINE), "native-mutant")})
    options = options_of(FAULT_SIZES, None, capture=False, batch_invariant=True)
    with LocalRig(description, tiny_model, options=options) as rig:
        shape = shape_of(rig, requests=(3, 3), most_new=24)
        result = check(Scenario(rig).run(draw_plan("cancel-storm", 7, shape)))
    assert result.verdict is verdict, result
    if verdict is Verdict.INVALID:
        assert result.clause == "conservation"


LIVE_WITHIN_S = 20.0
LONG, SHORT = SamplingParams(max_tokens=200), SamplingParams(max_tokens=4)


@contextmanager
def loaded(
    run: RunContext, description: RigDescription | None = None, **options: Any
) -> Iterator[tuple[Subject, FaultBench]]:
    """An engine with the no-op model and one request that is live as long as nobody reads, and the bench of a test."""
    nothing = cast(Any, None)
    chosen = LocalOptions(engine=dict(FAULT_SIZES), **options)
    with LocalRig(description or load_rig("local"), None, http=False, options=chosen) as rig:
        shape = Shape(vocab=rig.descriptor.config.vocab, page_size=16, longest=256, most_new=8)
        subject = Subject("model", rig, rig.ring(), shape, nothing, 256, run.break_rig)
        subject.client.submit((1, 2, 3), LONG)  # it pauses for want of credits
        deadline = time.monotonic() + LIVE_WITHIN_S
        while not live_requests(subject.snapshot()):
            assert time.monotonic() < deadline, f"no request was live in {LIVE_WITHIN_S:g} s"
        yield subject, FaultBench(run, nothing, "t", lambda: subject, nothing)


def test_engine_that_was_killed_serves_the_tests_after() -> None:
    """Catches: an engine that a fault replaced and that stays declared dead because a test ran a program meanwhile, so
    that every later test is blocked; a rig that broke for another reason declared mended with it."""
    run = RunContext(f"r1-{os.getpid()}", "local", "smoke", None, 7, "given", None)
    run.break_rig("it was broken before", fixture="tiny")
    with loaded(run) as (subject, bench):
        with bench("engine-kill") as hit:
            assert subject.rig.wait(LIVE_WITHIN_S) is not None
            assert subject.run(Program((RequestSpec((1, 2), SHORT),)), deadline_s=5.0).died is not None
            with pytest.raises(EngineLost):
                subject.snapshot()
            assert set(run.broken) == {"tiny", "rig"}
        assert len(hit.requests) == 1
        assert run.broken == {"tiny": "it was broken before"}
        after = subject.run(Program((RequestSpec((1, 2), SHORT),)), deadline_s=LIVE_WITHIN_S)
        assert (after.died, after.complete, subject.dead) == (None, True, None)


def test_stop_that_outlasts_the_heartbeat_limit_decides_nothing() -> None:
    """Catches: a stop whose real length nobody looks at, so that a late SIGCONT is blamed on the engine, or passes."""
    run = RunContext(f"r1-{os.getpid()}", "local", "smoke", None, 7, "given", None)
    with loaded(run) as (_, bench), bench("engine-stop") as hit:
        pass
    assert len(hit.requests) == 1
    with (
        loaded(run, heartbeat_limit_s=1e-6) as (_, bench),  # every stop outlasts it
        pytest.raises(PropertyUnknown, match="stood still for"),
        bench("engine-stop"),
    ):
        pass


def test_rig_that_says_it_goes_on_is_held_to_it() -> None:
    """Catches: a rig whose description promises streams without its host process, and which stands still with it,
    passed because the streams go on once the process is continued."""
    run = RunContext(f"r1-{os.getpid()}", "local", "smoke", None, 7, "given", None)
    goes_on = load_rig("local").model_copy(update={"when_host_stops": "goes-on"})
    with (
        loaded(run, goes_on) as (_, bench),
        pytest.raises(PropertyViolation, match="heartbeat stood still for"),
        bench("engine-stop"),
    ):
        pass
