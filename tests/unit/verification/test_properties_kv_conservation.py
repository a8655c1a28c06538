"""The checker of KV conservation on hand-made snapshots and logs: good ones pass, each clause has bad ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from blink_core.abi.config import EngineConfig
from blink_core.abi.dtypes import DTYPES, LOG_ENTRY, REQUEST, Array
from blink_core.abi.enums import Admission, ErrorReason, FinishReason, LogKind, PageState, RequestState
from hil_rigs.engine_memory import StateSnapshot
from verification.properties import kv_conservation as kv
from verification.result import Verdict

pytestmark = pytest.mark.usefixtures("well_formed")
CONFIG = EngineConfig(
    vocab=64, rings=2, slots=4, sq_entries=16, cq_entries=16, arena_tokens=32, max_len=32, page_size=4, pages=10,
    max_rows=3,
)  # fmt: skip
BUSY, OTHER = 5, 1  # request index: ring 1 slot 1, ring 0 slot 1


def snapshot(
    owned: dict[int, list[int]] | None = None,
    quarantine: tuple[int, ...] = (),
    *,
    cached: dict[int, int] | None = None,
    lru: tuple[int, ...] = (),
    in_flight: int = 1,
    log: Array | None = None,
    first: int = 0,
) -> StateSnapshot:
    """A consistent state in which each request of `owned` has those pages, computed up to the last token but one.

    cached: parent of each cached page. lru: those without holders. All requests have the tokens 0, 1, 2 ...
    """
    owned, cached = owned or {}, cached or {}
    requests, pages = np.zeros(8, REQUEST), np.zeros(CONFIG.pages, DTYPES["Page"])
    tables = np.zeros((CONFIG.max_rows, CONFIG.max_pages), np.uint32)
    for name in ("owner", "bucket_next", "lru_prev", "lru_next"):
        pages[name] = -1
    pages["state"][:2] = PageState.RESERVED
    requests["row"] = -1
    most = 0
    for row, (request, members) in enumerate(owned.items()):
        q = requests[request]
        q["state"], q["generation"], q["row"], q["n_pages"] = RequestState.RUNNING, 3, row, len(members)
        q["computed"] = 4 * len(members) - 1
        q["total"] = q["computed"] + 1
        q["prompt_len"], q["max_tokens"] = 4, 9
        q["published"] = sum(page in cached for page in members)
        most += 3
        tables[row, : len(members)] = members
        for page in members:
            if page not in cached:
                pages["owner"][page], pages["generation"][page], pages["state"][page] = request, 3, PageState.OWNED
            pages["refs"][page] += 1
    page_tokens, buckets = np.zeros((CONFIG.pages, 4), np.int32), np.full(CONFIG.pages, -1, np.int32)
    for page, parent in cached.items():
        depth, up = 0, parent
        while up:
            depth, up = depth + 1, cached[up]
        pages["state"][page], pages["parent"][page] = PageState.CACHED, parent
        pages["hash"][page] = 70 + depth  # the same for siblings, so that buckets have chains
        pages["children"][parent] += parent != 0
        page_tokens[page] = np.arange(4 * depth, 4 * depth + 4)
        bucket = (70 + depth) % CONFIG.pages
        pages["bucket_next"][page], buckets[bucket] = buckets[bucket], page
    for before, after in pairwise(lru):
        pages["lru_next"][before], pages["lru_prev"][after] = after, before
    pages["state"][list(quarantine)] = PageState.QUARANTINED
    taken = {page for members in owned.values() for page in members} | set(quarantine) | set(cached)
    free = np.array([p for p in range(2, CONFIG.pages) if p not in taken], np.uint32)
    entries = np.zeros(0, LOG_ENTRY) if log is None else log
    header = np.zeros(1, DTYPES["StateHeader"])[0]
    header["free_pages"], header["quarantined"], header["running"] = len(free), len(quarantine), len(owned)
    header["in_flight"], header["live"], header["log_tail"] = in_flight, len(owned), first + len(entries)
    header["lru_head"], header["lru_tail"] = (lru[0], lru[-1]) if lru else (-1, -1)
    header["idle_cached"], header["committed_pages"], header["reserved_for"] = len(lru), most, -1
    return StateSnapshot(
        config=CONFIG, header=header, rings=np.zeros(2, DTYPES["RingState"]), requests=requests,
        running=np.array(list(owned), np.uint32), block_tables=tables, pages=pages, free_list=free,
        quarantine=np.array(quarantine, np.uint32), log=entries, log_lost=first, log_from=first,
        buckets=buckets, page_tokens=page_tokens,
        running_tokens=np.tile(np.arange(CONFIG.max_len, dtype=np.int32), (len(owned), 1)),
    )  # fmt: skip


def tree() -> StateSnapshot:
    """Two requests share pages 2 and 3; 5 and then 4 follow 3, 6 follows 2, and nobody holds these."""
    s = snapshot({BUSY: [2, 3, 8], OTHER: [2, 3, 7]}, cached={2: 0, 3: 2, 4: 3, 5: 4, 6: 2}, lru=(5, 6, 4))
    s.page_tokens[6] = 9
    return s


@pytest.mark.parametrize(
    "s",
    [
        snapshot(in_flight=0),
        snapshot({BUSY: [2, 3], OTHER: [7]}),
        snapshot({BUSY: [2]}, (4, 5)),
        snapshot({BUSY: [2, 3]}, cached={2: 0}),
        snapshot(cached={2: 0, 3: 2}, lru=(3, 2), in_flight=0),
        tree(),
    ],
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


def over_reserved() -> StateSnapshot:
    s = snapshot({BUSY: [2], OTHER: [3], 0: [4]}, in_flight=1)
    return replace(s, config=replace(CONFIG, admission=Admission.RESERVE))


def unlinked(s: StateSnapshot, page: int) -> StateSnapshot:
    """Takes a page out of its hash bucket."""
    bucket = int(s.pages[page]["hash"]) % CONFIG.pages
    following = int(s.pages[page]["bucket_next"])
    if s.buckets[bucket] == page:
        s.buckets[bucket] = following
    else:
        s.pages["bucket_next"][s.pages["bucket_next"] == page] = following
    return s


def foreign_tokens(s: StateSnapshot, page: int) -> StateSnapshot:
    s.page_tokens[page, 3] = 60
    return s


def behind_own() -> StateSnapshot:
    s = snapshot({BUSY: [8, 2, 9]}, cached={2: 0})
    s.page_tokens[2] = [4, 5, 6, 7]
    return s


def reparented() -> StateSnapshot:
    """Page 3 lies behind page 2 in a table, and is cached as a first page."""
    s = snapshot({BUSY: [2, 3, 8]}, cached={2: 0, 3: 0})
    s.page_tokens[3] = [4, 5, 6, 7]
    return s


def twins() -> StateSnapshot:
    return foreign_tokens(snapshot(cached={2: 0, 3: 0}, lru=(2, 3), in_flight=0), 9)


def held_by_the_dead() -> StateSnapshot:
    s = snapshot({BUSY: [2, 3]}, cached={2: 0}, in_flight=0)
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
    "refs": ("refs", lambda: _set(base(), "pages", 2, refs=2)),
    "page-twice-in-a-table": ("one-state", lambda: table(base(), 2)),
    "state-of-a-private-page": ("one-state", lambda: _set(base(), "pages", 2, state=PageState.CACHED)),
    "set-aside": ("coverage", lambda: _set(base(), "header", None, committed_pages=5)),
    "set-aside-too-many": ("coverage", lambda: over_reserved()),
    "tokens-beyond": ("coverage", lambda: _set(base(), "requests", BUSY, total=33)),
    "cached-refs": ("refs", lambda: _set(tree(), "pages", 2, refs=1)),
    "cached-refs-zero": ("refs", lambda: _set(tree(), "pages", 5, refs=1)),
    "cached-owner": ("owner", lambda: _set(tree(), "pages", 2, owner=BUSY)),
    "last-cached-owner": ("owner", lambda: _set(tree(), "pages", 6, owner=BUSY)),
    "refs-beside-cached": ("refs", lambda: _set(tree(), "pages", 8, refs=2)),
    "refs-behind-cached": ("refs", lambda: _set(tree(), "pages", 7, refs=2)),
    "refs-of-a-free-page": ("refs", lambda: _set(tree(), "pages", 9, refs=1)),
    "cached-state": ("one-state", lambda: _set(tree(), "pages", 2, state=PageState.OWNED)),
    "cached-and-free": ("one-state", lambda: listed(tree(), 5)),
    "cached-and-lost": ("one-state", lambda: unlinked(tree(), 5)),
    "shared-uncached": ("one-state", lambda: unlinked(tree(), 2)),
    "other-tokens": ("hit", lambda: foreign_tokens(tree(), 3)),
    "hit-behind-own": ("hit", lambda: behind_own()),
    "hit-out-of-place": ("hit", lambda: _set(reparented(), "header", None)),
    "published-count": ("hit", lambda: _set(tree(), "requests", BUSY, published=1)),
    "published-uncomputed": ("hit", lambda: _set(tree(), "requests", BUSY, computed=7)),
    "found-whole-prompt": ("hit", lambda: _set(tree(), "requests", BUSY, cached=4)),
    "found-part-of-a-page": ("hit", lambda: _set(tree(), "requests", BUSY, cached=3)),
    "orphan": ("cache", lambda: _set(tree(), "pages", 6, parent=9)),
    "children": ("cache", lambda: _set(tree(), "pages", 2, children=1)),
    "twins": ("cache", lambda: twins()),
    "bucket": ("cache", lambda: _set(tree(), "pages", 4, hash=71)),
    "bucket-loop": ("cache", lambda: _set(tree(), "pages", 5, bucket_next=5)),
    "bucket-beyond": ("cache", lambda: _set(tree(), "pages", 5, bucket_next=1000)),
    "lru-missing": ("lru", lambda: _set(tree(), "pages", 6, lru_next=-1)),
    "lru-loop": ("lru", lambda: _set(tree(), "pages", 4, lru_next=5)),
    "lru-held": ("lru", lambda: snapshot({BUSY: [2, 3]}, cached={2: 0}, lru=(2,))),
    "lru-backwards": ("lru", lambda: _set(tree(), "pages", 4, lru_prev=5)),
    "lru-count": ("lru", lambda: _set(tree(), "header", None, idle_cached=2)),
    "lru-next-beyond": ("cache", lambda: _set(tree(), "pages", 5, lru_next=1000)),
    "lru-prev-beyond": ("cache", lambda: _set(tree(), "pages", 5, lru_prev=1000)),
    "lru-tail-beyond": ("cache", lambda: _set(tree(), "header", None, lru_tail=99)),
    "lru-parent-first": ("lru", lambda: snapshot(cached={2: 0, 3: 2}, lru=(2, 3), in_flight=0)),
    "lru-beyond": ("cache", lambda: _set(tree(), "header", None, lru_head=99)),
    "nobody-lives-cached": ("release", lambda: held_by_the_dead()),
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


# Numbers in what is said: what was recounted, and what memory says.
TOLD = {
    "refs": [2, 5, 2, 1], "cached-refs": [2, 2, 1], "cached-refs-zero": [5, 0, 1], "refs-of-a-free-page": [9, 1, 0],
    "children": [2, 2, 1], "lru-count": [3, 2], "orphan": [6, 9], "bucket": [4, 2], "lru-parent-first": [2, 3],
    "twins": [3, 2, 0], "published-count": [5, 2, 1], "published-uncomputed": [5, 7, 2],
    "hit-out-of-place": [3, 1, 5, 2, 0],
    "found-part-of-a-page": [5, 3, 4], "set-aside": [6, 5], "set-aside-too-many": [9, 8], "tokens-beyond": [5, 33, 32],
    "too-few-pages": [5, 2, 9, 10, 3, 3], "too-many-pages": [5, 2, 3, 4, 1, 1], "more-than-a-table": [5, 900, 8],
    "owner": [2, 5, 3, 1, 3], "no-row": [5, -1, 3], "nobody-lives": [7, 8], "header-counts": [4_000_000_000, 10],
}  # fmt: skip

# The link that is said to lead out of the pool.
BEYOND = {
    "bucket-beyond": "bucket_next holds", "lru-beyond": "lru_head holds", "lru-tail-beyond": "lru_tail holds",
    "lru-next-beyond": "lru_next holds", "lru-prev-beyond": "lru_prev holds",
}  # fmt: skip
# What is shown beside it; nothing for the others.
SHOWN: dict[str, dict[str, Any]] = {
    "leaked": {"pages": {"9": []}}, "free-and-owned": {"pages": {"2": ["free", "request 5"]}},
    "twice-free": {"pages": {"5": ["free", "free"]}},
    "two-owners": {"pages": {"3": [], "7": ["request 5", "request 1"]}},
    "reserved-owned": {"pages": {"1": ["reserved", "request 5"], "3": []}},
    "page-twice-in-a-table": {"pages": [2, 2]}, "cached-and-free": {"pages": {"5": ["free", "cached"]}},
    "cached-and-lost": {"pages": {"5": []}}, "shared-uncached": {"pages": {"2": ["request 5", "request 1"]}},
    "other-tokens": {"own": [4, 5, 6, 7], "page": [4, 5, 6, 60]}, "hit-behind-own": {"pages": [8, 2, 9]},
    "bucket-loop": {"page": 5}, "lru-missing": {"pages": [4]}, "lru-loop": {"pages": []}, "lru-held": {"pages": [2]},
    "lru-backwards": {"pages": [5, 6, 4]},
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_snapshots_are_invalid(name: str) -> None:
    """Catches: a clause that cannot fail, an exception where memory holds garbage, a count told wrong, and a witness
    that is lost or of other pages."""
    clause, build = BAD[name]
    result = kv.check_snapshot(build())
    assert (result.clause, result.verdict) == (clause, Verdict.INVALID), result
    assert result.witness == SHOWN.get(name, {})
    assert BEYOND.get(name, "") in result.message
    assert name not in TOLD or [int(n) for n in re.findall(r"-?\d+", result.message)] == TOLD[name], result


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

RESULT = (LogKind.RESULT, 9, 0, 0)
PREEMPTED, LOST = (LogKind.PREEMPT, 0, 4, 1), (LogKind.ERROR, ErrorReason.LEASE_LOST, 0, 1)
LATE = (LogKind.ERROR, ErrorReason.DEADLINE, 0, 1)
EVICT2, EVICT3 = (LogKind.PAGE_EVICT, 2, 0, 0), (LogKind.PAGE_EVICT, 3, 0, 0)
PUBLISH2, UNSHARE2 = (LogKind.PAGE_PUBLISH, 2, 0, 0), (LogKind.PAGE_UNSHARE, 2, 0, 0)
SHARE2, SHARE3 = (LogKind.PAGE_SHARE, 2, 0, 1), (LogKind.PAGE_SHARE, 3, 1, 1)
ALLOC8, ALLOC9 = (LogKind.PAGE_ALLOC, 8, 2, 0), (LogKind.PAGE_ALLOC, 9, 1, 0)
FREE8, FREE9 = (LogKind.PAGE_FREE, 8, 0, 0), (LogKind.PAGE_FREE, 9, 0, 0)
EPOCH = (LogKind.EPOCH, 2, 1, 0)


def idle_pair() -> StateSnapshot:
    """Nobody lives; page 3 follows page 2 in the cache."""
    return snapshot(cached={2: 0, 3: 2}, lru=(3, 2), in_flight=0)


PUBLISHED = [ALLOC2, PLAN, STEP, RESULT, PUBLISH2, TOKEN]
HIT = [SHARE2, SHARE3, ALLOC8]

GOOD_LOGS: dict[str, tuple[list[Entry], StateSnapshot]] = {
    "deadline-in-flight": ([ALLOC2, PLAN, STEP, HELD2, LATE, OUT2], IDLE),
    "lease-lost-in-flight": ([ALLOC2, PLAN, STEP, HELD2, LOST, OUT2], IDLE),
    "published": ([*PUBLISHED, ALLOC9], snapshot({BUSY: [2, 9]}, cached={2: 0})),
    "published-and-over": (
        [*PUBLISHED, UNSHARE2, LENGTH],
        snapshot(cached={2: 0}, lru=(2,), in_flight=0),
    ),
    "cancelled-with-a-cached-page": (
        [*PUBLISHED, ALLOC9, PLAN, STEP, CANCEL, (LogKind.PAGE_FREE, 9, 1, 0), UNSHARE2, CANCELLED],
        snapshot(quarantine=(9,), cached={2: 0}, lru=(2,)),
    ),
    "dropped-epoch": ([*PUBLISHED, UNSHARE2, EPOCH], snapshot(cached={2: 0}, lru=(2,), in_flight=0)),
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


def after(entries: Sequence[Entry], state: StateSnapshot, first: int = 0) -> StateSnapshot:
    made = log(*entries)
    header = state.header.copy()
    header["log_tail"] = first + len(made)
    return replace(state, header=header, log=made, log_lost=first)


@pytest.mark.parametrize("name", GOOD_LOGS)
def test_good_logs_pass(name: str) -> None:
    """Catches: a fold that rejects what the scheduler may do."""
    entries, state = GOOD_LOGS[name]
    result = kv.check_log(snapshot(in_flight=0), after(entries, state))
    assert result.ok(), result


CACHED2 = snapshot(cached={2: 0}, lru=(2,), in_flight=0)
BAD_LOGS: dict[str, tuple[str, list[Entry], StateSnapshot]] = {
    "deadline-free-in-flight": ("quarantine", [ALLOC2, PLAN, STEP, FREE2, LATE, RESULT], IDLE),
    "lease-free-in-flight": ("quarantine", [ALLOC2, PLAN, STEP, FREE2, LOST, RESULT], IDLE),
    "evict-in-flight": ("quarantine", [ALLOC2, PLAN, STEP, EVICT2], IDLE),
    "share-in-flight": ("quarantine", [ALLOC2, PLAN, STEP, SHARE2], IDLE),
    "published-unplanned": ("publish", [ALLOC2, RESULT, PUBLISH2, UNSHARE2, LENGTH], CACHED2),
    "published-without-result": ("publish", [ALLOC2, PLAN, PREFILL, PUBLISH2, UNSHARE2, LENGTH], CACHED2),
    "published-half": ("publish", [ALLOC2, (LogKind.PLAN_ROW, 3, 3, 0), *PUBLISHED[2:], UNSHARE2, LENGTH], CACHED2),
    "published-before-the-next-result": ("publish", [ALLOC2, PLAN, STEP, RESULT, STEP, PUBLISH2], CACHED2),
    "published-foreign": ("log", [PLAN, STEP, RESULT, PUBLISH2], CACHED2),
    "published-elsewhere": ("log", [*PUBLISHED[:4], (LogKind.PAGE_PUBLISH, 2, 1, 0)], CACHED2),
    "published-behind-a-stranger": ("log", [*PUBLISHED[:4], (LogKind.PAGE_PUBLISH, 2, 0, 7)], CACHED2),
    "shared-uncached": ("log", [SHARE2], snapshot({BUSY: [2]})),
    "unshared-unheld": ("log", [UNSHARE2], IDLE),
    "evicted-uncached": ("evict", [EVICT2], IDLE),
    "evicted-while-held": ("evict", [*PUBLISHED, EVICT2], IDLE),
    "kept-after-the-end": ("release", [ALLOC2, LENGTH], snapshot({BUSY: [2]})),
    "kept-after-an-error": ("release", [ALLOC2, FAILED], snapshot({BUSY: [2]})),
    "kept-after-giving-way": ("release", [ALLOC2, PREEMPTED], snapshot({BUSY: [2]})),
    "kept-after-an-epoch": ("release", [ALLOC2, EPOCH], snapshot({BUSY: [2]})),
    "released-not-last": ("log", [ALLOC2, ALLOC3, FREE2], snapshot({BUSY: [3]})),
    "place-in-table": ("log", [ALLOC3], snapshot({BUSY: [3]})),
    "cache-differs": ("log", [*PUBLISHED, UNSHARE2, LENGTH], IDLE),
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


# The illegal entry is the last one but in these; None: only the end shows it.
AT: dict[str, int | None] = {
    "deadline-free-in-flight": 3, "lease-free-in-flight": 3, "published-unplanned": 2, "published-without-result": 3,
    "published-half": 4, "free-in-flight": 4, "planned-in-flight": 2,
    **dict.fromkeys(("held-over-a-step", "cache-differs", "memory-has-more", "memory-has-less", "other-owner")),
    **dict.fromkeys(("quarantine-differs", "garbage-running")),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_LOGS)
def test_bad_logs_are_invalid(name: str) -> None:
    """Catches: reuse of a page that the step in flight may write; a log that contradicts memory; an illegal entry that
    goes unnoticed until the end, or another one named; an exception."""
    clause, entries, state = BAD_LOGS[name]
    result = kv.check_log(snapshot(in_flight=0), after(entries, state))
    assert (result.clause, result.verdict) == (clause, Verdict.INVALID), result
    assert result.witness.get("entry") == AT.get(name, len(entries) - 1)


def fold(entries: Sequence[Entry], state: StateSnapshot, start: StateSnapshot) -> str:
    """Clause and verdict of entries that follow `start`."""
    result = kv.check_log(start, after(entries, state))
    return f"{result.clause} {result.verdict}"


def test_life_of_a_cached_page() -> None:
    """Catches: hits, twins and evictions that are not followed, or are followed wrongly, through the log."""
    held = {BUSY: [2, 3, 8]}
    assert fold(HIT, snapshot(held, cached={2: 0, 3: 2}), idle_pair()) == "log valid"
    assert fold([EVICT3], snapshot(cached={2: 0}, lru=(2,), in_flight=0), idle_pair()) == "log valid"
    assert fold([EVICT3, EVICT2], IDLE, idle_pair()) == "log valid"
    back = [*HIT, FREE8, (LogKind.PAGE_UNSHARE, 3, 0, 0), UNSHARE2, PREEMPTED]
    assert fold(back, idle_pair(), idle_pair()) == "log valid"
    twin = [(LogKind.PAGE_ALLOC, 9, 0, 0), PLAN, STEP, RESULT, SHARE2, FREE9, (*ALLOC8[:2], 1, 0)]
    one = snapshot({BUSY: [2, 8]}, cached={2: 0})
    assert fold(twin, one, CACHED2) == "log valid"
    assert fold([*twin[:5], *twin[6:]], one, CACHED2) == "log invalid"  # the own copy is never released
    quarantined = [*twin[:5], (LogKind.PAGE_FREE, 9, 1, 0)]
    assert fold(quarantined, snapshot({BUSY: [2]}, (9,), cached={2: 0}), CACHED2) == "log invalid"


@pytest.mark.parametrize(
    ("clause", "entries"),
    [
        ("evict", [EVICT2]),  # not the least recently used; page 3 follows it
        ("evict", [SHARE2, EVICT2]),
        ("evict", [SHARE2, SHARE3, EVICT3]),
        ("log", [SHARE3]),  # beyond the end of the table
        ("log", [(*SHARE3[:2], 0, 1)]),  # not behind page 2
        ("log", [(*SHARE2[:2], 0, 2)]),  # counts two holders
        ("log", [SHARE2, (*SHARE2[:2], 1, 2)]),
        ("log", [SHARE2, SHARE3, UNSHARE2]),  # page 3 follows it in the table
        ("log", [(*SHARE2[:2], 5, 1)]),
        ("log", [*HIT, ALLOC8]),
        ("log", HIT[:2]),  # memory shows page 8 as well
        ("log", [ALLOC2]),  # cached, not free
    ],
)
def test_bad_life_of_a_cached_page(clause: str, entries: list[Entry]) -> None:
    """Catches: an eviction of a page in use, or with followers; a hit out of place; counts that drift."""
    end = snapshot({BUSY: [2, 3, 8]}, cached={2: 0, 3: 2})
    assert fold(entries, end, idle_pair()) == f"{clause} invalid"


def test_memory_disagrees_about_the_cache() -> None:
    """Catches: holders, parents or ages of cached pages that are not compared with memory at the end."""
    fresh = snapshot(cached={2: 0, 3: 0}, lru=(3, 2), in_flight=0)
    fresh.page_tokens[3] = 50
    older = snapshot(cached={2: 0, 3: 0}, lru=(2, 3), in_flight=0)
    older.page_tokens[3] = 50
    for start, end in ((idle_pair(), fresh), (older, fresh), (snapshot({BUSY: [2, 9]}, cached={2: 0}), IDLE)):
        assert kv.check_snapshot(end).ok()
        assert fold([], end, start) == "log invalid"


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
