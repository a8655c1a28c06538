"""Events, ends and preemption of requests (L, R9, R10)."""

from __future__ import annotations

from blink_core.abi.enums import EngineState, ErrorReason, EventKind, FinishReason, LogKind, RequestState
from verification.spec import kv
from verification.spec.state import Request, Ring, State


def write_event(s: State, ring: Ring, *fields: int) -> None:
    """R9: the next event of the ring; fields: slot, kind, reason or count, generation and what the kind says."""
    s.events.append((ring.index, ring.cq_tail, *fields))
    ring.cq_tail += 1


def end(s: State, request: Request, reason: FinishReason | ErrorReason) -> None:
    """L1: the terminal event."""
    finish, emitted = isinstance(reason, FinishReason), request.emitted
    entry, kind = (LogKind.FINISH, EventKind.FINISH) if finish else (LogKind.ERROR, EventKind.ERROR)
    s.note(entry, request, reason, emitted, let_go(s, request))
    cached = request.cached if finish else -1
    write_event(s, request.ring, request.slot, kind, reason, request.generation, emitted, cached, 0, s.step)


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
    if s.reserved is not None:
        s.note(LogKind.RESERVATION, s.reserved, 0, s.boundaries - s.reserved_since)
    s.reserved = None


def wait(request: Request) -> None:
    """Into its list by age (L2)."""
    waiting = request.ring.waiting[request.descriptor.priority]
    waiting.append(request)
    waiting.sort(key=lambda other: other.arrival)


def preempt(s: State, request: Request) -> None:
    """L1: RUNNING -> WAITING; it keeps its age and its output and computes all of it again."""
    computed, row = request.computed, request.row
    s.running.remove(request)
    s.rows.append(row)
    released = kv.release(s, request)
    request.state, request.row = RequestState.WAITING, -1
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
            end(s, request, ErrorReason.DEADLINE)


def lease(s: State, ring: Ring) -> None:  # L4
    checked = s.config.lease_us > 0
    if checked and ring.memory.lease != ring.lease:
        ring.lease, ring.lease_at = ring.memory.lease, s.clock
        if ring.lapsed:
            ring.lapsed = 0
            s.note(LogKind.LEASE, (ring.index, 0, 0), 0, 0)
    if checked and ring.live and s.clock - ring.lease_at >= s.config.lease_us:
        lost = [request for request in ring.requests if request is not None]
        for request in lost:
            end(s, request, ErrorReason.LEASE_LOST)
        s.note(LogKind.LEASE, (ring.index, 0, 0), 1, len(lost))
        ring.lapsed, ring.lapses = 1, ring.lapses + 1


def enter(s: State, state: EngineState) -> None:
    s.engine = state
    s.note(LogKind.STATE, a=state)
