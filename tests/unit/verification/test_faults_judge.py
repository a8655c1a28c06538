"""Each clause of fault-tolerance, by one observation that is made wrong at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from blink_core.abi.enums import FinishReason
from verification.certificate.outcomes import PropertyUnknown
from verification.certificate.recorder import Recorder
from verification.faults.bench import FaultBench
from verification.faults.judge import check
from verification.faults.model import FAULTS, Blast, End, Fault, Hit, LiveRequest, Proof, find, known_faults, register
from verification.faults.scenario import FaultPlan, FaultRun, draw_plan
from verification.faults.traffic import Call
from verification.judge import Judge
from verification.program import Shape
from verification.recording import read_recording
from verification.result import CheckResult, Verdict
from verification.run_context import RunContext

SHAPE = Shape(vocab=64, page_size=16, longest=256, most_new=24)
LENGTH = FinishReason.LENGTH.name.lower()


def call(name: str, end: End = End.FINISHED, output: tuple[int, ...] = (1, 2, 3), detail: str = LENGTH) -> Call:
    spec = draw_plan("engine-stop", 1, SHAPE).victims[0]
    return Call(name, spec, end, detail, list(output))


def good(fault: str = "frontend-kill") -> FaultRun:
    """A run in which all is as it should be."""
    run = FaultRun(draw_plan(fault, 1, SHAPE), find(fault))
    names = ["victim-0", "victim-1", *(f"{lane}-{i}" for lane in ("http", "ring") for i in range(3))]
    run.control = {name: call(name) for name in names}
    run.faulted = {f"ring-{i}": call(f"ring-{i}") for i in range(3)}
    run.faulted |= {f"victim-{i}": call(f"victim-{i}", End.DISCONNECTED, (1, 2), "reset") for i in range(2)}
    run.faulted |= {f"probe-{lane}": call(f"probe-{lane}") for lane in ("http", "ring")}
    run.hit = Hit((LiveRequest(0, 0, 1, 2),))
    run.proof = Proof(True, "it died")
    run.idle, run.live_at_end = CheckResult(Verdict.VALID, "kv-conservation", "pages", "fine"), 0
    return run


def test_a_run_as_it_should_be_passes() -> None:
    """Catches: a judge that passes nothing."""
    assert check(good()).ok(), check(good())


def _set(name: str, **values: object) -> Callable[[FaultRun], None]:
    def change(run: FaultRun) -> None:
        for field, value in values.items():
            setattr(run.faulted[name], field, value)

    return change


def _run(**values: object) -> Callable[[FaultRun], None]:
    def change(run: FaultRun) -> None:
        for field, value in values.items():
            setattr(run, field, value)

    return change


def _control_fails(run: FaultRun) -> None:
    run.control["http-1"].end = End.ERROR


def test_victims_are_told_why() -> None:
    """Catches: a lapsed lease that its clients hear of as some other error, or as none."""
    run = good("lease-frontend-stop")
    for name, detail in (("victim-0", "lease_lost"), ("victim-1", "lease_lost")):
        run.faulted[name] = call(name, End.ERROR, (1, 2), detail)
    assert check(run).ok(), check(run)
    run.faulted["victim-1"].detail = "engine_dead"
    assert (check(run).clause, check(run).verdict) == ("outcome", Verdict.INVALID)
    run.faulted["victim-1"].end, run.faulted["victim-1"].detail = End.FINISHED, LENGTH
    assert check(run).clause == "outcome"


LEAK = CheckResult(Verdict.INVALID, "kv-conservation", "pages", "page 3 leaked")


@pytest.mark.parametrize(
    ("change", "clause", "verdict"),
    [
        (_control_fails, "control", "invalid"),
        (_run(control={}), "control", "invalid"),
        (_run(hit=Hit()), "hit", "unknown"),
        (_run(proof=None), "hit", "unknown"),
        (_run(proof=Proof(False, "still there")), "hit", "unknown"),
        (_run(wrong="2 requests still live after the lease"), "meanwhile", "invalid"),
        (_set("ring-1", output=[1, 2, 4]), "goodput", "invalid"),
        (_set("ring-1", end=End.OPEN), "goodput", "invalid"),
        (_set("ring-1", detail="eos"), "goodput", "invalid"),
        (_set("victim-0", end=End.OPEN), "outcome", "invalid"),
        (_set("victim-0", end=End.ERROR), "outcome", "invalid"),
        (_set("victim-0", output=[1, 9]), "outcome", "invalid"),
        (_set("victim-0", output=[1, 2, 3, 4]), "outcome", "invalid"),
        (_set("victim-0", after_end=1), "outcome", "invalid"),
        (_run(trouble="the engine is out of reach"), "recovery", "invalid"),
        (_run(recovered_s=61.0), "recovery", "invalid"),
        (_set("probe-http", end=End.DISCONNECTED), "recovery", "invalid"),
        (_set("probe-ring", output=[7]), "recovery", "invalid"),
        (_run(live_at_end=1), "conservation", "invalid"),
        (_run(idle=LEAK), "conservation", "invalid"),
        (_run(idle=None), "conservation", "unknown"),
    ],
)
def test_one_wrong_observation_decides(change: Callable[[FaultRun], None], clause: str, verdict: str) -> None:
    """Catches: any clause that holds whatever was seen, or that another one hides."""
    run = good()
    change(run)
    result = check(run)
    assert (result.clause, result.verdict) == (clause, verdict), result


def test_missing_probe_is_no_recovery() -> None:
    """Catches: a scenario that was cut short taken for one in which everyone was served again."""
    run = good()
    del run.faulted["probe-http"]
    assert (check(run).clause, check(run).ok()) == ("recovery", False)


def test_violation_outranks_a_fault_that_hit_nobody() -> None:
    """Catches: a broken bystander excused because the fault cannot be shown to have hit."""
    run = good()
    run.hit = Hit()
    run.faulted["ring-0"].end = End.ERROR
    assert (check(run).clause, check(run).verdict) == ("goodput", Verdict.INVALID)


def test_registry() -> None:
    """Catches: a fault that declares nothing, one under another's name, an unknown one without the known names."""
    assert len(known_faults()) >= 10
    for name in known_faults():
        fault = find(name)
        assert fault.ends
        assert End.OPEN not in fault.ends
        assert fault.recovery_s > 0
        assert name in fault.about()
        assert fault.blast is not Blast.NONE or fault.ends == {End.FINISHED}
    with pytest.raises(
        ValueError, match=r"unknown fault 'engine-kil', did you mean 'engine-kill'\?; known: cancel-storm,"
    ):
        find("engine-kil")

    class Second(Fault):
        name = "engine-kill"

    with pytest.raises(ValueError, match="registered twice"):
        register(Second)  # type: ignore[type-abstract]
    assert FAULTS["engine-kill"] is not Second


def test_plans_are_drawn_by_seed_and_survive_json() -> None:
    """Catches: a plan that differs between two runs of one seed; one that a recording does not bring back; victims too
    short to be hit, requests that somebody cancels or that do not fit."""
    for seed in range(30):
        plan = draw_plan("engine-stop", seed, SHAPE)
        assert plan == draw_plan("engine-stop", seed, SHAPE)
        assert plan != draw_plan("engine-stop", seed + 1, SHAPE)
        assert FaultPlan.from_json(plan.to_json()) == plan
        for spec in plan.victims:
            assert spec.params.max_tokens >= 140
        for spec in (*plan.victims, *plan.bystanders):
            assert spec.cancel_after is None
            assert len(spec.prompt) + spec.params.max_tokens <= SHAPE.longest
            assert 0 <= spec.params.seed < 2**31
    with pytest.raises((KeyError, TypeError)):
        FaultPlan.from_json({"fault": "engine-stop", "seed": 1, "subject": "x", "victims": [{}], "bystanders": []})


def test_goodput_is_for_those_outside_the_blast_radius_only() -> None:
    """Catches: a victim's ring held to the control run; calls of another group taken for bystanders."""
    run = good()
    run.faulted["victim-1"] = replace(run.faulted["victim-1"], output=[1])
    assert check(run).ok()


def test_recorded_plan_is_replayed(tmp_path: Path) -> None:
    """Catches: a failing scenario whose `--replay` draws another plan, or one of another fault; a plan that is kept
    with what was seen and cannot be read back."""
    plan = replace(draw_plan("frontend-kill", 99, SHAPE), seed=12345)
    run = replace(good(), plan=plan, hit=Hit())
    context = RunContext("r1", "local", "smoke", None, 7, "given", None)
    judge = Judge(Recorder(), lambda: tmp_path, {"run": context.describe(), "test": {"id": "t", "nodeid": "n"}})
    nothing = cast(Any, None)
    with pytest.raises(PropertyUnknown):
        FaultBench(context, judge, "t", nothing, nothing).check(run)
    context.replay = read_recording(judge.kept[0])
    assert (context.replay.seed, context.replay.test, context.replay.subject) == (7, "t", plan.subject)
    bench = FaultBench(context, judge, "t", nothing, lambda fault: (nothing, SHAPE))
    assert bench.plan("frontend-kill") == plan
    assert bench.plan("engine-kill") != replace(plan, fault="engine-kill")
