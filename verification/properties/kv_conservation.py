"""KV conservation, recounted from raw memory at a step boundary (design sections 5 and 9).

Clauses of a snapshot (`kv_recount`):
  one-state     every page is free, quarantined, reserved, in the prefix cache or in exactly one block table, and its
                metadata says the same
  owner         a page in one block table only names that request and generation as its owner
  refs          a page's count is the number of block tables that hold it
  hit           cached pages of a request are its leading ones, hold its own tokens, and follow each other as cached;
                they are computed, and at least one prompt token is not among them at first admission
  cache         cached pages are a tree of full pages: no orphans, no twins, each in the bucket of its hash
  lru           the evictable pages are those without holders, none before a page that follows it
  coverage      a running request holds exactly the pages that its computed and planned tokens need; pages set aside for
                running requests are counted right
  release       with no live request, every page is free or can be evicted
  quarantine    pages are quarantined only while a step runs

Clauses of the event log between two snapshots (`kv_page_life`; the log is the product's own testimony):
  log           page events form a legal life of each page and end at what memory shows
  quarantine    a page released while a step runs, and written by it, is not given away before that step has ended
  publish       a page enters the prefix cache only full, behind a result of the step that computed it
  evict         only leaves without holders are evicted, least recently used first
  release       whoever ends, or gives way, leaves no page behind
"""

from __future__ import annotations

from hil_rigs.engine_memory import StateSnapshot
from verification.properties.kv_page_life import check_log
from verification.properties.kv_recount import PROPERTY, RESERVED, Recount, check_cache, check_tables, recount, unfit
from verification.result import CheckResult, Measurement, Verdict

__all__ = ["PROPERTY", "RESERVED", "check_log", "check_observed", "check_snapshot"]


def check_snapshot(s: StateSnapshot) -> CheckResult:
    """All clauses of one snapshot; the first that is violated decides."""
    if (wrong := unfit(s)) is not None:
        return wrong
    found = recount(s)
    if not isinstance(found, Recount):
        return found
    return check_cache(s, found) or check_tables(s, found) or _valid(s, found)


def _valid(s: StateSnapshot, r: Recount) -> CheckResult:
    shared = sum(count > 1 for count in r.holders.values())
    private = sum(page not in r.bucket_of for page in r.holders)
    message = f"{s.config.pages} pages, {len(s.free_list)} free, {private} owned, {len(r.bucket_of)} cached"
    measured = {
        "pages": Measurement(s.config.pages, "pages"),
        "running": Measurement(len(r.owned), "requests"),
        "cached": Measurement(len(r.bucket_of), "pages"),
        "shared": Measurement(shared, "pages"),
    }
    return CheckResult(Verdict.VALID, PROPERTY, "one-state", message, {}, measured)


def check_observed(running: int, allocations: int) -> CheckResult:
    """Whether a run showed anything: boundaries with running requests, and pages given out. Unknown if it did not."""
    seen = f"{running} observed boundaries had running requests, {allocations} pages were given out"
    verdict = Verdict.VALID if running and allocations else Verdict.UNKNOWN
    return CheckResult(verdict, PROPERTY, "one-state", seen, {}, {"busy_boundaries": Measurement(running, "snapshots")})
