"""The scheduler in its own thread, real ring clients, no model: bursts, two rings, failing steps, stop and drain."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from blink_core.abi.config import EngineConfig
from blink_core.abi.dtypes import Array
from blink_core.abi.enums import Admission, EngineState, ErrorReason, EventKind, FinishReason, LogKind
from blink_core.abi.params import SamplingParams
from blink_core.frontend.ring_client import Handle, RingClient, RingFull
from blink_core.runtime.cpu import CpuRuntime, ModelStep, Plan, noop_step
from blink_core.transport.shm import Segment, ShmTransport
from hil_rigs.description import load_rig
from hil_rigs.engine_memory import StateSnapshot
from hil_rigs.local import LocalOptions, LocalRig
from verification.drivers.ring import run_program
from verification.program import Program, RequestSpec
from verification.properties.kv_conservation import check_log, check_snapshot
from verification.properties.queue_ordering import check_fifo
from verification.properties.service_order import check_service
from verification.result import Verdict

DEADLINE_S = 60.0
Key = tuple[int, int]


class Live:
    """An engine in this process: scheduler thread and model thread."""

    def __init__(self, step: ModelStep = noop_step, **fields: Any) -> None:
        sizes: dict[str, Any] = {"slots": 1024, "max_len": 64, "page_size": 4, "pages": 200, "max_rows": 16}
        self.config = EngineConfig(vocab=251, **(sizes | {"token_budget": 64} | fields))
        self.runtime = CpuRuntime(self.config, f"blink-test-{os.getpid()}-{secrets.token_hex(4)}")
        self.thread = threading.Thread(target=self.runtime.serve, args=(step,))
        self.thread.start()

    def ring(self, index: int = 0) -> RingClient:
        layouts = self.config.layouts()
        nbytes = layouts["Ring"].nbytes
        base = layouts["Control"].nbytes + index * nbytes
        client = RingClient(ShmTransport(Segment(self.runtime.segment.name), base, nbytes), self.config)
        client.attach(30.0)
        return client

    def lapses(self, index: int) -> int:
        """Leases of a ring that have lapsed, from its memory: no front end is asked."""
        layouts = self.config.layouts()
        base = layouts["Control"].nbytes + index * layouts["Ring"].nbytes
        return int(layouts["Ring"].view(self.runtime.segment.buffer, "gpu", base)["lapses"][0])

    def header(self, field: str) -> int:
        return int(self.config.layouts()["State"].view(self.runtime.state.buffer, "header")[field][0])

    def requests_live(self) -> int:
        return int(self.config.layouts()["State"].view(self.runtime.state.buffer, "header")["live"][0])

    def close(self) -> None:
        self.runtime.request_stop()
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()
        self.runtime.close()


@pytest.fixture
def live() -> Iterator[Callable[..., Live]]:
    made: list[Live] = []

    def build(*args: Any, **fields: Any) -> Live:
        made.append(Live(*args, **fields))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


def collect(client: RingClient, events: dict[Key, list[Any]], until: Callable[[], bool]) -> None:
    """Polls until `until`; events by (slot, generation)."""
    deadline = time.monotonic() + DEADLINE_S
    while not until():
        assert time.monotonic() < deadline, f"{client.live} requests live after {DEADLINE_S} s"
        for event in client.poll(0.1):
            events[int(event["slot"]), int(event["generation"])].append(event)


def burst(client: RingClient, count: int, tokens: int) -> dict[Key, list[Any]]:
    """Submits `count` requests as fast as the ring takes them; returns the events of each."""
    events: dict[Key, list[Any]] = defaultdict(list)
    handles: list[Handle] = []
    while len(handles) < count:
        try:
            handles.append(client.submit([1 + len(handles) % 200, 2, 3], SamplingParams(tokens)))
        except RingFull:
            seen = client.live
            collect(client, events, lambda seen=seen: client.live < seen)  # type: ignore[misc]
    collect(client, events, lambda: client.live == 0)
    assert {(h.slot, h.generation) for h in handles} == set(events)
    return events


def check_exactly_once(config: EngineConfig, ring: int, events: dict[Key, list[Any]], tokens: int) -> None:
    for (slot, generation), ours in events.items():
        request = ring * config.slots + slot
        expected = [(EventKind.TOKEN, i, (request * 31 + (3 + i) * 7) % 251) for i in range(tokens)]
        expected.append((EventKind.FINISH, tokens, 0))  # no token of a prompt so short is found
        assert [(int(e["kind"]), int(e["index"]), int(e["token"])) for e in ours] == expected, (slot, generation)
        assert int(ours[-1]["reason"]) == FinishReason.LENGTH


@pytest.mark.parametrize("slots", [1024, 64])
def test_burst_of_a_thousand(live: Callable[..., Live], slots: int) -> None:
    """Catches: requests lost, repeated or mixed up when they come faster than they are served."""
    engine = live(slots=slots)
    client = engine.ring()
    events = burst(client, 1000, 3)
    assert len(events) == 1000
    check_exactly_once(engine.config, 0, events, 3)
    assert engine.requests_live() == 0


def test_two_rings_at_once(live: Callable[..., Live]) -> None:
    """Catches: one ring's traffic that delays, loses or alters another's."""
    engine = live(rings=2, slots=64)
    clients = [engine.ring(i) for i in range(2)]
    results: dict[int, dict[Key, list[Any]]] = {}

    def work(ring: int) -> None:
        results[ring] = burst(clients[ring], 300, 5)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    for ring in range(2):
        check_exactly_once(engine.config, ring, results[ring], 5)


def test_submitter_and_poller_are_different_threads(live: Callable[..., Live]) -> None:
    """Catches: a ring client whose submitting and polling threads corrupt each other's reads."""
    engine = live(slots=256)
    client = engine.ring()
    events: dict[Key, list[Any]] = defaultdict(list)
    done = threading.Event()
    poller = threading.Thread(target=collect, args=(client, events, lambda: done.is_set() and client.live == 0))
    poller.start()
    made = 0
    while made < 600:
        try:
            client.submit([1, 2, 3], SamplingParams(2))
            made += 1
        except RingFull:
            assert poller.is_alive()
            time.sleep(0)
    done.set()
    poller.join(DEADLINE_S)
    assert len(events) == 600
    check_exactly_once(engine.config, 0, events, 2)


def test_failing_step(live: Callable[..., Live], caplog: pytest.LogCaptureFixture) -> None:
    """Catches: a model step that raises and ends the engine, or leaves its requests without an answer."""
    fail = threading.Event()

    def step(plan: Plan) -> None:
        if fail.is_set():
            fail.clear()
            raise RuntimeError("planted")
        noop_step(plan)

    engine = live(step)
    client = engine.ring()
    fail.set()
    client.submit([1, 2, 3], SamplingParams(4))
    events: dict[Key, list[Any]] = defaultdict(list)
    collect(client, events, lambda: client.live == 0)
    (only,) = events.values()
    assert [(int(e["kind"]), int(e["reason"])) for e in only] == [(EventKind.ERROR, ErrorReason.MODEL_ERROR)]
    assert "planted" in caplog.text
    check_exactly_once(engine.config, 0, burst(client, 20, 3), 3)
    assert engine.runtime.status("failures") == 1


def test_stop_answers_everybody(live: Callable[..., Live]) -> None:
    """Catches: a stop that leaves live or just submitted requests without a terminal event."""
    engine = live(slots=64)
    client = engine.ring()
    for _ in range(64):
        client.submit([1, 2, 3], SamplingParams(60))
    engine.runtime.request_stop()
    events: dict[Key, list[Any]] = defaultdict(list)
    collect(client, events, lambda: client.live == 0)
    last = {(int(ours[-1]["kind"]), int(ours[-1]["reason"])) for ours in events.values()}
    assert last <= {(EventKind.ERROR, ErrorReason.DRAINING), (EventKind.FINISH, FinishReason.LENGTH)}
    engine.thread.join(DEADLINE_S)
    assert engine.runtime.status("state") == EngineState.STOPPED


def test_step_that_outlasts_a_stop() -> None:
    """Catches: results of an unfinished step taken for tokens, or an engine that never stops because of it."""
    entered, leave = threading.Event(), threading.Event()

    def step(plan: Plan) -> None:
        noop_step(plan)  # results of the step before lie in the plan
        if plan.step > 2:
            entered.set()
            assert leave.wait(DEADLINE_S)

    config = EngineConfig(vocab=251, slots=16, max_len=64, pages=40, token_budget=64)
    runtime = CpuRuntime(config, f"blink-test-{os.getpid()}-{secrets.token_hex(4)}")
    runtime.scheduler.start(stop_grace_ms=1)

    def model() -> None:
        while (waiting := runtime.scheduler.wait_plan(100)) >= 0:
            if waiting:
                step(runtime.current_plan())
                runtime.scheduler.complete(0)

    thread = threading.Thread(target=model)
    thread.start()
    layouts = config.layouts()
    client = RingClient(
        ShmTransport(Segment(runtime.segment.name), layouts["Control"].nbytes, layouts["Ring"].nbytes), config
    )
    client.attach(30.0)
    client.submit([1, 2, 3], SamplingParams(40))
    assert entered.wait(DEADLINE_S)
    runtime.request_stop()
    events: dict[Key, list[Any]] = defaultdict(list)
    collect(client, events, lambda: client.live == 0)
    leave.set()
    thread.join(DEADLINE_S)
    runtime.close()
    (ours,) = events.values()
    kinds = [(int(e["kind"]), int(e["reason"])) for e in ours]
    assert kinds == [(EventKind.TOKEN, 0)] * 2 + [(EventKind.ERROR, ErrorReason.MODEL_ERROR)]


def test_drain_in_the_live_engine(live: Callable[..., Live]) -> None:
    """Catches: a drain that cuts live requests, or an engine that forgets to refuse new ones."""
    engine = live(slots=64)
    client = engine.ring()
    for _ in range(20):
        client.submit([1, 2, 3], SamplingParams(30))
    first: dict[Key, list[Any]] = defaultdict(list)
    collect(client, first, lambda: len(first) == 20)
    engine.runtime.request_drain()
    client.submit([9], SamplingParams(3))
    collect(client, first, lambda: client.live == 0)
    *reasons, last = (int(ours[-1]["reason"]) for ours in first.values())
    assert reasons == [FinishReason.LENGTH] * 20
    assert last in (FinishReason.LENGTH, ErrorReason.DRAINING)  # it may have been taken before the drain was seen
    client.submit([9], SamplingParams(3))
    late: dict[Key, list[Any]] = defaultdict(list)
    collect(client, late, lambda: client.live == 0)
    (only,) = late.values()
    assert [(int(e["kind"]), int(e["reason"])) for e in only] == [(EventKind.ERROR, ErrorReason.DRAINING)]
    assert client.engine_words()[1] in (EngineState.DRAINING, EngineState.DRAINED)


# ---- front ends that go away

LEASE_S = 2.0  # longer than a busy machine keeps a living front end from its next call
LATE_S = DEADLINE_S  # a look at the rings takes microseconds; the rest is for a machine with other work
LEASED = {"rings": 2, "slots": 16, "sq_entries": 64, "cq_entries": 64, "pages": 400, "lease_us": int(LEASE_S * 1e6)}


def traffic(client: RingClient, events: dict[Key, list[Any]], until: Callable[[], bool], tokens: int = 5) -> None:
    """Requests one after the other, each of which must be answered in full, until `until`; at least one."""
    while True:
        client.submit([1, 2, 3], SamplingParams(tokens))
        collect(client, events, lambda: client.live == 0)
        if until():
            return


def endings(events: dict[Key, list[Any]]) -> set[tuple[int, int]]:
    return {(int(ours[-1]["kind"]), int(ours[-1]["reason"])) for ours in events.values()}


def test_frozen_front_end_loses_its_lease(live: Callable[..., Live]) -> None:
    """Catches: a dead front end whose requests keep pages for ever, or take another ring's streams with them."""
    engine = live(**LEASED)
    alive, frozen = engine.ring(0), engine.ring(1)
    streams: dict[Key, list[Any]] = defaultdict(list)
    since = time.monotonic()
    for i in range(8):  # more tokens than the completion queue has credits for: they are alive as long as they may be
        frozen.submit([40 + i, 2, 3], SamplingParams(50))
    deadline = time.monotonic() + LEASE_S + LATE_S
    traffic(alive, streams, lambda: engine.lapses(1) > 0 or time.monotonic() > deadline)
    assert engine.lapses(1) == 1, f"no lapse within {LEASE_S + LATE_S} s"
    assert time.monotonic() - since >= LEASE_S
    assert engine.requests_live() == 0
    assert engine.header("free_pages") + engine.header("idle_cached") == engine.config.pages - 2
    check_exactly_once(engine.config, 0, streams, 5)
    assert engine.lapses(0) == 0
    # It was only frozen: it reads how its requests ended, and goes on.
    events: dict[Key, list[Any]] = defaultdict(list)
    collect(frozen, events, lambda: frozen.live == 0)
    assert len(events) == 8
    assert endings(events) == {(EventKind.ERROR, ErrorReason.LEASE_LOST)}
    for ours in events.values():
        assert [int(e["index"]) for e in ours] == list(range(len(ours)))
    check_exactly_once(engine.config, 1, burst(frozen, 20, 3), 3)


def test_lease_holds_while_a_front_end_waits(live: Callable[..., Live]) -> None:
    """Catches: a front end that only waits for a slow model, taken for dead."""
    leave = threading.Event()

    def step(plan: Plan) -> None:
        assert leave.wait(DEADLINE_S)
        noop_step(plan)

    engine = live(step, **LEASED)
    client = engine.ring(1)
    client.submit([1, 2, 3], SamplingParams(3))
    assert len(client.poll(2 * LEASE_S)) == 0
    leave.set()
    events: dict[Key, list[Any]] = defaultdict(list)
    collect(client, events, lambda: client.live == 0)
    check_exactly_once(engine.config, 1, events, 3)
    assert engine.lapses(1) == 0


def test_restarted_front_end_attaches_by_epoch(live: Callable[..., Live]) -> None:
    """Catches: a new front end that gets its predecessor's events, whose pages stay taken, or that disturbs a ring."""
    engine = live(**LEASED | {"lease_us": 0})
    other, killed = engine.ring(0), engine.ring(1)
    streams: dict[Key, list[Any]] = defaultdict(list)
    for i in range(8):
        killed.submit([40 + i, 2, 3], SamplingParams(50))
    seen: dict[Key, list[Any]] = defaultdict(list)
    collect(killed, seen, lambda: len(seen) > 0)  # they run
    made: list[RingClient] = []
    attaching = threading.Thread(target=lambda: made.append(engine.ring(1)))
    attaching.start()
    traffic(other, streams, lambda: not attaching.is_alive())
    attaching.join(DEADLINE_S)
    (restarted,) = made
    assert engine.requests_live() == 0
    assert engine.header("free_pages") + engine.header("idle_cached") == engine.config.pages - 2
    assert len(restarted.poll(0.0)) == 0
    results = burst(restarted, 40, 3)
    assert min(results) == (0, 1), "generations begin anew"
    check_exactly_once(engine.config, 1, results, 3)
    check_exactly_once(engine.config, 0, streams, 5)


# ---- raw memory of an engine process, at its step boundaries


@pytest.fixture(scope="module")
def rig() -> Iterator[LocalRig]:
    sizes = {"slots": 64, "pages": 60, "page_size": 4, "max_rows": 8, "token_budget": 32, "max_len": 64, "log_level": 2}
    with LocalRig(load_rig("local"), None, options=LocalOptions(engine=sizes)) as made:
        yield made


def test_snapshots_of_a_running_engine(rig: LocalRig) -> None:
    """Catches: pages lost or shared while requests come, end, are cancelled and preempted in another process."""
    client, rng = rig.ring(), np.random.default_rng(3)
    handles: list[Handle] = []
    snapshots: list[StateSnapshot] = []
    held_live = 0
    deadline = time.monotonic() + DEADLINE_S
    while len(snapshots) < 25 or held_live < 5:  # busy at some of the holds, or they show little
        assert time.monotonic() < deadline
        for _ in range(12):
            try:
                length, most = rng.integers(1, 40, 2).tolist()
                # Some begin alike; the others fill the pool with pages that nobody shares.
                prompt = [5] * length if most % 3 == 0 else rng.integers(0, 251, length).tolist()
                handles.append(client.submit(prompt, SamplingParams(most)))
            except RingFull:
                break
        client.cancel(handles[int(rng.integers(len(handles)))])
        with rig.memory.hold():
            snapshots.append(rig.memory.snapshot())
        held_live += int(snapshots[-1].header["live"]) > 0
        client.poll(0.0)
    collect(client, defaultdict(list), lambda: client.live == 0)
    with rig.memory.hold():
        snapshots.append(rig.memory.snapshot())
    for before, after in pairwise(snapshots):
        assert check_snapshot(after).ok(), check_snapshot(after)
        assert check_log(before, after).ok(), check_log(before, after)
    assert int(snapshots[-1].header["live"]) == 0
    last = snapshots[-1]
    assert len(last.free_list) + int(last.header["idle_cached"]) == rig.descriptor.config.pages - 2
    needed = {LogKind.PAGE_PUBLISH, LogKind.PAGE_SHARE, LogKind.PAGE_UNSHARE, LogKind.PAGE_EVICT, LogKind.PREEMPT}
    seen = {kind for s in snapshots for kind in s.log["kind"].tolist()}
    assert needed <= seen, f"too little happened to show anything: no {[k.name for k in needed - seen]}"


def test_description_reaches_the_engine() -> None:
    """Catches: a rule in a rig's description that its engine never hears of."""
    rules = {"prefix_cache": False, "admission": "reserve", "quantum": 7, "reservation_steps": 3, "lease_us": 900_000}
    description = load_rig("local")
    settings = description.engine.model_copy(update=rules | {"masks": 5})
    with LocalRig(description.model_copy(update={"engine": settings}), None) as made:
        config = made.descriptor.config
        assert {name: getattr(config, name) for name in rules} == rules | {"admission": Admission.RESERVE}
        assert config.masks == 5
        snapshot = made.memory.snapshot()
        assert (int(snapshot.header["idle_cached"]), snapshot.page_tokens.shape) == (0, (512, 16))


def test_log_overflow_is_a_counted_gap() -> None:
    """Catches: a log that was overwritten while nobody read it, taken for the whole story."""
    with LocalRig(load_rig("local"), None, options=LocalOptions(engine={"log_level": 2, "log_entries": 256})) as made:
        client = made.ring()
        with made.memory.hold():
            before = made.memory.snapshot(log_from=2**63)
        start = int(before.header["log_tail"])
        assert before.log_gap == 0
        program = Program(tuple(RequestSpec((1, 2, 3), SamplingParams(20)) for _ in range(20)))
        history = run_program(client, program)
        with made.memory.hold():
            after = made.memory.snapshot(log_from=start)
    assert len(after.log) == 256
    assert after.log_gap == int(after.header["log_tail"]) - start - 256 > 0
    assert check_snapshot(after).ok(), "what memory shows needs no log"
    told = [
        check_log(before, after),
        check_service(before, after, [history]),
        check_fifo(history, after.log, after.log_gap),
    ]
    for result in told:
        assert (result.verdict, result.witness) == (Verdict.UNKNOWN, {"gap": after.log_gap}), result


def test_engine_lives_while_it_is_held(rig: LocalRig) -> None:
    """Catches: a hold during which a ring's heartbeat stands still, so that its front end declares the engine dead."""
    client = rig.ring()
    with rig.memory.hold():
        beat = client.engine_words()[0]
        deadline = time.monotonic() + DEADLINE_S
        while client.engine_words()[0] == beat:
            assert time.monotonic() < deadline, "no heartbeat during a hold"


def test_hold_ends_and_the_engine_goes_on(rig: LocalRig) -> None:
    """Catches: a hold that is never released, or work that proceeds during it."""
    client = rig.ring()
    with rig.memory.hold():
        handle = client.submit([1, 2, 3], SamplingParams(5))
        before = rig.memory.snapshot()
        events: Array = client.poll(0.05)
        after = rig.memory.snapshot()
        assert len(events) == 0
        assert int(before.header["step"]) == int(after.header["step"])
    got: dict[Key, list[Any]] = defaultdict(list)
    collect(client, got, lambda: client.live == 0)
    assert len(got[handle.slot, handle.generation]) == 6
