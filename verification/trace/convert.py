"""`convert`: a trace as JSON lines, or as Chrome's trace events for Perfetto (ui.perfetto.dev).

Chrome's format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, which
Perfetto reads. Process 0 is the engine, process r + 1 ring r; thread s + 1 of a ring is slot s. Times are the engine's
clock in microseconds; what one call does has one time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from blink_core.abi.enums import ErrorReason, FinishReason, LogKind, PageState
from verification.failures.engine_log import OF_ENGINE, OF_RING
from verification.trace.calls import Key, begins_boundary, clock_of, key_of
from verification.trace.format import Entry, Trace
from verification.trace.words import kind_name, values_of

CONTENT = frozenset({"token", "logprob_bits"})
ENGINE, STEPS = 0, 1  # process and thread of the steps


def jsonl(trace: Trace, *, content: bool = False) -> Iterator[str]:
    """One JSON object a line: the header, every entry with its clock and named values, gaps, the end.

    content: with token ids and log-probabilities.
    """
    h = trace.header
    named = ("source", "created_by", "abi_version", "engine_digest", "rig", "model", "seed", "clock_base", "payloads")
    yield json.dumps({"header": {name: getattr(h, name) for name in named} | {"config": h.config.sizes()}})
    clock = 0
    for part, first in ((trace.entries, trace.first), (trace.after_gap, sum(trace.gap or (0, 0)))):
        for n, entry in enumerate(part):
            if entry[1] == LogKind.CLOCK:
                clock = clock_of(entry)
            kind = kind_name(entry)
            line: dict[str, Any] = {"log": first + n, "clock_us": clock, "step": entry[0], "kind": kind}
            if kind in OF_RING:
                line["ring"] = entry[2]
            elif kind not in OF_ENGINE:
                line |= {"ring": entry[2], "slot": entry[3], "generation": entry[4]}
            line |= {k: v for k, v in values_of(entry).items() if content or k not in CONTENT}
            yield json.dumps(line)
        if part is trace.entries and trace.gap is not None:
            yield json.dumps({"gap": {"first": trace.gap[0], "entries": trace.gap[1]}})
    yield json.dumps({"end": trace.end, "problem": trace.problem})


def perfetto(trace: Trace) -> dict[str, Any]:
    """The JSON object format of Chrome's trace events. Entries behind a gap are left out."""
    made = _Perfetto(trace)
    for entry in trace.entries:
        made.take(entry)
    made.close()
    other = {name: str(getattr(trace.header, name)) for name in ("source", "rig", "model", "seed", "engine_digest")}
    return {"traceEvents": made.events, "displayTimeUnit": "ms", "otherData": other}


@dataclass(slots=True)
class _Life:
    """A live request: since when, and since when in which state."""

    since: int
    state: str
    state_since: int
    args: dict[str, Any] = field(default_factory=dict)


class _Perfetto:
    def __init__(self, trace: Trace) -> None:
        self.config = trace.header.config
        self.events: list[dict[str, Any]] = []
        self.clock = 0
        self.lives: dict[Key, _Life] = {}
        self.step: tuple[int, dict[str, Any]] | None = None
        self.pages = {PageState.FREE: self.config.pages - 2, PageState.OWNED: 0}
        self.pages |= {PageState.CACHED: 0, PageState.QUARANTINED: 0}
        self.cached: set[int] = set()
        self._name(ENGINE, None, "engine")
        self._name(ENGINE, STEPS, "steps")
        for ring in range(self.config.rings):
            self._name(ring + 1, None, f"ring {ring}")

    def take(self, entry: Entry) -> None:
        kind, a = entry[1], entry[5]
        if kind == LogKind.CLOCK:
            self.clock = clock_of(entry)
            if self.step is not None and begins_boundary(entry):
                self._end_step()
            return
        key = key_of(entry)
        if kind == LogKind.ACCEPT:
            if key not in self.lives:
                self._name(key[0] + 1, key[1] + 1, f"slot {key[1]}")
            self.lives[key] = _Life(self.clock, "waiting", self.clock, dict(values_of(entry)))
        elif kind == LogKind.ADMIT:
            self._state(key, "running")
        elif kind == LogKind.PREEMPT:
            self._state(key, "preempted")
        elif kind in (LogKind.FINISH, LogKind.ERROR):
            names = FinishReason if kind == LogKind.FINISH else ErrorReason
            self._over(key, names(a).name if a in list(names) else str(a), entry[6])
        elif kind == LogKind.EPOCH:
            for other in [other for other in self.lives if other[0] == entry[2]]:
                self._over(other, "EPOCH", None)
            self._instant(entry, entry[2] + 1, None)
        elif kind in (LogKind.REJECT, LogKind.RESERVATION, LogKind.CANCEL):
            self._instant(entry, entry[2] + 1, entry[3] + 1)
        elif kind == LogKind.LEASE:
            self._instant(entry, entry[2] + 1, None)
        elif kind in (LogKind.STATE, LogKind.CONTROL):
            self._instant(entry, ENGINE, STEPS)
        elif kind == LogKind.STEP:
            self.step = self.clock, {"step": entry[0], **values_of(entry)}
            self._counter("step tokens", {"used": entry[6], "unused": max(0, self.config.token_budget - entry[6])})
        else:
            self._page(kind, entry)

    def close(self) -> None:
        """Whatever is still open ends where the log ends."""
        if self.step is not None:
            self._end_step()
        for key in list(self.lives):
            self._over(key, "the log ends", None)

    def _state(self, key: Key, state: str) -> None:
        life = self.lives.get(key)
        if life is not None:
            self._slice(key[0] + 1, key[1] + 1, life.state, life.state_since, {})
            life.state, life.state_since = state, self.clock

    def _over(self, key: Key, why: str, emitted: int | None) -> None:
        life = self.lives.pop(key, None)
        if life is None:
            return
        args = life.args | {"end": why} | ({} if emitted is None else {"emitted": emitted})
        self._slice(key[0] + 1, key[1] + 1, f"request g{key[2]}", life.since, args)
        self._slice(key[0] + 1, key[1] + 1, life.state, life.state_since, {})

    def _end_step(self) -> None:
        assert self.step is not None
        since, args = self.step
        self._slice(ENGINE, STEPS, f"step {args['step']}", since, args)
        self.step = None

    def _page(self, kind: int, entry: Entry) -> None:
        free, owned = PageState.FREE, PageState.OWNED
        cached, quarantined = PageState.CACHED, PageState.QUARANTINED
        moves = {
            LogKind.PAGE_ALLOC: (free, owned), LogKind.PAGE_UNQUARANTINE: (quarantined, free),
            LogKind.PAGE_PUBLISH: (owned, cached), LogKind.PAGE_EVICT: (cached, free),
            LogKind.PAGE_FREE: (owned, quarantined if entry[6] else free),
        }  # fmt: skip
        if kind in moves:
            before, after = moves[LogKind(kind)]
            self.pages[before] -= 1
            self.pages[after] += 1
            self._counter("pages", {state.name.lower(): count for state, count in self.pages.items()})

    def _slice(self, pid: int, tid: int, name: str, since: int, args: dict[str, Any]) -> None:
        self._event("X", name, pid, tid, since, dur=self.clock - since, args=args)

    def _counter(self, name: str, values: dict[str, int]) -> None:
        last = self.events[-1] if self.events else {}
        if last.get("ph") == "C" and last["name"] == name and last["ts"] == self.clock:
            last["args"] = values  # one value a time
        else:
            self._event("C", name, ENGINE, None, self.clock, args=values)

    def _instant(self, entry: Entry, pid: int, tid: int | None) -> None:
        scope = "p" if tid is None else "t"
        self._event("i", kind_name(entry), pid, tid, self.clock, s=scope, args=dict(values_of(entry)))

    def _name(self, pid: int, tid: int | None, name: str) -> None:
        kind = "process_name" if tid is None else "thread_name"
        self._event("M", kind, pid, tid, 0, args={"name": name})

    def _event(self, ph: str, name: str, pid: int, tid: int | None, ts: int, **more: Any) -> None:
        self.events.append({"ph": ph, "name": name, "cat": "blink", "pid": pid, "tid": tid or 0, "ts": ts, **more})
