"""Event-log entries and events with names instead of numbers, and with token ids taken out."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any

import numpy as np

from blink_core.abi.dtypes import Array
from blink_core.abi.enums import EngineState, ErrorReason, EventKind, FinishReason, LogKind
from verification.failures.redact import Redactor
from verification.history import enum_name

Key = tuple[int, int, int]
"""Ring, slot, generation: what names one request in the engine."""

# Meaning of a, b, c by kind (blink_core.abi.enums.LogKind). An enumeration names its value, `TOKEN` is a token id; a
# kind that is not here shows none of its numbers, for they might be content.
TOKEN = "token"
_Field = tuple[str, type[IntEnum] | None]


def _f(name: str, kind: type[IntEnum] | None = None) -> _Field:
    return name, kind


LOG_FIELDS: dict[str, tuple[_Field, ...]] = {
    "ACCEPT": (_f("prompt_len"), _f("max_tokens"), _f("sq_index")),
    "REJECT": (_f("reason", ErrorReason), _f("sq_index")),
    "ADMIT": (_f("row"), _f("known_tokens"), _f("preemptions")),
    "PREEMPT": (_f("row"), _f("computed_tokens"), _f("released_pages")),
    "FINISH": (_f("reason", FinishReason), _f("emitted"), _f("released_pages")),
    "ERROR": (_f("reason", ErrorReason), _f("emitted"), _f("released_pages")),
    "CANCEL": (_f("was_live"), _f("sq_index")),
    "PAGE_ALLOC": (_f("page"), _f("table_index")),
    "PAGE_FREE": (_f("page"), _f("quarantined")),
    "PAGE_UNQUARANTINE": (_f("page"),),
    "STEP": (_f("rows"), _f("step_tokens"), _f("sampling_rows")),
    "TOKEN": (_f("index"), _f(TOKEN)),
    "PLAN_ROW": (_f("row_tokens"), _f("context_len"), _f("row")),
    "EPOCH": (_f("epoch"), _f("dropped_requests")),
    "STATE": (_f("state", EngineState),),
}
# Kinds that are about the engine and not about the request that their ring, slot and generation would name.
GLOBAL = frozenset({"STEP", "STATE", "EPOCH", "PAGE_UNQUARANTINE"})

_REASONS: dict[int, type[IntEnum]] = {EventKind.FINISH: FinishReason, EventKind.ERROR: ErrorReason}


def entry_key(entry: Any) -> Key:
    """The request that an entry names."""
    return int(entry["ring"]), int(entry["slot"]), int(entry["generation"])


def decode(index: int, entry: Any, redactor: Redactor) -> dict[str, Any]:
    """One log entry. index: its place in the whole log."""
    kind = enum_name(LogKind, int(entry["kind"]))
    shown: dict[str, Any] = {"log": index, "step": int(entry["step"]), "kind": kind}
    if kind not in GLOBAL:
        shown |= dict(zip(("ring", "slot", "generation"), entry_key(entry), strict=True))
    fields = LOG_FIELDS.get(kind)
    if fields is None:
        values = [int(entry[letter]) for letter in "abc"]
        return shown | ({"abc": values} if redactor.show else {"withheld": "kind without a known meaning"})
    for letter, (name, enumeration) in zip("abc", fields, strict=False):
        value = int(entry[letter])
        if name == TOKEN:
            shown[name] = redactor.token(value)
        else:
            shown[name] = value if enumeration is None else enum_name(enumeration, value)
    return shown


def decode_event(event: dict[str, Any], redactor: Redactor) -> dict[str, Any]:
    """One completion-queue event, as `History.events` holds it; the token and its log probability are content."""
    kind = int(event["kind"])
    shown: dict[str, Any] = {
        name: int(event[name]) for name in ("seq", "slot", "generation", "index", "step") if name in event
    }
    shown["kind"] = enum_name(EventKind, kind)
    if kind in _REASONS:
        shown["reason"] = enum_name(_REASONS[kind], int(event["reason"]))
    if kind == EventKind.TOKEN:
        shown["token"] = redactor.token(int(event["token"]))
    if redactor.show:
        shown |= {name: value for name, value in event.items() if name not in shown}
    return shown


def select(log: Array, keys: Iterable[Key], margin: int, most: int) -> Array:
    """Which entries are kept: int64 indexes into `log` [n], sorted, at most `most`.

    First the entries of the requests `keys`, newest first; then what stands between them and `margin` entries around;
    then the newest others.
    """
    n = len(log)
    wanted = np.zeros(n, bool)
    for ring, slot, generation in keys:
        wanted |= (log["ring"] == ring) & (log["slot"] == slot) & (log["generation"] == generation)
    own = np.flatnonzero(wanted)
    rank = np.full(n, 2, np.int8)
    if own.size:
        rank[max(0, own[0] - margin) : own[-1] + margin + 1] = 1
    rank[own] = 0
    order = np.lexsort((-np.arange(n), rank))  # by rank, the newest first
    chosen: Array = np.sort(order[:most])
    return chosen
