"""Corpus rows K: the life of KV pages; on the compiled scheduler, stepped by hand.

After every call the harness recounts all pages from raw memory (one place each, owners, counts, cache tree); the tagged
pool shows in the step itself if a row reads a page that is not its own.
"""

from __future__ import annotations

import pytest

from blink_core.abi.enums import FinishReason, LogKind, PageState, RequestState
from tests.scenarios.common import (
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
    text,
)
from verification.scheduler import cache_invariants, invariants
from verification.scheduler.harness import Harness, small_config


@pytest.mark.parametrize("budget", [3, 7, 13])
@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
def test_k02_chunks_that_end_inside_a_page(page_size: int, budget: int) -> None:
    """K02. Catches: a chunk's end rounded to a page, or not, so that pages are lost or freed twice once idle.

    Condition: chunks of several requests end inside pages (with pages of one token: nowhere else), pages pass on.
    """
    pages = {1: 80, 2: 40, 16: 9, 64: 4}[page_size]
    fields = {"max_len": 100, "pages": 2 + pages, "slots": 4, "max_rows": 3, "log_entries": 1 << 15}
    h, front = started(**fields, page_size=page_size, token_budget=budget)
    made = []
    for length in (33, 5, 50, 17, 21, 37, 64):
        while not front.free:
            h.tick()
        made.append(submit(front, length, 6))
    h.settle()
    assert all(x.terminal == (FINISH, FinishReason.LENGTH, 6) for x in made)
    ends = [int(e["b"]) for e in h.entries(LogKind.PLAN_ROW) if int(e["a"]) > 1]
    inside = [n for n in ends if n % page_size]
    assert len(inside) >= 5 or page_size == 1
    owners = [(int(e["a"]), int(e["generation"]), int(e["slot"])) for e in h.entries(LogKind.PAGE_ALLOC)]
    assert len({page for page, *_ in owners}) < len(set(owners)), "no page was used twice"


@pytest.mark.parametrize("lacking", ["pages", "rows"])
def test_k03_admission_that_fails_takes_nothing(lacking: str) -> None:
    """K03. Catches: the row or the pages that an admission has taken when it then fails for want of the other.

    Condition: of rows and pages there is one and not the other, at each of a thousand boundaries with a waiting head.
    """
    rows, pages = (4, 9) if lacking == "pages" else (2, 40)
    fields = {"rings": 3, "slots": 2, "max_rows": rows, "pages": 2 + pages, "cq_entries": 8, "sq_entries": 8}
    h = Harness(small_config(**fields, paused_limit=1 << 20, prefix_cache=0, log_level=0))
    h.attach()
    for front in h.fronts[:2]:
        front.withhold = True
    held = [submit(front, 11, 12) for front in h.fronts[:2]]
    for _ in range(20):  # until credits are out: both hold their rows and pages, and neither goes on
        h.tick()
    waiting = [submit(h.fronts[2], 6, 2) for _ in range(2)]
    h.poll()
    s = h.snapshot()
    assert [request(h, x).paused > 0 for x in held] == [True, True]
    assert (s.header["free_rows"] > 0, s.header["free_pages"] >= 2) == ((True, False), (False, True))[lacking == "rows"]
    before = s.header["free_rows"], s.free_list, [s.table(r) for r in s.running]
    checks, h.checks = h.checks, frozenset()  # nothing changes, as is seen below
    for _ in range(1000):
        h.boundary()
        h.poll()
    h.checks = checks
    s = h.snapshot()
    assert (s.header["free_rows"], s.free_list, [s.table(r) for r in s.running]) == before
    invariants.check_all(s)
    assert all(request(h, x).state == RequestState.WAITING for x in waiting)
    for front in h.fronts:
        front.withhold = False
    h.settle()
    assert all(x.terminal == (FINISH, FinishReason.LENGTH, 2) for x in waiting)


def test_k03_a_request_that_leaves_before_its_first_token() -> None:
    """K03. Catches: the row or pages of a request that was admitted and ended before it emitted anything.

    Condition: more requests than there are rows are cancelled in the middle of their prefill, one after the other.
    """
    h, front = started(max_rows=3, token_budget=4, prefix_cache=0)
    rows, pages = (int(h.state["header"][name][0]) for name in ("free_rows", "free_pages"))
    for _ in range(12):
        x = submit(front, 15, 3)
        h.tick()
        h.tick()
        assert 0 < request(h, x).computed < 15 or h.in_flight
        front.cancel(x)
        h.tick()
        h.tick()
        assert (x.terminal, x.tokens) == ((FINISH, FinishReason.CANCELLED, 0), [])
        found = tuple(int(h.state["header"][name][0]) for name in ("free_rows", "free_pages"))
        assert found == (rows, pages)
    h.settle()


def test_k05_shared_pages_are_counted_once() -> None:
    """K05. Catches: pages that two requests share counted twice, when the first ends, or the last.

    Condition: two requests share five pages while both run; both end, one by cancel; the gauge equals a recount.
    """
    h, front = started(pages=2 + 16, token_budget=32, max_len=48)
    submit_tokens(front, text(21), 1)
    h.settle()
    both = [submit_tokens(front, [*text(20), last], 8) for last in (7, 9)]
    h.tick()
    h.tick()
    s = h.snapshot()
    tables = [s.table(x.slot + x.ring * h.config.slots) for x in both]
    assert tables[0][:5] == tables[1][:5]
    assert [s.pages[p].refs for p in tables[0][:5]] == [2] * 5
    assert s.header["idle_cached"] == 0
    front.cancel(both[0])
    h.tick()
    assert [h.snapshot().pages[p].refs for p in tables[0][:5]] == [1] * 5
    h.settle()
    s = h.snapshot()
    idle = [p for p, page in enumerate(s.pages) if page.state == PageState.CACHED and page.refs == 0]
    assert set(tables[0][:5]) <= set(idle)
    assert s.header["idle_cached"] == len(idle)
    assert s.header["free_pages"] + len(idle) == h.config.pages - 2


def test_k14_an_evicted_page_is_forgotten() -> None:
    """K14. Catches: a page that goes to another request and is still found under what it held before.

    Condition: pages of A are evicted and hold B when A comes again.
    """
    h, front = started(pages=2 + 6, token_budget=32, max_rows=2)
    a, b = text(17, 2), text(17, 5)
    submit_tokens(front, a, 2)
    h.settle()
    mine = {int(e["a"]) for e in h.entries(LogKind.PAGE_PUBLISH)}
    second = submit_tokens(front, b, 6)
    h.settle()
    evicted = {int(e["a"]) for e in h.entries(LogKind.PAGE_EVICT)}
    reused = {int(e["a"]) for e in of(second, h.entries(LogKind.PAGE_ALLOC))} & evicted & mine
    assert reused
    third = submit_tokens(front, a, 2)
    h.settle()
    lost = len(reused)
    assert third.cached <= 16 - h.config.page_size * lost
    assert third.tokens == alone(a, 2)


def test_k15_leaves_are_evicted_first() -> None:
    """K15. Catches: eviction of a page that others stand behind, which are then found without their beginning.

    Condition: a long beginning with two branches, idle; the beginning is the longer unused; several are evicted.
    """
    h, front = started(pages=2 + 14, token_budget=40, max_len=48, max_rows=2)
    beginning = text(17, 2)
    for branch in (3, 4):
        submit_tokens(front, [*beginning[:16], *text(9, branch)], 1)
        h.settle()
    s = h.snapshot()
    inner = [p for p, page in enumerate(s.pages) if page.state == PageState.CACHED and page.children]
    assert max(s.pages[p].children for p in inner) == 2, "no branches"
    evicted: list[int] = []
    for seed in (7, 9, 11):
        before = h.snapshot()
        order = [int(e["a"]) for e in h.entries(LogKind.PAGE_EVICT)]
        submit_tokens(front, text(24, seed), 1)
        h.settle()
        parents = {p: before.pages[p].parent for p, page in enumerate(before.pages) if page.state == PageState.CACHED}
        children = {p: before.pages[p].children for p in parents}
        for page in [int(e["a"]) for e in h.entries(LogKind.PAGE_EVICT)][len(order) :]:
            if page not in children:
                continue
            assert children[page] == 0, f"page {page} was evicted before {children[page]} that stand behind it"
            evicted.append(page)
            if parents[page] in children:
                children[parents[page]] -= 1
    assert len(evicted) >= 4


def test_k17_nine_pages_of_eight() -> None:
    """K17. Catches: a page taken from an empty list, so that two requests hold the same one.

    Condition: the requests that run together need nine pages, eight there are, and the list runs empty.
    """
    h, front = started(pages=2 + 8, max_rows=3, prefix_cache=0, page_size=4)
    made = [submit(front, 4, 9) for _ in range(3)]  # three pages each: 12 tokens of KV
    empty = 0
    for _ in range(80):
        h.tick()
        empty += len(h.snapshot().free_list) == 0
        if all(x.terminal for x in made):
            break
    assert empty > 0
    assert preemptions(h) > 0
    assert all(x.tokens == alone(x.prompt, 9) for x in made)
    h.settle()


@pytest.mark.parametrize("page_size", [2, 3, 4, 8, 16])
def test_k18_eviction_gives_whole_pages(page_size: int) -> None:
    """K18. Catches: eviction that gives places of tokens where pages are wanted.

    Condition: pages of more than one token, evictions forced, and the evicted pages used by others.
    """
    h, front = started(page_size=page_size, pages=2 + 6, token_budget=24, max_len=64, max_rows=2)
    for seed in range(1, 9):
        x = submit_tokens(front, text(5 * page_size + 1 if page_size < 12 else 60, seed)[:60], 2)
        h.settle()
        assert x.tokens == alone(x.prompt, 2)
    evicted = [int(e["a"]) for e in h.entries(LogKind.PAGE_EVICT)]
    taken = [int(e["a"]) for e in h.entries(LogKind.PAGE_ALLOC)]
    assert len(evicted) > 6
    assert set(evicted) <= set(range(2, h.config.pages))
    assert any(taken.count(page) > 1 for page in evicted)


@pytest.mark.parametrize("length", [19, 20])
@pytest.mark.parametrize("gap", [1, 2, 3])
def test_k20_the_same_prompt_between_two_chunks(gap: int, length: int) -> None:
    """K20. Catches: a page that another request finds before it is computed.

    Condition: the same prompt comes when the first is between two of its chunks, its computed pages full; the last page
    is full, or lacks one token.
    """
    h, front = started(token_budget=5, max_rows=3, max_len=40, pages=2 + 30)
    first = submit_tokens(front, text(length), 4)
    h.poll()
    for _ in range(gap):
        h.tick()
    between = request(h, first)
    assert 0 < between.computed < len(first.prompt) or gap == 1
    second = submit_tokens(front, text(length), 4)
    h.poll()
    while not first.tokens:
        h.tick()
        if not first.tokens:
            assert not [p for p in h.snapshot().pages if p.state == PageState.CACHED], "found before it is confirmed"
    h.settle()
    third = submit_tokens(front, text(length), 4)
    h.settle()
    assert third.cached == 16, length
    assert first.tokens == second.tokens == third.tokens == alone(text(length), 4)


def test_k06_neighbours_under_eviction_and_cancels() -> None:
    """K06. Catches: a page freed by a cancel while a step still reads it, or evicted under a neighbour.

    Condition: twelve requests with common beginnings in a tiny pool; preemption, eviction, hits and cancels in flight.
    """
    h, front = started(slots=12, sq_entries=64, cq_entries=64, max_rows=5, pages=2 + 10, token_budget=12, max_len=40)
    in_flight = 0
    for step in range(240):
        while front.free:
            n = len(front.history)
            shared = text(4 * (1 + n % 4), 1 + n % 3)
            submit_tokens(front, [*shared, n % 37, n * 7 % 37], 3 + n % 9)
        h.poll()
        if h.boundary():
            victims = [p.submission for p in h.in_flight if p.submission.terminal is None]
            if step % 4 == 0 and victims:
                front.cancel(victims[step % len(victims)])
                h.poll()
                in_flight += 1
            h.run_model()
        h.poll()
        front.consume()
    h.settle()
    assert in_flight > 30
    assert {"PREEMPT", "PAGE_EVICT", "PREFIX_HIT", "PAGE_UNQUARANTINE"} <= h.situations
    for x in h.history:
        assert x.tokens == alone(x.prompt, len(x.tokens))
    cache_invariants.check_cache(h.snapshot())


def test_g02_g06_rows_of_a_step_never_touch_reserved_pages() -> None:
    """G02, G06 (the part of the host). Catches: a page that padded rows of a graph write handed to a live request.

    Condition: every other page is in use, one request is parked outside the batch, and steps have fewer rows than most.
    """
    h, front = started(pages=2 + 6, slots=4, max_rows=4, prefix_cache=0)
    made = [submit(front, 4, 11) for _ in range(3)]
    fewer, parked = 0, 0
    for _ in range(100):
        h.tick()
        s = h.snapshot()
        assert all(page >= 2 for r in s.running for page in s.table(r))
        assert [s.pages[p].state for p in (0, 1)] == [PageState.RESERVED] * 2
        fewer += bool(h.in_flight) and len(h.in_flight) < h.config.max_rows
        parked += any(q.preemptions and q.state == RequestState.WAITING for q in s.requests)
        if all(x.terminal for x in made):
            break
    assert fewer > 5
    assert parked > 0
    assert all(x.tokens == alone(x.prompt, 11) for x in made)
    assert {slot for rows in plans(h).values() for _, slot, _ in rows} == {x.slot for x in made}


def test_g08_more_tokens_than_pages_in_one_step() -> None:
    """G08 (the part of the host). Catches: a buffer of the plan sized in pages and filled for each token.

    Condition: one step has more tokens than the pool has pages, pages of 16; regions are exactly as large as laid out.
    """
    h, front = started(page_size=16, pages=2 + 10, token_budget=120, max_len=150, max_rows=2)
    made = [submit(front, 70, 3), submit(front, 49, 3)]
    h.poll()
    h.boundary()
    assert int(h.plan["header"]["n_tokens"][0]) == 119 > h.config.pages
    assert len(h.plan["kv_slots"]) == h.config.token_budget
    h.run_model()
    h.settle()
    assert all(x.tokens == alone(x.prompt, 3) for x in made)
    assert free_pages(h) == 10
