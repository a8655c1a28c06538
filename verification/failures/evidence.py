"""What a failure leaves behind, gathered while the rig still stands: histories, raw memory, process logs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from blink_core.abi.enums import PageState, RequestState
from hil_rigs.engine_memory import EngineUnreachable, StateSnapshot
from verification.failures.engine_log import Key
from verification.failures.http_log import Exchange
from verification.failures.limits import MAX_LOG_READ
from verification.history import History, enum_name
from verification.result import CheckResult

if TYPE_CHECKING:
    from hil_rigs.local import LocalRig

HOLD_TIMEOUT_S = 5.0  # a healthy engine reaches a boundary in milliseconds; a wedged one never does
PROCESSES = ("engine", "frontend")
_PROGRAM_REQUEST = re.compile(r"\brequest (\d+)\b")
# Written by the front end at level DEBUG, which the suite's rigs run with.
HTTP_REQUEST = re.compile(r"request ([0-9a-f]{32}(?:-\d+)?) is slot (\d+) generation (\d+)")


@dataclass(frozen=True, slots=True)
class FailedRun:
    """One program's history, with the check that it failed (None: it was merely the last to run)."""

    history: History
    result: CheckResult | None = None
    ordinal: int = 0  # counts the programs of its test


@dataclass(slots=True)
class EngineEvidence:
    """One engine at the time of the failure.

    died: how a process of the rig ended, None while all live. state: raw memory with the whole event log. boundary:
    whether the state was copied at a step boundary. notes: what could not be read, and why. logs: text by process.
    """

    name: str
    died: str | None = None
    state: StateSnapshot | None = None
    boundary: bool = False
    notes: list[str] = field(default_factory=list)
    logs: dict[str, str] = field(default_factory=dict)
    log_verdict: dict[str, Any] | None = None  # of the whole log against the specification, without content


def look_at(name: str, rig: LocalRig) -> EngineEvidence:
    """Copies state, event log and process logs of a rig, dead or alive. Never raises for what a rig is or is not."""
    folder = rig.options.logs or rig.run_dir
    found = EngineEvidence(name, logs={} if folder is None else read_logs(folder))
    if rig.run_dir is None:
        found.notes.append("the rig does not run any more: its memory is gone")
        return found
    found.died = rig.wait(0.0)
    try:
        _read_memory(found, rig)
    except Exception as e:  # half-written memory of a dead engine may be anything
        found.notes.append(f"raw memory: {type(e).__name__}: {e}")
    return found


def read_logs(folder: Path) -> dict[str, str]:
    """The ends of a rig's process logs, by process; of those that are there."""
    paths = {process: folder / f"{process}.log" for process in PROCESSES}
    return {process: _tail(path) for process, path in paths.items() if path.is_file()}


def _read_memory(found: EngineEvidence, rig: LocalRig) -> None:
    memory = rig.memory
    if found.died is None:
        try:
            with memory.hold(HOLD_TIMEOUT_S):
                found.state, found.boundary = memory.snapshot(0), True
            return
        except EngineUnreachable as e:
            found.notes.append(f"not at a step boundary: {e}")
            found.died = rig.wait(0.0)
    found.state = memory.snapshot(0)  # nobody writes in a dead engine; in a wedged one what is read may be torn


def _tail(path: Path) -> str:
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - MAX_LOG_READ))
        return stream.read().decode("utf-8", "replace")


def http_requests(logs: dict[str, str]) -> dict[str, Key]:
    """Front-end request id (with "-CHOICE" where a request has several) -> its request in ring 0."""
    found = HTTP_REQUEST.findall(logs.get("frontend", ""))
    return {request_id: (0, int(slot), int(generation)) for request_id, slot, generation in found}


def failing_keys(run: FailedRun | None, engine: EngineEvidence | None, exchanges: list[Exchange]) -> list[Key]:
    """The requests that a failure names, as far as can be told; all of the program's, or of the client's, if none is.

    A slot and generation in the witness come first. A request's number is its place in the program, or with the
    properties that look at raw memory its index in the engine (ring * slots + slot).
    """
    if run is None:
        known = http_requests(engine.logs) if engine is not None else {}
        asked = {exchange.request_id for exchange in exchanges}
        return [key for name, key in known.items() if name.partition("-")[0] in asked]
    history, result = run.history, run.result
    submitted = {s.request: (history.ring, s.slot, s.generation) for s in history.submitted}
    found: dict[Key, None] = {}
    if result is not None:
        for slot, generation in _pairs(result.witness):
            found[history.ring, slot, generation] = None
        numbers = [*_requests(result.witness), *map(int, _PROGRAM_REQUEST.findall(result.message.split("\n")[0]))]
        in_engine = result.property == "kv-conservation"
        for number in numbers:
            key = _engine_request(number, engine) if in_engine else submitted.get(number)
            if key is not None:
                found[key] = None
    ended = {(e["slot"], e["generation"]) for e in history.events if e["kind"] >= 3}
    if not found and (history.died or history.broken or not history.complete):
        found |= dict.fromkeys(key for key in submitted.values() if key[1:] not in ended)
    return list(found) or list(submitted.values())


def _engine_request(number: int, engine: EngineEvidence | None) -> Key | None:
    state = engine.state if engine is not None else None
    if state is None or number >= len(state.requests):
        return None
    ring, slot = divmod(number, state.config.slots)
    return ring, slot, int(state.requests[number]["generation"])


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for item in value.values():
            yield from _dicts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _dicts(item)


def _pairs(witness: Any) -> Iterator[tuple[int, int]]:
    for one in _dicts(witness):
        if isinstance(one.get("slot"), int) and isinstance(one.get("generation"), int):
            yield one["slot"], one["generation"]


def _requests(witness: Any) -> Iterator[int]:
    for one in _dicts(witness):
        values = [one.get("request"), *(one["requests"] if isinstance(one.get("requests"), list) else [])]
        yield from (value for value in values if isinstance(value, int) and not isinstance(value, bool))


def summary(engine: EngineEvidence, keys: list[Key]) -> dict[str, Any]:
    """Raw state without content: counters, rings, requests that live or failed, pages by state, running rows."""
    state = engine.state
    assert state is not None
    slots = state.config.slots
    wanted = {ring * slots + slot for ring, slot, _ in keys}
    live = set(np.flatnonzero(state.requests["state"] != RequestState.FREE).tolist())
    requests = []
    for index in sorted(i for i in live | wanted if 0 <= i < len(state.requests)):
        record = state.requests[index]
        row = int(record["row"])
        pages = state.block_tables[row][: int(record["n_pages"])].tolist() if 0 <= row < len(state.block_tables) else []
        requests.append(
            {
                "request": index,
                "ring": index // slots,
                "slot": index % slots,
                "state": enum_name(RequestState, int(record["state"])),
                "pages": pages,
                **_scalars(record),
            }
        )
    sizes = {f.name: getattr(state.config, f.name) for f in fields(state.config)}
    states = state.pages["state"]
    return {
        "boundary": engine.boundary,
        "config": {name: value for name, value in sizes.items() if isinstance(value, int)},
        "header": _scalars(state.header),
        "rings": [_scalars(ring) for ring in state.rings],
        "requests": requests,
        "running": state.running.tolist(),
        "pages": {enum_name(PageState, int(value)): int((states == value).sum()) for value in np.unique(states)},
        "free_list": len(state.free_list),
        "quarantine": state.quarantine.tolist(),
    }


# Request fields that are places and counts. Any other is left out: a field of a later ABI might carry content.
_KNOWN = frozenset(
    "arrival tag expires generation prompt_len max_tokens total computed emitted n_pages published cached next row "
    "preemptions paused admitted mask_index mask_box priority n_stop "
    "judged epoch sq_next cq_tail cq_published cq_head lease lease_at retry_at waiting live retries torn duplicates "
    "stale_cancels bad_heads bad_masks planned lapsed step committed arrivals admissions tokens log_tail in_flight "
    "free_pages quarantined running free_rows committed_pages clock next_expiry logged_clock reserved_since boundaries "
    "lookups hits evictions reserved_for lru_head lru_tail idle_cached".split()
)
# Lists by priority class, of rings and of the header.
_BY_CLASS = frozenset("deficit wait_head wait_tail next_ring".split())


def _scalars(record: Any) -> dict[str, Any]:
    """The known fields of one record: places and counts."""
    names = record.dtype.names or ()
    shown: dict[str, Any] = {name: int(record[name]) for name in names if name in _KNOWN and record[name].ndim == 0}
    return shown | {name: record[name].tolist() for name in names if name in _BY_CLASS}
