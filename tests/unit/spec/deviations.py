"""Small deviations of the specification from its clauses: lock-step must find each."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from blink_core.abi.enums import ErrorReason, SlotFlag
from verification.spec import kv, life, machine, plan, ring
from verification.spec.state import Request, Ring, State

Deviation = tuple[str, str, ModuleType, str, Callable[..., Any]]


def _no_age(request: Request) -> None:
    request.ring.waiting[request.descriptor.priority].append(request)


def _reversed_quarantine(s: State) -> None:
    s.quarantine.reverse()
    _end_quarantine(s)


def _late_deadlines(s: State) -> None:
    for request in life.by_index(s):
        if request.expires and s.clock > request.expires:
            life.end(s, request, ErrorReason.DEADLINE)


def _whole_prefix(s: State, request: Request) -> list[int]:
    request.tokens.append(0)
    found = _hit(s, request)
    request.tokens.pop()
    return found


def _eager_end(s: State, request: Request, token: int) -> Any:
    request.emitted += 1
    try:
        early = _end_of(s, request, token)
    finally:
        request.emitted -= 1
    return early if early in (1, 2) else _end_of(s, request, token)


def _greedy_credits(s: State, request: Request) -> bool:
    r = request.ring
    return r.cq_tail - r.cq_head + r.planned + request.event_cost <= s.config.cq_entries


def _first_paused(s: State) -> Request | None:
    return next((r for r in s.running if r.paused >= s.config.paused_limit), None)


def _restless_head(s: State, ring: Ring, level: int, passed: set[Ring]) -> Request | None:
    first = next(iter(ring.waiting[level]), None)
    return first if first is not None and ring not in passed and plan.has_credits(s, first) else None


def _due_late(s: State) -> bool:
    return s.boundaries - s.reserved_since > s.config.reservation_steps


def _kept_deficit(s: State, level: int, passed: set[Ring]) -> None:
    kept = [r.deficit[level] for r in s.rings]
    _pass_turn(s, level, passed)
    for r, deficit in zip(s.rings, kept, strict=True):
        r.deficit[level] = max(r.deficit[level], deficit)


def _shared_flags(s: State, request: Request) -> bool:
    return bool(s.config.prefix_cache) or bool(request.descriptor.flags & SlotFlag.NO_PREFIX_CACHE and False)


def _numeric_newer(generation: int, than: int) -> bool:
    return generation > than


_end_quarantine, _hit, _end_of, _pass_turn = kv.end_quarantine, kv.hit, machine.end_of, plan.pass_turn

DEVIATIONS: tuple[Deviation, ...] = (
    ("age lost by preemption", "L2", life, "wait", _no_age),
    ("quarantine emptied from its bottom", "K5", kv, "end_quarantine", _reversed_quarantine),
    ("deadline one tick late", "L3", life, "deadlines", _late_deadlines),
    ("hit on the whole prompt", "K7", kv, "hit", _whole_prefix),
    ("stop ids at min_tokens", "C4", machine, "end_of", _eager_end),
    ("no credits kept for terminal events", "P3", plan, "has_credits", _greedy_credits),
    ("the first paused row gives way", "P4", plan, "paused_row", _first_paused),
    ("a request comes back before its mask", "A2", plan, "head", _restless_head),
    ("reservation due one boundary late", "A5", plan, "reservation_due", _due_late),
    ("deficit kept by a ring without requests", "A2", plan, "pass_turn", _kept_deficit),
    ("NO_PREFIX_CACHE not heeded", "K8", kv, "shares", _shared_flags),
    ("generations compared as numbers", "R6", ring, "newer", _numeric_newer),
)
