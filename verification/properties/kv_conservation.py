"""KV conservation, recounted from raw memory at a step boundary (design sections 5 and 9).

Clauses:
  one-state     every page is free, quarantined, reserved or in exactly one block table, and its metadata says the same
  owner         a page in a block table names that request and generation as its only owner
  coverage      a running request owns exactly the pages that its computed and planned tokens need
  quarantine    pages are quarantined only while a step runs; by the log, a page released while a step runs is
                quarantined, and is not given away before that step has ended
  log           ownership folded from the event log between two snapshots equals the memory (the log is testimony only)
  release       with no live request, every page is free
"""

from __future__ import annotations

from typing import Any

from blink_core.abi.dtypes import Array
from blink_core.abi.enums import FinishReason, LogKind, PageState, RequestState
from hil_rigs.engine_memory import StateSnapshot
from verification.history import enum_name
from verification.result import CheckResult, Measurement, Verdict

PROPERTY = "kv-conservation"
RESERVED = 2


def _bad(clause: str, message: str, **witness: Any) -> CheckResult:
    return CheckResult(Verdict.INVALID, PROPERTY, clause, message, witness)


def _unfit(s: StateSnapshot) -> CheckResult | None:
    """Indices and counts that point outside their tables: nothing can be recounted from them."""
    k = s.config
    for name, found, most in (
        ("running", len(s.running), k.max_rows),
        ("free_pages", len(s.free_list), k.pages),
        ("quarantined", len(s.quarantine), k.pages),
    ):
        if int(s.header[name]) > most or found != int(s.header[name]):
            return _bad("one-state", f"header counts {int(s.header[name])} {name}, at most {most} can be")
    for request in s.running.tolist():
        if request >= len(s.requests):
            return _bad("owner", f"the running list names request {request}, there are {len(s.requests)}")
        q = s.requests[request]
        if not 0 <= int(q["row"]) < k.max_rows:
            return _bad("owner", f"request {request} runs in block-table row {int(q['row'])} of {k.max_rows}")
        if int(q["n_pages"]) > k.max_pages:
            return _bad("coverage", f"request {request} counts {int(q['n_pages'])} pages, a table has {k.max_pages}")
    if len(set(s.running.tolist())) != len(s.running):
        return _bad("owner", f"a request is named twice among the {len(s.running)} running ones")
    return None


def tables(s: StateSnapshot) -> dict[int, list[int]]:
    """Pages of each running request, from the block tables. IndexError for a snapshot that `check_snapshot` rejects."""
    result: dict[int, list[int]] = {}
    for request in s.running.tolist():
        row, count = int(s.requests[request]["row"]), int(s.requests[request]["n_pages"])
        result[request] = s.block_tables[row, :count].tolist()
    return result


def check_snapshot(s: StateSnapshot) -> CheckResult:
    """Clauses one-state, owner, coverage, quarantine and release of one snapshot."""
    if (unfit := _unfit(s)) is not None:
        return unfit
    owned = tables(s)
    pages = s.config.pages
    claims: dict[int, list[str]] = {page: [] for page in range(pages)}
    lists = {"free": s.free_list.tolist(), "quarantined": s.quarantine.tolist(), "reserved": list(range(RESERVED))}
    for name, members in lists.items():
        for page in members:
            if page not in claims:
                return _bad("one-state", f"{name} list holds page {page}, the pool has {pages}")
            claims[page].append(name)
    for request, members in owned.items():
        for page in members:
            if page not in claims:
                return _bad("one-state", f"block table of request {request} holds page {page}, the pool has {pages}")
            claims[page].append(f"request {request}")
    wrong = {page: found for page, found in claims.items() if len(found) != 1}
    if wrong:
        page, found = next(iter(wrong.items()))
        what = "belongs to nobody: it is lost" if not found else "has several owners: " + ", ".join(found)
        return _bad(
            "one-state", f"page {page} {what} ({len(wrong)} such pages)", pages={str(k): v for k, v in wrong.items()}
        )
    return (
        _check_metadata(s, claims)
        or _check_running(s, owned)
        or CheckResult(
            Verdict.VALID,
            PROPERTY,
            "one-state",
            f"{pages} pages, {len(s.free_list)} free, {sum(map(len, owned.values()))} owned",
            {},
            {"pages": Measurement(pages, "pages"), "running": Measurement(len(owned), "requests")},
        )
    )


def _check_metadata(s: StateSnapshot, claims: dict[int, list[str]]) -> CheckResult | None:
    states = {"free": PageState.FREE, "quarantined": PageState.QUARANTINED, "reserved": PageState.RESERVED}
    for page, (claim,) in claims.items():
        meta = s.pages[page]
        state, found = states.get(claim, PageState.OWNED), int(meta["state"])
        if found != state:
            return _bad("one-state", f"page {page} is {claim}, its metadata says {enum_name(PageState, found)}")
        refs = 1 if state is PageState.OWNED else 0
        if int(meta["refs"]) != refs:
            return _bad("owner", f"page {page} is {claim} with {int(meta['refs'])} references, expected {refs}")
        if state is PageState.OWNED:
            request = int(claim.removeprefix("request "))
            generation = int(s.requests[request]["generation"])
            if (int(meta["owner"]), int(meta["generation"])) != (request, generation):
                return _bad(
                    "owner",
                    f"page {page} is in the block table of request {request} generation {generation}, its metadata "
                    f"names request {int(meta['owner'])} generation {int(meta['generation'])}",
                )
    return None


def _check_running(s: StateSnapshot, owned: dict[int, list[int]]) -> CheckResult | None:
    for request, members in owned.items():
        q = s.requests[request]
        if (state := int(q["state"])) != RequestState.RUNNING:
            return _bad("owner", f"request {request} runs in state {enum_name(RequestState, state)}")
        least = -(-int(q["computed"]) // s.config.page_size)
        most = -(-int(q["total"]) // s.config.page_size)
        if not least <= len(members) <= most:
            return _bad(
                "coverage",
                f"request {request} owns {len(members)} pages for {int(q['computed'])} computed of {int(q['total'])} "
                f"known tokens: expected {least} to {most}",
            )
    idle = s.requests[(s.requests["state"] != RequestState.RUNNING) & (s.requests["n_pages"] != 0)]
    if len(idle):
        return _bad("release", f"{len(idle)} requests that do not run count pages as theirs")
    if len(s.quarantine) and not int(s.header["in_flight"]):
        return _bad("quarantine", f"{len(s.quarantine)} pages are quarantined and no step runs")
    if int(s.header["live"]) == 0 and len(s.free_list) != s.config.pages - RESERVED:
        return _bad("release", f"no request lives, {len(s.free_list)} of {s.config.pages - RESERVED} pages are free")
    return None


def check_observed(running: int, allocations: int) -> CheckResult:
    """Whether a run showed anything: boundaries with running requests, and pages given out. Unknown if it did not."""
    seen = f"{running} observed boundaries had running requests, {allocations} pages were given out"
    verdict = Verdict.VALID if running and allocations else Verdict.UNKNOWN
    return CheckResult(verdict, PROPERTY, "one-state", seen, {}, {"busy_boundaries": Measurement(running, "snapshots")})


def check_log(before: StateSnapshot, after: StateSnapshot) -> CheckResult:
    """Clauses log and quarantine: fold the page events between two snapshots over the ownership of the first."""
    start = int(before.header["log_tail"])
    if after.log_lost > start:
        return CheckResult(
            Verdict.UNKNOWN, PROPERTY, "log", f"{after.log_lost - start} event-log entries were overwritten"
        )
    for snapshot in (before, after):
        if (unfit := _unfit(snapshot)) is not None:
            return unfit
    log = after.log[start - after.log_lost :]
    if (early := _check_in_flight(log, before)) is not None:
        return early
    owner = {page: request for request, members in tables(before).items() for page in members}
    quarantined = set(before.quarantine.tolist())
    for e in log:
        kind, page = int(e["kind"]), int(e["a"])
        request = int(e["ring"]) * after.config.slots + int(e["slot"])
        if kind == LogKind.PAGE_ALLOC:
            if page in quarantined:
                return _bad(
                    "quarantine", f"page {page} was given to request {request} in quarantine", step=int(e["step"])
                )
            if page in owner:
                return _bad("log", f"page {page} was given to request {request} while in use", step=int(e["step"]))
            owner[page] = request
        elif kind == LogKind.PAGE_FREE:
            if owner.pop(page, None) != request:
                return _bad("log", f"request {request} released page {page} that was not its own", step=int(e["step"]))
            if e["b"]:
                quarantined.add(page)
        elif kind == LogKind.PAGE_UNQUARANTINE:
            if page not in quarantined:
                return _bad("log", f"page {page} left the quarantine without being in it", step=int(e["step"]))
            quarantined.discard(page)
    actual = {page: request for request, members in tables(after).items() for page in members}
    if owner != actual or quarantined != set(after.quarantine.tolist()):
        differing = sorted(p for p in owner.keys() | actual.keys() if owner.get(p) != actual.get(p))
        return _bad("log", "ownership folded from the event log differs from memory", pages=differing)
    return CheckResult(Verdict.VALID, PROPERTY, "log", f"{len(log)} log entries agree with memory")


# Entries that only the commit of a step writes, or what follows it.
_AFTER_COMMIT = (LogKind.PAGE_UNQUARANTINE, LogKind.TOKEN, LogKind.ERROR)
_OF_PLANNING = (LogKind.PAGE_ALLOC, LogKind.ADMIT, LogKind.PREEMPT, LogKind.PLAN_ROW)


def _check_in_flight(log: Array, before: StateSnapshot) -> CheckResult | None:
    """Clause quarantine in the log: what happens from a STEP entry until the commit of that step.

    The commit has no entry of its own. Of a step that samples it always shows: in a token, an error, or, when all its
    rows were cancelled meanwhile, in their pages leaving the quarantine. A step that samples nothing may end without a
    trace, so nothing is claimed of it.
    """
    last = before.log[-1] if len(before.log) else None
    in_flight = (
        last is not None
        and int(before.header["in_flight"]) != 0
        and int(last["kind"]) == LogKind.STEP
        and int(last["c"]) > 0
    )
    held: set[int] = set(before.quarantine.tolist())
    for i, e in enumerate(log):
        kind = int(e["kind"])
        if kind == LogKind.STEP:
            in_flight = int(e["c"]) > 0
        elif kind in _AFTER_COMMIT or (kind == LogKind.FINISH and int(e["a"]) != FinishReason.CANCELLED):
            in_flight = False
        elif in_flight and kind == LogKind.PAGE_FREE and not e["b"]:
            if _closing(log, i) == LogKind.ERROR:  # a failed step: its rows end in the commit
                in_flight = False
                continue
            return _bad(
                "quarantine",
                f"page {int(e['a'])} was released as free while step {int(e['step'])}, which may still write it, ran",
                step=int(e["step"]),
                entry=i,
            )
        elif in_flight and kind in _OF_PLANNING:
            return _bad(
                "quarantine",
                f"{LogKind(kind).name} was logged while step {int(e['step'])} ran: the next was planned before its end",
                step=int(e["step"]),
                entry=i,
            )
        if kind == LogKind.PAGE_FREE and e["b"]:
            held.add(int(e["a"]))
        elif kind == LogKind.PAGE_UNQUARANTINE:
            held.discard(int(e["a"]))
        elif kind == LogKind.STEP and held:
            return _bad("quarantine", f"{len(held)} pages were still quarantined when the next step began")
    return None


def _closing(log: Array, at: int) -> int:
    """Kind of the first entry from `at` on that releases no page: it says why the pages before it were released."""
    kinds = log["kind"][at:]
    others = kinds[kinds != LogKind.PAGE_FREE]
    return int(others[0]) if len(others) else -1
