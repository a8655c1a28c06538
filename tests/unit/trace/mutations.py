"""Single faults of a recorded log, each with the clauses of docs/rules.md that it violates.

A mutation gets the log and says which entries it would change and into what; None where the log has no place for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from blink_core.abi.enums import ErrorReason, FinishReason, LogKind
from verification.trace.format import Entry

Log = list[Entry]
Mutation = Callable[[Log], Log | None]
STEP, KIND, RING, SLOT, GENERATION, A, B, C = range(8)


def places(log: Sequence[Entry], kind: LogKind, **fields: int) -> list[int]:
    names = {"a": A, "b": B, "c": C}
    return [i for i, e in enumerate(log) if e[KIND] == kind and all(e[names[name]] == v for name, v in fields.items())]


def last(found: Sequence[int]) -> int | None:
    """The middle one: late enough for there to be a state, early enough for there to be consequences."""
    return found[len(found) // 2] if found else None


def altered(kind: LogKind, field: int, change: Callable[[int], int], **fields: int) -> Mutation:
    def mutate(log: Log) -> Log | None:
        at = last(places(log, kind, **fields))
        if at is None:
            return None
        entry = list(log[at])
        entry[field] = change(entry[field])
        return [*log[:at], tuple(entry), *log[at + 1 :]]

    return mutate


def dropped(kind: LogKind, **fields: int) -> Mutation:
    def mutate(log: Log) -> Log | None:
        at = last(places(log, kind, **fields))
        return None if at is None or at + 3 > len(log) else [*log[:at], *log[at + 1 :]]

    return mutate


def doubled(kind: LogKind, **fields: int) -> Mutation:
    def mutate(log: Log) -> Log | None:
        at = last(places(log, kind, **fields))
        return None if at is None else [*log[: at + 1], log[at], *log[at + 1 :]]

    return mutate


def swapped(kind: LogKind) -> Mutation:
    """Two neighbours of a kind, of different requests or pages, in the other order."""

    def mutate(log: Log) -> Log | None:
        for at in reversed(places(log, kind)):
            if at + 1 < len(log) and log[at + 1][KIND] == kind and log[at][RING:] != log[at + 1][RING:]:
                return [*log[:at], log[at + 1], log[at], *log[at + 2 :]]
        return None

    return mutate


def overtaken(log: Log) -> Log | None:
    """Two requests of one ring and class, admitted at one boundary, admitted in the other order."""
    admits = places(log, LogKind.ADMIT, c=0)
    for one, two in itertools.pairwise(admits):
        first, second = log[one], log[two]
        same = first[RING] == second[RING] and first[SLOT:B] != second[SLOT:B] and first[STEP] == second[STEP]
        if same and not any(e[KIND] == LogKind.STEP for e in log[one:two]):
            names = {first[RING:A]: second[RING:A], second[RING:A]: first[RING:A]}
            body = [(*e[:RING], *names.get(e[RING:A], e[RING:A]), *e[A:]) for e in log[one : two + 1]]
            return [*log[:one], *body, *log[two + 1 :]]
    return None


def token_shifted(log: Log) -> Log | None:
    """The event says another token than the model step."""
    return altered(LogKind.TOKEN, B, lambda token: token ^ 1)(log)


LENGTH, CANCELLED = int(FinishReason.LENGTH), int(FinishReason.CANCELLED)
MUTATIONS: dict[str, tuple[Mutation, set[str]]] = {
    "token of another id": (token_shifted, {"C3"}),
    "token index skipped": (altered(LogKind.TOKEN, A, lambda n: n + 1), {"C3"}),
    "token lost": (dropped(LogKind.TOKEN), {"C3"}),
    "token twice": (doubled(LogKind.TOKEN), {"C3"}),
    "result of no row": (doubled(LogKind.RESULT), {"C1"}),
    "page of another id": (altered(LogKind.PAGE_ALLOC, A, lambda page: page ^ 1), {"K2"}),
    "page at another index": (altered(LogKind.PAGE_ALLOC, B, lambda n: n + 1), {"P4"}),
    "page leaked": (dropped(LogKind.PAGE_FREE), {"K4"}),
    "page freed twice": (doubled(LogKind.PAGE_FREE), {"K4", "L1"}),
    "pages freed from the first": (swapped(LogKind.PAGE_FREE), {"K4"}),
    "page not quarantined": (altered(LogKind.PAGE_FREE, B, lambda _: 0, b=1), {"K4"}),
    "quarantine kept": (dropped(LogKind.PAGE_UNQUARANTINE), {"K5"}),
    "quarantine emptied from its bottom": (swapped(LogKind.PAGE_UNQUARANTINE), {"K5"}),
    "another page evicted": (altered(LogKind.PAGE_EVICT, A, lambda page: page ^ 1), {"K2"}),
    "page published behind another": (altered(LogKind.PAGE_PUBLISH, C, lambda page: page + 1), {"K6"}),
    "page not published": (dropped(LogKind.PAGE_PUBLISH), {"K6"}),
    "hit one page longer": (altered(LogKind.PREFIX_HIT, A, lambda n: n + 1), {"K7"}),
    "hit not taken": (dropped(LogKind.PAGE_SHARE), {"K7", "K6"}),
    "holders miscounted": (altered(LogKind.PAGE_SHARE, C, lambda n: n + 1), {"K1"}),
    "row of another request's table": (altered(LogKind.PLAN_ROW, C, lambda row: row + 1), {"A4"}),
    "more tokens than the budget": (altered(LogKind.PLAN_ROW, A, lambda n: n + 1), {"P2"}),
    "context too short": (altered(LogKind.PLAN_ROW, B, lambda n: n - 1), {"P2"}),
    "rows in another order": (swapped(LogKind.PLAN_ROW), {"P1", "P2"}),
    "step without a row": (altered(LogKind.STEP, A, lambda n: n - 1), {"P1"}),
    "step number skipped": (altered(LogKind.STEP, STEP, lambda n: n + 1), {"E1"}),
    "overtaken in its ring": (overtaken, {"L2"}),
    "admitted to another row": (altered(LogKind.ADMIT, A, lambda row: row + 1), {"A4"}),
    "preemption denied": (altered(LogKind.ADMIT, C, lambda n: n - 1, c=1), {"L1"}),
    "another victim": (altered(LogKind.PREEMPT, A, lambda row: row ^ 1), {"P4"}),
    "preempted with fewer pages": (altered(LogKind.PREEMPT, C, lambda n: n - 1), {"K4"}),
    "ended for another reason": (altered(LogKind.FINISH, A, lambda _: int(FinishReason.EOS), a=LENGTH), {"C4"}),
    "a token more at its end": (altered(LogKind.FINISH, B, lambda n: n + 1), {"L1"}),
    "end lost": (dropped(LogKind.FINISH, a=LENGTH), {"C4"}),
    "second terminal event": (doubled(LogKind.FINISH), {"L1"}),
    "second error": (doubled(LogKind.ERROR), {"L1"}),
    "deadline as a model error": (
        altered(LogKind.ERROR, A, lambda _: int(ErrorReason.MODEL_ERROR), a=int(ErrorReason.DEADLINE)),
        {"L3", "C2", "C3", "K4", "E2"},
    ),
    "cancel not heeded": (altered(LogKind.CANCEL, A, lambda _: 0, a=1), {"R10"}),
    "cancelled one lives": (dropped(LogKind.FINISH, a=CANCELLED), {"R10"}),
    "accepted with another length": (altered(LogKind.ACCEPT, A, lambda n: n + 1), {"R10"}),
    "refused for another reason": (
        altered(LogKind.REJECT, A, lambda _: int(ErrorReason.BAD_LENGTH), a=int(ErrorReason.BAD_PARAM)),
        {"R6"},
    ),
    "entry taken twice": (doubled(LogKind.SQ_ENTRY), {"R3", "R5"}),
    "entry out of turn": (altered(LogKind.SQ_ENTRY, C, lambda n: n + 1), {"R3", "R4", "R5", "R11", "L7"}),
    "credit for what was not published": (altered(LogKind.CREDITS, A, lambda n: n + 100), {"R4"}),
    "credit taken back": (altered(LogKind.CREDITS, A, lambda n: 0), {"R4"}),
    "epoch that ended more": (altered(LogKind.EPOCH, B, lambda n: n + 1), {"R2"}),
    "mask of another token": (altered(LogKind.MASK, A, lambda n: n + 1), {"R11"}),
    "lapse that ended more": (altered(LogKind.LEASE, B, lambda n: n + 1, a=1), {"L4"}),
    "reservation held too long": (altered(LogKind.RESERVATION, B, lambda n: n - 1, a=0), {"A5"}),
    "reservation not given up": (dropped(LogKind.RESERVATION, a=0), {"A5", "L2"}),
    "clock that goes back": (altered(LogKind.CLOCK, A, lambda n: 0), {"T2"}),
    "drained too early": (dropped(LogKind.STATE, a=2), {"L6"}),
}  # fmt: skip

# A step that failed as a whole explains it as well, where the request's row was the first.
LATE = {"deadline as a model error"}
