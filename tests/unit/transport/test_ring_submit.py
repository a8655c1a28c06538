"""The ring client publishes: descriptors on the wire, what is refused, what runs out, and what did not arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from blink_core.abi.dtypes import BIAS_PAIR, SLOT
from blink_core.abi.enums import ErrorReason, EventKind, FinishReason, Op, SlotFlag
from blink_core.abi.params import SamplingParams
from blink_core.frontend.ring_client import (
    Handle,
    RingFull,
    sq_word,
)
from blink_core.transport.checksum import words_checksum
from blink_core.transport.interface import TransportError, TransportTimeout
from blink_core.transport.shm import ShmTransport
from tests.unit.transport.ring_engine import Stepped, ends


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
