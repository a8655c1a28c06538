"""Corpus rows Q: queue order, admission, starvation, hang; on the compiled scheduler, stepped by hand.

Each scenario first shows that its revealing condition occurred.
"""

from __future__ import annotations

import pytest

from blink_core.abi.enums import ErrorReason, FinishReason, LogKind, RequestState, SlotFlag
from tests.scenarios.common import (
    ERROR,
    FINISH,
    alone,
    free_pages,
    of,
    plans,
    preemptions,
    request,
    started,
    submit,
    submit_tokens,
)
from verification.scheduler.harness import Harness, small_config

MASKED = SlotFlag.MASKED | SlotFlag.IGNORE_EOS


def test_q01_one_page_too_many() -> None:
    """Q01. Catches: a request larger than the whole pool retried for ever, and everybody behind it waiting with it.

    Condition: it needs exactly one page more than there is, a neighbour needs exactly all, five wait behind both.
    """
    h, front = started(pages=2 + 4, slots=8, sq_entries=32)
    usable = (h.config.pages - 2) * h.config.page_size
    too_large = submit(front, usable - 2, 4)  # KV of all tokens but the last
    too_large.refusal = ErrorReason.NEVER_FITS
    just_fits = submit(front, usable - 2, 3)
    small = [submit(front, 3, 2) for _ in range(5)]
    assert [-(-(usable - 2 + most - 1) // h.config.page_size) for most in (4, 3)] == [5, 4]
    h.settle()
    assert too_large.terminal == (ERROR, ErrorReason.NEVER_FITS, 0)
    assert just_fits.terminal == (FINISH, FinishReason.LENGTH, 3)
    assert [x.terminal for x in small] == [(FINISH, FinishReason.LENGTH, 2)] * 5


def test_q02_rows_that_could_not_run_come_back() -> None:
    """Q02. Catches: rows that are held back counted against the most rows for good, so that nobody is admitted again.

    Condition: every row is taken, half of the rows cannot run (their masks do not come), requests wait, pages are free.
    """
    h, front = started(slots=8, max_rows=4, sq_entries=32, pages=2 + 40, paused_limit=1 << 20)
    held = [submit_tokens(front, [7 * i + 1, 2, 3], 6, flags=MASKED) for i in range(2)]
    others = [submit(front, 3, 6) for _ in range(2)]
    behind = [submit(front, 3, 4) for _ in range(3)]
    rows = [*held, *others]
    steps_without_masks(h, 4)
    assert [request(h, x).state for x in rows] == [RequestState.RUNNING] * 4
    assert [request(h, x).paused > 0 for x in rows] == [True, True, False, False]
    assert free_pages(h) > 4
    assert all(request(h, x).state == RequestState.WAITING for x in behind)
    steps_without_masks(h, 16)  # the others end: their rows pass on although two rows stand still
    assert all(x.terminal is not None for x in [*others, *behind])
    h.settle()  # the masks come
    assert all(x.terminal == (FINISH, FinishReason.LENGTH, 6) for x in rows)
    late = [submit(front, 2, 6) for _ in range(4)]
    h.tick()
    h.tick()
    assert [request(h, x).state for x in late] == [RequestState.RUNNING] * 4, "slots of rows were not given back"
    h.settle()


def steps_without_masks(h: Harness, count: int) -> None:
    for _ in range(count):
        if h.boundary():
            assert h.n_rows > 0, "a step without rows"
            h.run_model()
        h.poll()
        h.fronts[0].consume()


def test_q04_full_pool_keeps_working() -> None:
    """Q04. Catches: empty schedules, no preemption and no output once requests come faster than they are served.

    Condition: not one page is free or can be evicted, at several boundaries; requests wait; rows are preempted. In the
    end nobody has credits.
    """
    h, front = started(pages=2 + 8, slots=8, max_rows=4, sq_entries=32)
    exhausted, silent, tokens = 0, 0, 0
    for _ in range(150):
        while front.free:
            n = len(h.history)
            submit(front, 2 + n % 9, 4 + n % 8)
        h.poll()
        launched = h.tick()
        assert launched, "nothing was scheduled while requests live"
        exhausted += free_pages(h) == 0
        now = sum(len(x.tokens) for x in h.history)
        silent = 0 if now > tokens else silent + 1
        tokens = now
        assert silent <= 6, f"no token for {silent} steps"
    assert exhausted >= 10
    assert preemptions(h) >= 5
    front.withhold = True  # until nobody can go on: then there is no step, rather than an empty one
    for _ in range(60):
        launched = h.tick()
        assert not launched or h.n_rows > 0, "a step without rows"
    assert not launched
    assert h.snapshot().header["live"] > 0
    front.withhold = False
    h.settle()


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_q04_a_row_that_cannot_go_on_gives_way_at_its_limit(limit: int) -> None:
    """Q04. Catches: a row that cannot go on and keeps the only row from those that could, for ever or for too long.

    Condition: another request waits for the row from before it is paused; it is paused for exactly the limit.
    """
    h = Harness(small_config(rings=2, slots=1, max_rows=1, cq_entries=4, sq_entries=4, paused_limit=limit))
    h.attach()
    slow, quick = h.fronts
    slow.withhold = True
    held = submit(slow, 3, 8)
    h.tick()
    waiting = submit(quick, 3, 4)
    for _ in range(30):
        h.tick()
        if request(h, held).preemptions:
            break
    assert (request(h, held).paused, request(h, held).preemptions) == (limit, 1)
    h.settle_only(quick)
    assert waiting.tokens == alone(waiting.prompt, 4)
    slow.withhold = False
    h.settle()


def test_q05_others_decode_through_a_preemption() -> None:
    """Q05. Catches: a preempted row left in the running list, at which the next pass stops and starves the others.

    Condition: one of four rows is preempted in the middle of its chunked prefill, while the three others decode; then
    the first of the list leaves it.
    """
    h, front = started(slots=4, max_rows=4, pages=2 + 14, token_budget=7, max_len=40, prefix_cache=0)
    decodes = [submit(front, 3, 20) for _ in range(3)]
    h.tick()
    h.tick()
    h.tick()
    long = submit(front, 30, 4)
    during = False
    for _ in range(12):
        before = [len(x.tokens) for x in decodes]
        was = request(h, long)
        h.tick()
        assert [len(x.tokens) for x in decodes] == [n + 1 for n in before], "a decode has been left out"
        now = request(h, long)
        during |= now.preemptions > was.preemptions and was.emitted == 0 and was.computed > 0
    assert during, "the prefill was not preempted between two chunks"
    assert {int(e["slot"]) for e in h.entries(LogKind.PREEMPT)} == {long.slot}
    assert h.snapshot().running[:3] == [x.slot for x in decodes]
    front.cancel(decodes[0])
    h.tick()
    assert h.snapshot().running[:2] == [x.slot for x in decodes[1:]], "another place in the order of service"
    h.settle()
    assert long.tokens == alone(long.prompt, 4)


def test_q07_urgent_goes_next_and_victims_come_back() -> None:
    """Q07. Catches: preemption by priority that never happens, or whose victims end wrongly or not at all.

    Condition: lazy requests hold every page and wait besides when the urgent one comes.
    """
    h, front = started(pages=2 + 9, slots=8, max_rows=3, sq_entries=32, reservation_steps=2, prefix_cache=0)
    lazy = [submit(front, 8, 12, priority=3) for _ in range(5)]
    while free_pages(h) > 0:
        h.tick()
    waiting = [x for x in lazy if request(h, x).state == RequestState.WAITING]
    assert len(waiting) >= 2
    urgent = submit(front, 8, 8, priority=0)
    h.settle()
    admitted = [(int(e["slot"]), int(e["c"])) for e in h.entries(LogKind.ADMIT)]
    at = admitted.index((urgent.slot, 0))
    assert not {x.slot for x in waiting} & {slot for slot, again in admitted[:at] if again == 0}, "overtaken"
    victims = {int(e["slot"]) for e in h.entries(LogKind.PREEMPT)}
    assert victims
    assert urgent.slot not in victims
    assert all(x.tokens == alone(x.prompt, 12) for x in lazy)
    assert urgent.tokens == alone(urgent.prompt, 8)


def test_q08_large_requests_hold_small_ones_up_for_a_bounded_time() -> None:
    """Q08. Catches: admission closed to everybody for as long as one oversized head lacks pages or budget.

    Condition: heads whose prompts are many times the budget, some of which do not fit when their turn comes.
    """
    small_alone = first_token_after(large=0)
    held_up = first_token_after(large=18)
    assert len(small_alone) == len(held_up) == 11
    # A head holds the reservation for 4 boundaries at most; a turn of large ones is a quantum and one request.
    assert max(held_up) <= max(small_alone) + 40, f"{held_up} steps, alone {small_alone}"


def first_token_after(large: int) -> list[int]:
    """Steps to the first token of 11 small requests beside so many large ones, all published at once."""
    fields = {"rings": 2, "slots": 18, "sq_entries": 64, "cq_entries": 64, "max_rows": 4, "token_budget": 8}
    h = Harness(small_config(**fields, pages=2 + 24, max_len=80, quantum=40, prefix_cache=0, log_entries=1 << 16))
    h.attach()
    for _ in range(large):
        submit(h.fronts[0], 64, 2)
    while large and not h.entries(LogKind.RESERVATION):
        h.tick()  # until a head's turn has come and it does not fit
    small = [submit(h.fronts[1], 4, 2) for _ in range(11)]
    steps: dict[int, int] = {}
    for step in range(1500):
        h.tick()
        for at, x in enumerate(small):
            if x.tokens:
                steps.setdefault(at, step)
        if len(steps) == 11:
            break
    assert not large or max(len(x.prompt) for x in h.history) >= 8 * h.config.token_budget
    h.settle()
    return list(steps.values())


@pytest.mark.parametrize("budget", [3, 4, 9])
def test_q10_a_late_decode_keeps_its_token(budget: int) -> None:
    """Q10. Catches: the token budget handed out in slot order, so that a prefill leaves a decode behind it nothing.

    Condition: the prefill is older, in an earlier slot and row, ten times the budget long, and takes all the rest.
    """
    h, front = started(slots=2, max_rows=2, pages=2 + 60, token_budget=budget, max_len=120, page_size=4)
    late = submit(front, 1, 60, priority=1)
    h.tick()
    h.tick()
    first = submit_tokens(front, list(range(1, 11)) * budget, 4, priority=0)  # goes before the decode
    shared = 0
    for _ in range(12):
        before = len(late.tokens)
        h.tick()
        assert len(late.tokens) == before + 1, "the decode got no token"
    for rows in plans(h).values():
        mine, other = (rows.get((0, x.slot, x.generation)) for x in (first, late))
        if mine is not None and other is not None and int(mine["b"]) < len(first.prompt):
            shared += 1
            assert (int(mine["a"]), int(other["a"])) == (budget - 1, 1)
    assert shared >= 9
    h.settle()


def test_q14_pages_come_back_by_length() -> None:
    """Q14. Catches: pages of requests that ended by length kept as used, until nothing can be admitted.

    Condition: sequential requests, idle in between, all ended by LENGTH, many times the pool in total; some were
    preempted before.
    """
    h, front = started(prefix_cache=0, pages=2 + 6)
    start, asked = int(h.state["header"]["free_pages"][0]), 0
    for i in range(60):
        x = submit(front, 1 + i % 20, 1 + i % 4)
        h.settle()
        assert x.terminal == (FINISH, FinishReason.LENGTH, 1 + i % 4)
        assert int(h.state["header"]["free_pages"][0]) == start
        asked += sum(1 for _ in of(x, h.entries(LogKind.PAGE_ALLOC)))
    assert asked > 10 * start
    for _ in range(4):
        both = [submit(front, 4, 15) for _ in range(2)]
        h.settle()
        assert all(x.terminal == (FINISH, FinishReason.LENGTH, 15) for x in both)
        assert int(h.state["header"]["free_pages"][0]) == start
    assert preemptions(h) >= 4
