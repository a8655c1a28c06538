"""Recorded runs under the linearisability checker: how they are read, and runs of a real engine, one with clients that
overlap."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from blink_core.abi.enums import ErrorReason, EventKind, FinishReason
from blink_core.abi.params import SamplingParams
from blink_core.frontend.ring_client import Handle, RingClient, RingFull
from blink_core.transport.interface import TransportTimeout
from hil_rigs.description import load_rig
from hil_rigs.local import LocalOptions, LocalRig
from tests.unit.failures import material
from verification.benchmarks import linearisability as benchmark
from verification.drivers.ring import run_program
from verification.history import History, Submitted
from verification.linearisability.check import check
from verification.linearisability.operations import Kind, Request
from verification.linearisability.recorded import check_recorded, operations_of, picture_of
from verification.linearisability.recorder import Recorder
from verification.program import Program, RequestSpec, Shape, draw_program
from verification.properties import queue_ordering
from verification.result import Verdict

TOKEN, FINISH, ERROR = EventKind.TOKEN, EventKind.FINISH, EventKind.ERROR


def event(slot: int, kind: int, index: int, reason: int = 0, generation: int = 1) -> dict[str, Any]:
    made = {
        "slot": slot,
        "generation": generation,
        "kind": kind,
        "index": index,
        "token": 5 * (kind == TOKEN),
        "reason": reason,
    }
    return made | {"logprob": -0.5}


def two() -> History:
    """Request 0 is cancelled after a token, then request 1 comes and is served."""
    spec = RequestSpec((1, 2), SamplingParams(2, ignore_eos=True))
    history = History(Program((spec, spec)), 1, [Submitted(0, 0, 1, 0), Submitted(1, 1, 1, 2)], {0}, complete=True)
    history.events = [
        event(0, TOKEN, 0), event(0, FINISH, 1, FinishReason.CANCELLED),
        event(1, TOKEN, 0), event(1, TOKEN, 1), event(1, FINISH, 2, FinishReason.LENGTH),
    ]  # fmt: skip
    history.calls = [("submit", 0), ("poll", 1), ("cancel", 0), ("submit", 1), ("poll", 4)]
    return history


def changed(change: Callable[[History], Any]) -> tuple[str, str]:
    history = two()
    change(history)
    result = check_recorded(history)
    assert result.clause == "linearisability"
    return result.verdict.value, str(result.witness.get("law", ""))


def reorder_events(history: History, *order: int) -> None:
    history.events = [history.events[i] for i in order]


def reorder_calls(history: History, *order: int) -> None:
    history.calls = [history.calls[i] for i in order]


def test_order_of_calls_is_judged() -> None:
    """Catches: calls that are not read, so that an effect may come before its cause; a cancel that took effect after
    what was submitted behind it; an order that is read where none was recorded."""
    assert changed(lambda h: None) == ("valid", "")
    assert changed(lambda h: reorder_events(h, 0, 2, 1, 3, 4)) == ("invalid", "V9")
    assert changed(lambda h: reorder_calls(h, 1, 0, 2, 3, 4)) == ("invalid", "V1")
    assert changed(lambda h: reorder_calls(h, 0, 1, 3, 4, 2)) == ("invalid", "V6")
    assert changed(lambda h: h.calls.clear()) == ("valid", "")

    def unordered_and_swapped(history: History) -> None:
        reorder_events(history, 0, 2, 1, 3, 4)
        history.calls.clear()

    assert changed(unordered_and_swapped) == ("valid", "")  # the cancel may have come late

    def unordered_and_endless(history: History) -> None:
        history.events.pop()
        history.calls.clear()

    assert changed(unordered_and_endless) == ("invalid", "V12")


def test_every_event_is_read() -> None:
    """Catches: a stranger's event, one of unknown kind or reason, or events that no poll accounts for, passed over; a
    missing end excused although the run was complete, or held against one that was not."""
    assert changed(lambda h: h.events.append(event(7, TOKEN, 0))) == ("invalid", "V1")
    assert changed(lambda h: h.events.append(event(1, TOKEN, 2))) == ("invalid", "V3")
    assert changed(lambda h: h.events.insert(0, event(0, 77, 0))) == ("invalid", "V10")
    assert changed(lambda h: h.events[4].update(reason=200)) == ("invalid", "V10")
    assert changed(lambda h: h.events.pop()) == ("invalid", "V12")

    def died(history: History) -> None:
        history.events.pop()
        history.complete = False

    assert changed(died) == ("valid", "")


def test_ends_that_were_asked_for_or_explained() -> None:
    """Catches: an end by deadline, stop id or the run's story refused, or allowed to a request that gives no reason."""
    history = two()
    history.events[4] = event(1, ERROR, 2, ErrorReason.LEASE_LOST)
    assert check_recorded(history).verdict is Verdict.INVALID
    assert check_recorded(history, [ErrorReason.LEASE_LOST]).verdict is Verdict.VALID
    history.events[3:] = [event(1, FINISH, 1, FinishReason.STOP_TOKEN)]
    assert check_recorded(history).verdict is Verdict.INVALID
    spec = RequestSpec((1, 2), SamplingParams(2, stop_token_ids=(5,), deadline_us=9))
    history.program = Program((spec, spec))
    assert check_recorded(history).verdict is Verdict.VALID
    history.events[3] = event(1, ERROR, 1, ErrorReason.DEADLINE)
    assert check_recorded(history).verdict is Verdict.VALID


def test_property_names_requests_of_the_program() -> None:
    """Catches: the clause left out of queue-ordering; a witness in numbers that only the checker knows."""
    history = two()
    reorder_events(history, 0, 2, 1, 3, 4)
    result = queue_ordering.check_history(history, eos_ids=[], max_len=64)
    assert (result.clause, result.verdict, result.witness["requests"]) == ("linearisability", Verdict.INVALID, [0, 1])
    again = History.from_json(json.loads(json.dumps(history.to_json())))
    assert again.calls == history.calls
    assert check_recorded(again).message == result.message.partition(" (")[0]
    del (old := history.to_json())["calls"]
    assert History.from_json(old).calls == []


def test_picture_of_a_run_fits() -> None:
    """Catches: a picture without the pages of the log, larger than it may be, or that garbage makes impossible."""
    run, engine = material.run(), material.engine()
    assert engine.state is not None
    whole = picture_of(run.history, engine.state.log, 1 << 20)
    assert whole is not None
    assert "invalid: V2" in whole
    small = picture_of(run.history, engine.state.log, 4000)
    assert small is not None
    assert len(small) <= 4000
    assert picture_of(run.history, None, 10) is None
    garbage = two()
    garbage.submitted.append(Submitted(1, 0, 1, 9))
    assert "svg" in (picture_of(garbage, None, 1 << 20) or "")


def test_real_runs() -> None:
    """Catches: a driver that does not record its calls; laws that the engine as it is does not follow."""
    shape = Shape(vocab=64, page_size=16, longest=60, requests=(6, 12), cancels=0.5)
    options = LocalOptions(engine={"slots": 4, "max_len": 64, "pages": 12, "max_rows": 4})
    with LocalRig(load_rig("local"), None, http=False, options=options) as rig:
        client = rig.ring(1)
        cancels = 0
        for seed in range(6):
            program = draw_program(random.Random(seed), shape)
            history = run_program(client, program, deadline_s=60.0)
            result = check_recorded(history)
            assert result.ok(), str(result)
            read = operations_of(history).operations
            kinds = [o.kind for o in read.operations]
            assert kinds.count(Kind.SUBMIT) == len(program.requests)
            assert kinds.count(Kind.CANCEL) == len(history.cancels)
            assert sum(number for call, number in history.calls if call == "poll") == len(history.events)
            assert [c for c in history.calls if c[0] == "submit"] == [("submit", s.request) for s in history.submitted]
            cancels += len(history.cancels)
        assert cancels > 0


def test_clients_that_overlap() -> None:
    """Catches: a recorder that loses calls or events, a ring client that mixes up the calls of its threads, an engine
    that answers late, twice or for another."""
    options = LocalOptions(engine={"slots": 6, "max_len": 64, "pages": 12, "max_rows": 4, "sq_entries": 32})
    with LocalRig(load_rig("local"), None, http=False, options=options) as rig:
        recorder = Recorder(rig.ring(1))
        polled = threading.Condition()
        deadline = time.monotonic() + 60.0

        def submit_and_cancel(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(12):
                length, most = rng.randint(1, 30), rng.randint(1, 20)
                params = SamplingParams(most, ignore_eos=True)
                while (number := recorder.submit([1] * length, params)) is None:
                    with polled:
                        polled.wait(1.0)
                    if time.monotonic() > deadline:
                        return
                if rng.random() < 0.6:
                    recorder.cancel(number)

        threads = [threading.Thread(target=submit_and_cancel, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        while time.monotonic() < deadline and (any(t.is_alive() for t in threads) or recorder.client.live):
            recorder.poll(0.05)
            with polled:
                polled.notify_all()
        for thread in threads:
            thread.join(5.0)
        recorder.quiet()
    history = recorder.history()
    found = check(history)
    assert found.verdict is Verdict.VALID, found.message
    ends = [o.reason for o in history.operations if o.kind in (Kind.FINISH, Kind.ERROR)]
    assert len(ends) == len(history.requests) == 48
    assert check(history.with_operations(o for o in history.operations if o.kind is not Kind.CANCEL)).law == (
        "V6" if "CANCELLED" in ends else ""
    )


class Broken:
    """A ring whose writes time out, or that is full."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def submit(self, prompt: object, params: object, *, tag: int = 0) -> Handle:
        raise self.error

    def cancel(self, handle: Handle) -> None:
        raise self.error


def test_what_is_not_known_is_recorded_so() -> None:
    """Catches: a call whose write timed out recorded as done or as undone; one that failed as unknown."""
    recorder = Recorder(cast(RingClient, Broken(TransportTimeout("no completion"))))
    recorder.handles.append(Handle(0, 1, 0))
    recorder.requests.append(Request(0, 1, 3))
    with pytest.raises(TransportTimeout):
        recorder.cancel(0)
    recorder.client = cast(RingClient, Broken(RingFull("no entry")))
    with pytest.raises(RingFull):
        recorder.cancel(0)
    assert recorder.submit([1], SamplingParams(1)) is None
    assert [(o.returned is None, o.failed) for o in recorder.history().operations] == [(True, False), (False, True)]


def test_benchmark_runs() -> None:
    """Catches: a benchmark that no longer runs, or whose histories are not what it says."""
    good, bad = benchmark.run(5)
    assert good.operations > 10
    assert bad.steps > 0


@pytest.mark.parametrize("at", range(5))
def test_no_event_may_come_twice(at: int) -> None:
    """Catches: a repetition of some kind of event that passes."""
    history = two()
    history.events.insert(at, dict(history.events[at]))
    assert check_recorded(history).verdict is Verdict.INVALID
