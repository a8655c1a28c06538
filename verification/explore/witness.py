"""A counterexample in words: one line a transition, from the records of `Explorer.replay`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from blink_core.abi.enums import EngineState, ErrorReason, EventKind, FinishReason, RequestState
from verification.explore.scope import Attach, Cancel, Outcome, Scope, Submit

if TYPE_CHECKING:
    from verification.explore.run import Search

POLL, BOUNDARY, TICK, HOST, CRASH, DELIVER, SKIP, CONSUME, CREDIT, RENEW, SUPERSEDE = range(11)
ELDER = 1 << 15  # of a detail: the move is that of a front end beside which its successor attaches
RIVAL = 1 << 14  # ... and which attaches itself
_PARTS = ("payload", "descriptor, first line", "descriptor, rest", "entry")


class Reader:
    """The words of one record, one after the other."""

    def __init__(self, words: list[int]) -> None:
        self._words = iter(words)

    def __call__(self) -> int:
        return next(self._words)

    def take(self, count: int) -> list[int]:
        return [self() for _ in range(count)]


def decode(search: Search) -> Iterator[str]:
    """Lines `number  who does what  | what it changed`."""
    scope = search.scope
    in_flight, samples, before = False, 0, [0] * len(scope.programs)
    for number, words in enumerate(search.records, start=1):
        read = Reader(words)
        label = read()
        action, ring, detail = label & 255, label >> 8 & 255, label >> 16
        what = _action(scope, action, ring, detail, before, in_flight, samples)
        in_flight_now, free, quarantined, idle, state, now = read.take(6)
        requests = _requests(scope, read)
        plan, samples = _plan(scope, read, samples)
        rings, before = _rings(scope, read)
        in_flight = bool(in_flight_now)
        pages = f"free pages {free}" + (f", quarantined {quarantined}" if quarantined else "")
        pages += f", idle in the cache {idle}" if idle else ""
        engine = "" if state == EngineState.READY else f"; {EngineState(state).name}"
        clock = f"; clock {now}" if scope.ticks else ""
        step = "; a step runs" if in_flight else ""
        seen = "; ".join(part for part in (requests, pages, plan, rings) if part)
        yield f"{number:3}  {what:44} | {seen}{step}{engine}{clock}"


def _action(scope: Scope, action: int, ring: int, detail: int, before: list[int], in_flight: bool, samples: int) -> str:
    front = "front end" if len(scope.programs) == 1 else f"front end {ring}"
    if action == POLL:
        return "scheduler polls"
    if action == BOUNDARY:
        return f"step ends ({_outcomes(scope, detail, samples)}), boundary" if in_flight else "boundary"
    if action == TICK:
        return f"clock goes on by {scope.tick_us} us"
    if action == HOST:
        return f"host asks to {'stop' if detail else 'drain'}"
    if action == CRASH:
        return f"{front} dies"
    if action == SUPERSEDE and isinstance(scope.programs[ring][before[ring]], Attach):
        return f"another attach begins beside {front}'s"
    if action == SUPERSEDE:
        return f"{front} gets a successor and lives on"
    if detail & ELDER:
        front = f"{'earlier' if detail & RIVAL else 'superseded'} {front}"
    if action == CONSUME:
        return f"{front} reads {'events' if scope.consume_all else 'an event'}"
    if action == CREDIT:
        return f"{front}'s head is delivered"
    if action == RENEW:
        return f"{front}'s lease is renewed"
    number = detail & ~(ELDER | RIVAL) if detail & ELDER else before[ring]
    op = scope.programs[ring][number]
    if action == SKIP:
        return f"{front} does without operation {number}"
    if isinstance(op, Submit):
        part = "all" if detail & ELDER else _PARTS[detail]
        return f"NIC delivers {part} of request {op.request}"
    if isinstance(op, Cancel):
        return f"NIC delivers the cancel of request {op.request}"
    return f"NIC delivers a word of {front}'s attach ({op.epoch})"


def _outcomes(scope: Scope, detail: int, samples: int) -> str:
    kinds = [kind for kind in Outcome if kind in scope.outcomes | Outcome.OK and kind != Outcome.STEP_FAILED]
    if Outcome.STEP_FAILED in scope.outcomes and detail == len(kinds) ** samples:
        return "failed"
    return ", ".join(kinds[detail // len(kinds) ** i % len(kinds)].name or "" for i in range(samples)) or "no sample"


def _requests(scope: Scope, read: Reader) -> str:
    parts = []
    slots = scope.engine().slots
    for index in range(read()):
        state, generation, computed, total, pages, paused = read.take(6)
        if state == RequestState.FREE:
            continue
        text = f"r{index // slots}s{index % slots}g{generation} {RequestState(state).name} {computed}/{total}"
        text += f" on {pages} pages" if pages else ""
        parts.append(text + (f" paused {paused}" if paused else ""))
    return ", ".join(parts)


def _plan(scope: Scope, read: Reader, samples: int) -> tuple[str, int]:
    """The step launched by this transition, if any, and how many of its rows are sampled."""
    rows = [read.take(4) for _ in range(read())]
    if not rows:
        return "", samples
    slots = scope.engine().slots
    text = ", ".join(f"r{q // slots}s{q % slots} +{n} to {end}" for q, n, end, _ in rows)
    return f"planned {text}", sum(row[3] for row in rows)


def _rings(scope: Scope, read: Reader) -> tuple[str, list[int]]:
    parts, operations = [], []
    for ring in range(len(scope.programs)):
        epoch, acknowledged, _taken, operation, _part, _consumed, events = read.take(7)
        operations.append(operation)
        if acknowledged != epoch:
            parts.append(f"ring {ring}: epoch {epoch}, acknowledged {acknowledged}")
        for _ in range(events):
            slot, generation, kind, reason, index, token = read.take(6)
            text = f"r{ring}s{slot}g{generation} {EventKind(kind).name} {index}"
            if kind == EventKind.TOKEN:
                text += f" = {token}"
            elif kind == EventKind.FINISH:
                text += f" {FinishReason(reason).name}"
            elif kind == EventKind.ERROR:
                text += f" {ErrorReason(reason).name}"
            parts.append(text)
    return ", ".join(parts), operations
