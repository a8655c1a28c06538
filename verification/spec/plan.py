"""Planning of running requests and admission of waiting ones (P, A)."""

from __future__ import annotations

from collections.abc import Sequence

from blink_core.abi.definition import PRIORITIES
from blink_core.abi.enums import Admission, LogKind, RequestState
from verification.spec import kv, life
from verification.spec.state import PlanRow, Request, Ring, State


def make_plan(s: State) -> list[PlanRow]:
    """A6, then P, then A. The rows of the next step, in plan order."""
    rows: list[PlanRow] = []
    enforce_reservation(s)
    budget = s.config.token_budget
    able = {r for r in s.running if has_credits(s, r) and not r.wants_mask()}  # before anything is planned
    for request in tuple(s.running):
        if request.state != RequestState.RUNNING:
            continue
        later = s.running[s.running.index(request) + 1 :]
        decodes = sum(len(other.tokens) - other.computed == 1 and other in able for other in later)  # P1
        planned = plan_request(s, rows, request, budget - decodes)
        if planned < 0:
            break
        budget -= planned
    admit(s, rows, budget)
    return rows


def has_credits(s: State, request: Request) -> bool:  # P3
    ring = request.ring
    unconsumed = ring.cq_tail - ring.cq_head
    return unconsumed + ring.planned + request.event_cost + s.config.slots <= s.config.cq_entries


def plan_request(s: State, rows: list[PlanRow], request: Request, budget: int) -> int:
    """P2, P4: tokens planned, or -1 if the request had to give way to itself."""
    remaining = len(request.tokens) - request.computed
    count = min(remaining, budget) if remaining > 1 else remaining
    able = has_credits(s, request) and not request.wants_mask()
    if count and not able:  # P2
        held = (len(request.pages) + kv.available(s)) * s.config.page_size
        count = min(count, remaining - 1, held - request.computed)
        request.paused += not count
    if able or count:
        request.paused = 0
    if not count:
        return 0
    context_len, sample = request.computed + count, int(count == remaining)
    while len(request.pages) < kv.pages_of(s, context_len):  # P4
        if not kv.take(s, request):
            victim = paused_row(s) or s.running[-1]
            life.preempt(s, victim)
            if victim is request:
                return -1
    start = rows[-1].q_start + rows[-1].q_len if rows else 0
    rows.append(PlanRow(request, start, count, context_len, sample, request.emitted))
    request.ring.planned += sample * request.event_cost
    s.note(LogKind.PLAN_ROW, request, count, context_len, request.row)
    return count


def paused_row(s: State) -> Request | None:
    """The last in order of service of the rows paused long enough (P4, A3)."""
    return next((r for r in reversed(s.running) if r.paused >= s.config.paused_limit), None)


def fits(s: State, request: Request, gone: Sequence[Request] = ()) -> bool:
    """A3; without the running requests `gone`, each of whose pages counts as available (A6)."""
    found = kv.hit(s, request)
    needed = kv.pages_of(s, len(request.tokens)) - len(found) + sum(page in s.idle for page in found)
    if not (s.rows or gone) or needed > kv.available(s) + sum(len(other.pages) for other in gone):
        return False
    together = [request, *(other for other in s.running if other not in gone)]
    return s.config.admission != Admission.RESERVE or committed_pages(s, together) <= s.config.pages - 2


def committed_pages(s: State, requests: Sequence[Request]) -> int:
    """The most pages that these may need together."""
    return sum(kv.most_pages(s, request.descriptor) for request in requests)


def cost(s: State, request: Request) -> int:  # A2
    d = request.descriptor
    return 0 if request.admitted else min(d.prompt_len + d.max_tokens, s.config.max_len)


def admit(s: State, rows: list[PlanRow], budget: int) -> None:
    ended = False  # a reservation ended at this boundary: nobody takes one any more (A7)
    for level in range(PRIORITIES):  # A1
        passed: set[Ring] = set()
        back: int | None = None
        while budget > 0:
            request = choose(s, level, passed)
            if request is None:
                break
            while not (fitting := fits(s, request)) and (victim := paused_row(s)) is not None:  # A3
                life.preempt(s, victim)
            if fitting:
                start(s, request)
                budget -= plan_request(s, rows, request, budget)
                request.paused = 0  # A4
                back = None
                continue
            if not ended:
                hold_reservation(s, request)
                if not reservation_due(s):
                    return
                life.give_up_reservation(s)
                ended, back = True, request.ring.index
            passed.add(request.ring)
        if back is not None:
            s.turn[level] = back


def hold_reservation(s: State, request: Request) -> None:  # A5
    if s.reserved is not request:
        life.give_up_reservation(s)
        s.reserved, s.reserved_since = request, s.boundaries
        s.note(LogKind.RESERVATION, request, 1, 0)


def head(s: State, ring: Ring, level: int, passed: set[Ring]) -> Request | None:
    """The ring's head of a class, if it has credits (A2) and was not passed over (A7)."""
    first = next((request for request in ring.waiting[level] if not request.wants_mask()), None)
    return first if first is not None and ring not in passed and has_credits(s, first) else None


def choose(s: State, level: int, passed: set[Ring]) -> Request | None:
    holder = s.reserved
    if holder is not None and head(s, holder.ring, level, passed) is holder:  # A1
        return holder
    if all(head(s, ring, level, passed) is None for ring in s.rings):
        return None
    while True:  # A2
        ring = s.rings[s.turn[level]]
        request = head(s, ring, level, passed)
        if request is not None and ring.deficit[level] >= cost(s, request):
            return request
        pass_turn(s, level, passed)


def pass_turn(s: State, level: int, passed: set[Ring]) -> None:  # A2
    for step in (0, 1):
        s.turn[level] = (s.turn[level] + step) % s.config.rings
        ring = s.rings[s.turn[level]]
        if not ring.waiting[level]:
            ring.deficit[level] = 0
    request = head(s, ring, level, passed)
    if request is not None and ring.deficit[level] < cost(s, request):
        ring.deficit[level] += s.config.quantum


def start(s: State, request: Request) -> None:
    """A4: WAITING -> RUNNING."""
    level = request.descriptor.priority
    request.ring.deficit[level] -= cost(s, request)
    request.ring.waiting[level].remove(request)
    if s.reserved is request:
        life.give_up_reservation(s)
    request.state, request.row = RequestState.RUNNING, s.rows.pop()
    request.paused = request.mask_index = 0
    s.running = sorted([*s.running, request], key=lambda r: r.order)  # L2
    s.admissions += 1
    found = kv.hit(s, request)  # K7
    for index, page in enumerate(found):
        kv.hold(s, request, index, page)
        request.pages.append(page)
    request.published, request.computed = len(found), len(found) * s.config.page_size
    if not request.admitted:
        request.cached = request.computed  # L1
    if kv.shares(s, request):
        s.lookups += (len(request.tokens) - 1) // s.config.page_size * s.config.page_size
        s.hits += request.computed
        if found:
            s.note(LogKind.PREFIX_HIT, request, len(found), request.computed, request.row)
    request.admitted = 1
    s.note(LogKind.ADMIT, request, request.row, len(request.tokens), request.preemptions)


def reservation_due(s: State) -> bool:
    return s.boundaries - s.reserved_since >= s.config.reservation_steps


def enforce_reservation(s: State) -> None:  # A6
    holder = s.reserved
    if holder is None or not reservation_due(s):
        return
    if not has_credits(s, holder):
        return life.give_up_reservation(s)
    after = [request for request in s.running if request.order > holder.order]
    if fits(s, holder) or not fits(s, holder, after):
        return
    while after and not fits(s, holder):
        life.preempt(s, after.pop())
    if fits(s, holder):
        s.note(LogKind.RESERVATION, holder, 2, s.boundaries - s.reserved_since)
