"""The least part of a history that still has no legal order.

Leaving out just any operation would not do: without its submission every event is wrong. A history is made smaller only
by what keeps every legal one legal, so that what remains fails for a reason that was there:

1. the shortest beginning that fails: what was not seen yet is left out, what had not returned is of unknown outcome;
2. whole requests are left out, but not from a slot where a refusal for its owner or its generation remains;
3. cancels and ring-wide operations are left out, if it fails whether they happened or not;
4. neighbouring tokens of a request become one operation.

Steps 2 to 4 are repeated, as long as the same law is broken, until none makes it smaller (delta debugging by single
steps: A. Zeller and R. Hildebrandt, IEEE TSE 28(2), 2002).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from verification.linearisability.operations import EVENTS, RING_WIDE, Kind, Operation, OperationHistory
from verification.linearisability.search import linearise
from verification.result import Verdict

_OF_OTHERS = frozenset({"SLOT_BUSY", "BAD_GENERATION"})
Item = tuple[Operation, tuple[int, ...]]
"""An operation with the positions that it stands for."""


@dataclass(frozen=True, slots=True)
class Least:
    """operations: of the witness; places: for each, its positions in the history. blocked: which of them cannot be
    next, with the law that forbids it."""

    operations: tuple[Operation, ...]
    places: tuple[tuple[int, ...], ...]
    blocked: int
    law: str


def minimise(history: OperationHistory, part: Sequence[int], budget: int) -> Least:
    """The witness of a failing part. budget: of each search; one that is undecided counts as not failing."""
    items: list[Item] = [(history.operations[i], (i,)) for i in part]

    def judged(some: Sequence[Item]) -> tuple[int, str] | None:
        """The operation that cannot be next, of several the first that was seen, with its law; None: not failing."""
        operations = [o for o, _ in some]
        found = linearise(operations, history.requests, budget)
        if found.verdict is not Verdict.INVALID:
            return None
        place = min(found.blocked, key=lambda i: (operations[i].kind not in EVENTS, operations[i].invoked, i))
        return place, found.blocked[place]

    items = _shortest_beginning(items, lambda some: judged(some) is not None)
    found = judged(items)
    while found is not None:
        blocked, law = found
        for tried, smaller in _smaller(history, items, blocked):
            after = judged(smaller)
            # Smaller, and still a witness of the same law.
            if after is not None and _number(after[1]) == _number(law) and (tried is smaller or judged(tried)):
                items, found = smaller, after
                break
        else:
            return Least(tuple(o for o, _ in items), tuple(places for _, places in items), blocked, law)
    raise ValueError(f"the part of {len(part)} operations does not fail within {budget} steps")


def _number(law: str) -> str:
    return law.partition(":")[0]


def _shortest_beginning(items: list[Item], fails: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """Only events and QUIET can be impossible, and more of them never help: the shortest beginning by bisection."""
    seen = [i for i, (o, _) in enumerate(items) if o.kind in EVENTS]
    seen.sort(key=lambda i: items[i][0].invoked)
    if not seen or not fails(_beginning(items, seen)):
        return items  # a QUIET is what fails
    low, high = 1, len(seen)
    while low < high:
        middle = (low + high) // 2
        if fails(_beginning(items, seen[:middle])):
            high = middle
        else:
            low = middle + 1
    return _beginning(items, seen[:high])


def _beginning(items: list[Item], seen: Iterable[int]) -> list[Item]:
    kept = set(seen)
    until = max(returned for i in kept if (returned := items[i][0].returned) is not None)
    out: list[Item] = []
    for i, (operation, places) in enumerate(items):
        if operation.kind in EVENTS:
            if i in kept:
                out.append((operation, places))
        elif operation.kind is not Kind.QUIET and operation.invoked <= until:
            over = operation.returned is not None and operation.returned <= until
            out.append((operation if over else replace(operation, returned=None), places))
    return out


def _smaller(history: OperationHistory, items: list[Item], blocked: int) -> Iterator[tuple[list[Item], list[Item]]]:
    """Pairs (what must fail too, what is smaller then), the largest steps first."""
    blamed = items[blocked][0].request
    if blamed is not None:  # what reaches beyond a slot is rare: try the slot alone first
        slot = history.requests[blamed].slot
        alone = [i for i in items if i[0].request is None or history.requests[i[0].request].slot == slot]
        if len(alone) < len(items):
            yield alone, alone
    named = {o.request for o, _ in items if o.request is not None}
    refused = {o.request for o, _ in items if o.request is not None and o.reason in _OF_OTHERS}
    for number in sorted(named, reverse=True):
        slot = history.requests[number].slot
        if not any(other != number and history.requests[other].slot == slot for other in refused):
            without = [item for item in items if item[0].request != number]
            yield without, without
    for i, (operation, places) in enumerate(items):
        without = [*items[:i], *items[i + 1 :]]
        if operation.kind is Kind.QUIET:
            yield without, without
        elif operation.kind is Kind.CANCEL or operation.kind in RING_WIDE:
            # With an unknown outcome it may have happened or not: if that fails too, the operation does not matter.
            unknown = (replace(operation, returned=None), places)
            yield [*items[:i], unknown, *items[i + 1 :]], without
    merged, at = items, blocked
    for i in range(len(items) - 1, -1, -1):
        shorter = _merged(merged, i, at)
        if shorter is not None:
            merged, at = shorter, at - (i < at)
    if merged is not items:
        yield merged, merged
    for i in range(len(items)):
        one = _merged(items, i, blocked)
        if one is not None:
            yield one, one


def _merged(items: list[Item], i: int, blocked: int) -> list[Item] | None:
    """With the tokens at `i` and the next ones of the request as one operation at their place; not the blocked one."""
    first, places = items[i]
    if first.kind is not Kind.TOKEN:
        return None
    for j in range(i + 1, len(items)):
        later, more = items[j]
        if later.request == first.request and later.kind in EVENTS:
            if j == blocked or later.kind is not Kind.TOKEN or later.index != first.index + first.count:
                return None
            whole = replace(later, index=first.index, count=first.count + later.count)
            return [*items[:i], *items[i + 1 : j], (whole, places + more), *items[j + 1 :]]
    return None
