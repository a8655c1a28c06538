"""KV pages and the prefix cache (K)."""

from __future__ import annotations

from blink_core.abi.enums import LogKind, PageState, SlotFlag
from verification.spec.state import ENGINE, Descriptor, Request, State


def pages_of(s: State, tokens: int) -> int:
    """Pages for a number of tokens."""
    return -(-tokens // s.config.page_size)


def most_pages(s: State, d: Descriptor) -> int:
    """Pages a request may need at most: its last token's KV is never computed (R7)."""
    return pages_of(s, min(d.prompt_len + d.max_tokens, s.config.max_len) - 1)


def available(s: State) -> int:  # K3
    return len(s.free) + len(s.idle)


def take(s: State, request: Request) -> bool:
    """K2: one page for the request's table; False if there is none."""
    if not s.free and not s.idle:
        return False
    if not s.free:
        evict(s, next(iter(s.idle)))
    page = s.free.pop()
    s.page_state[page] = PageState.OWNED
    request.pages.append(page)
    s.note(LogKind.PAGE_ALLOC, request, page, len(request.pages) - 1)
    return True


def evict(s: State, page: int) -> None:
    assert all(parent != page for parent, _ in s.cache), "design 5: only leaves are evicted"
    del s.idle[page], s.cache[s.key.pop(page)]
    s.evictions += 1
    s.page_state[page] = PageState.FREE
    s.free.append(page)
    s.note(LogKind.PAGE_EVICT, ENGINE, page)


def hold(s: State, request: Request, index: int, page: int) -> None:
    """The request's table holds a CACHED page at an index."""
    s.idle.pop(page, None)
    s.holders[page] += 1
    s.note(LogKind.PAGE_SHARE, request, page, index, s.holders[page])


def release(s: State, request: Request) -> int:
    """K4: every page of the table; returns how many."""
    count = len(request.pages)
    for page in reversed(request.pages):
        if s.page_state[page] == PageState.CACHED:
            s.holders[page] -= 1
            if not s.holders[page]:
                s.idle[page] = None
            s.note(LogKind.PAGE_UNSHARE, request, page, s.holders[page])
        else:
            free_own(s, request, page)
    request.pages.clear()
    return count


def free_own(s: State, request: Request, page: int) -> None:
    """An OWNED page leaves its table: to the quarantine while a step runs (K4)."""
    in_flight = s.plan is not None
    s.page_state[page] = PageState.QUARANTINED if in_flight else PageState.FREE
    (s.quarantine if in_flight else s.free).append(page)
    s.note(LogKind.PAGE_FREE, request, page, int(in_flight))


def end_quarantine(s: State) -> None:  # K5
    while s.quarantine:
        page = s.quarantine.pop()
        s.page_state[page] = PageState.FREE
        s.free.append(page)
        s.note(LogKind.PAGE_UNQUARANTINE, ENGINE, page)


def shares(s: State, request: Request) -> bool:  # K8
    return bool(s.config.prefix_cache) and not request.descriptor.flags & SlotFlag.NO_PREFIX_CACHE


def _key(s: State, request: Request, index: int, parent: int) -> tuple[int, tuple[int, ...]]:
    size = s.config.page_size
    return parent, tuple(request.tokens[index * size : (index + 1) * size])


def hit(s: State, request: Request) -> list[int]:
    """K7: the cached pages that the request may begin with."""
    found: list[int] = []
    if shares(s, request):
        for index in range((len(request.tokens) - 1) // s.config.page_size):
            page = s.cache.get(_key(s, request, index, found[-1] if found else 0))
            if page is None:
                break
            found.append(page)
    return found


def publish(s: State, request: Request) -> None:
    """K6: full pages of the request become CACHED, or give way to equal ones."""
    if not shares(s, request):
        return
    while (request.published + 1) * s.config.page_size <= request.computed:
        index = request.published
        parent = request.pages[index - 1] if index else 0
        key, own = _key(s, request, index, parent), request.pages[index]
        same = s.cache.get(key)
        if same is None:
            s.cache[key], s.key[own], s.holders[own] = own, key, 1
            s.page_state[own] = PageState.CACHED
            s.note(LogKind.PAGE_PUBLISH, request, own, index, parent)
        else:
            hold(s, request, index, same)
            request.pages[index] = same
            free_own(s, request, own)
        request.published += 1
