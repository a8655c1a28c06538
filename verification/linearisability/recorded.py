"""Recorded runs as operation histories, the clause of queue-ordering that judges them, and their picture."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from blink_core.abi.dtypes import Array
from blink_core.abi.enums import ErrorReason, EventKind, FinishReason
from verification.history import History, enum_name
from verification.linearisability.check import Decision, check
from verification.linearisability.operations import Kind, Operation, OperationHistory, Request
from verification.linearisability.pages import spans
from verification.linearisability.picture import PageUse, draw
from verification.linearisability.scene import Scene, Text, to_svg
from verification.program import RequestSpec
from verification.result import CheckResult, Measurement, Verdict

PROPERTY, CLAUSE = "queue-ordering", "linearisability"
_SHOWN = 40  # operations of a witness that a report lists
_CLIENT, _FIRST_CANCELLER = 0, 1


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run as operations. names: for each request of `operations` its place in the program, None for a stranger."""

    operations: OperationHistory
    names: tuple[int | None, ...]


def operations_of(history: History, explained: Collection[ErrorReason] = ()) -> RecordedRun:
    """The operations of a run of `verification.drivers.ring`.

    Its calls never overlap, and stand in the order of `history.calls`. A history without them (made by hand, or of an
    older version) is read as weakly as it can be: submissions first, in the order of their entries, and cancels at any
    time after them. explained: ends that the run's own story gives.
    """
    return _Reader(history, frozenset(reason.name for reason in explained)).read()


class _Reader:
    def __init__(self, history: History, explained: frozenset[str]) -> None:
        self.history, self.explained = history, explained
        self.requests: list[Request] = []
        self.names: list[int | None] = []
        self.by_key: dict[tuple[int, int], int] = {}
        self.operations: list[Operation] = []
        self.now = 0

    def read(self) -> RecordedRun:
        history = self.history
        for s in history.submitted:
            spec = history.program.requests[s.request]
            self._request(s.slot, s.generation, s.request, spec.params.max_tokens, _ends(spec) | self.explained)
        place = {name: number for number, name in enumerate(self.names)}
        if history.calls:
            at = 0
            for call, number in history.calls:
                if call == "poll":
                    self._poll(history.events[at : at + number])
                    at += number
                else:
                    self._call(Kind(call), place[number])
            self._poll(history.events[at:])
        else:
            self._unordered(place)
        if history.complete:
            self._add(Kind.QUIET, None)
        return RecordedRun(OperationHistory(tuple(self.requests), tuple(self.operations)), tuple(self.names))

    def _request(self, slot: int, generation: int, name: int | None, most: int | None, ends: frozenset[str]) -> int:
        number = self.by_key.setdefault((slot, generation), len(self.requests))
        if number == len(self.requests):
            self.requests.append(Request(slot, generation, most, ends))
            self.names.append(name)
        return number

    def _add(self, kind: Kind, request: int | None, **fields: Any) -> None:
        self.operations.append(Operation(kind, _CLIENT, self.now, self.now + 1, request, **fields))
        self.now += 2

    def _call(self, kind: Kind, request: int) -> None:
        self._add(kind, request)

    def _poll(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["kind"] == EventKind.LOGPROBS:
                continue  # belongs to the token behind it
            # A stranger's event has no submission, which is what is wrong with it.
            number = self._request(event["slot"], event["generation"], None, None, frozenset())
            kind, reason = named(int(event["kind"]), int(event["reason"]))
            self.operations.append(
                Operation(kind, _CLIENT, self.now, self.now + 1, number, int(event["index"]), reason=reason)
            )
        self.now += 2

    def _unordered(self, place: dict[int | None, int]) -> None:
        for s in sorted(self.history.submitted, key=lambda s: s.sq_index):
            self._call(Kind.SUBMIT, place[s.request])
        started = self.now
        self.now += 2
        self._poll(self.history.events)
        for process, name in enumerate(sorted(self.history.cancels), _FIRST_CANCELLER):
            self.operations.append(Operation(Kind.CANCEL, process, started, self.now, place[name]))
        self.now += 2


def named(kind: int, reason: int) -> tuple[Kind, str]:
    """An event's EventKind and reason as those of an operation; a kind that is none is an end nothing explains."""
    if kind == EventKind.TOKEN:
        return Kind.TOKEN, ""
    if kind == EventKind.FINISH:
        return Kind.FINISH, enum_name(FinishReason, reason)
    return Kind.ERROR, enum_name(ErrorReason, reason) if kind == EventKind.ERROR else enum_name(EventKind, kind)


def _ends(spec: RequestSpec) -> frozenset[str]:
    """Ends that a request may have by what it asked for; whether the tokens agree, clause `terminal` judges."""
    params = spec.params
    ends = {"CONTEXT"}
    if not params.ignore_eos:
        ends.add("EOS")
    if params.stop_token_ids:
        ends.add("STOP_TOKEN")
    if params.deadline_us:
        ends.add("DEADLINE")
    if spec.mask_seed is not None or params.mask_box is not None or params.logit_bias or params.min_tokens:
        ends.add("NO_TOKEN")
    return frozenset(ends)


def check_recorded(history: History, explained: Collection[ErrorReason] = ()) -> CheckResult:
    """Clause linearisability of queue-ordering. explained: as in `operations_of`."""
    run = operations_of(history, explained)
    return as_result(check(run.operations), run)


def picture_of(history: History, log: Array | None, most_bytes: int) -> str | None:
    """The run as SVG of at most `most_bytes`, pages and then legal parts left out until it fits; None if it does not.

    log: `LogEntry` records of the engine, also of other runs, or None. Never raises for what a history holds.
    """
    try:
        run = operations_of(history)
    except ValueError as error:
        return to_svg(Scene(900, 60, "history", [Text(10, 30, f"no picture: {error}"[:180])]))
    decision = check(run.operations)
    title = f"{history.subject or 'engine'}, ring {history.ring}: {len(history.submitted)} requests"
    pages = None if log is None else _pages_of(history, log)
    drawings: tuple[Callable[[], Scene], ...] = (
        lambda: draw(run.operations, decision, title=title, names=run.names, pages=pages),
        lambda: draw(run.operations, decision, title=title, names=run.names),
        lambda: draw(
            run.operations.with_operations(run.operations.operations[i] for i in sorted(decision.shown)),
            replace(decision, shown=frozenset(), blocked=None),
            title=title,
            names=run.names,
        ),
    )
    texts = (to_svg(drawing()) for drawing in drawings)
    return next((text for text in texts if len(text.encode("utf-8")) <= most_bytes), None)


def _pages_of(history: History, log: Array) -> PageUse | None:
    """Pages from the first to the last log entry of the run's own requests."""
    own = np.zeros(len(log), bool)
    for s in history.submitted:
        own |= (log["ring"] == history.ring) & (log["slot"] == s.slot) & (log["generation"] == s.generation)
    places = np.flatnonzero(own)
    if not places.size:
        return None
    window = log[places[0] : places[-1] + 1]
    return PageUse(spans(window), len(window), history.ring)


def as_result(decision: Decision, run: RecordedRun) -> CheckResult:
    """A decision as a result of the suite, in the program's own numbers of requests."""
    effort = {"linearisability_steps": Measurement(decision.steps, "steps", n=len(run.operations.operations))}
    if decision.witness is None:
        return CheckResult(decision.verdict, PROPERTY, CLAUSE, decision.message, {}, effort)
    operations = decision.witness.operations
    shown = sorted({o.request for o in operations if o.request is not None})
    witness: dict[str, Any] = {
        "law": decision.law,
        "requests": [run.names[number] for number in shown if run.names[number] is not None],
        "slots": [
            {"slot": run.operations.requests[n].slot, "generation": run.operations.requests[n].generation}
            for n in shown
        ],
        "operations": [str(o) for o in operations[:_SHOWN]],
    }
    return CheckResult(Verdict.INVALID, PROPERTY, CLAUSE, f"{decision.law}: {decision.message}", witness, effort)
