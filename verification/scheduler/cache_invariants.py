"""The prefix cache recounted from raw memory: hashes, buckets, tree, least-recently-used list (design section 5)."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from blink_core.abi.enums import PageState, SlotFlag
from verification.scheduler.front_end import mix
from verification.scheduler.invariants import State


@lru_cache(maxsize=1 << 14)
def extend(chain: int, tokens: tuple[int, ...]) -> int:
    """Hash of a prefix that ends with `tokens`, `chain` being that of what comes before (0: nothing)."""
    for token in tokens:
        chain = mix(token, chain)
    return chain


def tokens_of(s: State, page: int) -> tuple[int, ...]:
    return tuple(s.page_tokens[page].tolist())


def check_tree(s: State, cached: list[int]) -> None:
    """Parents are cached, children counted, hashes those of the tokens, no prefix twice."""
    children: Counter[int] = Counter(s.pages[p].parent for p in cached)
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for page in cached:
        p, tokens = s.pages[page], tokens_of(s, page)
        assert p.children == children[page], f"page {page} counts {p.children} children, has {children[page]}"
        before = 0
        if p.parent:
            above = s.pages[p.parent]
            assert above.state == PageState.CACHED, f"page {page} stands behind {p.parent}, which is not cached"
            assert above.refs >= p.refs, f"page {page} has {p.refs} holders, the page before it {above.refs}"
            before = above.hash
        assert p.hash == extend(before, tokens), f"page {page} has hash {p.hash:#x}, not that of its tokens"
        assert p.owner == -1, f"cached page {page} has owner {p.owner}"
        assert (p.parent, tokens) not in seen, f"page {page} is cached twice: {tokens} behind {p.parent}"
        seen.add((p.parent, tokens))


def check_buckets(s: State, cached: list[int]) -> None:
    """Every cached page in the bucket of its hash, once, and nothing else."""
    found: list[int] = []
    for bucket, at in enumerate(s.buckets):
        while at >= 0:
            expected = s.pages[at].hash % s.config.pages
            assert expected == bucket, f"page {at} is in bucket {bucket}, belongs in {expected}"
            found.append(at)
            assert len(found) <= s.config.pages, f"bucket {bucket} does not end"
            at = s.pages[at].bucket_next
    assert sorted(found) == cached, f"buckets hold {sorted(found)}, cached are {cached}"


def check_lru(s: State, cached: list[int]) -> None:
    """Exactly the cached pages without holders, well linked, every page before the page that it stands behind."""
    order: list[int] = []
    at, previous = s.header["lru_head"], -1
    while at >= 0:
        assert s.pages[at].lru_prev == previous, f"page {at} links back to {s.pages[at].lru_prev}, not {previous}"
        order.append(at)
        assert len(order) <= s.config.pages, "the list of idle pages does not end"
        previous, at = at, s.pages[at].lru_next
    assert s.header["lru_tail"] == previous
    assert s.header["idle_cached"] == len(order)
    assert sorted(order) == [p for p in cached if s.pages[p].refs == 0], f"idle pages are {order}"
    places = {page: place for place, page in enumerate(order)}
    for page, place in places.items():
        above = places.get(s.pages[page].parent, len(order))
        assert place < above, f"page {page} would be evicted after the page before it in the prefix"


def check_holders(s: State) -> None:
    """A request's leading pages are its own tokens' pages, in order; without cache it holds none."""
    size = s.config.page_size
    for request in s.running:
        q, table = s.requests[request], s.table(request)
        if q.flags & SlotFlag.NO_PREFIX_CACHE or not s.config.prefix_cache:
            assert q.published == 0, f"request {request} does not use the cache and holds {q.published} of its pages"
        tokens = s.tokens[request].tolist()
        before = chain = 0
        for index, page in enumerate(table[: q.published]):
            mine = tuple(tokens[index * size : (index + 1) * size])
            theirs = tokens_of(s, page)
            assert theirs == mine, f"page {page} of request {request} holds {theirs}, not {mine}"
            assert s.pages[page].parent == before, f"page {page} of request {request} stands behind another page"
            before, chain = page, extend(chain, mine)
        assert q.chain == chain, f"request {request} goes on from hash {q.chain:#x}, not {chain:#x}"


def check_cache(s: State) -> None:
    cached = [page for page, p in enumerate(s.pages) if p.state == PageState.CACHED]
    check_tree(s, cached)
    check_buckets(s, cached)
    check_lru(s, cached)
    check_holders(s)
    if not s.config.prefix_cache:
        assert not cached, f"pages {cached} are cached, the cache is off"
    assert 0 <= s.header["hits"] <= s.header["lookups"]
