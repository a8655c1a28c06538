"""What one ring may do, one operation after the other: the object that histories are compared with (design section 3).

A submission is in effect when its entry is published, an event when it is taken out of the completion queue. Both
queues are first in, first out, so the order of events is that of what the engine did. Laws:

  V1   no event of a request that was not submitted                                     (rules R6, L1)
  V2   token indices 0, 1, 2, ... without gap or repetition                             (C3)
  V3   one terminal event, nothing after it                                             (L1)
  V4   a terminal event counts the tokens before it                                     (L1)
  V5   at most max_tokens tokens, and exactly those when it ends with LENGTH            (C4)
  V6   FINISH CANCELLED only of a request whose own cancel was published                (R10)
  V7   a slot's next owner speaks only after the end of the owner before; SLOT_BUSY only before it (R6)
  V8   a generation that is not newer gets BAD_GENERATION, a newer one does not; the same again is ignored (R6)
  V9   a cancel is taken before what was submitted after it: its request has ended before that speaks (R5, R10)
  V10  LEASE_LOST only after a lapse, DRAINING only after a drain (without tokens) or a stop; what does not follow from
       what was asked or from the ring's story is no end; a refusal counts no token      (L4, L6, L7, R10)
  V11  a new epoch ends everything without events; nothing of another epoch is heard    (R2)
  V12  who waits for all ends gets them                                                 (L1)

A cancel is asynchronous: until it is taken tokens may follow, and the request may come to its natural end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from verification.linearisability.operations import GENERATIONS, Kind, Operation, Request

REFUSALS = frozenset(
    "BAD_ENTRY SLOT_BUSY BAD_GENERATION BAD_LENGTH BAD_EXTENT BAD_TOKEN BAD_PARAM CHECKSUM NEVER_FITS".split()
)
_BEFORE_OWNER = frozenset({"SLOT_BUSY", "BAD_ENTRY", "BAD_GENERATION"})  # judged whoever owns the slot


class Life(NamedTuple):
    """One request that was submitted and has not ended. waits: requests that must have ended before it speaks."""

    waits: frozenset[int]
    stale: bool  # its generation is not newer: only a refusal may come
    spoken: int = 0
    cancelled: bool = False
    lapsed: bool = False


class State(NamedTuple):
    """The ring.

    newest: (slot, newest generation), by slot. lives: (request, Life) by slot, those of one slot in the order of
    submission; between slots that order means nothing, and would make one state look like many. over: requests that
    have ended.
    """

    epoch: int = 0
    closing: int = 0  # 1: drained, 2: stopped
    newest: tuple[tuple[int, int], ...] = ()
    lives: tuple[tuple[int, Life], ...] = ()
    over: frozenset[int] = frozenset()


def newer(generation: int, than: int) -> bool:
    """24-bit serial arithmetic (rule R6)."""
    return 0 < (generation - than) % GENERATIONS < GENERATIONS // 2


def step(state: State, operation: Operation, requests: Sequence[Request]) -> State | str:
    """The state after an operation, or the law that forbids it with what is wrong."""
    kind, number = operation.kind, operation.request
    if number is None:
        return _ring_wide(state, operation)
    request = requests[number]
    if kind is Kind.SUBMIT:
        return _submit(state, number, requests)
    if kind is Kind.CANCEL:
        return _changed(state, number, lambda life: life._replace(cancelled=True))
    life = next((found for other, found in state.lives if other == number), None)
    if life is None:
        if request.epoch != state.epoch:
            return f"V11: an event of epoch {request.epoch}, the ring is in epoch {state.epoch}"
        return "V3: an event after the terminal one" if number in state.over else "V1: an event before any submission"
    if life.waits:
        return f"V9: request {min(life.waits)} was cancelled before this one was submitted, and has not ended"
    owner = _owner_before(state, number, request.slot, requests)
    if kind is Kind.TOKEN:
        wrong = _token(life, operation, request, owner)
        spoken = operation.index + operation.count
        return wrong or _changed(state, number, lambda old: old._replace(spoken=spoken))
    return _terminal(state, life, operation, request, owner) or _ended(state, number)


def _submit(state: State, number: int, requests: Sequence[Request]) -> State:
    request = requests[number]
    if request.epoch != state.epoch or number in state.over or any(other == number for other, _ in state.lives):
        return state  # an entry of another epoch, or the same again
    judged = dict(state.newest)
    before = judged.get(request.slot)  # None: what the slot had before the history began is not known
    stale = before is not None and not newer(request.generation, before)
    if not stale:
        judged[request.slot] = request.generation
    waits = frozenset(other for other, life in state.lives if life.cancelled)
    born = Life(stale=stale, waits=waits)
    lives = sorted((*state.lives, (number, born)), key=lambda entry: requests[entry[0]].slot)  # stable
    return state._replace(newest=tuple(sorted(judged.items())), lives=tuple(lives))


def _owner_before(state: State, number: int, slot: int, requests: Sequence[Request]) -> int | None:
    """The live request that got the slot before this one."""
    for other, life in state.lives:
        if other == number:
            return None
        if requests[other].slot == slot and not life.stale:
            return other
    return None


def _token(life: Life, operation: Operation, request: Request, owner: int | None) -> str | None:
    if life.stale:
        return f"V8: generation {request.generation} of slot {request.slot} is not newer, and is served"
    if owner is not None:
        return f"V7: slot {request.slot} still belongs to request {owner}"
    if operation.index != life.spoken:
        return f"V2: index {operation.index} where index {life.spoken} is next"
    if request.max_tokens is not None and operation.index + operation.count > request.max_tokens:
        return f"V5: index {operation.index + operation.count - 1} of at most {request.max_tokens} tokens"
    return None


def _terminal(state: State, life: Life, operation: Operation, request: Request, owner: int | None) -> str | None:
    reason = operation.reason
    if operation.index != life.spoken:
        return f"V4: it counts {operation.index} tokens, {life.spoken} tokens were delivered"
    if life.stale:
        right = operation.kind is Kind.ERROR and reason == "BAD_GENERATION"
        return None if right else f"V8: generation {request.generation} of slot {request.slot} is not newer"
    if owner is not None and not (operation.kind is Kind.ERROR and reason in _BEFORE_OWNER):
        return f"V7: slot {request.slot} still belongs to request {owner}"
    if operation.kind is Kind.FINISH:
        return _finish(life, operation, request)
    if reason in REFUSALS and life.spoken:
        return f"V10: refused with {reason} after {life.spoken} tokens"
    if reason == "SLOT_BUSY":
        return None if owner is not None else f"V7: slot {request.slot} is not busy"
    told = {
        "LEASE_LOST": life.lapsed,
        "DRAINING": state.closing == 2 or (state.closing == 1 and not life.spoken),
    }
    if told.get(reason) or reason in request.may_end:
        return None
    return "V8: the generation is newer" if reason == "BAD_GENERATION" else f"V10: nothing explains {reason}"


def _finish(life: Life, operation: Operation, request: Request) -> str | None:
    if operation.reason == "CANCELLED":
        return None if life.cancelled else "V6: nobody cancelled it"
    if operation.reason == "LENGTH":
        full = request.max_tokens in (None, life.spoken)
        return None if full else f"V5: LENGTH after {life.spoken} tokens, max_tokens is {request.max_tokens}"
    return None if operation.reason in request.may_end else f"V10: nothing explains {operation.reason}"


def _ring_wide(state: State, operation: Operation) -> State | str:
    if operation.kind is Kind.LAPSE:
        return state._replace(lives=tuple((n, life._replace(lapsed=True)) for n, life in state.lives))
    if operation.kind in (Kind.DRAIN, Kind.STOP):
        return state._replace(closing=max(state.closing, 1 if operation.kind is Kind.DRAIN else 2))
    if operation.kind is Kind.EPOCH:
        return state._replace(epoch=operation.index, newest=(), lives=(), over=frozenset())
    if state.lives:
        return f"V12: request {state.lives[0][0]} never ended"
    return state


def _changed(state: State, number: int, change: Callable[[Life], Life]) -> State:
    """The state with one request changed; a request that does not live is none."""
    return state._replace(lives=tuple((n, change(life) if n == number else life) for n, life in state.lives))


def _ended(state: State, number: int) -> State:
    lives = tuple(
        (n, life._replace(waits=life.waits - {number}) if number in life.waits else life)
        for n, life in state.lives
        if n != number
    )
    return state._replace(lives=lives, over=state.over | {number})
