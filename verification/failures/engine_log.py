"""Event-log entries and events with names instead of numbers, and with token ids taken out."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any

import numpy as np

from blink_core.abi.dtypes import Array
from blink_core.abi.enums import EngineState, ErrorReason, EventKind, FinishReason, LogKind, StepStatus
from verification.failures.redact import Redactor
from verification.history import enum_name

Key = tuple[int, int, int]
"""Ring, slot, generation: what names one request in the engine."""

# Meaning of a, b, c by kind (blink_core.abi.enums.LogKind). An enumeration names its value; `TOKEN`, a token id, and
# `LOGPROB`, whose value tells one, are content. A kind that is not here shows none of its numbers: they might be too.
TOKEN, LOGPROB = "token", "logprob_bits"
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
    "PREFIX_HIT": (_f("found_pages"), _f("found_tokens"), _f("row")),
    "RESERVATION": (_f("change"), _f("boundaries")),
    "LEASE": (_f("lapsed"), _f("ended_requests")),
    "PAGE_SHARE": (_f("page"), _f("table_index"), _f("refs")),
    "PAGE_UNSHARE": (_f("page"), _f("refs")),
    "PAGE_PUBLISH": (_f("page"), _f("prefix_index"), _f("parent")),
    "PAGE_EVICT": (_f("page"),),
    "CLOCK": (_f("us_low"), _f("us_high"), _f("boundaries")),
    "CREDITS": (_f("head_low"), _f("head_high")),
    "SQ_ENTRY": (_f("word_low"), _f("word_high"), _f("sq_index")),
    "RESULT": (_f(TOKEN), _f("status", StepStatus), _f(LOGPROB)),
    "MASK": (_f("index"), _f("mailbox")),
    "CONTROL": (_f("asked"),),
}
# Kinds that are about the engine, or about a ring, and not about the request that their slot and generation would name.
OF_ENGINE = frozenset({"STEP", "STATE", "PAGE_UNQUARANTINE", "PAGE_EVICT", "CLOCK", "CONTROL"})
OF_RING = frozenset({"EPOCH", "LEASE", "CREDITS"})

_REASONS: dict[int, type[IntEnum]] = {EventKind.FINISH: FinishReason, EventKind.ERROR: ErrorReason}


def entry_key(entry: Any) -> Key:
    """The request that an entry names."""
    return int(entry["ring"]), int(entry["slot"]), int(entry["generation"])


def key_of(entry: Any) -> Key | None:
    """The request that an entry is about, None for one of the engine or of a ring."""
    return None if enum_name(LogKind, int(entry["kind"])) in OF_ENGINE | OF_RING else entry_key(entry)


def decode(index: int, entry: Any, redactor: Redactor) -> dict[str, Any]:
    """One log entry. index: its place in the whole log."""
    kind = enum_name(LogKind, int(entry["kind"]))
    shown: dict[str, Any] = {"log": index, "step": int(entry["step"]), "kind": kind}
    if kind in OF_RING:
        shown["ring"] = int(entry["ring"])
    elif kind not in OF_ENGINE:
        shown |= dict(zip(("ring", "slot", "generation"), entry_key(entry), strict=True))
    fields = LOG_FIELDS.get(kind)
    if fields is None:
        values = [int(entry[letter]) for letter in "abc"]
        return shown | ({"abc": values} if redactor.show else {"withheld": "kind without a known meaning"})
    for letter, (name, enumeration) in zip("abc", fields, strict=False):
        value = int(entry[letter])
        if name in (TOKEN, LOGPROB):
            shown[name] = redactor.token(value)
        else:
            shown[name] = value if enumeration is None else enum_name(enumeration, value)
    return shown


def decode_event(event: dict[str, Any], redactor: Redactor) -> dict[str, Any]:
    """One completion-queue event, as `History.events` holds it; tokens and their log probabilities are content."""
    kind = int(event["kind"])
    # An Event's index and step are token and logarithm in a LogprobsEvent.
    names = (
        ("seq", "slot", "generation") if kind == EventKind.LOGPROBS else ("seq", "slot", "generation", "index", "step")
    )
    shown: dict[str, Any] = {name: int(event[name]) for name in names if name in event}
    shown["kind"] = enum_name(EventKind, kind)
    if kind in _REASONS:
        shown["reason"] = enum_name(_REASONS[kind], int(event["reason"]))
    if kind == EventKind.TOKEN:
        shown["token"] = redactor.token(int(event["token"]))
    elif kind == EventKind.FINISH:
        shown["cached_tokens"] = int(event["token"])
    elif kind == EventKind.LOGPROBS:
        shown["count"] = int(event["count"])
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
