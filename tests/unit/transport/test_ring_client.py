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
from blink_core.abi.dtypes import BIAS_PAIR, EVENT, SLOT, Array
from blink_core.abi.enums import ErrorReason, EventKind, FinishReason, Op, SlotFlag
from blink_core.abi.params import SamplingParams
from blink_core.frontend.engine_client import open_ring
from blink_core.frontend.ring_client import (
    Handle,
    ProtocolError,
    RingClient,
    RingFull,
    Superseded,
    decode_logprobs,
    sq_word,
)
from blink_core.runtime.cpu import CpuRuntime, noop_step
from blink_core.runtime.descriptor import EngineDescriptor, Memory, ModelInfo
from blink_core.transport.checksum import words_checksum
from blink_core.transport.interface import TransportError, TransportTimeout
from blink_core.transport.shm import Segment, ShmTransport


class Stepped:
    """An engine whose scheduler moves only when the test says so, and a client of its ring."""

    def __init__(self, **fields: Any) -> None:
        sizes: dict[str, Any] = {"slots": 4, "sq_entries": 16, "cq_entries": 32, "max_len": 32, "arena_tokens": 64}
        sizes |= {"pages": 66, "page_size": 4, "max_rows": 4, "token_budget": 64}
        self.config = EngineConfig(vocab=251, **(sizes | fields))
        self.now = 1  # microseconds, the scheduler's clock
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
            self.step()  # an epoch is acknowledged at a boundary: pages of a running step are not free before
        return epochs[0]

    def step(self) -> None:
        if self.runtime.scheduler.boundary(self.now):
            noop_step(self.runtime.current_plan())
        self.runtime.scheduler.poll(self.now)

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
    params = SamplingParams(
        5,
        0.5,
        0.25,
        2**64 - 1,
        2**32 - 1,
        (3, 4),
        ignore_eos=True,
        top_k=2**32 - 1,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=2.0,
        logit_bias=((250, -100.0), (0, 2.5)),
        min_tokens=4,
        logprobs=3,
        priority=2,
        deadline_us=2**63,
        prefix_cache=False,
    )
    handle = e.client.submit([7, 8, 9], params, tag=77)
    assert handle == Handle(0, 1, 0)
    slot = e.ring["slots"][0]
    assert int(e.ring["sq"][0]) == sq_word(0, Op.SUBMIT, 0, 1)
    expected = {
        "generation": 1,
        "prompt_len": 3,
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.25,
        "seed": 2**64 - 1,
        "choice": 2**32 - 1,
        "flags": SlotFlag.IGNORE_EOS | SlotFlag.NO_PREFIX_CACHE,
        "n_stop": 2,
        "priority": 2,
        "deadline_us": 2**63,
        "tag": 77,
        "top_k": 2**32 - 1,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 2.0,
        "min_tokens": 4,
        "n_bias": 2,
        "logprobs": 3,
        "mask_box": 0,
    }
    assert {name: slot[name].item() for name in expected} == expected
    assert {*expected, "stop_ids", "prompt_offset", "prompt_checksum", "checksum"} == set(SLOT.names or ())
    assert slot["stop_ids"].tolist() == [3, 4, 0, 0, 0, 0, 0, 0]
    start = int(slot["prompt_offset"])
    payload = e.ring["arena"][start : start + 7]
    assert payload[:3].tolist() == [7, 8, 9]
    assert payload[3:].view(BIAS_PAIR).tolist() == [(250, -100.0), (0, 2.5)]
    assert int(slot["prompt_checksum"]) == words_checksum(payload)
    assert ends(e.finish()) == [(EventKind.FINISH, FinishReason.LENGTH)]


def test_defaults_change_nothing(make: Callable[..., Stepped]) -> None:
    """Catches: a default that bars, biases or hurries a request that asked for none of it."""
    e = make()
    e.client.submit([7], SamplingParams(1))
    slot = e.ring["slots"][0]
    names = ("top_k", "min_p", "presence_penalty", "frequency_penalty", "min_tokens", "n_bias", "logprobs")
    assert [slot[n].item() for n in (*names, "priority", "deadline_us", "flags", "n_stop", "temperature")] == [0] * 12
    assert (slot["repetition_penalty"].item(), slot["top_p"].item()) == (1.0, 1.0)
    e.finish()


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
        ([1], {"top_k": -1}, "top_k is -1, must be from 0 to 4294967295"),
        ([1], {"min_tokens": 2**32}, "min_tokens is 4294967296"),
        ([1], {"logprobs": -1}, "logprobs is -1"),
        ([1], {"priority": -1}, "priority is -1"),
        ([1], {"deadline_us": 2**64}, "deadline_us is 18446744073709551616"),
        ([1], {"logit_bias": ((-(2**31) - 1, 1.0),)}, "logit-bias token id -2147483649 is beyond 32 bits"),
        ([1], {"logit_bias": ((5, 1.0), (6, 1.0), (5, 1.0))}, "logit bias names token id 5 twice"),
        ([1], {"mask_box": 0}, "mask_box is 0, the engine has 0 mailboxes"),
        ([1] * 63, {"logit_bias": ((5, 1.0),)}, "of 65 words are larger than the arena of 64"),
        ([1] * 65, {}, "prompt and logit bias of 65 words are larger than the arena of 64"),
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


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": 1e300},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("inf")},
        {"frequency_penalty": 1e39},
        {"logit_bias": ((5, 1e39),)},
        {"min_tokens": 5},
        {"logprobs": 21},
        {"priority": 4},
    ],
)
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
    e.runtime.scheduler.poll(e.now)
    assert int(e.ring["gpu"]["sq_head"][0]) == 8
    events = e.finish()
    assert ends(events) == [(EventKind.FINISH, FinishReason.CANCELLED)] * 4
    e.client.cancel(made[0])  # over: nothing is published
    assert e.runtime.scheduler.poll(e.now) == 0


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
            e.runtime.scheduler.poll(e.now)
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
    e.runtime.scheduler.poll(e.now)
    e.now += e.config.visibility_us
    assert ends(e.finish()) == [(EventKind.ERROR, ErrorReason.CHECKSUM)]


# ---- alternatives, masks, leases


@pytest.mark.parametrize("wanted", [0, 1, 2, 5, 20])
def test_alternatives_come_before_their_token(make: Callable[..., Stepped], wanted: int) -> None:
    """Catches: pairs read from the fields of another event, in another order, or given to another token."""
    e = make(cq_entries=64)
    e.client.submit([1, 2], SamplingParams(2, logprobs=wanted))
    events = [e.client.poll(0.0)]
    for _ in range(6):
        if e.runtime.scheduler.boundary(e.now):
            plan = e.runtime.current_plan()
            noop_step(plan)
            plan.top_tokens[:] = np.arange(20) + 100
            plan.top_logprobs[:] = -np.arange(20) / 4
        e.runtime.scheduler.poll(e.now)
        events.append(e.client.poll(0.0))
    found = np.concatenate(events)
    kinds = found["kind"].tolist()
    each = -(-wanted // 2)
    assert kinds == [*[EventKind.LOGPROBS] * each, EventKind.TOKEN] * 2 + [EventKind.FINISH]
    pairs = [
        pair
        for event in decode_logprobs(found[:each])
        for pair in zip(event["tokens"][: event["count"]], event["logprobs"], strict=False)
    ]
    assert pairs == [(100 + i, -i / 4) for i in range(wanted)]


def bits_of(config: EngineConfig, *ids: int) -> Array:
    words = np.zeros(config.mask_words, np.uint32)
    for token in ids:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


def test_masks_reach_the_row(make: Callable[..., Stepped]) -> None:
    """Catches: a mask for another index, row or request, a token planned without its mask, a mailbox never freed."""
    e = make(masks=2)
    handles = [e.client.submit([1, 2], SamplingParams(2), masked=True) for _ in range(2)]
    assert [handle.mask_box for handle in handles] == [0, 1]
    with pytest.raises(RingFull, match="all 2 mask mailboxes are in use"):
        e.client.submit([1], SamplingParams(2), masked=True)
    with pytest.raises(RingFull, match="mask mailbox 1 is in use"):
        e.client.submit([1], SamplingParams(2, mask_box=1))
    assert e.client.live == 2
    for _ in range(5):
        e.step()
    assert len(e.client.poll(0.0)) == 0
    seen: dict[int, list[int]] = {}
    for index in range(2):
        for request in (1, 0):
            assert e.client.post_mask(handles[request], index, bits_of(e.config, 10 * request + index, 250))
        for _ in range(3):
            e.runtime.scheduler.poll(e.now)
            if e.runtime.scheduler.boundary(e.now):
                plan = e.runtime.current_plan()
                noop_step(plan)
                for row, mask in zip(plan.rows, plan.masks, strict=True):
                    if row["sample"]:
                        assert row["masked"] == 1
                        words = bits_of(e.config, 10 * int(row["slot"]) + int(row["emitted"]), 250)
                        assert mask.tolist() == words.tolist()
                        seen.setdefault(int(row["slot"]), []).append(int(row["emitted"]))
        if index == 0:
            assert e.client.poll(0.0)["kind"].tolist() == [EventKind.TOKEN] * 2
    assert seen == {0: [0, 1], 1: [0, 1]}
    e.finish()
    assert not e.client.post_mask(handles[0], 2, bits_of(e.config))
    again = e.client.submit([1], SamplingParams(1), masked=True)
    assert again.mask_box is not None
    e.client.cancel(again)
    e.finish()


def test_masks_are_checked(make: Callable[..., Stepped]) -> None:
    """Catches: a mask of another size or for a request without masks written into somebody's mailbox."""
    e = make(masks=1)
    plain = e.client.submit([1], SamplingParams(1))
    with pytest.raises(ValueError, match="slot 0 was submitted without masks"):
        e.client.post_mask(plain, 0, bits_of(e.config))
    masked = e.client.submit([1], SamplingParams(1), masked=True)
    with pytest.raises(ValueError, match=r"must be uint32 \[8\]"):
        e.client.post_mask(masked, 0, np.zeros(7, np.uint32))
    with pytest.raises(ValueError, match="output index is -1"):
        e.client.post_mask(masked, -1, bits_of(e.config))
    e.client.cancel(masked)
    e.finish()
    none = make()
    with pytest.raises(ValueError, match="no mask mailboxes"):
        none.client.submit([1], SamplingParams(1), masked=True)


def test_attach_clears_mailboxes(make: Callable[..., Stepped]) -> None:
    """Catches: a mask of the old epoch taken for the first token of a new request with the same generation."""
    e = make(masks=1)
    handle = e.client.submit([1], SamplingParams(1), masked=True)
    e.client.post_mask(handle, 0, bits_of(e.config, 3))
    assert int(e.ring["mask_boxes"]["ready"][0]) == 1 << 40 | 1
    e.attach(e.client)
    assert int(e.ring["mask_boxes"]["ready"][0]) == 0
    assert e.client.submit([1], SamplingParams(1), masked=True) == Handle(0, 1, 0, 0)
    for _ in range(4):
        e.step()
    assert len(e.client.poll(0.0)) == 0


def lease(e: Stepped) -> int:
    return int(e.ring["front_end"]["lease"][0])


def test_lease_grows_with_use_but_not_with_every_use(
    make: Callable[..., Stepped], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a lease that a living front end lets lapse, or a write over the wire for every poll."""
    e = make(lease_us=10_000_000)
    clock = [1000.0]
    monkeypatch.setattr("blink_core.frontend.ring_client.time.monotonic", lambda: clock[0])
    e.client.renew_lease()
    first = lease(e)
    for _ in range(5):
        e.client.poll(0.0)
        handle = e.client.submit([1], SamplingParams(1))
        e.finish()
    assert lease(e) == first
    uses: list[Callable[[], object]] = [
        lambda: e.client.poll(0.0),
        lambda: e.client.submit([1], SamplingParams(1)),
        lambda: e.client.cancel(handle),
    ]
    for n, use in enumerate(uses, start=1):
        clock[0] += 1.0  # a tenth of the lease
        use()
        assert lease(e) == first + n
        e.finish()
    e.client.renew_lease()
    assert lease(e) == first + 4


def test_lease_is_kept_while_poll_waits(make: Callable[..., Stepped]) -> None:
    """Catches: a front end that waits for events and is taken for dead meanwhile."""
    e = make(lease_us=100_000)
    first = lease(e)
    e.client.poll(0.1)
    assert lease(e) >= first + 3


def test_lapsed_lease_ends_requests_and_the_client_goes_on(make: Callable[..., Stepped]) -> None:
    """Catches: requests of a dead front end that keep their slots, or one that was only frozen shut out for good."""
    e = make(lease_us=1000)
    e.client.submit([1, 2], SamplingParams(9))
    e.step()
    e.now += 2000
    e.runtime.scheduler.poll(e.now)
    assert ends(e.finish()) == [(EventKind.ERROR, ErrorReason.LEASE_LOST)]
    e.client.renew_lease()
    e.client.submit([1, 2], SamplingParams(2))
    assert ends(e.finish()) == [(EventKind.FINISH, FinishReason.LENGTH)]


def test_restarted_front_end_takes_over(make: Callable[..., Stepped]) -> None:
    """Catches: a second front end with the epoch of the first, a lease that stands still across the restart, or
    requests of the dead one that stay alive."""
    e = make()
    e.client.submit([1, 2], SamplingParams(9))
    e.step()
    before = lease(e)
    e.client = e.connect()  # a new process: nothing is known but what shared memory says
    assert e.attach(e.client) == 2
    assert lease(e) > before
    assert [e.client.submit([1, 2], SamplingParams(2)) for _ in range(4)] == [Handle(i, 1, i) for i in range(4)]
    assert ends(e.finish()) == [(EventKind.FINISH, FinishReason.LENGTH)] * 4


# ---- another front end on the ring


def use(client: RingClient, operation: str, handle: Handle) -> None:
    """One operation that writes to the ring, or that takes events from it."""
    match operation:
        case "poll":
            client.poll(0.0)
        case "submit":
            client.submit([1, 2], SamplingParams(2))
        case "cancel":
            client.cancel(handle)
        case "publish_entries":
            client.publish_entries([(Op.CANCEL, handle.slot, handle.generation)])
        case "post_mask":
            client.post_mask(handle, 0, bits_of(client.config, 1))
        case "release_credits":
            client.release_credits()
        case "renew_lease":
            client.renew_lease()


OPERATIONS = ["poll", "submit", "cancel", "publish_entries", "post_mask", "release_credits", "renew_lease"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_superseded_client_writes_nothing(make: Callable[..., Stepped], operation: str) -> None:
    """Catches: a front end that was frozen while another attached and goes on to write the queue, slots, masks, lease
    or credits of the new epoch, or takes its events."""
    e = make(masks=2, lease_us=10**9)
    old = e.client
    handle = old.submit([1, 2], SamplingParams(9), masked=True)
    e.client = e.connect()
    assert e.attach(e.client) == 2
    e.client.submit([3, 4], SamplingParams(2))
    for _ in range(4):
        e.step()  # as many events as the old client would take for its own
    assert int(e.ring["gpu"]["cq_tail"][0]) > 0
    sections = ("front_end", "sq", "slots", "arena", "mask_boxes", "mask_bits")
    before = {name: e.ring[name].tobytes() for name in sections}
    for _ in range(2):
        with pytest.raises(Superseded, match="superseded by epoch 2.*this one had 1"):
            use(old, operation, handle)
    assert {name: e.ring[name].tobytes() for name in sections} == before
    assert ends(e.finish()) == [(EventKind.FINISH, FinishReason.LENGTH)]


def test_superseded_while_it_waits(make: Callable[..., Stepped]) -> None:
    """Catches: an epoch looked at only before the wait for events, so that a client frozen in it takes the new epoch's
    events and writes its credits."""
    e = make()

    class Frozen(ShmTransport):
        during: Callable[[], None] | None = None

        def wait_word(self, offset: int, old: int, timeout: float) -> int:
            if self.during is not None:
                self.during()
            return super().wait_word(offset, old, timeout)

    old = e.connect(Frozen)
    e.attach(old)

    def taken() -> None:
        e.client = e.connect()
        e.attach(e.client)
        e.client.submit([3, 4], SamplingParams(2))
        for _ in range(4):
            e.step()

    old._transport.during = taken  # type: ignore[attr-defined]
    with pytest.raises(Superseded, match="superseded by epoch 3"):
        old.poll(0.0)
    assert int(e.ring["front_end"]["cq_head"][0]) == 0
    assert ends(e.finish()) == [(EventKind.FINISH, FinishReason.LENGTH)]


def test_epoch_is_taken_back_by_attaching(make: Callable[..., Stepped]) -> None:
    """Catches: a superseded client that stays so after it attached again, or a check that fails the one on the ring."""
    e = make()
    other = e.connect()
    e.attach(other)
    with pytest.raises(Superseded):
        e.client.poll(0.0)
    assert e.attach(e.client) == 3
    e.client.submit([1, 2], SamplingParams(2))
    assert ends(e.finish()) == [(EventKind.FINISH, FinishReason.LENGTH)]
    with pytest.raises(Superseded, match="epoch 3"):
        other.poll(0.0)
