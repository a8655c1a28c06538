"""The recount behind `kv_conservation.check_snapshot`: every page of one snapshot, from raw memory alone.

A page is claimed by the lists and tables that hold it. What a page's metadata says is compared with its claims, never
taken for them, except for one thing: that a page is in the prefix cache is seen from the hash buckets that lead to it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from blink_core.abi.enums import Admission, PageState, RequestState
from hil_rigs.engine_memory import StateSnapshot
from verification.history import enum_name
from verification.result import CheckResult, Verdict

PROPERTY = "kv-conservation"
RESERVED = 2


def bad(clause: str, message: str, **witness: Any) -> CheckResult:
    """A violated clause of this property."""
    return CheckResult(Verdict.INVALID, PROPERTY, clause, message, witness)


def unfit(s: StateSnapshot) -> CheckResult | None:
    """Indices and counts that point outside their tables: nothing can be recounted from them."""
    k = s.config
    for name, found, most in (
        ("running", len(s.running), k.max_rows),
        ("free_pages", len(s.free_list), k.pages),
        ("quarantined", len(s.quarantine), k.pages),
    ):
        if int(s.header[name]) > most or found != int(s.header[name]):
            return bad("one-state", f"header counts {int(s.header[name])} {name}, at most {most} can be")
    for request in s.running.tolist():
        if request >= len(s.requests):
            return bad("owner", f"the running list names request {request}, there are {len(s.requests)}")
        q = s.requests[request]
        if not 0 <= int(q["row"]) < k.max_rows:
            return bad("owner", f"request {request} runs in block-table row {int(q['row'])} of {k.max_rows}")
        if int(q["n_pages"]) > k.max_pages:
            return bad("coverage", f"request {request} counts {int(q['n_pages'])} pages, a table has {k.max_pages}")
        if int(q["total"]) > k.max_len:
            return bad("coverage", f"request {request} counts {int(q['total'])} tokens, at most {k.max_len} can be")
    if len(set(s.running.tolist())) != len(s.running):
        return bad("owner", f"a request is named twice among the {len(s.running)} running ones")
    for request, members in tables(s).items():
        beyond = [page for page in members if page >= k.pages]
        if beyond:
            return bad("one-state", f"block table of request {request} holds page {beyond[0]}, the pool has {k.pages}")
        if len(set(members)) != len(members):
            return bad("one-state", f"block table of request {request} holds a page twice", pages=members)
    return _unfit_cache(s)


def _unfit_cache(s: StateSnapshot) -> CheckResult | None:
    links = {"bucket_next": s.pages["bucket_next"], "lru_prev": s.pages["lru_prev"], "lru_next": s.pages["lru_next"]}
    links |= {"buckets": s.buckets, "lru_head": s.header["lru_head"], "lru_tail": s.header["lru_tail"]}
    for name, values in links.items():
        if ((values < -1) | (values >= s.config.pages)).any():
            return bad("cache", f"{name} holds an index outside the pool of {s.config.pages} pages")
    if len(s.buckets) != s.config.pages or s.page_tokens.shape != (s.config.pages, s.config.page_size):
        return bad("cache", f"{len(s.buckets)} buckets and tokens of {len(s.page_tokens)} pages were read")
    return None


def tables(s: StateSnapshot) -> dict[int, list[int]]:
    """Pages of each running request, from the block tables. IndexError for a snapshot that `unfit` rejects."""
    result: dict[int, list[int]] = {}
    for request in s.running.tolist():
        row, count = int(s.requests[request]["row"]), int(s.requests[request]["n_pages"])
        result[request] = s.block_tables[row, :count].tolist()
    return result


def _chain(first: int, links: Any) -> list[int]:
    """Pages along a linked list; longer than there are pages if it does not end."""
    found: list[int] = []
    at = first
    while at >= 0 and len(found) <= len(links):
        found.append(at)
        at = int(links[at])
    return found


def lru_order(s: StateSnapshot) -> list[int]:
    """Cached pages without holders, the least recently used first. Presupposes that `unfit` is None."""
    return _chain(int(s.header["lru_head"]), s.pages["lru_next"])


@dataclass(frozen=True, slots=True)
class Recount:
    """What was found: block tables by request, cached pages by hash bucket, holders of each page, the LRU list."""

    owned: dict[int, list[int]]
    bucket_of: dict[int, int]
    holders: Counter[int]
    lru: list[int]


def recount(s: StateSnapshot) -> Recount | CheckResult:
    """Walks every list. A result, of clause one-state or cache, where a page is claimed not exactly once."""
    owned = tables(s)
    claims: dict[int, list[str]] = {page: [] for page in range(s.config.pages)}
    for name, members in (
        ("free", s.free_list.tolist()),
        ("quarantined", s.quarantine.tolist()),
        ("reserved", list(range(RESERVED))),
    ):
        for page in members:
            if page not in claims:
                return bad("one-state", f"{name} list holds page {page}, the pool has {s.config.pages}")
            claims[page].append(name)
    bucket_of: dict[int, int] = {}
    for bucket, first in enumerate(s.buckets.tolist()):
        for page in _chain(first, s.pages["bucket_next"]) if first >= 0 else []:
            if page in bucket_of:
                return bad("cache", f"page {page} is reached twice through the hash buckets", page=page)
            bucket_of[page] = bucket
            claims[page].append("cached")
    for request, members in owned.items():
        for page in members:
            if page not in bucket_of:  # any number of requests may hold a cached page
                claims[page].append(f"request {request}")
    wrong = {page: found for page, found in claims.items() if len(found) != 1}
    if wrong:
        page, found = next(iter(wrong.items()))
        what = "belongs to nobody: it is lost" if not found else "has several owners: " + ", ".join(found)
        pages = {str(k): v for k, v in wrong.items()}
        return bad("one-state", f"page {page} {what} ({len(wrong)} such pages)", pages=pages)
    found_bad = _check_metadata(s, claims)
    holders = Counter(page for members in owned.values() for page in members)
    return found_bad or Recount(owned, bucket_of, holders, lru_order(s))


def _check_metadata(s: StateSnapshot, claims: dict[int, list[str]]) -> CheckResult | None:
    states = {"free": PageState.FREE, "quarantined": PageState.QUARANTINED, "reserved": PageState.RESERVED}
    states["cached"] = PageState.CACHED
    for page, (claim,) in claims.items():
        meta = s.pages[page]
        state, found = states.get(claim, PageState.OWNED), int(meta["state"])
        if found != state:
            return bad("one-state", f"page {page} is {claim}, its metadata says {enum_name(PageState, found)}")
        if state is PageState.CACHED:
            if int(meta["owner"]) != -1:
                return bad("owner", f"page {page} is cached, its metadata names request {int(meta['owner'])} as owner")
            continue
        refs = 1 if state is PageState.OWNED else 0
        if int(meta["refs"]) != refs:
            return bad("refs", f"page {page} is {claim} with {int(meta['refs'])} references, expected {refs}")
        if state is PageState.OWNED:
            request = int(claim.removeprefix("request "))
            generation = int(s.requests[request]["generation"])
            if (int(meta["owner"]), int(meta["generation"])) != (request, generation):
                return bad(
                    "owner",
                    f"page {page} is in the block table of request {request} generation {generation}, its metadata "
                    f"names request {int(meta['owner'])} generation {int(meta['generation'])}",
                )
    return None


def check_cache(s: StateSnapshot, r: Recount) -> CheckResult | None:
    """Clauses refs, cache and lru: the prefix cache as a tree of full pages."""
    children: Counter[int] = Counter()
    contents: dict[tuple[int, bytes], int] = {}
    for page, bucket in r.bucket_of.items():
        meta = s.pages[page]
        if int(meta["refs"]) != r.holders[page]:
            return bad("refs", f"page {page} is in {r.holders[page]} block tables, its count says {int(meta['refs'])}")
        if int(meta["hash"]) % s.config.pages != bucket:
            return bad("cache", f"page {page} lies in bucket {bucket}, its hash belongs elsewhere")
        parent = int(meta["parent"])
        if parent != 0 and parent not in r.bucket_of:
            return bad("cache", f"page {page} follows page {parent}, which is not cached: it is an orphan")
        children[parent] += 1
        twin = contents.setdefault((parent, s.page_tokens[page].tobytes()), page)
        if twin != page:
            return bad("cache", f"pages {twin} and {page} hold the same tokens behind the same page {parent}")
    for page in r.bucket_of:
        if (counted := int(s.pages[page]["children"])) != children[page]:
            return bad("cache", f"{children[page]} cached pages follow page {page}, its count says {counted}")
    return _check_lru(s, r)


def _check_lru(s: StateSnapshot, r: Recount) -> CheckResult | None:
    idle = {page for page in r.bucket_of if r.holders[page] == 0}
    if len(r.lru) != len(set(r.lru)) or set(r.lru) != idle:
        differing = sorted(idle ^ set(r.lru))
        return bad("lru", "the list of evictable pages is not that of cached pages without holders", pages=differing)
    if _chain(int(s.header["lru_tail"]), s.pages["lru_prev"]) != r.lru[::-1]:
        return bad("lru", "the list of evictable pages reads differently backwards", pages=r.lru)
    if int(s.header["idle_cached"]) != len(idle):
        return bad("lru", f"{len(idle)} cached pages have no holder, the header counts {int(s.header['idle_cached'])}")
    place = {page: at for at, page in enumerate(r.lru)}
    for page in idle:
        parent = int(s.pages[page]["parent"])
        if place.get(parent, len(place)) < place[page]:  # a parent with holders is not evicted at all
            return bad("lru", f"page {parent} would be evicted before page {page}, which follows it")
    return None


def check_tables(s: StateSnapshot, r: Recount) -> CheckResult | None:
    """Clauses owner, coverage, hit, release and quarantine: what running requests hold."""
    most = 0
    for at, (request, members) in enumerate(r.owned.items()):
        q = s.requests[request]
        if (state := int(q["state"])) != RequestState.RUNNING:
            return bad("owner", f"request {request} runs in state {enum_name(RequestState, state)}")
        least, all_known = (-(-int(q[name]) // s.config.page_size) for name in ("computed", "total"))
        if not least <= len(members) <= all_known:
            return bad(
                "coverage",
                f"request {request} owns {len(members)} pages for {int(q['computed'])} computed of {int(q['total'])} "
                f"known tokens: expected {least} to {all_known}",
            )
        if (wrong := _check_hits(s, r, request, s.running_tokens[at], members)) is not None:
            return wrong
        longest = min(int(q["prompt_len"]) + int(q["max_tokens"]), s.config.max_len)
        most += -(-(longest - 1) // s.config.page_size)
    return _check_commitment(s, most) or _check_released(s, r)


def _check_hits(s: StateSnapshot, r: Recount, request: int, tokens: Any, members: list[int]) -> CheckResult | None:
    """The cached pages of a table are its leading ones, and hold this request's own tokens in this order."""
    q, size = s.requests[request], s.config.page_size
    cached = [page in r.bucket_of for page in members]
    leading = cached.index(False) if False in cached else len(cached)
    if any(cached[leading:]):
        return bad("hit", f"request {request} holds a cached page behind one of its own", pages=members)
    if leading != int(q["published"]):
        return bad("hit", f"request {request} holds {leading} cached pages, its count says {int(q['published'])}")
    if leading * size > int(q["computed"]):
        return bad("hit", f"request {request} has computed {int(q['computed'])} tokens and {leading} pages are cached")
    if int(q["cached"]) % size or int(q["cached"]) >= max(1, int(q["prompt_len"])):
        return bad(
            "hit", f"request {request} counts {int(q['cached'])} of {int(q['prompt_len'])} prompt tokens as found"
        )
    for index in range(leading):
        page = members[index]
        before = members[index - 1] if index else 0
        own, held = tokens[index * size : (index + 1) * size].tolist(), s.page_tokens[page].tolist()
        if own != held:
            return bad(
                "hit", f"request {request} holds cached page {page}, whose tokens are not its own", own=own, page=held
            )
        if int(s.pages[page]["parent"]) != before:
            found = int(s.pages[page]["parent"])
            return bad(
                "hit", f"page {page} is at place {index} of request {request} behind {before}, cached behind {found}"
            )
    return None


def _check_commitment(s: StateSnapshot, most: int) -> CheckResult | None:
    if int(s.header["committed_pages"]) != most:
        counted = int(s.header["committed_pages"])
        return bad("coverage", f"running requests may need {most} pages, the header counts {counted}")
    usable = s.config.pages - RESERVED
    if s.config.admission == Admission.RESERVE and most > usable:
        return bad("coverage", f"running requests may need {most} pages, {usable} can be reserved")
    return None


def _check_released(s: StateSnapshot, r: Recount) -> CheckResult | None:
    idle = s.requests[(s.requests["state"] != RequestState.RUNNING) & (s.requests["n_pages"] != 0)]
    if len(idle):
        return bad("release", f"{len(idle)} requests that do not run count pages as theirs")
    if len(s.quarantine) and not int(s.header["in_flight"]):
        return bad("quarantine", f"{len(s.quarantine)} pages are quarantined and no step runs")
    if int(s.header["live"]) == 0:
        usable, have = s.config.pages - RESERVED, len(s.free_list) + len(r.lru)
        if have != usable or r.owned:
            return bad("release", f"no request lives, {have} of {usable} pages are free or can be evicted")
    return None
