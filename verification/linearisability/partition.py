"""Splits a history into parts that are linearisable if and only if the whole is (P-compositionality).

A. Horn and D. Kroening, "Faster linearizability checking via P-compositionality", FORTE 2015; for independent objects
it is the locality theorem of Herlihy and Wing (TOPLAS 1990). The parts are the **slots** of the ring. Three things
reach beyond a slot, and are handled so that the split stays exact:

* Law V9 joins a cancelled request A with a request B submitted after the cancel. Where that order is certain in time,
  the law is one comparison of two events, for events have one order: `broken_fence`. Where cancel and submission
  overlap, both orders must be tried: their slots are one part.
* A ring-wide operation stands in every part. If no other operation overlaps it, it stands at one place of all their
  orders, and the orders join; if one does, or if its outcome is unknown, all slots are one part.
* Events have one order over all slots, also those of one poll, which share its interval. That joins nothing: a
  submission or a cancel that is legal after an event of another request is legal before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from verification.linearisability.operations import (
    EVENTS,
    TERMINALS,
    Kind,
    Operation,
    OperationHistory,
)

Part = list[int]
"""Positions in `OperationHistory.operations`, in their order."""


def split(history: OperationHistory) -> list[Part]:
    """The parts of a history; ring-wide operations stand in each. Failed operations are left out."""
    happened = [(i, o) for i, o in enumerate(history.operations) if not o.failed]
    ring_wide = [(i, o) for i, o in happened if o.request is None]
    others = [o for _, o in happened if o.request is not None]
    slots = {history.requests[o.request].slot for o in others if o.request is not None}
    if _inseparable([o for _, o in ring_wide], others):
        return [[i for i, _ in happened]]
    leader = {slot: slot for slot in slots}

    def find(slot: int) -> int:
        while leader[slot] != slot:
            slot = leader[slot]
        return slot

    for a, b in _overlapping(history, others):
        leader[find(history.requests[a].slot)] = find(history.requests[b].slot)
    members: dict[int, Part] = defaultdict(list)
    for i, operation in happened:
        if operation.request is not None:
            members[find(history.requests[operation.request].slot)].append(i)
    shared = [i for i, _ in ring_wide]
    return [sorted(part + shared) for part in members.values()] or ([shared] if shared else [])


def _inseparable(ring_wide: list[Operation], others: list[Operation]) -> bool:
    """Whether some ring-wide operation has no certain place among the completed ones."""
    if not ring_wide:
        return False
    completed = [*(o for o in others if o.returned is not None), *ring_wide]
    return any(
        one.returned is None
        or any(one is not other and not one.precedes(other) and not other.precedes(one) for other in completed)
        for one in ring_wide
    )


def _overlapping(history: OperationHistory, others: list[Operation]) -> Iterator[tuple[int, int]]:
    """Pairs (A, B) of requests of two slots where it is not certain whether B came after A's cancel had an effect.

    A cancel of unknown outcome joins nothing: just before A's own end is a place for it that touches nobody.
    """
    submits = [o for o in others if o.kind is Kind.SUBMIT]
    for cancel in (o for o in others if o.kind is Kind.CANCEL and o.returned is not None):
        a = cancel.request
        assert a is not None
        live = _submitted_before(submits, cancel)
        for submit in submits:
            b = submit.request
            assert b is not None
            if history.requests[b].slot == history.requests[a].slot or submit.precedes(cancel):
                continue
            if not (live and cancel.precedes(submit)):
                yield a, b


def _submitted_before(submits: list[Operation], cancel: Operation) -> bool:
    return any(s.request == cancel.request and s.precedes(cancel) for s in submits)


def broken_fence(history: OperationHistory) -> Part | None:
    """The first violation of law V9 whose order is certain: the operations that show it.

    Only for histories that `split` took apart; in one part the specification judges V9 itself.
    """
    happened = [(i, o) for i, o in enumerate(history.operations) if not o.failed]
    events = [(i, o) for i, o in happened if o.kind in EVENTS]
    submits = [o for _, o in happened if o.kind is Kind.SUBMIT]
    requests, epochs = history.requests, [o for _, o in happened if o.kind is Kind.EPOCH]

    def epoch_at(operation: Operation) -> int:
        """Certain, for the history could be split."""
        return next((o.index for o in reversed(epochs) if o.precedes(operation)), 0)

    first: dict[int, int] = {}  # request -> rank of its first event
    end: dict[int, int] = {}
    for rank, (_, o) in enumerate(sorted(events, key=lambda item: item[1].invoked)):
        assert o.request is not None
        first.setdefault(o.request, rank)
        if o.kind in TERMINALS:
            end.setdefault(o.request, rank)
    ranked = [i for i, _ in sorted(events, key=lambda item: item[1].invoked)]
    for at, cancel in happened:
        if cancel.kind is not Kind.CANCEL or cancel.returned is None or not _submitted_before(submits, cancel):
            continue
        a = cancel.request
        assert a is not None
        for place, submit in happened:
            b = submit.request
            if submit.kind is not Kind.SUBMIT or b is None or b not in first:
                continue
            if not all(cancel.precedes(s) for s in submits if s.request == b):
                continue  # an entry published twice counts once, and the first may have been before the cancel
            if not {requests[a].epoch} == {requests[b].epoch} == {epoch_at(cancel)} == {epoch_at(submit)}:
                continue
            if end.get(a, len(events)) > first[b]:
                own = next(i for i, o in happened if o.kind is Kind.SUBMIT and o.request == a and o.precedes(cancel))
                return sorted({own, at, place, ranked[first[b]]})
    return None
