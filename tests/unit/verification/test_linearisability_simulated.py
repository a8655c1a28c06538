"""Histories that are good by construction, large and with clients that overlap, and mutants of known label."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from verification.linearisability.check import check
from verification.linearisability.operations import EVENTS, TERMINALS, Kind, Operation, OperationHistory
from verification.linearisability.simulated import Mix, draw
from verification.result import Verdict

HISTORIES = 150
Mutation = Callable[[Random, list[Operation]], list[Operation] | None]


def places(operations: list[Operation], *kinds: Kind) -> list[int]:
    return [i for i, o in enumerate(operations) if o.kind in kinds]


def test_simulated_histories_are_legal() -> None:
    """Catches: a legal interleaving, unknown outcome, slot reuse or story that the laws refuse."""
    seen: Counter[str] = Counter()
    for seed in range(HISTORIES):
        history = draw(Random(seed))
        found = check(history)
        assert found.verdict is Verdict.VALID, (seed, found.message)
        for o in history.operations:
            seen[o.kind] += 1
            seen[o.reason] += 1
            seen["unknown"] += o.returned is None
        seen["parts"] += found.parts > 1
    assert min(seen[kind] for kind in Kind) > 10, seen
    ends = (
        "LENGTH",
        "EOS",
        "CANCELLED",
        "SLOT_BUSY",
        "BAD_GENERATION",
        "DEADLINE",
        "LEASE_LOST",
        "DRAINING",
        "BAD_TOKEN",
    )
    assert min(seen[reason] for reason in ends) > 0, seen
    assert seen["unknown"] > 50, seen
    assert seen["parts"] > 10, seen


# ---- mutations that make every history bad


def duplicated(rng: Random, operations: list[Operation]) -> list[Operation] | None:
    """An event comes twice."""
    at = rng.choice(places(operations, *EVENTS))
    return [*operations[:at], operations[at], *operations[at:]]


def dropped_token(rng: Random, operations: list[Operation]) -> list[Operation] | None:
    """A token of a request that has an end is lost."""
    ended = {o.request for o in operations if o.kind in TERMINALS}
    tokens = [i for i in places(operations, Kind.TOKEN) if operations[i].request in ended]
    if not tokens:
        return None
    at = rng.choice(tokens)
    return [*operations[:at], *operations[at + 1 :]]


def dropped_submit(rng: Random, operations: list[Operation]) -> list[Operation] | None:
    """Nobody submitted it."""
    spoke = {o.request for o in operations if o.kind in EVENTS}
    at = rng.choice([i for i in places(operations, Kind.SUBMIT) if operations[i].request in spoke])
    return [*operations[:at], *operations[at + 1 :]]


def before_its_submit(rng: Random, operations: list[Operation]) -> list[Operation] | None:
    """A request is submitted after its first event was seen."""
    at = rng.choice(places(operations, *EVENTS))
    first = next(o for o in operations if o.kind in EVENTS and o.request == operations[at].request)
    assert first.returned is not None
    late = first.returned + 1
    return _sorted(
        replace(o, invoked=late, returned=None, process=1000)
        if o.kind is Kind.SUBMIT and o.request == first.request
        else o
        for o in operations
    )


def swapped(rng: Random, operations: list[Operation]) -> list[Operation] | None:
    """Two neighbouring events of one request change places."""
    events = places(operations, *EVENTS)
    pairs = []
    for i in events:
        later = next((j for j in events if j > i and operations[j].request == operations[i].request), None)
        if later is not None:
            pairs.append((i, later))
    if not pairs:
        return None
    i, j = rng.choice(pairs)
    a, b = operations[i], operations[j]
    out = list(operations)
    out[i] = replace(b, invoked=a.invoked, returned=a.returned)
    out[j] = replace(a, invoked=b.invoked, returned=b.returned)
    return out


def miscounted(rng: Random, operations: list[Operation]) -> list[Operation] | None:
    """A terminal event counts one more."""
    at = rng.choice(places(operations, *TERMINALS))
    return [*operations[:at], replace(operations[at], index=operations[at].index + 1), *operations[at + 1 :]]


def uncancelled(rng: Random, operations: list[Operation]) -> list[Operation] | None:
    """The cancels of a request that ended by one are gone."""
    ends = [o.request for o in operations if o.reason == "CANCELLED"]
    if not ends:
        return None
    request = rng.choice(ends)
    return [o for o in operations if not (o.kind is Kind.CANCEL and o.request == request)]


def misdelivered(rng: Random, operations: list[Operation]) -> list[Operation] | None:
    """A token goes to another request."""
    ended = {o.request for o in operations if o.kind in TERMINALS}
    tokens = [i for i in places(operations, Kind.TOKEN) if operations[i].request in ended]
    if not tokens:
        return None
    at = rng.choice(tokens)
    others = sorted({o.request for o in operations if o.request is not None} - {operations[at].request})
    if not others:
        return None
    return [*operations[:at], replace(operations[at], request=rng.choice(others)), *operations[at + 1 :]]


def endless(rng: Random, operations: list[Operation]) -> list[Operation] | None:
    """The end of a request whose submission returned is lost; nothing afterwards excuses it."""
    told = any(o.kind is Kind.EPOCH for o in operations)
    sure = {o.request for o in operations if o.kind is Kind.SUBMIT and o.returned is not None}
    ends = [i for i in places(operations, *TERMINALS) if operations[i].request in sure]
    if told or not ends:
        return None
    at = rng.choice(ends)
    return [*operations[:at], *operations[at + 1 :]]


def unexplained(rng: Random, operations: list[Operation]) -> list[Operation] | None:
    """An end for a reason that nothing gives."""
    at = rng.choice(places(operations, *TERMINALS))
    wrong = replace(operations[at], kind=Kind.ERROR, reason="NAN_LOGITS")
    return [*operations[:at], wrong, *operations[at + 1 :]]


# ---- mutations that leave every history good


def unknown_outcome(rng: Random, operations: list[Operation]) -> list[Operation] | None:
    """Nobody learnt what came of a call."""
    at = rng.choice(places(operations, Kind.SUBMIT, Kind.CANCEL))
    return [*operations[:at], replace(operations[at], returned=None, process=1000), *operations[at + 1 :]]


def slower_call(rng: Random, operations: list[Operation]) -> list[Operation] | None:
    """A call began earlier and came back later."""
    at = rng.choice(places(operations, Kind.SUBMIT, Kind.CANCEL))
    o = operations[at]
    returned = None if o.returned is None else o.returned + rng.randint(0, 20)
    wider = replace(o, invoked=max(0, o.invoked - rng.randint(0, 20)), returned=returned, process=1000)
    return _sorted([*operations[:at], wider, *operations[at + 1 :]])


def failed_call(rng: Random, operations: list[Operation]) -> list[Operation] | None:
    """One more call, which certainly did nothing."""
    request = rng.choice([o.request for o in operations if o.request is not None])
    return [*operations, Operation(Kind.CANCEL, 1000, 0, rng.randint(0, 50), request, failed=True)]


def vain_cancel(rng: Random, operations: list[Operation]) -> list[Operation] | None:
    """A cancel after the request's end was seen."""
    end = operations[rng.choice(places(operations, *TERMINALS))]
    assert end.returned is not None
    late = end.returned + 1
    return _sorted([*operations, Operation(Kind.CANCEL, 1000, late, late + rng.randint(0, 9), end.request)])


def _sorted(operations: object) -> list[Operation]:
    return sorted(operations, key=lambda o: o.invoked)  # type: ignore[call-overload, no-any-return]


BAD: list[Mutation] = [
    duplicated, dropped_token, dropped_submit, before_its_submit, swapped, miscounted, uncancelled, misdelivered,
    endless, unexplained,
]  # fmt: skip
GOOD: list[Mutation] = [unknown_outcome, slower_call, failed_call, vain_cancel]


def mutants(mutation: Mutation, mix: Mix) -> list[OperationHistory]:
    out = []
    for seed in range(HISTORIES // 3):
        rng = Random(seed)
        history = draw(rng, mix)
        if not places(list(history.operations), *TERMINALS):
            continue
        changed = mutation(rng, list(history.operations))
        if changed is not None:
            out.append(history.with_operations(changed))
    assert len(out) >= 10, f"{mutation.__name__} hardly ever applies"
    return out


@pytest.mark.parametrize("mutation", BAD)
def test_bad_mutants(mutation: Mutation) -> None:
    """Catches: a fault of delivery that passes because clients overlap, because an outcome is unknown, or because the
    witness was made of too little; a check that runs out of effort on ten requests."""
    # A new epoch, a duplicate that is ignored, or an entry that may be lost could excuse the mutation.
    for history in mutants(mutation, Mix(story=0.0, busy=0.0, unknown=0.05)):
        found = check(history)
        assert found.verdict is Verdict.INVALID, found.message
        assert found.witness is not None
        assert check(found.witness).verdict is Verdict.INVALID
        assert len(found.witness.operations) <= 8


@pytest.mark.parametrize("mutation", GOOD)
def test_good_mutants(mutation: Mutation) -> None:
    """Catches: a checker that is sure of what the clients cannot know."""
    for history in mutants(mutation, Mix()):
        found = check(history)
        assert found.verdict is Verdict.VALID, found.message
