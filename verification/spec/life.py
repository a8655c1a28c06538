"""Events, ends and preemption of requests (L, R9, R10)."""

from __future__ import annotations

from blink_core.abi.enums import EngineState, ErrorReason, EventKind, FinishReason, LogKind, RequestState
from verification.spec import kv
from verification.spec.state import Request, Ring, State


def write_event(s: State, ring: Ring, *fields: int) -> None:
    """R9: the next event of the ring; fields: slot, kind, reason or count, generation and what the kind says."""
    s.events.append((ring.index, ring.cq_tail, *fields))
    ring.cq_tail += 1


def finish(s: State, request: Request, reason: FinishReason) -> None:
    _end(s, request, LogKind.FINISH, EventKind.FINISH, reason, request.cached)  # L1


def fail(s: State, request: Request, reason: ErrorReason) -> None:
    _end(s, request, LogKind.ERROR, EventKind.ERROR, reason, -1)


def _end(s: State, request: Request, entry: LogKind, kind: EventKind, reason: int, token: int) -> None:
    emitted = request.emitted
    s.note(entry, request, reason, emitted, let_go(s, request))
    write_event(s, request.ring, request.slot, kind, reason, request.generation, emitted, token, 0, s.step)


def let_go(s: State, request: Request) -> int:
    """The request is over: it leaves every list and table. Returns the pages released (E3)."""
    if request.state == RequestState.RUNNING:
        s.running.remove(request)
        s.rows.append(request.row)
    else:
        request.ring.waiting[request.descriptor.priority].remove(request)
    released = kv.release(s, request)
    if s.reserved is request:
        give_up_reservation(s)
    request.state = RequestState.FREE
    request.ring.requests[request.slot] = None
    request.ring.live -= 1
    return released


def give_up_reservation(s: State) -> None:
    s.note(LogKind.RESERVATION, s.reserved, 0, s.boundaries - s.reserved_since)
    s.reserved = None


def wait(request: Request) -> None:
    """Into its list by age (L2)."""
    waiting = request.ring.waiting[request.descriptor.priority]
    at = len(waiting)
    while at and waiting[at - 1].arrival > request.arrival:
        at -= 1
    waiting.insert(at, request)


def preempt(s: State, request: Request) -> None:
    """L1: RUNNING -> WAITING; it keeps its age and its output and computes all of it again."""
    computed, row = request.computed, request.row
    s.running.remove(request)
    s.rows.append(row)
    released = kv.release(s, request)
    request.state = RequestState.WAITING
    request.row = -1
    request.computed = request.published = 0
    request.preemptions += 1
    s.preemptions += 1
    wait(request)
    s.note(LogKind.PREEMPT, request, row, computed, released)


def by_index(s: State) -> list[Request]:
    """Live requests by request index (R1)."""
    return [request for ring in s.rings for request in ring.requests if request is not None]


def deadlines(s: State) -> None:  # L3
    for request in by_index(s):
        if request.expires and s.clock >= request.expires:
            fail(s, request, ErrorReason.DEADLINE)


def lease(s: State, ring: Ring) -> None:  # L4
    if not s.config.lease_us:
        return
    if ring.memory.lease != ring.lease:
        ring.lease, ring.lease_at = ring.memory.lease, s.clock
        if ring.lapsed:
            ring.lapsed = 0
            s.note_at(LogKind.LEASE, ring.index, 0, 0, 0, 0)
    if ring.live and s.clock - ring.lease_at >= s.config.lease_us:
        lost = [request for request in ring.requests if request is not None]
        for request in lost:
            fail(s, request, ErrorReason.LEASE_LOST)
        s.note_at(LogKind.LEASE, ring.index, 0, 0, 1, len(lost))
        ring.lapsed = 1
        ring.lapses += 1


def enter(s: State, state: EngineState) -> None:
    s.engine = state
    s.note(LogKind.STATE, None, state)
