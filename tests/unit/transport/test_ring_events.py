"""The ring client reads: events in sequence, credits, alternatives, and rings that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from blink_core.abi.enums import EventKind
from blink_core.abi.params import SamplingParams
from blink_core.frontend.engine_client import open_ring
from blink_core.frontend.ring_client import (
    ProtocolError,
    RingClient,
    decode_logprobs,
)
from blink_core.runtime.cpu import noop_step
from blink_core.runtime.descriptor import EngineDescriptor, Memory, ModelInfo
from blink_core.transport.shm import Segment, ShmTransport
from tests.unit.transport.ring_engine import Stepped


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
