"""Clauses K, C4, P, A and E of docs/rules.md, each by a small example."""

from __future__ import annotations

from typing import Any

import pytest

from blink_core.abi.enums import Admission, EventKind, FinishReason, LogKind, LogLevel, Op, PageState, SlotFlag
from tests.unit.spec.small import Small, planned
from verification.spec import kv, plan
from verification.spec.state import Request

NO_CACHE = int(SlotFlag.NO_PREFIX_CACHE)
MASKED = int(SlotFlag.MASKED)


def test_pages_come_from_the_top_and_go_back_last_first() -> None:
    """Catches: K1, K2, K4 broken: a reserved page handed out, or another order than the one that makes runs replay."""
    s = Small()
    s.submit(0, (1,) * 8, 1, flags=NO_CACHE)
    s.go()
    s.tick()
    assert s.at(0).pages == [2, 3]
    assert s.page_state[:4] == [PageState.RESERVED] * 2 + [PageState.OWNED] * 2
    s.tick()
    assert s.free[-2:] == [3, 2]


def test_pages_freed_during_a_step_are_quarantined_until_its_commit() -> None:
    """Catches: K4, K5 broken: a page that the step in flight writes handed to another request."""
    s = Small()
    s.submit(0, (1,) * 8)
    s.go()
    s.tick()
    s.entry(Op.CANCEL, 0, 1)
    s.go()
    assert (s.quarantine, s.page_state[2]) == ([3, 2], PageState.QUARANTINED)
    s.tick()
    assert (s.quarantine, s.free[-2:]) == ([], [2, 3])


def test_full_pages_are_published_with_a_good_token_and_hit_later() -> None:
    """Catches: K6, K7, L1 broken: KV shared before it is computed, or never; a hit that leaves nothing to compute."""
    s = Small()
    s.submit(0, (1,) * 8, 2)
    s.go()
    s.tick()
    assert not s.cache
    s.tick()
    assert len(s.cache) == 2
    s.tick()
    s.submit(1, (1,) * 8, 1)
    s.go()
    assert planned(s.tick()) == [(1, 4)]
    assert (s.at(1).cached, s.at(1).pages[0], s.lookups, s.hits) == (4, 2, 8, 4)
    s.tick()
    assert s.events[-1][3:8] == (EventKind.FINISH, FinishReason.LENGTH, 1, 1, 4)


def test_equal_pages_are_kept_once() -> None:
    """Catches: K6 broken: two cached pages of equal tokens, or the wrong one freed."""
    s = Small(token_budget=16)
    for slot in (0, 1):
        s.submit(slot, (1,) * 5, 2)
    s.go()
    s.tick()
    own = s.at(1).pages[0]
    s.tick()
    assert s.at(0).pages[0] == s.at(1).pages[0] == 2
    assert (s.holders[2], s.page_state[own]) == (2, PageState.FREE)


def test_idle_cached_pages_count_as_available_and_the_least_recent_goes() -> None:
    """Catches: K2, K3 broken: a page in use evicted, or a full pool while nobody holds anything."""
    s = Small(pages=5)
    s.submit(0, (1,) * 8, 1)
    s.go()
    s.run(2)
    assert (len(s.free), len(s.idle), kv.available(s)) == (1, 2, 3)
    s.submit(1, (2,) * 8, 1)
    s.go()
    s.tick()
    assert (list(s.idle), s.evictions, s.at(1).pages) == ([2], 1, [4, 3])


@pytest.mark.parametrize(("cache", "flags"), [(1, NO_CACHE), (0, 0)])
def test_without_prefix_cache_nothing_is_shared(cache: int, flags: int) -> None:
    """Catches: K8 broken."""
    s = Small(prefix_cache=cache)
    for generation in (1, 2):
        s.submit(0, (1,) * 8, 1, generation=generation, flags=flags)
        s.go()
        s.run(3)
    assert (s.cache, s.hits, s.lookups) == ({}, 0, 0)


def test_decodes_behind_a_row_keep_their_token_when_its_elders_give_way() -> None:
    """Catches: P1 broken where the plan has become shorter while it is made: the decodes behind a row are looked for at
    the place that it had before its elders were preempted, so that a prefill takes the token of one of them."""
    s = Small(slots=6, max_rows=6, token_budget=6, page_size=8, paused_limit=1, cq_entries=64, prefix_cache=0)
    for slot in (0, 1):
        s.submit(slot, (1, 2, 3), flags=MASKED, mask_box=slot)  # paused at their last token, with a page each
    for slot, length in ((2, 5), (3, 6)):
        s.submit(slot, (1,) * length, 9)  # decodes that need another page at one and the same boundary
    s.submit(4, (1, 2, 3), 20, priority=1)  # the decode behind the prefill
    s.go()
    s.run(4)
    s.submit(5, (1,) * 20, 2)
    s.go()
    assert planned(s.tick()) == [(2, 1), (3, 1), (4, 1), (5, 3)]
    assert [request.slot for request in s.running] == [0, 1, 2, 3, 5, 4]
    assert [request.paused > 0 for request in s.running] == [True, True, False, False, False, False]
    s.free.clear()  # all other pages are somebody's
    assert planned(s.tick()) == [(2, 1), (3, 1), (5, 3), (4, 1)]
    assert [request.slot for request in s.running] == [2, 3, 5, 4]


@pytest.mark.parametrize(
    ("fields", "reason", "index"),
    [
        ({"max_tokens": 9, "eos_ids": (7,)}, FinishReason.EOS, 1),
        ({"max_tokens": 3, "eos_ids": (7,), "flags": int(SlotFlag.IGNORE_EOS)}, FinishReason.LENGTH, 3),
        ({"max_tokens": 9, "eos_ids": (7,), "min_tokens": 2}, FinishReason.EOS, 3),
        ({"max_tokens": 9, "n_stop": 1, "stop_ids": (7,) * 8}, FinishReason.STOP_TOKEN, 1),
        ({"max_tokens": 9, "n_stop": 0, "stop_ids": (7,) * 8, "max_len": 8}, FinishReason.CONTEXT, 5),
        ({"max_tokens": 5, "max_len": 8}, FinishReason.LENGTH, 5),
    ],
)
def test_why_a_request_finishes(fields: dict[str, Any], reason: FinishReason, index: int) -> None:
    """Catches: C4 broken: the wrong reason, or one token too many or too few."""
    engine = {name: fields.pop(name) for name in ("eos_ids", "max_len") if name in fields}
    limit = int(engine.get("max_len", 24))
    tokens = fields.pop("max_tokens")
    assert isinstance(tokens, int)
    s = Small(**engine)
    s.submit(0, (1, 2, 3), min(tokens, limit), **fields)
    s.go()
    s.run(12)
    assert s.ends() == [(0, EventKind.FINISH, reason, index)]


def test_logprobs_come_two_an_event_before_their_token() -> None:
    """Catches: C3, P3 broken: alternatives lost, out of order, or without credits."""
    s = Small()
    s.submit(0, max_tokens=1, logprobs=3)
    s.go()
    s.tick()
    assert s.rings[0].planned == 3
    s.tick(tops=((7, 1), (8, 2), (9, 3)))
    assert [event[3:5] for event in s.events[:2]] == [(EventKind.LOGPROBS, 2), (EventKind.LOGPROBS, 1)]
    assert s.events[0][6:] == (7, 1, 8, 2)
    assert s.events[2][3] == EventKind.TOKEN


def test_every_decode_keeps_a_token_of_the_budget() -> None:
    """Catches: P1, P2 broken: a long prompt that starves decodes, or leaves budget unused."""
    s = Small(token_budget=4)
    s.submit(0, (1,), 9, priority=1)
    s.go()
    s.run(1)
    s.submit(1, (2,) * 20, 1)
    s.go()
    assert planned(s.tick()) == [(0, 1), (1, 3)]
    assert planned(s.tick()) == [(1, 3), (0, 1)]


def test_decode_that_cannot_have_its_token_keeps_none() -> None:
    """Catches: P1 broken: budget kept for a row that lacks its mask or its ring credits."""
    s = Small(slots=3, max_rows=4, token_budget=4, cq_entries=8, sq_entries=8, rings=2, paused_limit=99)
    s.submit(0, (1,), 9, priority=1, flags=MASKED)
    s.submit(0, (1,), 9, priority=1, ring=1)
    s.go()
    s.run(6)
    assert [q.paused > 0 for q in s.running] == [True, True]
    s.submit(1, (2,) * 10, 1)
    s.go()
    assert [planned(s.tick()) for _ in range(3)] == [[(1, 4)], [(1, 4)], [(1, 2)]]


def test_nobody_gives_way_to_a_row_that_cannot_speak() -> None:
    """Catches: P2 broken: a prompt without its mask, or credits, that takes others' pages; one that does nothing
    though it has pages, or is not paused then."""
    s = Small(pages=8, token_budget=3, prefix_cache=0, paused_limit=99)
    s.submit(0, (1,), 14, priority=1)
    s.go()
    s.run(4)
    s.submit(1, (1,), 14, priority=1)
    s.go()
    s.run(3)
    s.submit(2, (1,) * 8, 2, flags=MASKED, mask_box=2)
    s.go()
    s.run(5)
    assert (s.at(2).computed, len(s.at(2).pages), s.at(2).paused, len(s.free)) == (4, 1, 1, 0)
    assert (s.preemptions, len(s.plan or [])) == (0, 2)
    s.at(2).mask_index = 1
    s.tick()
    assert (len(s.at(2).pages), s.at(2).paused, s.at(1).preemptions) == (2, 0, 1)


def test_row_without_credits_computes_all_but_its_last_token_and_is_paused() -> None:
    """Catches: P2, P3 broken: a token without credits for it and for every terminal event."""
    s = Small(slots=2, max_rows=2, cq_entries=4, sq_entries=8)
    s.submit(0, max_tokens=9)
    s.go()
    s.run(3)
    assert (s.at(0).emitted, s.rings[0].cq_tail) == (2, 2)
    assert s.tick() == []
    assert s.at(0).paused == 2
    s.rings[0].memory.cq_head = 2
    s.go()
    assert planned(s.tick()) == [(0, 1)]
    assert s.at(0).paused == 0


def test_without_pages_the_last_in_order_of_service_gives_way() -> None:
    """Catches: P4 broken: the elder gives way to the younger."""
    s = Small(pages=5, prefix_cache=0)
    for slot in (0, 1):
        s.submit(slot, (1,) * 4, 5)
    s.go()
    s.run(2)
    assert [(q.slot, len(q.pages)) for q in s.running] == [(0, 2)]
    assert (s.preemptions, s.rings[0].waiting[0]) == (1, [s.at(1)])


def test_a_row_paused_for_long_gives_way_before_the_last() -> None:
    """Catches: P4 broken: rows that cannot go on keep their pages from those that can."""
    s = Small(pages=5, prefix_cache=0)
    s.submit(0, (1,) * 4, 5, flags=MASKED)
    s.submit(1, (2,) * 4, 9)
    s.go()
    s.run(5)
    assert [(q.slot, q.paused) for q in s.running] == [(0, 4), (1, 0)]
    s.run(1)
    assert [(q.slot, len(q.pages)) for q in s.running] == [(1, 3)]
    assert (s.at(0).preemptions, s.at(1).preemptions) == (1, 0)


def test_preempted_request_keeps_its_age_and_its_tokens() -> None:
    """Catches: L1, L2 broken: output lost or repeated by preemption, or others overtaking."""
    s = Small(pages=5, prefix_cache=0)
    for slot in (0, 1):
        s.submit(slot, (1,) * 4, 6)
    s.go()
    s.run(3)
    again = s.at(1)
    assert (again.preemptions, again.pages, again.computed) == (1, [], 0)
    s.submit(2, (1,), 1)
    s.go()
    assert s.rings[0].waiting[0] == [again, s.at(2)]
    s.run(20)
    assert [e[6] for e in s.events if e[2] == 1 and e[3] == EventKind.TOKEN] == [0, 1, 2, 3, 4, 5]


def test_rings_take_turns_by_tokens() -> None:
    """Catches: A2 broken: one ring that takes all, or a turn counted in requests."""
    s = Small(rings=2, max_rows=4, token_budget=32, quantum=8)
    for slot in range(3):
        s.submit(slot, (1, 2, 3), 5, ring=0)
        s.submit(slot, (1, 2, 3, 4), 12, ring=1)
    s.go()
    s.tick()
    assert [sum(q.ring.index == r for q in s.running) for r in (0, 1)] == [3, 1]


def test_more_urgent_class_is_admitted_first_whatever_its_ring() -> None:
    """Catches: A1 broken."""
    s = Small(rings=2, max_rows=1)
    s.submit(0, ring=0, priority=3)
    s.submit(0, ring=1, priority=1)
    s.go()
    s.tick()
    assert [q.ring.index for q in s.running] == [1]


@pytest.mark.parametrize(("admission", "rows"), [(Admission.OPTIMISTIC, 2), (Admission.RESERVE, 1)])
def test_reserve_counts_the_longest_output(admission: Admission, rows: int) -> None:
    """Catches: A3 broken: RESERVE that has to preempt later, or OPTIMISTIC that does not fill the pool."""
    s = Small(pages=6, admission=admission)
    for slot in (0, 1):
        s.submit(slot, (1,) * 4, 8)
    s.go()
    s.tick()
    assert len(s.running) == rows


def reserved() -> tuple[Small, Request]:
    """An engine of 4 pages, all but one of them held by a class-1 request; a class-0 one of 4 pages waits."""
    s = Small(pages=6, prefix_cache=0, token_budget=16, reservation_steps=2)
    s.submit(0, (1,) * 12, 5, priority=1)
    s.go()
    s.tick()
    s.submit(1, (2,) * 16, 1)
    s.submit(2, (3,), 1, priority=2)
    s.go()
    return s, s.at(1)


def test_request_that_does_not_fit_keeps_others_waiting_and_is_then_made_room_for() -> None:
    """Catches: A5, A6 broken: a head overtaken for ever, or others kept waiting for longer than reservation_steps."""
    s, holder = reserved()
    s.tick()
    assert (s.reserved, [q.slot for q in s.running]) == (holder, [0])
    s.tick()
    assert (s.reserved, [q.slot for q in s.running]) == (holder, [0])
    s.tick()
    assert (s.reserved is holder, s.running[0].slot) == (False, 1)
    assert (s.at(0).preemptions, holder.row >= 0) == (1, True)


def test_reservation_is_given_up_when_elders_hold_the_pages() -> None:
    """Catches: A7 broken: others kept waiting for a request that only the end of an elder can help."""
    s = Small(pages=7, prefix_cache=0, token_budget=16, reservation_steps=2)
    s.submit(0, (1,) * 12, 5)
    s.go()
    s.tick()
    s.submit(1, (2,) * 16, 1)
    s.submit(2, (3,), 1, priority=1)
    s.go()
    s.run(2)
    assert (s.reserved, [q.slot for q in s.running]) == (s.at(1), [0])
    s.tick()
    assert (s.reserved, [q.slot for q in s.running]) == (None, [0, 2])
    assert s.turn[0] == 0


def test_admission_charges_once_and_takes_the_prefix() -> None:
    """Catches: A4, A2 broken: a request charged again after each preemption."""
    s = Small()
    s.submit(0, (1, 2, 3), 4)
    s.go()
    s.tick()
    assert s.rings[0].deficit[0] == 8 - 7
    assert plan.cost(s, s.at(0)) == 0


def test_long_paused_row_gives_way_to_a_waiting_request_but_not_at_its_own_admission() -> None:
    """Catches: A3, A4 broken: pages held by a row that cannot go on; two rows that give way to each other for ever."""
    s = Small(max_rows=1, paused_limit=1)
    for slot in (0, 1):
        s.submit(slot, (1,), flags=MASKED, mask_box=slot)
    s.go()
    assert s.tick() == []
    assert [q.slot for q in s.running] == [0]
    assert s.tick() == []
    assert s.preemptions == 1


def test_who_gave_way_sleeps_until_its_mask_is_there() -> None:
    """Catches: A2, R11 broken: a request that comes back before its mask does, gives way again, and so on; a head that
    sleeps and keeps those behind it waiting; a mask that does not wake it."""
    s = Small(max_rows=1, paused_limit=1)
    s.submit(0, (1,), 2, flags=MASKED)
    s.go()
    s.run(2)
    s.submit(1, (1,), 1)
    s.go()
    assert planned(s.tick()) == [(1, 1)]
    s.submit(2, (1, 2), 1)
    s.go()
    assert (s.at(0).wants_mask(), s.at(2).wants_mask()) == (True, False)
    assert planned(s.tick()) == [(2, 1 + 1)]
    for index in (1, 0):
        s.go()
        assert s.tick() == []
        box = s.rings[0].memory.boxes[0]
        box.ready, box.bits, box.signed = 1 << 40 | index + 1, (7,) * len(box.bits), (7,) * len(box.bits)
    s.go()
    assert (s.at(0).wants_mask(), s.at(0).row, s.kinds()[-1]) == (False, -1, LogKind.MASK)
    assert s.tick() == []
    assert [q.slot for q in s.running] == [0]
    s.go()
    assert planned(s.tick()) == [(0, 1)]


def test_entries_carry_step_and_clock_in_order() -> None:
    """Catches: E1, E2 or E3 broken: a log that does not replay."""
    s = Small()
    s.now = 5
    s.submit(0, (1, 2), 1)
    s.go()
    s.tick()
    s.tick(9)
    order = [
        *(LogKind.CLOCK, LogKind.SQ_ENTRY, LogKind.ACCEPT),
        *(LogKind.CLOCK, LogKind.ADMIT, LogKind.PAGE_ALLOC, LogKind.PLAN_ROW, LogKind.STEP),
        *(LogKind.CLOCK, LogKind.RESULT, LogKind.TOKEN, LogKind.PAGE_FREE, LogKind.FINISH),
    ]
    assert s.kinds() == order
    assert [entry[0] for entry in s.log] == [0] * 3 + [1] * 10
    clocks = [entry[2:] for entry in s.log if entry[1] == LogKind.CLOCK]
    assert clocks == [(0, 0, 0, 5, 0, 0), (0, 1, 0, 5, 0, 1), (0, 1, 0, 5, 0, 2)]


def test_level_decisions_leaves_details_out() -> None:
    """Catches: E2 broken: details at level DECISIONS, or decisions lost."""
    s = Small(log_level=LogLevel.DECISIONS)
    s.submit(0, (1, 2), 1)
    s.go()
    s.run(2)
    assert s.kinds() == [LogKind.ACCEPT, LogKind.ADMIT, LogKind.STEP, LogKind.FINISH]


def test_result_that_is_not_ok_is_logged_as_it_was() -> None:
    """Catches: E4 broken: a failure that the log does not show."""
    s = Small()
    s.submit(0)
    s.go()
    s.tick()
    s.tick(7, status=3)
    assert (1, LogKind.RESULT, 0, 0, 1, 7, 3, 0) in s.log
