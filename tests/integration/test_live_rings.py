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
from blink_core.abi.enums import EngineState, ErrorReason, EventKind, FinishReason
from blink_core.abi.params import SamplingParams
from blink_core.frontend.ring_client import Handle, RingClient, RingFull
from blink_core.runtime.cpu import CpuRuntime, ModelStep, Plan, noop_step
from blink_core.transport.shm import Segment, ShmTransport
from hil_rigs.description import load_rig
from hil_rigs.engine_memory import StateSnapshot
from hil_rigs.local import LocalOptions, LocalRig
from verification.properties.kv_conservation import check_log, check_snapshot

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
        expected.append((EventKind.FINISH, tokens, -1))
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
                handles.append(client.submit([5] * length, SamplingParams(most)))
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
    assert len(snapshots[-1].free_list) == rig.descriptor.config.pages - 2


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
