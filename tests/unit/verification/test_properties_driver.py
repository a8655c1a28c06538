"""The driver and the subject under faults: what the engine does wrong must end in the history and be judged invalid."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from blink_core.abi.dtypes import EVENT, Array
from blink_core.abi.enums import EventKind, FinishReason
from blink_core.abi.params import SamplingParams
from blink_core.frontend.engine_client import open_ring
from blink_core.frontend.ring_client import Handle, ProtocolError, RingClient, RingFull
from blink_core.transport.interface import TransportError
from hil_rigs import engine_memory
from hil_rigs.description import load_rig
from hil_rigs.engine_memory import EngineUnreachable
from hil_rigs.local import LocalOptions, LocalRig
from verification.certificate.outcomes import PropertyViolation
from verification.certificate.recorder import Recorder
from verification.certificate.required import load
from verification.drivers import ring
from verification.drivers.ring import run_program
from verification.fixtures import EngineLost, Judge, Subject
from verification.history import History
from verification.program import Program, RequestSpec, Shape, draw_program
from verification.properties.queue_ordering import check_delivery
from verification.result import CheckResult, Verdict
from verification.suite.running import serve
from verification.thresholds import default_thresholds

# ---- a scripted ring: what a real one does only when it breaks

ONE = Program((RequestSpec((1, 2), SamplingParams(2), cancel_after=1),))


def events(*kinds: int) -> Array:
    made = np.zeros(len(kinds), EVENT)
    made["kind"], made["generation"] = kinds, 1
    made["reason"] = np.where(np.array(kinds) == EventKind.FINISH, FinishReason.CANCELLED, 0)
    return made


class Scripted:
    """Answers polls from a list; an exception in it is raised. The first `full` cancels find the ring full."""

    def __init__(self, *polls: Array | Exception, full: int = 0, submit: Exception | None = None) -> None:
        self.polls, self.full, self.fails = list(polls), full, submit
        self.cancelled_at: list[int] = []

    def submit(self, prompt: object, params: object, *, tag: int = 0, masked: bool = False) -> Handle:
        if self.fails is not None:
            raise self.fails
        return Handle(0, 1, 0)

    def cancel(self, handle: Handle) -> None:
        if self.full > 0:
            self.full -= 1
            raise RingFull("submission queue is full")
        self.cancelled_at.append(len(self.polls))

    def poll(self, timeout: float) -> Array:
        found = self.polls.pop(0) if self.polls else events()
        if isinstance(found, Exception):
            raise found
        return found


def drive(client: Scripted, **options: Any) -> History:
    return run_program(cast(RingClient, client), ONE, deadline_s=5.0, **options)


def test_cancel_is_tried_again_when_the_ring_was_full() -> None:
    """Catches: a full ring on cancel that ends the run, or that makes the driver forget the cancel."""
    client = Scripted(events(EventKind.TOKEN), events(), events(), events(EventKind.FINISH), full=2)
    history = drive(client)
    assert history.complete
    assert history.cancels == {0}
    assert client.cancelled_at == [1]


def test_alternatives_do_not_bring_arrivals_forward() -> None:
    """Catches: LOGPROBS events counted as tokens, so that what should come after a request's end comes before."""
    late = Program((RequestSpec((1, 2), SamplingParams(2)), RequestSpec((1, 2), SamplingParams(2), after=3)))
    client = Scripted(events(EventKind.LOGPROBS, EventKind.LOGPROBS, EventKind.LOGPROBS), ProtocolError("stop here"))
    history = run_program(cast(RingClient, client), late, deadline_s=5.0)
    assert [s.request for s in history.submitted] == [0]


@pytest.mark.parametrize(
    ("client", "clause"),
    [
        (Scripted(ProtocolError("event 4 carries sequence number 3")), "sequence"),
        (Scripted(events(EventKind.FINISH), ProtocolError("event 2 carries sequence number 1")), "sequence"),
        (Scripted(TransportError("read failed")), "bounded-wait"),
        (Scripted(submit=TransportError("write failed")), "bounded-wait"),
    ],
)
def test_broken_ring_is_a_finding(client: Scripted, clause: str) -> None:
    """Catches: a broken protocol or a lost transport that leaves the driver as an exception, also in the last look."""
    result = check_delivery(drive(client))
    assert (result.clause, result.verdict) == (clause, Verdict.INVALID)


@pytest.mark.parametrize(("asked", "seconds"), [(None, 120.0 + 0.5 * 4), (7.0, 7.0)])
def test_silent_engine_is_waited_for_until_the_deadline(
    asked: float | None, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a program whose run never ends; a deadline that is not handed on from suite to subject to driver."""
    now = [1000.0]

    class Silent(Scripted):
        def poll(self, timeout: float) -> Array:
            now[0] += 1.0
            assert now[0] < 2000.0, "it waits for ever"
            return events()

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    client: Any = Silent()
    rig: Any = SimpleNamespace(wait=lambda timeout: None, descriptor=SimpleNamespace(capture=""), ring=lambda i: client)
    subject = Subject("silent", rig, client, Shape(vocab=64, page_size=4, longest=32), default_thresholds(), 32)
    monkeypatch.setattr(subject, "reattach", lambda: None)
    monkeypatch.setattr(Subject, "eos_ids", (1,))
    monkeypatch.setattr(Subject, "max_len", 32)
    judge = Judge(Recorder(), lambda: None)
    with pytest.raises(PropertyViolation, match="bounded-wait"):
        serve(subject, ONE, judge, deadline_s=asked)
    assert seconds < now[0] - 1000.0 <= seconds + 2.0


def test_deadline_grows_with_the_work() -> None:
    """Catches: a busy machine that is called a product failure, by a long program under the deadline of a short one; a
    wedged engine that costs a whole test its time, which then cannot say what was wrong."""
    assert ring.deadline_of(ONE) == 122.0
    eight = Program((RequestSpec((1,) * 16, SamplingParams(32)),) * 8)
    assert ring.deadline_of(eight) == 120.0 + 0.5 * 8 * 48
    most = min(load("local").profile(name).test_timeout_s for name in ("smoke", "nightly", "full"))
    assert ring.deadline_of(LONG) < most


def test_lost_boundary_and_dead_process_are_findings() -> None:
    """Catches: a hold that times out, or a process that is gone, waited for until the deadline or not noted."""

    def lost() -> None:
        raise EngineUnreachable("engine did not reach a step boundary")

    found = drive(Scripted(events(EventKind.TOKEN)), every=1, observe=lost)
    assert check_delivery(found).clause == "bounded-wait"
    found = drive(Scripted(events()), died=lambda: "engine exited with status -9")
    assert "exited with status -9" in check_delivery(found).message


def test_drawn_programs_have_something_to_finish() -> None:
    """Catches: a program of which every request is cancelled: it passes whatever the engine does."""
    shape = Shape(vocab=64, page_size=4, longest=32, requests=(1, 3), cancels=1.0)
    for seed in range(50):
        program = draw_program(random.Random(seed), shape)
        assert any(r.cancel_after is None for r in program.requests)


def test_judge_counts_programs_and_keeps_failures(tmp_path: Path) -> None:
    """Catches: one program counted twice as an independent case; a failure whose program is lost."""
    judge = Judge(Recorder(), lambda: tmp_path)
    for _ in range(3):
        judge.case(ONE)
    assert judge.record.as_dict()["cases"] == 1
    judge(CheckResult(Verdict.VALID, "queue-ordering", "fifo", "fine"), History(ONE, 1))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PropertyViolation):
        judge(CheckResult(Verdict.INVALID, "queue-ordering", "fifo", "wrong"), History(ONE, 1))
    kept = json.loads((tmp_path / "failure-0.json").read_text(encoding="utf-8"))
    assert kept["result"]["message"] == "wrong"
    assert Program.from_json(kept["history"]["program"]) == ONE


# ---- a real engine process, without a model

LONG = Program((RequestSpec((1, 2, 3), SamplingParams(4000)),) * 4)


class Quick(LocalRig):
    def ring(self, index: int = 1) -> RingClient:
        client = open_ring(self.descriptor, index)
        client.attach(1.0 if self.wedged else 30.0)
        return client

    wedged = False


@pytest.fixture
def subject() -> Iterator[Subject]:
    sizes = {"max_len": 4096, "page_size": 16, "pages": 1200, "arena_tokens": 8192, "slots": 16, "log_level": 2}
    with Quick(load_rig("local"), None, options=LocalOptions(engine=sizes)) as rig:
        shape = Shape(vocab=64, page_size=16, longest=4096)
        yield Subject("noop", rig, rig.ring(1), shape, default_thresholds(), 4096)


def at_first_observation(act: Callable[[], None]) -> Callable[[], None]:
    todo = [act]
    return lambda: todo.pop()() if todo else None


def test_killed_engine_is_a_violation_and_stays_one(subject: Subject) -> None:
    """Catches: an engine that crashes under valid requests reported as trouble of the rig; later tests that go on."""
    reasons: list[str] = []
    subject.on_death = reasons.append
    pid = subject.rig.pid("engine")
    history = subject.run(LONG, every=1, observe=at_first_observation(lambda: os.kill(pid, signal.SIGKILL)))
    result = check_delivery(history)
    assert (result.clause, result.verdict) == ("bounded-wait", Verdict.INVALID)
    assert "engine exited with status -9" in result.message
    assert len(reasons) == 1
    assert check_delivery(subject.run(ONE)).clause == "bounded-wait"
    with pytest.raises(PropertyViolation, match="bounded-wait") as caught:
        subject.snapshot()
    assert isinstance(caught.value, EngineLost)
    assert len(reasons) == 1


def test_engine_killed_before_a_hold_is_noticed_at_once(subject: Subject) -> None:
    """Catches: a hold that waits its whole 20 s for the boundary of an engine whose process is gone."""
    memory = subject.rig.memory
    os.kill(subject.rig.pid("engine"), signal.SIGKILL)
    with pytest.raises(EngineUnreachable, match=r"engine process \d+ is gone"), memory.hold(timeout=3600.0):
        pass


def test_logs_outlive_the_rig(tmp_path: Path) -> None:
    """Catches: the log of a crashed engine deleted with the rig's folder; one that a second start empties."""
    options = LocalOptions(logs=tmp_path / "logs", engine={"slots": 16, "max_len": 64, "pages": 40})
    rig = LocalRig(load_rig("local"), None, options=options)
    for _ in range(2):
        rig.start()
        os.kill(rig.pid("engine"), signal.SIGKILL)
        assert "status -9" in str(rig.wait(30.0))
        rig.stop()
    assert (tmp_path / "logs" / "engine.log").read_text().count("ready: noop") == 2


def test_wedged_engine_is_a_violation(subject: Subject) -> None:
    """Catches: a hung engine whose refusal of a new front end leaves the test as an exception of the transport."""
    rig = cast(Quick, subject.rig)
    pid = rig.pid("engine")

    def freeze() -> None:
        os.kill(pid, signal.SIGSTOP)
        rig.wedged = True

    try:
        history = subject.run(LONG, every=1, observe=at_first_observation(freeze), deadline_s=5.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    result = check_delivery(history)
    assert (result.clause, result.verdict) == ("bounded-wait", Verdict.INVALID)
    assert "takes no new front end" in str(subject.dead)


def test_outlived_hold_is_no_evidence(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: memory copied after the engine went on by itself taken for a state at a boundary."""
    memory = subject.rig.memory
    with memory.hold():
        pass
    monkeypatch.setattr(engine_memory, "HOLD_LIMIT_S", 0.0)
    with pytest.raises(EngineUnreachable, match="may be torn"), memory.hold():
        pass
    with pytest.raises(ZeroDivisionError), memory.hold():  # the body's own error is not replaced
        _ = 1 // 0


def test_snapshot_copies_only_the_log_asked_for(subject: Subject) -> None:
    """Catches: entries of earlier runs in a run's window, or some of its own left out."""
    before = subject.snapshot(log_from=2**63)
    assert len(before.log) == 0
    start = int(before.header["log_tail"])
    assert before.log_lost == start
    history = subject.run(Program((RequestSpec((1, 2), SamplingParams(2)),)))
    assert check_delivery(history).ok()
    whole, part = subject.snapshot(), subject.snapshot(log_from=start)
    assert part.log_lost == start
    ours = whole.log[start - whole.log_lost :]  # credits may have come back between the two snapshots
    assert len(ours) > 0
    assert part.log[: len(ours)].tobytes() == ours.tobytes()
    assert len(part.log) > 0
