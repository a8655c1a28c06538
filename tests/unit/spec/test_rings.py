"""Clauses T, R and L of docs/rules.md, each by a small example."""

from __future__ import annotations

from typing import Any

import pytest

from blink_core.abi.enums import EngineState, ErrorReason, EventKind, FinishReason, Op, SlotFlag, StepStatus
from tests.unit.spec.small import Small, planned
from verification.spec.ring import entry_word, newer
from verification.spec.state import Descriptor, Mailbox, RingMemory

ERROR, FINISH = EventKind.ERROR, EventKind.FINISH
NAN = float("nan")


def test_clock_never_goes_back() -> None:
    """Catches: T2 broken, so that deadlines and leases jump."""
    s = Small()
    s.poll(9)
    s.poll(4)
    assert s.clock == 9


def test_results_of_a_step_are_read_by_the_next_boundary() -> None:
    """Catches: T1, T3 broken: a boundary that commits after it has planned."""
    s = Small()
    s.submit(0)
    s.go()
    assert planned(s.tick()) == [(0, 3)]
    assert (s.boundaries, s.committed, s.at(0).emitted) == (1, 0, 0)
    assert planned(s.tick()) == [(0, 1)]
    assert (s.boundaries, s.committed, s.at(0).emitted) == (2, 1, 1)


def test_poll_takes_entries_before_masks_and_publishes_last() -> None:
    """Catches: T4, R9 broken: events that stay unpublished, or a head that is judged against a tail not yet told."""
    s = Small()
    s.submit(0, max_tokens=1)
    s.go()
    s.tick()
    s.tick()
    assert s.rings[0].memory.cq_tail == 0
    s.go()
    assert (s.rings[0].memory.cq_tail, s.rings[0].memory.sq_head, s.heartbeat) == (2, 1, 3)


def test_requests_are_numbered_by_ring_and_slot() -> None:
    """Catches: R1, L3 broken: an order of ends that depends on arrival."""
    s = Small(rings=2)
    for ring, slot in ((1, 0), (0, 3), (0, 1)):
        s.submit(slot, ring=ring, deadline_us=1)
        s.go()
    s.poll(2)
    assert [event[:3] for event in s.events] == [(0, 0, 1), (0, 1, 3), (1, 0, 0)]


def test_new_epoch_forgets_requests_generations_and_queues() -> None:
    """Catches: R2 broken: a predecessor's request or generation that survives, or an acknowledgement during a step."""
    s = Small()
    s.submit(0, generation=9)
    s.go()
    s.tick()
    memory = s.rings[0].memory
    memory.epoch, memory.sq[:] = 2, [0] * 16
    s.go()
    assert (s.live, s.rings[0].judged[0], s.rings[0].sq_next, s.events, memory.epoch_ack) == (0, 0, 0, [], 1)
    assert len(s.quarantine) == 1
    s.tick()
    assert (memory.epoch_ack, len(s.free)) == (2, 12)


def test_ring_of_epoch_0_is_left_alone() -> None:
    """Catches: R2 broken: entries taken of a ring that has no front end."""
    s = Small(rings=2)
    s.rings[1].memory.epoch = 0
    s.go()
    s.submit(0, ring=1)
    s.go()
    assert (s.live, s.rings[1].sq_next) == (0, 0)


def test_sequence_numbers_are_never_0_and_skip_none() -> None:
    """Catches: R3 broken at the wrap of 24 bits."""
    last = (1 << 24) - 2
    assert [entry_word(i, 0, 0, 0) for i in (0, last, last + 1)] == [1, (1 << 24) - 1, 1]


def test_word_of_another_turn_is_not_there_yet() -> None:
    """Catches: R3 broken: an old word taken again."""
    s = Small()
    s.submit(0)
    s.rings[0].memory.sq[0] += 1
    s.go()
    assert s.live == 0


@pytest.mark.parametrize(("head", "credible", "bad"), [(1, 1, 0), (2, 2, 0), (3, 0, 1), (0, 0, 0)])
def test_credible_heads(head: int, credible: int, bad: int) -> None:
    """Catches: R4 broken: credits for events nobody was told of."""
    s = Small()
    s.submit(0, max_tokens=1)
    s.go()
    s.run(2)
    s.rings[0].memory.cq_head = head
    s.go()
    assert (s.rings[0].cq_head, s.rings[0].bad_heads) == (credible, bad)


def test_head_that_goes_back_is_counted() -> None:
    """Catches: R4 broken."""
    s = Small()
    s.submit(0, max_tokens=1)
    s.go()
    s.run(2)
    for head in (2, 1):
        s.rings[0].memory.cq_head = head
        s.go()
    assert (s.rings[0].cq_head, s.rings[0].bad_heads) == (2, 1)


def test_submissions_wait_for_credits_and_cancels_do_not() -> None:
    """Catches: R5 broken: an event that overwrites an unread one, or a cancel that starves behind a slow reader."""
    s = Small(slots=2, max_rows=2, cq_entries=4, sq_entries=8)
    for generation in range(4):
        s.entry(Op.SUBMIT, 9, generation)  # BAD_ENTRY, an event each
    s.submit(0)
    s.go()
    assert (s.rings[0].cq_tail, s.live) == (4, 0)
    s.rings[0].memory.cq_head = 1
    s.go()
    assert s.live == 1
    s.entry(Op.CANCEL, 0, 1)
    s.submit(1)
    s.go()
    assert (s.rings[0].cq_tail, s.live) == (5, 0)


REFUSALS: tuple[tuple[ErrorReason, dict[str, Any]], ...] = (
    (ErrorReason.BAD_LENGTH, {"prompt_len": 0, "signed": ()}),
    (ErrorReason.BAD_LENGTH, {"max_tokens": 25}),
    (ErrorReason.BAD_EXTENT, {"prompt_offset": 158}),
    (ErrorReason.BAD_PARAM, {"n_bias": 3}),
    (ErrorReason.BAD_PARAM, {"temperature": NAN}),
    (ErrorReason.BAD_PARAM, {"top_p": 0.0}),
    (ErrorReason.BAD_PARAM, {"min_tokens": 5}),
    (ErrorReason.BAD_PARAM, {"logprobs": 5}),
    (ErrorReason.BAD_PARAM, {"flags": 8}),
    (ErrorReason.BAD_PARAM, {"mask_box": 1}),
    (ErrorReason.BAD_PARAM, {"flags": int(SlotFlag.MASKED), "mask_box": 4}),
    (ErrorReason.BAD_TOKEN, {"n_stop": 1, "stop_ids": (20,) * 8}),
    (ErrorReason.BAD_TOKEN, {"signed": (1, 2, 20)}),
    (ErrorReason.BAD_PARAM, {"n_bias": 1, "signed": (1, 2, 3, 4, 0x7F800000)}),
)


@pytest.mark.parametrize(("reason", "fields"), REFUSALS)
def test_fields_are_refused_with_their_reason(reason: ErrorReason, fields: dict[str, Any]) -> None:
    """Catches: R6, R7, R10 broken: a bad field accepted, or blamed on another."""
    s = Small()
    s.submit(0, **({"max_tokens": 4} | fields))
    s.go()
    assert s.ends() == [(0, ERROR, reason, 0)]
    assert (s.live, s.rings[0].judged[0]) == (0, 1)


def test_request_that_can_never_fit_is_refused() -> None:
    """Catches: R7 broken: a request that would wait for ever; its last token needs no KV."""
    s = Small(pages=4)
    s.submit(0, (1,) * 4, 5)
    s.submit(1, (1,) * 4, 6)
    s.go()
    assert s.ends() == [(1, ERROR, ErrorReason.NEVER_FITS, 0)]
    assert s.live == 1


def test_generations_are_judged_once_in_serial_order() -> None:
    """Catches: R6, R10 broken: a duplicate answered twice, an older one taken, a busy slot overwritten."""
    s = Small()
    s.submit(0, generation=5)
    s.entry(Op.SUBMIT, 0, 5)
    s.entry(Op.SUBMIT, 0, 4)
    s.entry(Op.SUBMIT, 0, 6)
    s.entry(3, 0, 7)
    s.go()
    assert s.rings[0].duplicates == 1
    assert [end[2] for end in s.ends()] == [ErrorReason.BAD_GENERATION, ErrorReason.SLOT_BUSY, ErrorReason.BAD_ENTRY]
    assert s.rings[0].judged[0] == 6
    assert [newer(1, (1 << 24) - 1), newer(1 << 23, 0), newer(3, 3)] == [True, False, False]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"intact": False}, ErrorReason.CHECKSUM),
        ({"generation": 2}, ErrorReason.BAD_GENERATION),
        ({"signed": (1, 2, 4)}, ErrorReason.CHECKSUM),
    ],
)
def test_torn_entry_is_looked_at_again_and_refused_in_the_end(fields: dict[str, Any], reason: ErrorReason) -> None:
    """Catches: R8 broken: a torn request accepted, refused too soon, counted twice, or holding its ring up for ever."""
    s = Small()
    s.write(0, (1, 2, 3), 4, **fields)
    s.rings[0].memory.arena[:3] = [1, 2, 3]
    s.entry(Op.SUBMIT, 0, 1)
    s.submit(1)
    for now in (5, 6, 7):
        s.poll(now)
        assert (s.live, s.rings[0].torn) == (0, 1)
    s.poll(8)
    assert s.ends() == [(0, ERROR, reason, 0)]
    assert s.live == 1


def test_slot_that_nobody_has_written_is_torn() -> None:
    """Catches: R6, R8 broken: zeros, whose checksum does not hold, refused for the generation that they show."""
    s = Small()
    s.entry(Op.SUBMIT, 0, 1)
    s.poll(5)
    s.poll(8)
    assert (s.ends(), s.rings[0].torn) == ([(0, ERROR, ErrorReason.CHECKSUM, 0)], 1)


def test_torn_entry_that_settles_is_accepted() -> None:
    """Catches: R8 broken: a late descriptor refused though it came in time."""
    s = Small()
    s.submit(0, intact=False)
    s.poll(5)
    s.write(0, (1, 2, 3), 4)
    s.poll(7)
    assert (s.live, s.rings[0].torn) == (1, 1)


def test_cancel_hits_its_generation_only() -> None:
    """Catches: R10 broken: a late cancel that ends the slot's next owner."""
    s = Small()
    s.submit(0, generation=2)
    s.entry(Op.CANCEL, 0, 1)
    s.entry(Op.CANCEL, 4095, 1)
    s.go()
    assert (s.live, s.rings[0].stale_cancels) == (1, 2)
    s.entry(Op.CANCEL, 0, 2)
    s.go()
    assert s.ends() == [(0, FINISH, FinishReason.CANCELLED, 0)]


def test_memory_that_nobody_has_written_is_zeros() -> None:
    """Catches: a specification that begins with other words than a new ring shows: R3, R4, R11 broken."""
    config = Small(rings=1).config
    memory, zeros = RingMemory(config), (0,) * config.mask_words
    assert memory.boxes == [Mailbox(0, zeros, zeros)] * config.masks
    assert memory.slots == [Descriptor()] * config.slots
    assert (memory.sq, memory.arena) == ([0] * config.sq_entries, [0] * config.arena_tokens)
    words = (memory.epoch, memory.lease, memory.cq_head, memory.epoch_ack, memory.sq_head, memory.cq_tail)
    assert words == (0,) * 6


def test_mask_counts_only_for_its_request_and_index() -> None:
    """Catches: R11, P2 broken: a row that samples without its mask, or with one that is torn or another's."""
    s = Small()
    s.submit(0, (1,), flags=int(SlotFlag.MASKED), mask_box=2)
    s.go()
    box, request = s.rings[0].memory.boxes[2], s.at(0)
    right = 1 << 40 | 0 << 28 | 1
    for ready, signed, there in ((right + 1, (6,), 0), (right, (5,), 0), (right, (6,), 1)):
        assert s.tick() == []
        box.ready, box.bits, box.signed = ready, (6,), signed
        s.go()
        assert request.mask_index == there
    assert (s.rings[0].bad_masks, request.mask) == (1, (6,))
    assert planned(s.tick()) == [(0, 1)]


def test_one_terminal_event_whose_index_is_the_tokens_emitted() -> None:
    """Catches: L1 broken: tokens behind the terminal event, or none."""
    s = Small()
    s.submit(0, max_tokens=2)
    s.go()
    s.run(4)
    assert [(e[3], e[6]) for e in s.events] == [(EventKind.TOKEN, 0), (EventKind.TOKEN, 1), (FINISH, 2)]


def test_service_is_by_class_then_age() -> None:
    """Catches: L2 broken: urgent requests behind others, or age lost by preemption."""
    s = Small()
    for slot, priority in enumerate((1, 0, 1, 0)):
        s.submit(slot, (slot,), priority=priority)
    s.go()
    s.tick()
    assert [request.slot for request in s.running] == [1, 3, 0]


@pytest.mark.parametrize("running", [False, True])
def test_deadline_ends_a_request_on_time(running: bool) -> None:
    """Catches: L3 broken: ended a tick early or late, or only when it runs."""
    s = Small()
    s.submit(0, deadline_us=4)
    s.poll(10)
    if running:
        s.now = 13
        s.tick()
    s.poll(13)
    assert s.live == 1
    s.poll(14)
    assert s.ends() == [(0, ERROR, ErrorReason.DEADLINE, 0)]


def test_lease_lapses_once_and_is_renewed_by_word_or_entry() -> None:
    """Catches: L4, R10 broken: a live front end cut off, or a dead one that keeps its pages."""
    s = Small(lease_us=10)
    s.submit(0)
    s.submit(1)
    s.poll(5)
    s.submit(2)
    s.poll(14)
    s.poll(23)
    assert s.live == 3
    s.poll(24)
    assert [end[0] for end in s.ends()] == [0, 1, 2]
    assert {end[2] for end in s.ends()} == {ErrorReason.LEASE_LOST}
    s.poll(60)
    assert (s.rings[0].lapses, s.rings[0].lapsed) == (1, 1)
    s.rings[0].memory.lease = 1
    s.go()
    assert s.rings[0].lapsed == 0


def test_result_of_a_request_that_ended_meanwhile_is_dropped() -> None:
    """Catches: L5, C1 broken: a token for a cancelled request, or for the slot's next owner."""
    s = Small()
    s.submit(0)
    s.go()
    s.tick()
    s.entry(Op.CANCEL, 0, 1)
    s.submit(0, generation=2)
    s.go()
    s.tick()
    assert s.ends() == [(0, FINISH, FinishReason.CANCELLED, 0)]
    assert s.at(0).emitted == 0


def test_drain_refuses_and_ends_when_nothing_lives() -> None:
    """Catches: L6 broken: a drain that takes new work or never ends."""
    s = Small()
    s.submit(0, max_tokens=1)
    s.go()
    s.drain = 1
    s.tick()
    s.submit(1)
    s.go()
    assert s.engine == int(EngineState.DRAINING)
    assert s.ends() == [(1, ERROR, ErrorReason.DRAINING, 0)]
    s.tick()
    assert s.engine == int(EngineState.DRAINED)


def test_stop_ends_all_and_refuses_what_was_published() -> None:
    """Catches: L7 broken: a submission without any answer."""
    s = Small()
    s.submit(2)
    s.submit(1)
    s.go()
    s.submit(3)
    s.stop = 1
    assert s.tick() == []
    assert [(end[0], end[2]) for end in s.ends()] == [(slot, ErrorReason.DRAINING) for slot in (1, 2, 3)]
    assert (s.engine, s.rings[0].memory.cq_tail) == (EngineState.STOPPED, 3)


def test_status_of_a_failed_step_ends_its_rows() -> None:
    """Catches: C2, C3 broken: a failed step whose tokens count."""
    s = Small()
    s.submit(0)
    s.submit(1, (1,) * 9)
    s.go()
    s.tick()
    s.tick(failed=True)
    assert [(end[0], end[2]) for end in s.ends()] == [(0, ErrorReason.MODEL_ERROR), (1, ErrorReason.MODEL_ERROR)]


@pytest.mark.parametrize(
    ("token", "status", "reason"),
    [
        (7, StepStatus.NAN_LOGITS, ErrorReason.NAN_LOGITS),
        (7, StepStatus.NO_TOKEN, ErrorReason.NO_TOKEN),
        (7, 9, ErrorReason.MODEL_ERROR),
        (20, StepStatus.OK, ErrorReason.MODEL_ERROR),
        (-1, StepStatus.OK, ErrorReason.MODEL_ERROR),
    ],
)
def test_bad_results_end_their_row(token: int, status: int, reason: ErrorReason) -> None:
    """Catches: C3 broken: a token that no model gave."""
    s = Small()
    s.submit(0)
    s.go()
    s.tick()
    s.tick(token, status=status)
    assert s.ends() == [(0, ERROR, reason, 0)]
