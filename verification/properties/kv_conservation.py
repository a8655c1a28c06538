"""KV conservation, recounted from raw memory at a step boundary (design sections 5 and 9).

Clauses:
  one-state     every page is free, quarantined, reserved or in exactly one block table, and its metadata says the same
  owner         a page in a block table names that request and generation as its only owner
  coverage      a running request owns exactly the pages that its computed and planned tokens need
  quarantine    pages are quarantined only while a step runs
  log           ownership folded from the event log between two snapshots equals the memory (the log is testimony only)
  release       with no live request, every page is free
"""

from __future__ import annotations

from typing import Any

from blink_core.abi.enums import LogKind, PageState, RequestState
from hil_rigs.engine_memory import StateSnapshot
from verification.result import CheckResult, Measurement, Verdict

PROPERTY = "kv-conservation"
RESERVED = 2


def _bad(clause: str, message: str, **witness: Any) -> CheckResult:
    return CheckResult(Verdict.INVALID, PROPERTY, clause, message, witness)


def tables(s: StateSnapshot) -> dict[int, list[int]]:
    """Pages of each running request, from the block tables."""
    result: dict[int, list[int]] = {}
    for request in s.running.tolist():
        row, count = int(s.requests[request]["row"]), int(s.requests[request]["n_pages"])
        result[request] = s.block_tables[row, :count].tolist()
    return result


def check_snapshot(s: StateSnapshot) -> CheckResult:
    """Clauses one-state, owner, coverage, quarantine and release of one snapshot."""
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
        state = states.get(claim, PageState.OWNED)
        if int(meta["state"]) != state:
            return _bad("one-state", f"page {page} is {claim}, its metadata says {PageState(int(meta['state'])).name}")
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
    if len(owned) != int(s.header["running"]):
        return _bad("owner", f"{int(s.header['running'])} requests run, the running list names {len(owned)} different")
    for request, members in owned.items():
        q = s.requests[request]
        if int(q["state"]) != RequestState.RUNNING:
            return _bad("owner", f"request {request} runs in state {RequestState(int(q['state'])).name}")
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


def check_log(before: StateSnapshot, after: StateSnapshot) -> CheckResult:
    """Clause log: fold the page events between two snapshots over the ownership of the first."""
    start = int(before.header["log_tail"])
    if after.log_lost > start:
        return CheckResult(
            Verdict.UNKNOWN, PROPERTY, "log", f"{after.log_lost - start} event-log entries were overwritten"
        )
    owner = {page: request for request, members in tables(before).items() for page in members}
    quarantined = set(before.quarantine.tolist())
    for e in after.log[start - after.log_lost :]:
        kind, page = int(e["kind"]), int(e["a"])
        request = int(e["ring"]) * after.config.slots + int(e["slot"])
        if kind == LogKind.PAGE_ALLOC:
            if page in owner or page in quarantined:
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
    return CheckResult(Verdict.VALID, PROPERTY, "log", f"{len(after.log)} log entries agree with memory")
