"""The ring client against a scheduler that the test steps by hand: what it publishes, refuses and notices."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from blink_core.abi.config import EngineConfig
from blink_core.abi.dtypes import EVENT, SLOT, Array
from blink_core.abi.enums import ErrorReason, EventKind, FinishReason, Op
from blink_core.abi.params import SamplingParams
from blink_core.frontend.engine_client import open_ring
from blink_core.frontend.ring_client import Handle, ProtocolError, RingClient, RingFull, sq_word
from blink_core.runtime.cpu import CpuRuntime, noop_step
from blink_core.runtime.descriptor import EngineDescriptor, Memory, ModelInfo
from blink_core.transport.interface import TransportError, TransportTimeout
from blink_core.transport.shm import Segment, ShmTransport


class Stepped:
    """An engine whose scheduler moves only when the test says so, and a client of its ring."""

    def __init__(self, **fields: Any) -> None:
        sizes: dict[str, Any] = {"slots": 4, "sq_entries": 16, "cq_entries": 32, "max_len": 32, "arena_tokens": 64}
        sizes |= {"pages": 66, "page_size": 4, "max_rows": 4, "token_budget": 64}
        self.config = EngineConfig(vocab=251, **(sizes | fields))
        self.runtime = CpuRuntime(self.config, f"blink-test-{os.getpid()}-{secrets.token_hex(4)}")
        self.layout = self.config.layouts()["Ring"]
        self.base = self.config.layouts()["Control"].nbytes
        self.ring = self.layout.views(self.runtime.segment.buffer, self.base)
        self.client = self.connect()
        self.attach(self.client)

    def connect(self, transport: type[ShmTransport] = ShmTransport) -> RingClient:
        return RingClient(transport(Segment(self.runtime.segment.name), self.base, self.layout.nbytes), self.config)

    def attach(self, client: RingClient) -> int:
        epochs: list[int] = []
        thread = threading.Thread(target=lambda: epochs.append(client.attach(30.0)))
        thread.start()
        while thread.is_alive():
            self.runtime.scheduler.poll()
        return epochs[0]

    def step(self) -> None:
        if self.runtime.scheduler.boundary():
            noop_step(self.runtime.current_plan())
        self.runtime.scheduler.poll()

    def finish(self) -> Array:
        """Steps until nothing lives; returns all events."""
        events = [np.zeros(0, EVENT)]
        for _ in range(500):
            self.step()
            events.append(self.client.poll(0.0))
            if not self.client.live:
                return np.concatenate(events)
        raise AssertionError(f"{self.client.live} requests live after 500 steps")


@pytest.fixture
def make() -> Iterator[Callable[..., Stepped]]:
    made: list[Stepped] = []

    def build(**fields: Any) -> Stepped:
        made.append(Stepped(**fields))
        return made[-1]

    yield build
    for engine in made:
        engine.runtime.close()


def ends(events: Array) -> list[tuple[int, int]]:
    return [(int(e["kind"]), int(e["reason"])) for e in events if e["kind"] >= EventKind.FINISH]


def test_descriptor_on_the_wire(make: Callable[..., Stepped]) -> None:
    """Catches: a parameter written to another field, or a prompt that does not lie where the descriptor says."""
    e = make()
    params = SamplingParams(5, 0.5, 0.25, 2**64 - 1, 2**32 - 1, (3, 4), ignore_eos=True)
    handle = e.client.submit([7, 8, 9], params, tag=77)
    assert handle == Handle(0, 1, 0)
    slot = e.ring["slots"][0]
    assert int(e.ring["sq"][0]) == sq_word(0, Op.SUBMIT, 0, 1)
    names = (
        "generation",
        "prompt_len",
        "max_tokens",
        "temperature",
        "top_p",
        "seed",
        "choice",
        "flags",
        "n_stop",
        "tag",
    )
    assert [slot[n].item() for n in names] == [1, 3, 5, 0.5, 0.25, 2**64 - 1, 2**32 - 1, 1, 2, 77]
    assert slot["stop_ids"].tolist() == [3, 4, 0, 0, 0, 0, 0, 0]
    start = int(slot["prompt_offset"])
    assert e.ring["arena"][start : start + 3].tolist() == [7, 8, 9]
    assert ends(e.finish()) == [(EventKind.FINISH, FinishReason.LENGTH)]


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([[1]], {}, r"prompt has shape \(1, 1\)"),
        ([2**31], {}, "beyond 32 bits"),
        ([2**70], {}, "beyond 64 bits"),
        ([1], {"max_tokens": -1}, "max_tokens is -1, must be from 0 to 4294967295"),
        ([1], {"max_tokens": 2**32}, "max_tokens is 4294967296"),
        ([1], {"seed": 2**64}, "seed is 18446744073709551616"),
        ([1], {"choice": -5}, "choice is -5"),
        ([1], {"stop_token_ids": tuple(range(9))}, "9 stop token ids, at most 8"),
        ([1], {"stop_token_ids": (2**31,)}, "stop token id 2147483648 is beyond 32 bits"),
        ([1] * 65, {}, "prompt of 65 tokens is larger than the arena of 64"),
    ],
)
def test_values_that_no_descriptor_holds(
    make: Callable[..., Stepped], prompt: list[Any], fields: dict[str, Any], message: str
) -> None:
    """Catches: a value cut to fit its field, or a refused submission that leaves a slot or an entry taken."""
    e = make()
    with pytest.raises(ValueError, match=message):
        e.client.submit(prompt, SamplingParams(**({"max_tokens": 4} | fields)))
    assert e.client.live == 0
    assert e.client.submit([1], SamplingParams(2)) == Handle(0, 1, 0)
    e.finish()


@pytest.mark.parametrize("bad", [{"temperature": 1e300}, {"temperature": float("nan")}, {"top_p": 0.0}])
def test_the_engine_judges_the_rest(make: Callable[..., Stepped], bad: dict[str, Any]) -> None:
    """Catches: a sampling parameter out of range that raises in the client, or that runs."""
    e = make()
    e.client.submit([1], SamplingParams(**({"max_tokens": 4} | bad)))
    assert ends(e.finish()) == [(EventKind.ERROR, ErrorReason.BAD_PARAM)]


def test_slots_run_out(make: Callable[..., Stepped]) -> None:
    """Catches: a live slot given to a second request, or a slot that is not given back after its terminal event."""
    e = make()
    made = [e.client.submit([1, 2], SamplingParams(2)) for _ in range(4)]
    with pytest.raises(RingFull, match="all 4 slots are in use"):
        e.client.submit([1], SamplingParams(2))
    assert e.client.live == 4
    assert len(ends(e.finish())) == 4
    again = [e.client.submit([1, 2], SamplingParams(2)) for _ in range(4)]
    assert sorted(h.slot for h in again) == sorted(h.slot for h in made)
    assert {h.generation for h in again} == {2}
    e.finish()


def test_queue_keeps_room_for_cancels(make: Callable[..., Stepped]) -> None:
    """Catches: a queue filled with submissions, so that no cancel finds an entry; a cancel sent twice."""
    e = make(slots=4, sq_entries=8)
    made = [e.client.submit([1, 2], SamplingParams(9)) for _ in range(4)]
    for handle in made:
        for _ in range(3):
            e.client.cancel(handle)
    e.runtime.scheduler.poll()
    assert int(e.ring["gpu"]["sq_head"][0]) == 8
    events = e.finish()
    assert ends(events) == [(EventKind.FINISH, FinishReason.CANCELLED)] * 4
    e.client.cancel(made[0])  # over: nothing is published
    assert e.runtime.scheduler.poll() == 0


def test_arena_is_a_circular_buffer(make: Callable[..., Stepped]) -> None:
    """Catches: a prompt written over one that the engine has not copied yet, at every alignment of the wrap."""
    e = make(slots=4, sq_entries=64, arena_tokens=37)
    rng = np.random.default_rng(5)
    expected: dict[tuple[int, int], list[int]] = {}
    refused = 0
    state = e.config.layouts()["State"].views(e.runtime.state.buffer)
    tokens = state["tokens"].reshape(-1, e.config.max_len)
    for _ in range(300):
        prompt = rng.integers(0, 251, int(rng.integers(1, 24))).tolist()
        try:
            handle = e.client.submit(prompt, SamplingParams(1))
            expected[handle.slot, handle.generation] = prompt
        except RingFull:
            refused += 1
        if rng.random() < 0.5:
            e.runtime.scheduler.poll()
            for (slot, generation), sent in list(expected.items()):
                if int(state["requests"]["generation"][slot]) == generation:
                    assert tokens[slot, : len(sent)].tolist() == sent
                    del expected[slot, generation]
            e.finish()
    assert refused > 10, "the arena was never full"


def test_failed_write_takes_nothing(make: Callable[..., Stepped]) -> None:
    """Catches: K03, a slot, entry or extent that stays taken when the transport fails half way."""
    e = make()

    class Failing(ShmTransport):
        left = 10**9

        def post_write(self, offset: int, data: Any) -> int:
            if self.left == 0:
                raise TransportError("cut")
            self.left -= 1
            return super().post_write(offset, data)

    e.client = e.connect(Failing)
    assert e.attach(e.client) == 2
    for use in range(3):  # prompt, descriptor, entry
        for _ in range(20):
            e.client._transport.left = use  # type: ignore[attr-defined]
            with pytest.raises(TransportError, match="cut"):
                e.client.submit([1, 2, 3], SamplingParams(2))
    e.client._transport.left = 10**9  # type: ignore[attr-defined]
    assert e.client.live == 0
    made = [e.client.submit([1, 2, 3], SamplingParams(2)) for _ in range(4)]
    assert made == [Handle(i, 1, i) for i in range(4)]
    assert ends(e.finish()) == [(EventKind.FINISH, FinishReason.LENGTH)] * 4


class Late(ShmTransport):
    """Writes are posted; their completions are awaited as a NIC's are, and may fail or not come."""

    broken: type[TransportError] | None = None
    posted = 0
    awaited = 0

    def post_write(self, offset: int, data: Any) -> int:
        self.posted = super().post_write(offset, data)
        return self.posted

    def wait(self, work: int, deadline: float) -> bytes:
        if self.broken is not None and work == self.posted:
            raise self.broken(f"work {work}")
        self.awaited = max(self.awaited, work)
        return super().wait(work, deadline)


@pytest.mark.parametrize("error", [TransportError, TransportTimeout])
def test_completion_of_each_submission_is_awaited(make: Callable[..., Stepped], error: type[TransportError]) -> None:
    """Catches: a write that failed after it was posted taken for an accepted request or cancel, and a slot that is
    given to a second request although the engine may have the first."""
    e = make()
    e.client = e.connect(Late)
    e.attach(e.client)
    transport = e.client._transport
    assert isinstance(transport, Late)
    assert transport.awaited >= transport.posted
    handle = e.client.submit([1, 2], SamplingParams(2))
    assert transport.awaited >= transport.posted
    e.client.cancel(handle)
    assert transport.awaited >= transport.posted
    other = e.client.submit([1, 2], SamplingParams(3))
    transport.broken = error
    with pytest.raises(error, match="work"):
        e.client.submit([1, 2], SamplingParams(2))
    with pytest.raises(error, match="work"):
        e.client.cancel(other)
    transport.broken = None
    assert e.client.live == 3  # the one in doubt keeps its slot
    assert e.client.submit([1, 2], SamplingParams(2)).slot == 3
    assert len(ends(e.finish())) == 4  # the engine had it: here the writes themselves came through
    assert e.client.live == 0


def test_descriptor_of_another_engine(make: Callable[..., Stepped]) -> None:
    """Catches: a client that lays out a ring by a configuration which the segment's engine does not have."""
    e = make()
    model = ModelInfo("noop", "", 251, 32, (), None)
    true = EngineDescriptor(1, e.runtime.segment.name, e.config, model, Memory(0, 0), Memory(0, 0), None, None)
    assert open_ring(true, 0).config == e.config
    with pytest.raises(ProtocolError, match="slots=4.*the descriptor says.*slots=2"):
        open_ring(replace(true, config=replace(e.config, slots=2)), 0)
    e.runtime.segment.buffer[0] = 0
    with pytest.raises(ProtocolError, match="not a Blink engine"):
        open_ring(true, 0)


def test_events_out_of_sequence(make: Callable[..., Stepped]) -> None:
    """Catches: a stale, missing or foreign event taken for the next one."""
    e = make()
    e.client.submit([1, 2], SamplingParams(2))
    for _ in range(4):
        e.step()
    e.ring["cq"]["seq"][1] = 9
    with pytest.raises(ProtocolError, match="event 2 carries sequence number 9"):
        e.client.poll(0.0)


@pytest.mark.parametrize("tail", [33, 2**40])
def test_tail_that_cannot_be(make: Callable[..., Stepped], tail: int) -> None:
    """Catches: a completion tail beyond the queue that makes the client read entries twice or out of the ring."""
    e = make()
    e.ring["gpu"]["cq_tail"] = tail
    with pytest.raises(ProtocolError, match=f"completion tail {tail} is not within 32"):
        e.client.poll(0.0)


def test_attach_needs_an_engine(make: Callable[..., Stepped]) -> None:
    """Catches: a front end that waits for ever for an engine that does not answer."""
    e = make()
    with pytest.raises(TransportTimeout, match="did not acknowledge epoch 2 within 0.01 s"):
        e.client.attach(0.01)


def test_client_attaches_again(make: Callable[..., Stepped]) -> None:
    """Catches: indices, slots or generations of the old epoch that a client carries into the new one."""
    e = make()
    e.client.submit([1, 2], SamplingParams(9))
    e.step()
    e.step()
    assert e.attach(e.client) == 2
    assert e.client.live == 0
    assert [e.client.submit([1, 2], SamplingParams(2)) for _ in range(4)] == [Handle(i, 1, i) for i in range(4)]
    assert ends(e.finish()) == [(EventKind.FINISH, FinishReason.LENGTH)] * 4
    assert int(e.config.layouts()["State"].view(e.runtime.state.buffer, "rings")["bad_heads"][0]) == 0


def test_credits_can_be_kept_back(make: Callable[..., Stepped]) -> None:
    """Catches: `consume=False` that returns credits all the same, or events that are lost when they come back."""
    e = make(slots=2, cq_entries=8, max_rows=2, token_budget=8)
    e.client.submit([1, 2], SamplingParams(20))
    got = []
    for _ in range(20):
        e.step()
        got.append(e.client.poll(0.0, consume=False))
    assert int(e.ring["front_end"]["cq_head"][0]) == 0
    assert sum(map(len, got)) == 8 - 2
    e.client.release_credits()
    got.append(e.finish())
    assert np.concatenate(got)["index"].tolist() == [*range(20), 20]


def test_ring_smaller_than_its_layout(make: Callable[..., Stepped]) -> None:
    """Catches: a client of another configuration that writes beyond the ring."""
    e = make()
    small = ShmTransport(Segment(e.runtime.segment.name), e.base, e.layout.nbytes - 64)
    with pytest.raises(ProtocolError, match="its layout needs"):
        RingClient(small, e.config)


def test_prepared_descriptor_is_published_as_it_is(make: Callable[..., Stepped]) -> None:
    """Catches: `submit_slot` mending the malformed descriptors that verification publishes."""
    e = make()
    slot = np.zeros(1, SLOT)
    slot["prompt_len"], slot["max_tokens"], slot["top_p"], slot["checksum"] = 2, 2, 1.0, 123
    e.client.submit_slot(slot, np.array([1, 2], "<i4"), seal=False)
    assert int(e.ring["slots"]["checksum"][0]) == 123
    for _ in range(e.config.visibility_polls):
        e.runtime.scheduler.poll()
    assert ends(e.finish()) == [(EventKind.ERROR, ErrorReason.CHECKSUM)]
