"""A ring changes hands: attaching, leases, and two front ends on one ring."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest

from blink_core.abi.enums import ErrorReason, EventKind, FinishReason, Op
from blink_core.abi.params import SamplingParams
from blink_core.frontend.epoch_word import FENCE
from blink_core.frontend.ring_client import (
    Handle,
    RingClient,
    Superseded,
)
from blink_core.transport.interface import TransportTimeout
from blink_core.transport.shm import ShmTransport
from tests.unit.transport.ring_engine import Meddled, Stepped, bits_of, ends, lease


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


ATTACH_WRITES = 7  # queue, head, fence, queue, head, lease, epoch


@pytest.mark.parametrize("place", range(ATTACH_WRITES))
@pytest.mark.parametrize("operation", ["submit", "poll"])
def test_predecessor_lives_while_its_successor_attaches(
    make: Callable[..., Stepped], operation: str, place: int
) -> None:
    """Catches: what a front end writes between two words of its successor's attach taken for the successor's: a request
    that nobody made, which answers in the place of the first one; credits for events that nobody has read."""
    e = make(slots=1, cq_entries=8, max_rows=1)
    old = e.client
    if operation == "poll":
        old.submit([1, 2], SamplingParams(4))
        for _ in range(4):
            e.step()
        assert int(e.ring["gpu"]["cq_tail"][0]) > 1
    e.client = e.connect(Meddled)
    met = []

    def meddle() -> None:
        met.append(place)
        with suppress(Superseded):
            old.submit([5, 6], SamplingParams(9)) if operation == "submit" else old.poll(0.0)

    transport = e.client._transport
    assert isinstance(transport, Meddled)
    transport.place, transport.during = place, meddle
    assert e.attach(e.client) == 2
    attach_writes = transport.posted
    assert int(e.ring["front_end"]["cq_head"][0]) == 0
    e.client.submit([1, 2], SamplingParams(2))
    events = e.finish()
    assert events["kind"].tolist() == [EventKind.TOKEN, EventKind.TOKEN, EventKind.FINISH]
    with pytest.raises(Superseded, match="superseded by epoch 2"):
        old.poll(0.0)
    assert (met, attach_writes) == ([place], ATTACH_WRITES)


def test_successor_dies_while_it_attaches(make: Callable[..., Stepped]) -> None:
    """Catches: an epoch that is used twice because the word held a fence when its owner died; a front end that was
    shut out and finds its own epoch again."""
    e = make()
    old = e.client
    e.ring["front_end"]["epoch"] = 2 | FENCE
    with pytest.raises(Superseded, match="superseded by epoch 2:"):
        old.poll(0.0)
    e.client = e.connect()
    assert e.attach(e.client) == 3
    with pytest.raises(Superseded, match="superseded by epoch 3:"):
        old.poll(0.0)
    e.client.submit([1, 2], SamplingParams(2))
    assert ends(e.finish()) == [(EventKind.FINISH, FinishReason.LENGTH)]
