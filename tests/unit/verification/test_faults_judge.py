"""Each clause of fault-tolerance, by one observation that is made wrong at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest

from blink_core.abi.dtypes import LOG_ENTRY, REQUEST, Array
from blink_core.abi.enums import ErrorReason, EventKind, FinishReason, LogKind
from verification.certificate.outcomes import PropertyUnknown
from verification.certificate.recorder import Recorder
from verification.faults import processes
from verification.faults.bench import FaultBench
from verification.faults.judge import check
from verification.faults.model import (
    FAULTS,
    Blast,
    End,
    Fault,
    Hit,
    LiveRequest,
    Proof,
    Site,
    find,
    known_faults,
    paused_rows,
    register,
)
from verification.faults.processes import too_long
from verification.faults.rings import wrong_answers, wrong_cancels
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


def killed() -> FaultRun:
    """An engine that was killed, and whose clients were told in time."""
    run = good("engine-kill")
    run.faulted = {name: call for name, call in run.faulted.items() if not name.startswith("ring-")}
    for name in ("victim-0", "victim-1"):
        run.faulted[name] = call(name, End.ERROR, (1, 2), "engine_dead")
    run.told_s = 0.4
    return run


@pytest.mark.parametrize(
    ("told_s", "stalled_s", "verdict"),
    [(0.4, 0.0, "valid"), (1.01, 0.0, "invalid"), (None, 0.0, "unknown"), (2.0, 1.1, "valid"), (2.2, 1.1, "invalid")],
)
def test_an_engines_death_is_told_in_time(told_s: float | None, stalled_s: float, verdict: str) -> None:
    """Catches: clients that hear of their engine's death late, or whose delay nobody measured, and the run passes; a
    measurement that is not reported with its bound."""
    run = killed()
    run.told_s, run.stalled_s = told_s, stalled_s
    result = check(run)
    assert result.verdict == verdict, result
    assert result.ok() or result.clause == "outcome"
    if told_s is not None:
        told = result.measurements["victims told after"]
        assert (told.value, told.unit, told.limit) == (told_s, "s", 1.0)


def test_a_stop_that_became_too_long_decides_nothing_but_the_pages() -> None:
    """Catches: streams that a late SIGCONT cost their lease, taken for the engine's fault or for a pass; pages that
    leak meanwhile excused by it."""
    run = good("engine-stop")
    run.void = too_long(4.9, 5.0)
    assert (check(run).clause, check(run).verdict) == ("hit", Verdict.UNKNOWN)
    assert "4.90 s" in check(run).message
    run.trouble = "the front end gave it up"
    assert check(run).verdict is Verdict.UNKNOWN
    run.idle = LEAK
    assert (check(run).clause, check(run).verdict) == ("conservation", Verdict.INVALID)


def test_a_stop_that_bystanders_made_too_long_is_their_finding() -> None:
    """Catches: a stopped front end that keeps another ring waiting, excused because the wait outlasted the lease."""
    run = good("frontend-stop")
    for name in ("victim-0", "victim-1"):
        run.faulted[name] = call(name, End.ERROR, (1, 2), "lease_lost")
    run.void = too_long(60.0, 10.0)
    assert (check(run).clause, check(run).verdict) == ("hit", Verdict.UNKNOWN)
    run.faulted["ring-1"].end = End.OPEN
    assert (check(run).clause, check(run).verdict) == ("goodput", Verdict.INVALID)


def test_a_stop_is_held_to_the_limit() -> None:
    """Catches: a stop near to, or beyond, the limit taken for a short one; one that was never measured; every stop."""
    assert too_long(0.5, 2.5) is None
    assert too_long(60.0, float("inf")) is None
    for lasted, limit in ((2.4, 2.5), (2.5, 2.5), (9.0, 5.0), (None, 5.0)):
        assert too_long(lasted, limit) is not None


def log(*entries: tuple[LogKind, int, int, int]) -> Array:
    """Entries of the suite's ring: kind, slot, generation, a."""
    rows = np.zeros(len(entries), LOG_ENTRY)
    for row, (kind, slot, generation, a) in zip(rows, entries, strict=True):
        row["ring"], row["kind"], row["slot"], row["generation"], row["a"] = 1, kind, slot, generation, a
    return rows


def event(
    slot: int, generation: int, kind: int = EventKind.ERROR, reason: int = ErrorReason.CHECKSUM
) -> dict[str, int]:
    return {"slot": slot, "generation": generation, "kind": kind, "reason": reason}


TORN = [(0, 5), (1, 6)]
REFUSED = [(LogKind.REJECT, slot, generation, ErrorReason.CHECKSUM) for slot, generation in TORN]


@pytest.mark.parametrize(
    ("entries", "events", "right"),
    [
        (REFUSED, [event(0, 5), event(1, 6)], True),
        (REFUSED, [event(1, 6), event(0, 5)], True),
        (REFUSED, [event(0, 5)], False),
        (REFUSED, [event(0, 5), event(0, 5), event(1, 6)], False),
        (REFUSED, [event(0, 5), event(0, 5)], False),
        (REFUSED, [event(0, 5), event(1, 6, reason=ErrorReason.BAD_ENTRY)], False),
        (REFUSED, [event(0, 5), event(1, 6, EventKind.TOKEN, 0), event(1, 6, EventKind.FINISH, 0)], False),
        (REFUSED, [event(0, 5), event(1, 6), event(2, 9, EventKind.TOKEN, 0)], False),
        (REFUSED[:1], [event(0, 5), event(1, 6)], False),
        ([*REFUSED, REFUSED[0]], [event(0, 5), event(1, 6)], False),
    ],
)
def test_entries_are_refused_once_and_for_the_right_reason(
    entries: list[tuple[LogKind, int, int, int]], events: list[dict[str, int]], right: bool
) -> None:
    """Catches: a torn descriptor that is accepted and served, dropped in silence, refused twice or for a wrong reason,
    and the fault said to be unproven instead of the engine wrong."""
    assert (wrong_answers(log(*entries), events, TORN, ErrorReason.CHECKSUM) is None) is right


def test_each_cancelled_request_ends_once() -> None:
    """Catches: a request that a burst of cancels ends twice or not at all; cancels that are lost."""
    first = [(LogKind.CANCEL, slot, generation, 1) for slot, generation in TORN]
    more = [(LogKind.CANCEL, slot, generation, 0) for slot, generation in TORN]
    ended = [(LogKind.FINISH, slot, generation, FinishReason.CANCELLED) for slot, generation in TORN]
    assert wrong_cancels(log(*first, *ended, *more), TORN, 4) is None
    for wrong in ([*first, *ended], [*first, *ended, *first], [*first, *more, *ended[:1]], [*first, *more, *ended * 2]):
        assert wrong_cancels(log(*wrong), TORN, 4) is not None


def test_paused_rows_are_counted_by_ring() -> None:
    """Catches: rows of another ring, or requests that wait, counted for a ring's own rows that pause."""
    requests = np.zeros(2 * 4, REQUEST)
    requests["paused"][[0, 3, 5]] = 1, 7, 2
    state = cast(
        Any, SimpleNamespace(requests=requests, running=np.array([0, 1, 5], "<u4"), config=SimpleNamespace(slots=4))
    )
    assert paused_rows(state, 0) == (1, 2)
    assert paused_rows(state, 1) == (1, 1)


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


class StoppedEngine:
    """A rig whose engine process is stopped, with a status line that a test moves."""

    def __init__(self, when_host_stops: str, **moving: int) -> None:
        self.description = SimpleNamespace(when_host_stops=when_host_stops)
        self.options = SimpleNamespace(heartbeat_limit_s=5.0)
        self.memory, self.words, self.moving = self, {"heartbeat": 7, "steps": 3}, moving

    def status(self, field: str) -> int:
        self.words[field] += self.moving.get(field, 0)
        return self.words[field]

    def send(self, process: str, number: int) -> None:
        assert process == "engine"

    def pid(self, process: str) -> int:
        return 1


@pytest.mark.parametrize(
    ("declared", "moving", "delivers", "proven", "wrong"),
    [
        ("stands-still", {}, False, True, None),
        ("stands-still", {"heartbeat": 1}, False, False, None),
        ("goes-on", {"heartbeat": 1, "steps": 1}, True, True, None),
        ("goes-on", {}, True, True, "heartbeat, steps stood still"),
        ("goes-on", {"heartbeat": 1}, True, True, "steps stood still"),
        ("goes-on", {"heartbeat": 1, "steps": 1}, False, True, "the stream of victim-0 stood still"),
    ],
)
def test_a_stopped_host_is_judged_by_what_its_rig_declares(
    declared: str,
    moving: dict[str, int],
    delivers: bool,
    proven: bool,
    wrong: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: a scheduler on a device that stands still with its host and passes; one in the host process whose heart
    beats on, so that nothing was stopped, taken for a proof."""
    monkeypatch.setattr(processes, "await_stopped", lambda pid: True)
    monkeypatch.setattr(processes, "GOES_ON_WITHIN_S", 0.05)
    monkeypatch.setattr(psutil, "Process", lambda pid: SimpleNamespace(status=lambda: psutil.STATUS_STOPPED))
    victim = call("victim-0", End.OPEN)
    rig = StoppedEngine(declared, **moving)
    site = Site(cast(Any, rig), victims=(victim,), pump=lambda seconds: victim.output.extend([4] if delivers else []))
    fault = find("engine-stop")
    assert fault.stalls_on(cast(Any, rig.description)) == (declared == "stands-still")
    fault.inject(site)
    assert fault.proof(site).holds == proven
    found = fault.wrong(site)
    assert (found is None) == (wrong is None)
    assert wrong is None or wrong in str(found)
