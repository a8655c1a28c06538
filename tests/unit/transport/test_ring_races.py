"""Attaches that meet: several clients at once, one that stands still in the middle, one that fails half way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from blink_core.abi.enums import EventKind, FinishReason
from blink_core.abi.params import SamplingParams
from blink_core.frontend.ring_client import Handle, ProtocolError, RingClient, Superseded
from blink_core.transport.interface import TransportTimeout
from blink_core.transport.shm import ShmTransport
from tests.unit.transport.ring_engine import Meddled, Stepped, ends
from tests.unit.transport.test_ring_takeover import ATTACH_WRITES, OPERATIONS, use

FENCE_WRITE = 2  # its place among the writes of an attach


def rivals(e: Stepped, place: int) -> tuple[RingClient, RingClient, list[Handle], BaseException | None]:
    """(slow, quick, quick's accepted request, what slow's attach raised): slow stands still behind one write of its
    attach while quick attaches and submits."""
    slow, quick = e.connect(Meddled), e.connect()
    accepted: list[Handle] = []
    raised: list[BaseException] = []

    def meddle() -> None:
        quick.attach(30.0)
        accepted.append(quick.submit([5, 6], SamplingParams(2)))

    assert isinstance(slow._transport, Meddled)
    slow._transport.place, slow._transport.during = place, meddle

    class Slow:
        @staticmethod
        def attach(timeout: float) -> int:
            try:
                return slow.attach(timeout)
            except ProtocolError as error:
                raised.append(error)
                return 0

    e.attach(Slow)  # type: ignore[arg-type]
    return slow, quick, accepted, raised[0] if raised else None


def serve(e: Stepped, client: RingClient) -> list[tuple[int, int]]:
    e.client = client
    return ends(e.finish())


FINISHED = [(EventKind.FINISH, FinishReason.LENGTH)]


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("place", [0, 1])
def test_two_find_the_same_word(make: Callable[..., Stepped], place: int, fresh: bool) -> None:
    """Catches: two clients that take the same epoch because both found the same word, on a ring that had a front end
    or on a fresh one, so that nobody is superseded and both write the ring."""
    e = make()
    if fresh:
        e.ring["front_end"]["epoch"] = 0
        e.step()
    slow, quick, accepted, raised = rivals(e, place)
    assert (raised, len(accepted)) == (None, 1)
    # The fence of the slow one came last.
    with pytest.raises(Superseded):
        quick.poll(0.0)
    with pytest.raises(Superseded):
        quick.submit([5, 6], SamplingParams(2))
    assert slow.submit([1, 2], SamplingParams(2)) == Handle(0, 1, 0)
    assert serve(e, slow) == FINISHED


@pytest.mark.parametrize("place", range(FENCE_WRITE, ATTACH_WRITES - 1))
def test_third_attaches_behind_the_fence(make: Callable[..., Stepped], place: int) -> None:
    """Catches: a client that stood still in its attach and then clears the queue of the one that attached meanwhile, or
    writes its older epoch over the newer one's, whose accepted request it takes for its own."""
    e = make()
    slow, quick, accepted, raised = rivals(e, place)
    assert isinstance(raised, Superseded)
    assert "superseded by epoch 3: another front end has attached (this one had 2)" in str(raised)
    assert int(e.ring["front_end"]["epoch"][0]) & 0xFFFFFFFF == 3
    assert accepted == [Handle(0, 1, 0)]
    for operation in ("poll", "submit", "publish_entries", "release_credits", "renew_lease"):
        with pytest.raises(Superseded):
            use(slow, operation, Handle(0, 1, 0))
    assert serve(e, quick) == FINISHED
    # The loser may try again.
    assert e.attach(slow) == 4
    slow.submit([1, 2], SamplingParams(2))
    assert serve(e, slow) == FINISHED


def test_epoch_taken_while_it_is_not_acknowledged(make: Callable[..., Stepped]) -> None:
    """Catches: a client that waits for the acknowledgement of an epoch that another has replaced, and is then told that
    the engine did not answer, so that it attaches over its successor."""
    e = make()
    _, quick, accepted, raised = rivals(e, ATTACH_WRITES - 1)
    assert isinstance(raised, Superseded)
    assert len(accepted) == 1
    assert serve(e, quick) == FINISHED


def test_words_of_attaches_differ(make: Callable[..., Stepped]) -> None:
    """Catches: an epoch without a nonce: a client that stood still between its last look and its epoch word would write
    the word that is there, the engine would see no change, and two clients would keep the ring."""
    e = make()
    words = set()
    for _ in range(3):
        e.ring["front_end"]["epoch"] = 7
        assert e.attach(e.connect()) == 8
        words.add(int(e.ring["front_end"]["epoch"][0]))
    assert len(words) == 3
    assert {word & 0xFFFFFFFF for word in words} == {8}


@pytest.mark.parametrize(
    ("found", "number"), [(2**64 - 1, 1), (2**32 - 1, 1), (2**31 - 1, 1), (2**31, 1), (2**31 - 2, 2**31 - 1), (0, 1)]
)
def test_any_word_is_followed_by_an_epoch(make: Callable[..., Stepped], found: int, number: int) -> None:
    """Catches: a word at its top that no client can follow: the ring cleared and no attach possible ever again; a
    number beyond its bits, which the event log would show as 0 or as a fence."""
    e = make()
    e.ring["front_end"]["epoch"] = found
    client = e.connect()
    assert e.attach(client) == number
    assert int(e.ring["front_end"]["epoch"][0]) & 0xFFFFFFFF == number
    client.submit([1, 2], SamplingParams(2))
    assert serve(e, client) == FINISHED


class Cut(ShmTransport):
    """`lost` posted writes of the epoch word pass, then what is awaited does not complete."""

    lost: int | None = None

    def post_write(self, offset: int, data: Any) -> int:
        if self.lost is not None and offset == 0:
            self.lost -= 1
        return super().post_write(offset, data)

    def wait(self, work: int, deadline: float) -> bytes:
        if self.lost is not None and self.lost < 0:
            raise TransportTimeout("posted, not completed")
        return super().wait(work, deadline)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("lost", [0, 1])
def test_nothing_is_written_after_half_an_attach(make: Callable[..., Stepped], operation: str, lost: int) -> None:
    """Catches: checks that are off since an attach failed at its fence or epoch word, so that the client writes into
    the ring under its fence, or into the ring of another that attached since."""
    e = make(masks=2)
    client = e.connect(Cut)
    e.attach(client)
    handle = client.submit([1, 2], SamplingParams(9), masked=True)
    transport = client._transport
    assert isinstance(transport, Cut)
    transport.lost = lost
    with pytest.raises(TransportTimeout, match="posted, not completed"):
        client.attach(1.0)
    transport.lost = None
    sections = ("front_end", "sq", "slots", "arena", "mask_boxes", "mask_bits")
    before = {name: e.ring[name].tobytes() for name in sections}
    with pytest.raises(ProtocolError, match="failed half way") as caught:
        use(client, operation, handle)
    assert not isinstance(caught.value, Superseded)
    client.check_successor()
    assert {name: e.ring[name].tobytes() for name in sections} == before
    other = e.connect()
    e.attach(other)
    with pytest.raises(Superseded):
        use(client, operation, handle)
    assert e.attach(client) > 3
    client.submit([1, 2], SamplingParams(2))
    assert serve(e, client) == FINISHED


def test_nothing_is_written_before_the_acknowledgement(make: Callable[..., Stepped]) -> None:
    """Catches: a client whose epoch was not acknowledged in time and that submits with the queue index of the epoch
    before: an entry that the engine never finds."""
    e = make()
    e.client.submit([1, 2], SamplingParams(2))
    e.finish()
    with pytest.raises(TransportTimeout, match="did not acknowledge epoch 2 within 0.01 s"):
        e.client.attach(0.01)
    for _ in range(3):
        e.step()
    assert not e.client.attached
    with pytest.raises(ProtocolError, match="failed half way"):
        e.client.submit([1, 2], SamplingParams(2))
    assert e.attach(e.client) == 3
    e.client.submit([1, 2], SamplingParams(2))
    assert serve(e, e.client) == FINISHED
