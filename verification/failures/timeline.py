"""One order of everything that is known: ring, event log, HTTP and process logs, joined by request.

The event log orders itself. A submission stands before its ACCEPT, a delivered event after the entry that made it; a
line of a process log stands where the request that it names was accepted, and other lines after the line before them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blink_core.abi.dtypes import Array
from blink_core.abi.enums import EventKind, LogKind
from verification.failures.engine_log import Key, decode, decode_event, key_of
from verification.failures.evidence import HTTP_REQUEST, EngineEvidence, FailedRun, http_requests
from verification.failures.http_log import Exchange
from verification.failures.redact import Redactor
from verification.history import Submitted

_START, _END = -1.0, float("inf")
_BEFORE_CLIENT, _BEFORE, _AT, _AFTER = range(4)
_PREFIX = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) ([A-Z]+) ([\w.]+): (.*)$", re.DOTALL)
_REQUEST_ID = re.compile(r"\brequest ([0-9a-f]{32})(?:-\d+)?\b")
_MADE = {
    EventKind.LOGPROBS: LogKind.TOKEN,
    EventKind.TOKEN: LogKind.TOKEN,
    EventKind.FINISH: LogKind.FINISH,
    EventKind.ERROR: LogKind.ERROR,
}


@dataclass(slots=True)
class Row:
    """One line of the timeline. at: position in the event log; key: the request, None for what is about none."""

    at: float
    rank: int
    key: Key | None
    values: dict[str, Any]


@dataclass(slots=True)
class Timeline:
    """Rows in order; `failing` are the requests that the failure names."""

    rows: list[Row] = field(default_factory=list)
    failing: tuple[Key, ...] = ()

    def relevant(self, row: Row) -> bool:
        return row.key is not None and row.key in self.failing


def split_log(text: str) -> Iterator[tuple[str, str, str]]:
    """A process log as (time, level, message): lines without a prefix (a traceback) belong to the one before."""
    time = level = ""
    held: list[str] = []
    for line in text.splitlines():
        found = _PREFIX.match(line)
        if found is None:
            held.append(line)
            continue
        if held:
            yield time, level, "\n".join(held)
        time, level, held = found.group(1), found.group(2), [f"{found.group(3)}: {found.group(4)}"]
    if held:
        yield time, level, "\n".join(held)


class _Places:
    """Where in the event log things happened."""

    def __init__(self, log: Array | None, first: int) -> None:
        self._at: dict[tuple[Key, int, int], int] = {}
        self._last: dict[Key, int] = {}
        if log is None:
            return
        kinds = (
            LogKind.SQ_ENTRY,
            LogKind.ACCEPT,
            LogKind.REJECT,
            LogKind.CANCEL,
            LogKind.TOKEN,
            LogKind.FINISH,
            LogKind.ERROR,
        )
        at = np.flatnonzero(np.isin(log["kind"], kinds))
        columns = [log[name][at].tolist() for name in ("kind", "ring", "slot", "generation", "a")]
        for i, kind, ring, slot, generation, a in zip(at.tolist(), *columns, strict=True):
            key = (ring, slot, generation)
            self._at.setdefault((key, kind, a if kind == LogKind.TOKEN else 0), first + i)
            self._last[key] = first + i

    def of(self, key: Key, *kinds: int, number: int = 0) -> int | None:
        return next((at for kind in kinds if (at := self._at.get((key, kind, number))) is not None), None)

    def last(self, key: Key) -> int | None:
        return self._last.get(key)


def build(
    runs: list[FailedRun],
    engine: EngineEvidence | None,
    chosen: Array | None,
    exchanges: list[Exchange],
    failing: list[Key],
    redactor: Redactor,
) -> Timeline:
    """Joins what there is. chosen: indexes of the log entries that are shown (`engine_log.select`)."""
    state = engine.state if engine is not None else None
    log, first = (state.log, state.log_lost) if state is not None else (None, 0)
    places = _Places(log, first)
    rows: list[Row] = []
    if log is not None and chosen is not None:
        for i in chosen.tolist():
            values = decode(first + i, log[i], redactor)
            rows.append(Row(first + i, _AT, key_of(log[i]), {"source": "engine-log", **values}))
    for run in runs:
        rows += _ring_rows(run, places, redactor)
    names = http_requests(engine.logs) if engine is not None else {}
    for exchange in exchanges:
        rows.append(_exchange_row(exchange, names, places))
    if engine is not None:
        for process, text in engine.logs.items():
            rows += _process_rows(process, text, names, places, redactor)
        if engine.died is not None:
            text = redactor.text(engine.died.splitlines()[0])
            rows.append(Row(_END, _AFTER, None, {"source": "rig", "what": "died", "message": text}))
    rows.sort(key=lambda row: (row.at, row.rank))  # stable: rows of one place stay as they came
    _name_requests(rows, runs, names)
    return Timeline(rows, tuple(failing))


def _ring_rows(run: FailedRun, places: _Places, redactor: Redactor) -> Iterator[Row]:
    history = run.history
    keys: dict[tuple[int, int], tuple[Submitted, Key]] = {}
    reached: dict[Key, float] = {}
    spoken: Counter[Key] = Counter()
    for s in history.submitted:
        key = (history.ring, s.slot, s.generation)
        keys[s.slot, s.generation] = s, key
        at = places.of(key, LogKind.SQ_ENTRY, LogKind.ACCEPT, LogKind.REJECT)
        reached[key] = _END if at is None else at
        spec = history.program.requests[s.request]
        values = {"prompt_tokens": len(spec.prompt), "max_tokens": spec.params.max_tokens, "sq_index": s.sq_index}
        yield Row(reached[key], _BEFORE, key, {"source": "ring", "what": "SUBMIT", **_key(key), **values})
    for event in history.events:
        known = keys.get((event["slot"], event["generation"]))
        key = (history.ring, event["slot"], event["generation"])
        made = _MADE.get(event["kind"])
        # Alternatives stand where the token does that they come before.
        number = {EventKind.TOKEN: event.get("index", 0), EventKind.LOGPROBS: spoken[key]}.get(event["kind"], 0)
        spoken[key] += event["kind"] == EventKind.TOKEN
        at = None if made is None else places.of(key, made, number=number)
        # What the log does not have stands after what the request had before: events of one request keep their order.
        reached[key] = max(reached.get(key, _END) if known else _END, at if at is not None else _START)
        values = decode_event(event, redactor)
        what = values.pop("kind")
        yield Row(
            reached[key], _AFTER, key, {"source": "ring", "what": f"event {what}", "ring": history.ring, **values}
        )
    for request in sorted(history.cancels):
        for s, key in keys.values():
            if s.request == request:
                at = places.of(key, LogKind.CANCEL)
                at = places.last(key) if at is None else at
                cancel: dict[str, Any] = {"source": "ring", "what": "CANCEL", **_key(key)}
                yield Row(_END if at is None else at, _BEFORE, key, cancel)


def _exchange_row(exchange: Exchange, names: dict[str, Key], places: _Places) -> Row:
    key = names.get(exchange.request_id) or names.get(f"{exchange.request_id}-0")
    at = None if key is None else places.of(key, LogKind.SQ_ENTRY, LogKind.ACCEPT, LogKind.REJECT)
    values: dict[str, Any] = {"source": "http", "what": f"{exchange.method} {exchange.path}", "status": exchange.status}
    values |= {"http_request": exchange.request_id, "stream": exchange.stream} | (_key(key) if key else {})
    return Row(_END if at is None else at, _BEFORE_CLIENT, key, values)


def _process_rows(process: str, text: str, names: dict[str, Key], places: _Places, redactor: Redactor) -> Iterator[Row]:
    at = _START
    for time, level, message in split_log(text):
        key: Key | None = None
        values: dict[str, Any] = {"source": f"{process}.log", "time": time, "level": level}
        if (found := HTTP_REQUEST.search(message)) is not None:
            key = (0, int(found.group(2)), int(found.group(3)))
            accepted = places.of(key, LogKind.ACCEPT, LogKind.REJECT)
            at = at if accepted is None else accepted
        if (named := _REQUEST_ID.search(message)) is not None:
            values["http_request"] = named.group(1)
            key = key or names.get(named.group(1)) or names.get(f"{named.group(1)}-0")
            if found is None and key is not None:
                last = places.last(key)
                at = at if last is None else max(at, last)
        yield Row(at, _AFTER, key, {**values, **(_key(key) if key else {}), "message": redactor.text(message)})
        if process == "engine" and ": ready" in message:
            at = _END  # no line of the engine names a request: what follows is later than anything that can be told


def _key(key: Key) -> dict[str, int]:
    return dict(zip(("ring", "slot", "generation"), key, strict=True))


def _name_requests(rows: list[Row], runs: list[FailedRun], names: dict[str, Key]) -> None:
    """Gives each row the number of its request in the program, and the front end's id of it."""
    by_key = {(r.history.ring, s.slot, s.generation): s.request for r in runs for s in r.history.submitted}
    ids = {key: name.partition("-")[0] for name, key in names.items()}
    for row in rows:
        if row.key in by_key:
            row.values["request"] = by_key[row.key]
        if row.key in ids:
            row.values.setdefault("http_request", ids[row.key])


def line(values: dict[str, Any]) -> str:
    """A row for a reader: where, what, and the rest as name=value."""
    head = f"{values['source']:<13} {values.get('what') or values.get('kind') or values.get('level', '')!s:<14}"
    step = f"step {values['step']:>6} " if "step" in values else " " * 12
    named = f"request {values['request']:>3} " if "request" in values else " " * 12
    left_out = {"source", "what", "step", "request", "level", "message", "kind"}
    rest = " ".join(f"{name}={value}" for name, value in values.items() if name not in left_out and value != "")
    message = str(values.get("message", "")).replace("\n", "\n      | ")
    return f"{step}{named}{head} {rest}{' ' if rest and message else ''}{message}".rstrip()
