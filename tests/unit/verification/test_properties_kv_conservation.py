"""The checker of KV conservation on hand-made snapshots and logs: good ones pass, each clause has bad ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from blink_core.abi.config import EngineConfig
from blink_core.abi.dtypes import DTYPES, LOG_ENTRY, REQUEST, Array
from blink_core.abi.enums import ErrorReason, FinishReason, LogKind, PageState, RequestState
from hil_rigs.engine_memory import StateSnapshot
from verification.properties import kv_conservation as kv
from verification.result import Verdict

CONFIG = EngineConfig(
    vocab=64,
    rings=2,
    slots=4,
    sq_entries=16,
    cq_entries=16,
    arena_tokens=32,
    max_len=32,
    page_size=4,
    pages=10,
    max_rows=3,
)
BUSY, OTHER = 5, 1  # request index: ring 1 slot 1, ring 0 slot 1


def snapshot(
    owned: dict[int, list[int]] | None = None,
    quarantine: tuple[int, ...] = (),
    *,
    in_flight: int = 1,
    log: Array | None = None,
    first: int = 0,
) -> StateSnapshot:
    """A consistent state in which each request of `owned` has those pages, full to the last token."""
    owned = {} if owned is None else owned
    requests, pages = np.zeros(8, REQUEST), np.zeros(CONFIG.pages, DTYPES["Page"])
    tables = np.zeros((CONFIG.max_rows, CONFIG.max_pages), np.uint32)
    pages["owner"] = -1
    pages["state"][:2] = PageState.RESERVED
    requests["row"] = -1
    for row, (request, members) in enumerate(owned.items()):
        q = requests[request]
        q["state"], q["generation"], q["row"], q["n_pages"] = RequestState.RUNNING, 3, row, len(members)
        q["computed"] = 4 * len(members) - 1
        q["total"] = q["computed"] + 1
        tables[row, : len(members)] = members
        for page in members:
            pages[page] = (request, 3, 1, PageState.OWNED)
    pages["state"][list(quarantine)] = PageState.QUARANTINED
    taken = {page for members in owned.values() for page in members} | set(quarantine)
    free = np.array([p for p in range(2, CONFIG.pages) if p not in taken], np.uint32)
    entries = np.zeros(0, LOG_ENTRY) if log is None else log
    header = np.zeros(1, DTYPES["StateHeader"])[0]
    header["free_pages"], header["quarantined"], header["running"] = len(free), len(quarantine), len(owned)
    header["in_flight"], header["live"], header["log_tail"] = in_flight, len(owned), first + len(entries)
    return StateSnapshot(
        config=CONFIG,
        header=header,
        rings=np.zeros(2, DTYPES["RingState"]),
        requests=requests,
        running=np.array(list(owned), np.uint32),
        block_tables=tables,
        pages=pages,
        free_list=free,
        quarantine=np.array(quarantine, np.uint32),
        log=entries,
        log_lost=first,
    )


@pytest.mark.parametrize(
    "s", [snapshot(in_flight=0), snapshot({BUSY: [2, 3], OTHER: [7]}), snapshot({BUSY: [2]}, (4, 5))]
)
def test_good_snapshots_pass(s: StateSnapshot) -> None:
    """Catches: a checker that rejects a consistent state."""
    result = kv.check_snapshot(s)
    assert result.ok(), result


def _set(s: StateSnapshot, where: str, index: Any, **fields: int) -> StateSnapshot:
    record = getattr(s, where)[index] if index is not None else getattr(s, where)
    for name, value in fields.items():
        record[name] = value
    return s


def base() -> StateSnapshot:
    return snapshot({BUSY: [2, 3], OTHER: [7]}, (4,))


def without_page(s: StateSnapshot) -> StateSnapshot:
    s.header["free_pages"] -= 1
    return replace(s, free_list=s.free_list[:-1])


def listed(s: StateSnapshot, page: int) -> StateSnapshot:
    s.header["free_pages"] += 1
    return replace(s, free_list=np.append(s.free_list, np.uint32(page)))


def table(s: StateSnapshot, page: int) -> StateSnapshot:
    s.block_tables[0, 1] = page
    return s


def running(s: StateSnapshot, *requests: int) -> StateSnapshot:
    s.header["running"] = len(requests)
    return replace(s, running=np.array(requests, np.uint32))


def dead_but_owning() -> StateSnapshot:
    s = snapshot({BUSY: [2]}, in_flight=0)
    return _set(s, "header", None, live=0)


BAD: dict[str, tuple[str, Callable[[], StateSnapshot]]] = {
    "leaked": ("one-state", lambda: without_page(base())),
    "free-and-owned": ("one-state", lambda: listed(base(), 2)),
    "twice-free": ("one-state", lambda: listed(base(), int(base().free_list[0]))),
    "two-owners": ("one-state", lambda: table(base(), 7)),
    "reserved-owned": ("one-state", lambda: table(base(), 1)),
    "page-beyond-pool": ("one-state", lambda: table(base(), 4_000_000_000)),
    "free-beyond-pool": ("one-state", lambda: listed(base(), 99)),
    "metadata-state": ("one-state", lambda: _set(base(), "pages", 2, state=PageState.FREE)),
    "garbage-state": ("one-state", lambda: _set(base(), "pages", 2, state=77)),
    "header-counts": ("one-state", lambda: _set(base(), "header", None, free_pages=4_000_000_000)),
    "refs": ("owner", lambda: _set(base(), "pages", 2, refs=2)),
    "owner": ("owner", lambda: _set(base(), "pages", 2, owner=OTHER)),
    "generation": ("owner", lambda: _set(base(), "pages", 2, generation=2)),
    "request-beyond": ("owner", lambda: running(base(), BUSY, OTHER, 800)),
    "request-twice": ("owner", lambda: running(base(), BUSY, OTHER, BUSY)),
    "row-beyond": ("owner", lambda: _set(base(), "requests", BUSY, row=1000)),
    "no-row": ("owner", lambda: _set(base(), "requests", BUSY, row=-1)),
    "runs-waiting": ("owner", lambda: _set(base(), "requests", BUSY, state=RequestState.WAITING)),
    "runs-in-garbage": ("owner", lambda: _set(base(), "requests", BUSY, state=55)),
    "too-few-pages": ("coverage", lambda: _set(base(), "requests", BUSY, computed=9, total=10)),
    "too-many-pages": ("coverage", lambda: _set(base(), "requests", BUSY, computed=3, total=4)),
    "more-than-a-table": ("coverage", lambda: _set(base(), "requests", BUSY, n_pages=900)),
    "idle-quarantine": ("quarantine", lambda: _set(base(), "header", None, in_flight=0)),
    "idle-owner": ("release", lambda: _set(base(), "requests", 0, n_pages=1)),
    "nobody-lives": ("release", dead_but_owning),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_snapshots_are_invalid(name: str) -> None:
    """Catches: a clause that cannot fail, and an exception where memory holds garbage."""
    clause, build = BAD[name]
    result = kv.check_snapshot(build())
    assert (result.clause, result.verdict) == (clause, Verdict.INVALID), result


Entry = tuple[int, int, int, int]  # kind, a, b, c


def log(*entries: Entry, slot: int = 1, ring: int = 1) -> Array:
    made = np.zeros(len(entries), LOG_ENTRY)
    for record, (kind, a, b, c) in zip(made, entries, strict=True):
        record["kind"], record["a"], record["b"], record["c"] = kind, a, b, c
        record["slot"], record["ring"], record["generation"], record["step"] = slot, ring, 3, 7
    return made


ALLOC2, ALLOC3 = (LogKind.PAGE_ALLOC, 2, 0, 0), (LogKind.PAGE_ALLOC, 3, 1, 0)
PLAN, STEP = (LogKind.PLAN_ROW, 4, 4, 0), (LogKind.STEP, 1, 4, 1)
PREFILL = (LogKind.STEP, 1, 4, 0)  # samples nothing
TOKEN = (LogKind.TOKEN, 0, 9, 0)
CANCEL, CANCELLED = (LogKind.CANCEL, 1, 0, 0), (LogKind.FINISH, FinishReason.CANCELLED, 1, 1)
FREE2, HELD2, OUT2 = (LogKind.PAGE_FREE, 2, 0, 0), (LogKind.PAGE_FREE, 2, 1, 0), (LogKind.PAGE_UNQUARANTINE, 2, 0, 0)
LENGTH = (LogKind.FINISH, FinishReason.LENGTH, 1, 1)
FAILED = (LogKind.ERROR, ErrorReason.MODEL_ERROR, 0, 1)
IDLE = snapshot(in_flight=0)

GOOD_LOGS: dict[str, tuple[list[Entry], StateSnapshot]] = {
    "nothing": ([], IDLE),
    "one-step": ([ALLOC2, PLAN, STEP, TOKEN], snapshot({BUSY: [2]})),
    "finished": ([ALLOC2, PLAN, STEP, TOKEN, FREE2, LENGTH], IDLE),
    "cancelled-in-flight": ([ALLOC2, PLAN, STEP, CANCEL, HELD2, CANCELLED, OUT2], IDLE),
    "cancelled-and-held": ([ALLOC2, PLAN, STEP, CANCEL, HELD2, CANCELLED], snapshot(quarantine=(2,))),
    "reused": ([ALLOC2, STEP, CANCEL, HELD2, CANCELLED, OUT2, ALLOC2, PLAN, STEP, TOKEN], snapshot({BUSY: [2]})),
    "failed-step": ([ALLOC2, PLAN, STEP, FREE2, FAILED], IDLE),
    "silent-commit": ([ALLOC2, PLAN, PREFILL, CANCEL, FREE2, CANCELLED], IDLE),
    "preempted": ([ALLOC2, STEP, TOKEN, FREE2, (LogKind.PREEMPT, 0, 4, 1)], IDLE),
}


def after(entries: list[Entry], state: StateSnapshot, first: int = 0) -> StateSnapshot:
    made = log(*entries)
    state.header["log_tail"] = first + len(made)
    return replace(state, log=made, log_lost=first)


@pytest.mark.parametrize("name", GOOD_LOGS)
def test_good_logs_pass(name: str) -> None:
    """Catches: a fold that rejects what the scheduler may do."""
    entries, state = GOOD_LOGS[name]
    result = kv.check_log(snapshot(in_flight=0), after(entries, state))
    assert result.ok(), result


BAD_LOGS: dict[str, tuple[str, list[Entry], StateSnapshot]] = {
    "free-in-flight": ("quarantine", [ALLOC2, PLAN, STEP, CANCEL, FREE2, CANCELLED, TOKEN], IDLE),
    "given-in-quarantine": ("quarantine", [ALLOC2, PREFILL, CANCEL, HELD2, CANCELLED, ALLOC2], snapshot({BUSY: [2]})),
    "planned-in-flight": ("quarantine", [ALLOC2, STEP, ALLOC3, TOKEN], snapshot({BUSY: [2, 3]})),
    "held-over-a-step": ("quarantine", [ALLOC2, STEP, CANCEL, HELD2, CANCELLED, STEP, OUT2], IDLE),
    "given-twice": ("log", [ALLOC2, ALLOC2], snapshot({BUSY: [2]})),
    "foreign-release": ("log", [FREE2], IDLE),
    "out-of-no-quarantine": ("log", [OUT2], IDLE),
    "memory-has-more": ("log", [ALLOC2], snapshot({BUSY: [2, 3]})),
    "memory-has-less": ("log", [ALLOC2, ALLOC3], snapshot({BUSY: [2]})),
    "other-owner": ("log", [ALLOC2], snapshot({OTHER: [2]})),
    "quarantine-differs": ("log", [], snapshot(quarantine=(2,))),
    "garbage-kind-and-page": ("log", [(900, 5, 0, 0), (LogKind.PAGE_ALLOC, 4_000_000_000, 0, 0)], IDLE),
    "garbage-running": ("owner", [], running(snapshot({BUSY: [2]}), 800)),
}


@pytest.mark.parametrize("name", BAD_LOGS)
def test_bad_logs_are_invalid(name: str) -> None:
    """Catches: reuse of a page that the step in flight may write; a log that contradicts memory; an exception."""
    clause, entries, state = BAD_LOGS[name]
    result = kv.check_log(snapshot(in_flight=0), after(entries, state))
    assert (result.clause, result.verdict) == (clause, Verdict.INVALID), result


def test_step_in_flight_at_the_first_snapshot() -> None:
    """Catches: a hold, which falls between launch and run, that makes the checker forget the step."""
    before = snapshot({BUSY: [2]}, log=log(ALLOC2, STEP))
    freed = after([CANCEL, FREE2, CANCELLED], snapshot(in_flight=0), first=2)
    assert kv.check_log(before, freed).clause == "quarantine"
    held = after([CANCEL, HELD2, CANCELLED, OUT2], snapshot(in_flight=0), first=2)
    assert kv.check_log(before, held).ok()


def test_nothing_seen_is_unknown() -> None:
    """Catches: a pass where entries were overwritten, or where no boundary had anything running."""
    lost = after([ALLOC2], snapshot({BUSY: [2]}), first=4)
    assert kv.check_log(snapshot(in_flight=0), lost).verdict is Verdict.UNKNOWN
    assert kv.check_observed(0, 7).verdict is Verdict.UNKNOWN
    assert kv.check_observed(3, 0).verdict is Verdict.UNKNOWN
    assert kv.check_observed(3, 7).ok()
