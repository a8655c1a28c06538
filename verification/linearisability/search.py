"""The search for a linearisation: Wing and Gong's algorithm with Lowe's memoisation ("WGL").

J. Wing and C. Gong, "Testing and verifying concurrent objects", Journal of Parallel and Distributed Computing 17, 1993:
take any operation that no other one precedes, apply it to the sequential object, go on; go back where none is left.
G. Lowe, "Testing for linearizability", Concurrency and Computation 29(4), 2017: a pair of (operations taken, state of
the object) that was reached before leads nowhere new. Operations of unknown outcome may be taken or left out.

Four things that hold for this object keep the search small; none changes a verdict (cross-checked by enumeration):

* An event that may be next and is legal is the only choice. Events have one order; what is legal now and waits is never
  better off, and nothing that is legal before an event becomes illegal by it.
* A submission is the only choice if its place among those of its slot, its own cancels, new epochs and waits for the
  end is certain: earlier it waits for fewer cancelled requests.
* The only submission of a request that was heard of was before the first event, also if its outcome is unknown.
* Of calls of unknown outcome, one on which no event depends is left out; a cancel is tried just before the end that
  needs it, where it makes nobody wait.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from verification.linearisability.operations import EVENTS, Kind, Operation, Request
from verification.linearisability.specification import State, step
from verification.result import Verdict

_LOOKS = EVENTS | {Kind.QUIET}  # what can be impossible; QUIET changes nothing
_PLACES = frozenset({Kind.EPOCH, Kind.QUIET})  # before or after them is not the same for a submission
_ABOUT_OTHERS = frozenset({"SLOT_BUSY", "BAD_GENERATION"})


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to.

    order: positions in `operations` in a legal order (valid), or the longest legal beginning that was met (invalid).
    blocked: position -> law, for each operation that was next after that beginning. steps: of the specification.
    """

    verdict: Verdict
    order: tuple[int, ...]
    blocked: dict[int, str]
    steps: int


@dataclass(slots=True)
class _Node:
    """Operations done, the state after them, what may be next and was not tried, and which law forbade what."""

    done: int
    state: State
    first: int
    heard: int
    choices: list[int]
    laws: dict[int, str] = field(default_factory=dict)


def _idle(operations: Sequence[Operation], requests: Sequence[Request]) -> set[int]:
    """Operations of unknown outcome that may as well be left out."""
    heard = {o.request for o in operations if o.kind in EVENTS}
    cancelled = {o.request for o in operations if o.kind is Kind.FINISH and o.reason == "CANCELLED"}
    compared = {requests[o.request].slot for o in operations if o.request is not None and o.reason in _ABOUT_OTHERS}

    def idle(o: Operation) -> bool:
        if o.returned is not None or o.request is None:
            return False
        if o.kind is Kind.CANCEL:
            return o.request not in cancelled
        return o.request not in heard and requests[o.request].slot not in compared

    return {i for i, o in enumerate(operations) if idle(o)}


class _Search:
    def __init__(self, operations: Sequence[Operation], requests: Sequence[Request]) -> None:
        idle = _idle(operations, requests)
        happened = (i for i, o in enumerate(operations) if not o.failed and i not in idle)
        # Stable: of operations of one process with one stamp, the listed order stays.
        self.places = sorted(happened, key=lambda i: operations[i].invoked)
        self.ops = [operations[i] for i in self.places]
        self.requests = requests
        self.events = [i for i, o in enumerate(self.ops) if o.kind in EVENTS]
        self.returned = self._returns()
        self.sure = [i for i, at in enumerate(self.returned) if at is not None]
        self.unsure = [i for i, at in enumerate(self.returned) if at is None]
        self.invoked_unsure = [self.ops[i].invoked for i in self.unsure]
        self.eager = [self._is_eager(i) for i in range(len(self.ops))]
        # What its process did just before: a process waits for each of its calls but those that never return.
        self.before: list[int] = []
        last: dict[int, int] = {}
        for i, operation in enumerate(self.ops):
            self.before.append(last.get(operation.process, -1))
            if operation.returned is not None:
                last[operation.process] = i

    def _returns(self) -> list[int | None]:
        """When each operation was over at the latest; None: never, or it did not happen."""
        submits = Counter(o.request for o in self.ops if o.kind is Kind.SUBMIT)
        first: dict[int | None, int] = {}
        for i in self.events:
            first.setdefault(self.ops[i].request, self.ops[i].returned or 0)
        out: list[int | None] = []
        for o in self.ops:
            heard = first.get(o.request) if o.kind is Kind.SUBMIT and submits[o.request] == 1 else None
            known = [at for at in (o.returned, heard) if at is not None]
            out.append(min(known, default=None))
        return out

    def _is_eager(self, i: int) -> bool:
        """Whether a submission's place is certain among all that its place matters to."""
        o, until = self.ops[i], self.returned[i]
        if o.kind is not Kind.SUBMIT or o.request is None or until is None:
            return False
        slot = self.requests[o.request].slot
        for j, other in enumerate(self.ops):
            if other.kind is Kind.SUBMIT and other.request is not None:
                matters = j != i and self.requests[other.request].slot == slot
            else:
                matters = other.kind in _PLACES or (other.kind is Kind.CANCEL and other.request == o.request)
            over = self.returned[j]
            if matters and not (until < other.invoked or (over is not None and over < o.invoked)):
                return False
        return True

    def candidates(self, done: int, first: int, heard: int) -> list[int]:
        """Operations that may be next, events first.

        first: the place in `sure` of the first that is not done. heard: events done.
        """
        limit = float("inf")
        events: list[int] = []
        calls: list[int] = []
        for i in self.sure[first:]:
            if self.ops[i].invoked > limit:
                break
            if done >> i & 1:
                continue
            limit = min(limit, self.returned[i] or 0)
            if self.before[i] < 0 or done >> self.before[i] & 1:
                if self.eager[i]:
                    return [i]
                (events if self.ops[i].kind in _LOOKS else calls).append(i)
        # Unknown ones come last: most histories need none of them. One invoked at the limit may still be first.
        for i in self.unsure[: bisect_right(self.invoked_unsure, limit)]:
            if not done >> i & 1 and (self.before[i] < 0 or done >> self.before[i] & 1) and self._helps(i, heard):
                calls.append(i)
        return events + calls

    def _helps(self, i: int, heard: int) -> bool:
        """Whether it may be time for an operation of unknown outcome."""
        if self.ops[i].kind is not Kind.CANCEL:
            return True
        event = self.ops[self.events[heard]] if heard < len(self.events) else None
        return event is not None and event.request == self.ops[i].request and event.reason == "CANCELLED"

    def run(self, start: State, budget: int) -> Found:
        goal = sum(1 << i for i in self.sure)
        steps = 0
        best: tuple[int, ...] = ()
        blocked: dict[int, str] = {}
        seen: set[tuple[int, State]] = {(0, start)}
        taken: list[int] = []
        stack = [_Node(0, start, 0, 0, self.candidates(0, 0, 0))]
        while stack:
            node = stack[-1]
            if node.done & goal == goal:
                return Found(Verdict.VALID, self._listed(taken), {}, steps)
            if not node.choices:
                if node.laws and (not blocked or len(taken) > len(best)):
                    best, blocked = tuple(taken), node.laws
                stack.pop()
                if taken:
                    taken.pop()
                continue
            if steps >= budget:
                return Found(Verdict.UNKNOWN, self._listed(taken), {}, steps)
            steps += 1
            i = node.choices.pop(0)
            after = step(node.state, self.ops[i], self.requests)
            if isinstance(after, str):
                node.laws[i] = after
                continue
            if self.ops[i].kind in _LOOKS:
                node.choices.clear()
            done = node.done | 1 << i
            if (done, after) in seen:
                continue
            seen.add((done, after))
            first = node.first
            while first < len(self.sure) and done >> self.sure[first] & 1:
                first += 1
            taken.append(i)
            heard = node.heard + (self.ops[i].kind in EVENTS)
            stack.append(_Node(done, after, first, heard, self.candidates(done, first, heard)))
        listed = {self.places[i]: law for i, law in blocked.items()}
        return Found(Verdict.INVALID, self._listed(best), listed, steps)

    def _listed(self, order: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.places[i] for i in order)


def linearise(operations: Sequence[Operation], requests: Sequence[Request], budget: int) -> Found:
    """Searches for a legal order of `operations` that extends their order in time and that of each process.

    budget: at most so many steps of the specification; when they are spent the answer is unknown, never valid.
    """
    return _Search(operations, requests).run(State(), budget)
