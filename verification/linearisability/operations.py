"""Operations on one ring as its clients saw them: calls with their results, in the order of one client-side clock.

The form is that of Jepsen and Knossos: each operation has the moment of its invocation and that of its return; one of
unknown outcome (a write that timed out, a client that died) has no return: it may have happened at any moment after
its invocation, or never ("info"). One that certainly did not happen has `failed`, and is kept for the picture only.

Events are operations too: a poll takes them out of the completion queue, one after the other. All events of one poll
share its interval; their order is that of the list, for operations of one process never change places.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

FORMAT = "blink-operations"
VERSION = 1
GENERATIONS = 1 << 24


class Kind(StrEnum):
    """What was called, or came back. The last five concern the whole ring."""

    SUBMIT = "submit"
    CANCEL = "cancel"
    TOKEN = "token"
    FINISH = "finish"
    ERROR = "error"
    LAPSE = "lapse"  # the front end kept silent for longer than its lease
    DRAIN = "drain"  # the engine was asked to drain
    STOP = "stop"  # the engine was asked to stop
    EPOCH = "epoch"  # a new epoch was taken; `index` is its number
    QUIET = "quiet"  # the clients waited for every end they were owed, and saw none any more


EVENTS = frozenset({Kind.TOKEN, Kind.FINISH, Kind.ERROR})
TERMINALS = frozenset({Kind.FINISH, Kind.ERROR})
RING_WIDE = frozenset({Kind.LAPSE, Kind.DRAIN, Kind.STOP, Kind.EPOCH, Kind.QUIET})
_MUST_RETURN = EVENTS | {Kind.QUIET}


@dataclass(frozen=True, slots=True)
class Request:
    """One request: where it lives, and which ends it may have.

    max_tokens: None if unknown. may_end: names of FinishReason and ErrorReason that it may end with by what it asked
    for, beyond LENGTH, CANCELLED and what the ring's story allows. epoch: of the front end that submitted it.
    """

    slot: int
    generation: int
    max_tokens: int | None = None
    may_end: frozenset[str] = frozenset()
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Operation:
    """One call or event. Stamps are numbers of one clock that all clients share.

    process: the thread or client that called. returned: None if the outcome is unknown. request: place in
    `OperationHistory.requests`, None for ring-wide ones. index: of a token; tokens that a terminal event counts; number
    of an epoch. count: TOKEN only, so many tokens in a row. reason: name of the end. failed: certainly did not happen.
    """

    kind: Kind
    process: int
    invoked: int
    returned: int | None
    request: int | None = None
    index: int = 0
    count: int = 1
    reason: str = ""
    failed: bool = False

    def precedes(self, other: Operation) -> bool:
        """Whether this one had returned before the other was invoked."""
        return self.returned is not None and self.returned < other.invoked

    def __str__(self) -> str:
        who = "" if self.request is None else f" of request {self.request}"
        until = "?" if self.returned is None else str(self.returned)
        what = {
            Kind.TOKEN: f"TOKEN index {self.index}"
            + (f" to index {self.index + self.count - 1}" if self.count > 1 else ""),
            Kind.FINISH: f"FINISH {self.reason} after {self.index} tokens",
            Kind.ERROR: f"ERROR {self.reason} after {self.index} tokens",
            Kind.EPOCH: f"EPOCH to epoch {self.index}",
        }.get(self.kind, self.kind.name)
        return f"{what}{who} at {self.invoked}..{until}"


@dataclass(frozen=True, slots=True)
class OperationHistory:
    """Everything that the clients of one ring did and saw. Operations of one process stand in their order.

    Raises ValueError, naming the operation, for one that cannot have been recorded: an unknown request, a return before
    the invocation, an event without return, a process that goes back in time, two processes that poll at once; and for
    two requests that nobody could tell apart.
    """

    requests: tuple[Request, ...]
    operations: tuple[Operation, ...]

    def __post_init__(self) -> None:
        keys: dict[tuple[int, int, int], int] = {}
        for number, r in enumerate(self.requests):
            other = keys.setdefault((r.epoch, r.slot, r.generation), number)
            if other != number:
                raise ValueError(f"requests {other} and {number} are both slot {r.slot} generation {r.generation}")
        last: dict[int, int] = {}
        for operation in self.operations:
            _validate(operation, len(self.requests))
            if operation.invoked < last.get(operation.process, operation.invoked):
                raise ValueError(f"{operation}: process {operation.process} goes back in time")
            last[operation.process] = operation.invoked
        events = sorted((o for o in self.operations if o.kind in EVENTS), key=lambda o: o.invoked)
        for one, other_event in pairwise(events):
            if one.process != other_event.process and not one.precedes(other_event):
                raise ValueError(f"{one} and {other_event} were polled by two processes at once")

    def with_operations(self, operations: Iterable[Operation]) -> OperationHistory:
        return replace(self, operations=tuple(operations))

    def to_json(self) -> dict[str, Any]:
        """JSON values; an operation holds only what differs from the defaults."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "requests": [
                _sparse(asdict(r) | {"may_end": sorted(r.may_end)}, {"max_tokens": None, "may_end": [], "epoch": 0})
                for r in self.requests
            ],
            "operations": [_sparse(asdict(o), _DEFAULTS) for o in self.operations],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OperationHistory:
        """What `to_json` gave; raises ValueError for anything else."""
        if data.get("format") != FORMAT or data.get("version") != VERSION:
            raise ValueError(
                f"no operation history: format {data.get('format')!r} version {data.get('version')!r}, "
                f"this one reads {FORMAT!r} version {VERSION}"
            )
        try:
            requests = tuple(Request(**{**r, "may_end": frozenset(r.get("may_end", ()))}) for r in data["requests"])
            operations = tuple(
                Operation(**{"returned": None, **o, "kind": Kind(o["kind"])}) for o in data["operations"]
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"damaged operation history: {type(error).__name__} at {error}") from error
        return cls(requests, operations)


_DEFAULTS: dict[str, Any] = {
    "returned": None, "request": None, "index": 0, "count": 1, "reason": "", "failed": False,
}  # fmt: skip


def _sparse(values: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}


def _validate(operation: Operation, requests: int) -> None:
    if operation.returned is not None and operation.returned < operation.invoked:
        raise ValueError(f"{operation}: returned before it was invoked")
    if (operation.request is None) != (operation.kind in RING_WIDE):
        raise ValueError(
            f"{operation}: a {operation.kind.value} names {'no' if operation.request is None else 'a'} request"
        )
    if operation.request is not None and not 0 <= operation.request < requests:
        raise ValueError(f"{operation}: the history has {requests} requests")
    if operation.kind in _MUST_RETURN and (operation.returned is None or operation.failed):
        raise ValueError(f"{operation}: what was seen has an outcome")
    if operation.failed and operation.returned is None:
        raise ValueError(f"{operation}: it either failed or its outcome is unknown")
    if operation.count < 1 or (operation.count > 1 and operation.kind is not Kind.TOKEN):
        raise ValueError(f"{operation}: count is {operation.count}")


def dumps(history: OperationHistory, **facts: Any) -> str:
    """JSON text with one operation a line, for files that people read. facts: further fields, first in the file."""
    data = {**facts, **history.to_json()}
    fields = [
        f'  "{name}": [\n' + ",\n".join(f"    {json.dumps(item)}" for item in value) + "\n  ]"
        if name in ("requests", "operations") and value
        else f"  {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}"
        for name, value in data.items()
    ]
    return "{\n" + ",\n".join(fields) + "\n}\n"
