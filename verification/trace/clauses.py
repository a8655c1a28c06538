"""Which clause of docs/rules.md a difference between log and specification violates."""

from __future__ import annotations

from collections.abc import Sequence

from blink_core.abi.enums import EngineState, ErrorReason, FinishReason, LogKind
from verification.trace.format import FIELDS, Entry

# What an entry of each kind follows from: it is missing, or it is of the wrong request.
OF_KIND = {
    LogKind.ACCEPT: "R10", LogKind.REJECT: "R6", LogKind.ADMIT: "A2", LogKind.PREEMPT: "P4", LogKind.FINISH: "C4",
    LogKind.ERROR: "C3", LogKind.CANCEL: "R10", LogKind.PAGE_ALLOC: "P4", LogKind.PAGE_FREE: "K4",
    LogKind.PAGE_UNQUARANTINE: "K5", LogKind.STEP: "P1", LogKind.TOKEN: "C3", LogKind.PLAN_ROW: "P2",
    LogKind.EPOCH: "R2", LogKind.STATE: "L6", LogKind.PREFIX_HIT: "K7", LogKind.RESERVATION: "A5",
    LogKind.LEASE: "L4", LogKind.PAGE_SHARE: "K7", LogKind.PAGE_UNSHARE: "K4", LogKind.PAGE_PUBLISH: "K6",
    LogKind.PAGE_EVICT: "K2", LogKind.CLOCK: "E2", LogKind.CREDITS: "R4", LogKind.SQ_ENTRY: "R3",
    LogKind.RESULT: "C1", LogKind.MASK: "R11", LogKind.CONTROL: "L6",
}  # fmt: skip
OF_FIELD = {
    (LogKind.ADMIT, "a"): "A4", (LogKind.ADMIT, "b"): "L1", (LogKind.ADMIT, "c"): "L1",
    (LogKind.PREEMPT, "b"): "C2", (LogKind.PREEMPT, "c"): "K4", (LogKind.FINISH, "b"): "L1",
    (LogKind.FINISH, "c"): "K4", (LogKind.ERROR, "b"): "L1", (LogKind.ERROR, "c"): "K4",
    (LogKind.PAGE_ALLOC, "a"): "K2", (LogKind.PLAN_ROW, "c"): "A4", (LogKind.PAGE_SHARE, "c"): "K1",
    (LogKind.CLOCK, "a"): "T2", (LogKind.CLOCK, "b"): "T2",
}  # fmt: skip
_OF_ERROR = {
    ErrorReason.DEADLINE: "L3", ErrorReason.LEASE_LOST: "L4", ErrorReason.DRAINING: "L7", ErrorReason.MODEL_ERROR: "C2",
}  # fmt: skip
_ENDS = (LogKind.FINISH, LogKind.ERROR)
_ADMISSION = (LogKind.ADMIT, LogKind.PREFIX_HIT, LogKind.RESERVATION, LogKind.PAGE_SHARE)
_OF_REQUEST = {*LogKind} - {
    *(LogKind.EPOCH, LogKind.LEASE, LogKind.CREDITS, LogKind.STEP, LogKind.STATE, LogKind.PAGE_UNQUARANTINE),
    *(LogKind.PAGE_EVICT, LogKind.CLOCK, LogKind.CONTROL, LogKind.SQ_ENTRY, LogKind.REJECT, LogKind.CANCEL),
    LogKind.ACCEPT,
}


def _kind(value: int) -> LogKind | None:
    try:
        return LogKind(value)
    except ValueError:
        return None


def of_entry(entry: Entry) -> str:
    """The clause that an entry of this kind and reason follows from."""
    kind = _kind(entry[1])
    if kind == LogKind.FINISH and entry[5] == FinishReason.CANCELLED:
        return "R10"
    if kind == LogKind.ERROR and entry[5] in _OF_ERROR:
        return _OF_ERROR[ErrorReason(entry[5])]
    if kind in (LogKind.STATE, LogKind.CONTROL) and entry[5] in (2, EngineState.STOPPED):
        return "L7" if entry[5] == EngineState.STOPPED or kind == LogKind.CONTROL else "L6"
    return OF_KIND[kind] if kind is not None else "E3"


def violated(rest: Sequence[Entry], log: Sequence[Entry], live: bool, clock: int) -> tuple[str, str]:
    """The clause, and in which way.

    rest: what the specification's call writes from here on. log: the entry in question and the next. live: whether
    the request that the entry names is alive then. clock: of the newest CLOCK entry.
    """
    found, kind = log[0], _kind(log[0][1])
    if kind is None:
        return "E3", f"{found[1]} is no kind of a log entry"
    if kind in _OF_REQUEST and not live:
        if kind in _ENDS:
            return "L1", "a second terminal event, or one of a request that never was"
        return "L1", "the request that the entry names is not alive"
    if kind == LogKind.CLOCK and found[5] | found[6] << 32 < clock:
        return "T2", "the clock goes back"
    if not rest:
        return ("R5" if kind == LogKind.SQ_ENTRY else of_entry(found)), "no clause gives this entry here"
    expected = rest[0]
    if len(log) > 1 and log[1] == expected and found not in rest:
        return of_entry(found), "no clause gives this entry here"
    if kind in _ADMISSION and expected[1] in _ADMISSION and expected[2:5] != found[2:5]:
        return ("L2" if expected[2] == found[2] else "A2"), "another request's turn"
    if expected[1] != found[1]:
        if kind in _ENDS and expected[1] in _ENDS:
            return of_entry(expected), "another end"
        return of_entry(expected), "an entry is missing, or stands out of order"
    if expected[2:5] != found[2:5]:
        return (
            "P1" if kind in (LogKind.PLAN_ROW, LogKind.PAGE_ALLOC) else of_entry(expected)
        ), "another request's turn"
    fields = [name for name, x, y in zip(FIELDS, expected, found, strict=True) if x != y]
    if fields == ["step"]:
        return "E1", "number of the plan"
    name = next(name for name in fields if name != "step")
    clause = OF_FIELD.get((kind, name)) or of_entry(expected)
    return clause, f"value {name} of the entry"
