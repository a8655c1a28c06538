"""The life of each page by the event log, behind `kv_conservation.check_log`.

The page events between two snapshots are folded over the first; each must be legal where it stands, and the end must be
what the second snapshot shows in raw memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from blink_core.abi.dtypes import Array
from blink_core.abi.enums import LogKind
from hil_rigs.engine_memory import StateSnapshot
from verification.properties.kv_in_flight import check_in_flight
from verification.properties.kv_recount import PROPERTY, RESERVED, Recount, bad, recount, unfit
from verification.result import CheckResult, Verdict


class _Broken(Exception):
    """An entry that is not legal where it stands."""

    def __init__(self, clause: str, message: str) -> None:
        super().__init__(message)
        self.clause = clause


@dataclass
class _Life:
    """Where every page is: free, quarantined, in one table (owner), or cached with the requests that hold it.

    lru: cached pages without holders, least recently used first. tables: pages of each request that has some.
    context: tokens of each request whose KV is computed once its step in flight has ended. resulted: requests whose
    results were taken in since the last step began. replaced: pages whose twin has just taken their place in a table.
    """

    slots: int
    page_size: int
    free: set[int]
    quarantined: set[int]
    owner: dict[int, int]
    holders: dict[int, set[int]]
    parent: dict[int, int]
    lru: list[int]
    tables: dict[int, list[int]]
    context: dict[int, int]
    resulted: set[int] = field(default_factory=set)
    replaced: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, s: StateSnapshot, r: Recount) -> _Life:
        return cls(
            slots=s.config.slots,
            page_size=s.config.page_size,
            free=set(s.free_list.tolist()),
            quarantined=set(s.quarantine.tolist()),
            owner={p: q for q, members in r.owned.items() for p in members if p not in r.bucket_of},
            holders={page: {q for q, members in r.owned.items() if page in members} for page in r.bucket_of},
            parent={page: int(s.pages[page]["parent"]) for page in r.bucket_of},
            lru=list(r.lru),
            tables={q: list(members) for q, members in r.owned.items() if members},
            context={q: int(s.requests[q]["total"]) for q in r.owned},
        )

    def before(self, request: int, index: int) -> int:
        return self.tables[request][index - 1] if index else 0

    def need(self, ok: bool, clause: str, message: str) -> None:
        if not ok:
            raise _Broken(clause, message)

    # ---- one method for each kind of entry; a, b, c are those of the entry

    def alloc(self, request: int, page: int, index: int, _: int) -> None:
        self.need(
            page not in self.quarantined, "quarantine", f"page {page} was given to request {request} in quarantine"
        )
        self.need(page in self.free, "log", f"page {page} was given to request {request} while in use")
        table = self.tables.setdefault(request, [])
        self.need(index == len(table), "log", f"page {page} went to place {index} of a table of {len(table)} pages")
        self.free.discard(page)
        self.owner[page] = request
        table.append(page)

    def free_page(self, request: int, page: int, quarantined: int, _: int) -> None:
        self.need(
            self.owner.get(page) == request, "log", f"request {request} released page {page} that was not its own"
        )
        if self.replaced.get(page) == request:
            self.need(quarantined == 0, "log", f"page {page}, replaced by its twin, went into quarantine")
            del self.replaced[page]
        else:
            self._leave(request, page)
        del self.owner[page]
        (self.quarantined if quarantined else self.free).add(page)

    def _leave(self, request: int, page: int) -> None:
        table = self.tables.get(request, [])
        self.need(
            table[-1:] == [page], "log", f"request {request} released page {page}, which was not the last of {table}"
        )
        table.pop()
        if not table:
            del self.tables[request]

    def unquarantine(self, _: int, page: int, __: int, ___: int) -> None:
        self.need(page in self.quarantined, "log", f"page {page} left the quarantine without being in it")
        self.quarantined.discard(page)
        self.free.add(page)

    def share(self, request: int, page: int, index: int, refs: int) -> None:
        self.need(page in self.holders, "log", f"request {request} shares page {page}, which is not cached")
        self.need(request not in self.holders[page], "log", f"request {request} shares page {page} a second time")
        table = self.tables.setdefault(request, [])
        self.need(index <= len(table), "log", f"page {page} went to place {index} of a table of {len(table)} pages")
        before = self.before(request, index)
        self.need(
            self.parent[page] == before, "log", f"page {page} was shared behind page {before}, not {self.parent[page]}"
        )
        if index < len(table):
            own = table[index]
            self.need(self.owner.get(own) == request, "log", f"page {page} took the place of page {own}, no own one")
            self.replaced[own] = request
            table[index] = page
        else:
            table.append(page)
        if not self.holders[page]:
            self.lru.remove(page)
        self.holders[page].add(request)
        self._count(page, refs)

    def unshare(self, request: int, page: int, refs: int, _: int) -> None:
        held = request in self.holders.get(page, ())
        self.need(held, "log", f"request {request} let go of page {page}, which it did not share")
        self._leave(request, page)
        self.holders[page].discard(request)
        if not self.holders[page]:
            self.lru.append(page)
        self._count(page, refs)

    def _count(self, page: int, refs: int) -> None:
        found = len(self.holders[page])
        self.need(refs == found, "log", f"page {page} has {found} holders, the log counts {refs}")

    def publish(self, request: int, page: int, index: int, parent: int) -> None:
        self.need(self.owner.get(page) == request, "log", f"request {request} published page {page}, not its own")
        table = self.tables.get(request, [])
        self.need(table[index : index + 1] == [page], "log", f"page {page} was published as place {index} of {table}")
        before = self.before(request, index)
        ok = parent == before and (parent == 0 or parent in self.holders)
        self.need(ok, "log", f"page {page} was published behind page {parent}, in the table it follows {before}")
        computed = self.context.get(request, 0)
        self.need(
            request in self.resulted and (index + 1) * self.page_size <= computed,
            "publish",
            f"page {page} of request {request} was published without a result of a step that computed it whole "
            f"({computed} tokens, {'with' if request in self.resulted else 'no'} result)",
        )
        del self.owner[page]
        self.holders[page], self.parent[page] = {request}, parent

    def evict(self, _: int, page: int, __: int, ___: int) -> None:
        self.need(page in self.holders, "evict", f"page {page} was evicted, it is not cached")
        self.need(not self.holders[page], "evict", f"page {page} was evicted while {self.holders[page]} held it")
        leaf = page not in self.parent.values()
        self.need(leaf, "evict", f"page {page} was evicted, cached pages follow it")
        first = self.lru[0]
        self.need(first == page, "evict", f"page {page} was evicted, page {first} was used less recently")
        self.lru.remove(page)
        del self.holders[page], self.parent[page]
        self.free.add(page)

    def plan_row(self, request: int, _: int, context: int, __: int) -> None:
        self.context[request] = context
        self.resulted.discard(request)

    def step(self, *_: int) -> None:
        self.resulted.clear()

    def result(self, request: int, *_: int) -> None:
        self.resulted.add(request)

    def over(self, request: int, *_: int) -> None:
        left = self.tables.get(request)
        self.need(not left, "release", f"request {request} ended or gave way and keeps pages {left}")
        self.context.pop(request, None)

    def epoch(self, first: int, *_: int) -> None:
        for request in range(first, first + self.slots):
            self.over(request)

    def handlers(self) -> dict[int, Callable[[int, int, int, int], None]]:
        """By kind of entry; called with request, a, b and c."""
        return {
            LogKind.PAGE_ALLOC: self.alloc,
            LogKind.PAGE_FREE: self.free_page,
            LogKind.PAGE_UNQUARANTINE: self.unquarantine,
            LogKind.PAGE_SHARE: self.share,
            LogKind.PAGE_UNSHARE: self.unshare,
            LogKind.PAGE_PUBLISH: self.publish,
            LogKind.PAGE_EVICT: self.evict,
            LogKind.PLAN_ROW: self.plan_row,
            LogKind.STEP: self.step,
            LogKind.RESULT: self.result,
            LogKind.FINISH: self.over,
            LogKind.ERROR: self.over,
            LogKind.PREEMPT: self.over,
            LogKind.EPOCH: self.epoch,
        }


_OF_PAGES = {
    LogKind.PAGE_ALLOC,
    LogKind.PAGE_FREE,
    LogKind.PAGE_UNQUARANTINE,
    LogKind.PAGE_SHARE,
    LogKind.PAGE_UNSHARE,
    LogKind.PAGE_PUBLISH,
    LogKind.PAGE_EVICT,
}


def check_log(before: StateSnapshot, after: StateSnapshot) -> CheckResult:
    """Clauses log, quarantine, publish, evict and release of the log (level ALL) between two snapshots."""
    start = int(before.header["log_tail"])
    if after.log_lost > start:
        lost = after.log_lost - start
        return CheckResult(
            Verdict.UNKNOWN, PROPERTY, "log", f"{lost} event-log entries were overwritten", {"gap": lost}
        )
    counts = []
    for snapshot in (before, after):
        if (wrong := unfit(snapshot)) is not None:
            return wrong
        found = recount(snapshot)
        if not isinstance(found, Recount):
            return found
        counts.append(found)
    log = after.log[start - after.log_lost :]
    if (early := check_in_flight(log, before)) is not None:
        return early
    life, now = _Life.of(before, counts[0]), _Life.of(after, counts[1])
    if (wrong := _fold(life, log, after.config.pages)) is not None:
        return wrong
    return _compare(life, now) or CheckResult(
        Verdict.VALID, PROPERTY, "log", f"{len(log)} log entries agree with memory"
    )


def _fold(life: _Life, log: Array, pages: int) -> CheckResult | None:
    names = ("kind", "ring", "slot", "a", "b", "c", "step")
    handlers = life.handlers()
    for at, entry in enumerate(zip(*(log[name].tolist() for name in names), strict=True)):
        kind, ring, slot, a, b, c, step = entry
        if (handler := handlers.get(kind)) is None:
            continue
        if kind in _OF_PAGES and not RESERVED <= a < pages:
            return bad("log", f"{LogKind(kind).name} names page {a}, which is none of the pool's", step=step, entry=at)
        try:
            handler(ring * life.slots + slot, a, b, c)
        except _Broken as e:
            return bad(e.clause, str(e), step=step, entry=at)
    return None


def _compare(life: _Life, memory: _Life) -> CheckResult | None:
    """What the log leads to against what memory shows."""
    if life.replaced:
        return bad("log", "pages whose twin took their place were not released", pages=sorted(life.replaced))
    differing = [name for name in ("free", "quarantined", "owner", "tables") if not _same(life, memory, name)]
    if differing:
        both = {p for life_or in (life, memory) for p in life_or.owner}
        pages = sorted(p for p in both if life.owner.get(p) != memory.owner.get(p))
        what = ", ".join(differing)
        return bad("log", f"what the event log leads to differs from memory in: {what}", pages=pages)
    for name, meaning in (
        ("holders", "cached pages and their holders"),
        ("parent", "their order"),
        ("lru", "their age"),
    ):
        if not _same(life, memory, name):
            return bad("log", f"the prefix cache that the event log leads to differs from memory in {meaning}")
    return None


def _same(a: _Life, b: _Life, name: str) -> bool:
    return bool(getattr(a, name) == getattr(b, name))
