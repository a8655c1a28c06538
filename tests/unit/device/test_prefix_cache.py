"""The prefix cache on the compiled scheduler: who shares which page, since when, what is evicted (design section 5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blink_core.abi.enums import FinishReason, LogKind, PageState, RequestState, SlotFlag
from tests.unit.device.scenarios import ERROR, FINISH, request, started
from verification.scheduler.cache_invariants import extend
from verification.scheduler.front_end import FrontEnd, Submission
from verification.scheduler.harness import VOCAB, Harness, next_token, small_config


def submit(front: FrontEnd, prompt: list[int], max_tokens: int, *, flags: int = 1, **fields: Any) -> Submission:
    made = front.submit(prompt, max_tokens, flags=flags, **fields)
    assert made is not None
    return made


def text(length: int, seed: int = 1) -> list[int]:
    return [(seed + 3 * i * seed) % VOCAB for i in range(length)]


def alone(prompt: list[int], count: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(next_token(prompt + tokens))
    return tokens


def table(h: Harness, x: Submission) -> list[int]:
    s = h.snapshot()
    return s.table(x.ring * h.config.slots + x.slot)


def cached_pages(h: Harness) -> list[int]:
    return [p for p, page in enumerate(h.snapshot().pages) if page.state == PageState.CACHED]


def planned_tokens(h: Harness, x: Submission) -> int:
    """Tokens planned for a request so far."""
    rows = [e for e in h.entries(LogKind.PLAN_ROW) if (e["slot"], e["generation"]) == (x.slot, x.generation)]
    return sum(int(e["a"]) for e in rows)


def test_second_request_computes_only_the_tail() -> None:
    """Catches: a prompt computed again though its pages are there, or other tokens than without the cache."""
    h, front = started(token_budget=16)
    first = submit(front, text(14), 4)
    h.settle()
    second = submit(front, text(14), 4)
    h.settle()
    assert first.tokens == second.tokens == alone(text(14), 4)
    assert (first.cached, second.cached) == (0, 12)
    assert planned_tokens(h, first) == 14 + 3
    assert planned_tokens(h, second) == 2 + 3
    assert (int(h.state["header"]["lookups"][0]), int(h.state["header"]["hits"][0])) == (24, 12)


def test_running_requests_hold_the_same_pages() -> None:
    """Catches: a page shared in time only, so that two running requests keep two copies."""
    h, front = started(token_budget=16, max_rows=3)
    first = submit(front, text(9), 10)
    h.tick()
    h.tick()
    second = submit(front, [*text(8), 7, 7], 10)
    h.tick()
    h.tick()
    assert table(h, first)[:2] == table(h, second)[:2]
    assert [h.snapshot().pages[p].refs for p in table(h, first)[:2]] == [2, 2]
    front.cancel(first)
    h.tick()
    assert [h.snapshot().pages[p].refs for p in table(h, second)[:2]] == [1, 1]
    h.settle()
    assert second.tokens == alone(second.prompt, 10)


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_one_token_is_always_computed(length: int, hit: int) -> None:
    """Catches: a hit of the whole prompt, which leaves no logits to choose the first token from."""
    h, front = started(token_budget=16)
    submit(front, text(16), 4)
    h.settle()
    x = submit(front, text(length), 3)
    h.settle()
    assert x.cached == hit
    assert x.tokens == alone(x.prompt, 3)


def test_outputs_are_found_as_prompts() -> None:
    """Catches: only prompts entered, so that the next turn of a conversation is computed from its beginning."""
    h, front = started(token_budget=16)
    x = submit(front, text(6), 8)
    h.settle()
    turn = submit(front, [*x.prompt, *x.tokens, 5, 6], 2)
    h.settle()
    assert turn.cached == 12  # 6 + 8 tokens, the last one's KV was never computed


def test_same_hash_is_no_hit() -> None:
    """Catches: pages compared by their hash alone."""
    vocab = 1 << 22
    ids = np.arange(vocab, dtype=np.uint64)
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):  # the chained hash of one token, then where the second must lead
        z = ids + golden
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        reached = ((z ^ (z >> np.uint64(31))) + np.uint64(1)) * golden
    order = np.argsort(reached)
    gaps = np.diff(reached[order])
    at = int(np.argmin(gaps))
    assert int(gaps[at]) < vocab - 1, "no two pages of this vocabulary have one hash"
    low, high = int(ids[order[at]]), int(ids[order[at + 1]])
    one, other = (low, int(gaps[at]) + 1), (high, 1)
    assert extend(0, one) == extend(0, other)
    h, front = started(vocab=vocab, page_size=2, pages=2 + 20, masks=0, token_budget=16)
    first = submit(front, [*one, 3, 4, 5], 3)
    h.settle()
    second = submit(front, [*other, 3, 4, 5], 3)
    h.settle()
    assert (first.cached, second.cached) == (0, 0)
    assert second.tokens == alone(second.prompt, 3)
    third = submit(front, [*one, 3, 4, 5], 3)
    fourth = submit(front, [*other, 3, 4, 5], 3)
    h.settle()
    assert (third.cached, fourth.cached) == (4, 4)


def test_same_page_behind_another_is_no_hit() -> None:
    """Catches: a page found by its own tokens, whatever came before them."""
    h, front = started(token_budget=16)
    submit(front, text(13, 1), 2)
    h.settle()
    x = submit(front, [*text(4, 2), *text(13, 1)[4:]], 2)
    h.settle()
    assert x.cached == 0
    assert x.tokens == alone(x.prompt, 2)


def test_nothing_is_shared_before_a_token_confirms_it() -> None:
    """Catches: a page that another request may read while the step that computes it runs, or before it proved sound."""
    h, front = started(token_budget=4, max_rows=2)
    first = submit(front, text(13), 3)
    h.poll()
    for _ in range(3):  # three chunks of prefill, no token yet
        h.tick()
        assert not cached_pages(h)
    h.tick()
    assert not cached_pages(h), "published by the step in flight"
    h.boundary()
    assert len(cached_pages(h)) == 3
    h.run_model()
    h.settle()
    assert first.tokens == alone(first.prompt, 3)


@pytest.mark.parametrize("fault", ["nan", "poison", "range", "unwritten", "no_token"])
def test_faulty_request_publishes_nothing(fault: str) -> None:
    """Catches: a NaN in one request's KV that reaches every request with the same beginning."""
    h, front = started(token_budget=4, max_rows=2)
    bad = submit(front, text(13), 3)
    h.poll()
    for step in range(4):
        h.boundary()
        h.run_model({0: fault} if step == (1 if fault == "poison" else 3) else None)
        h.poll()
    h.boundary()
    assert bad.terminal is not None
    assert bad.terminal[0] == ERROR
    assert not cached_pages(h)
    x = submit(front, text(13), 3)
    h.settle()
    assert x.cached == 0
    assert x.tokens == alone(x.prompt, 3)


def test_twin_pages_become_one() -> None:
    """Catches: two copies of a page that was computed twice at once, or a swap that frees the one in use."""
    h, front = started(token_budget=30, max_rows=3, pages=2 + 14)
    made = [submit(front, text(9), 6) for _ in range(3)]
    h.poll()
    h.tick()
    assert [x.cached for x in made] == [0, 0, 0]
    owned = [table(h, x) for x in made]
    assert len({p for t in owned for p in t}) == 9
    h.boundary()  # the first publishes, the others swap
    now = [table(h, x) for x in made]
    assert now[0] == owned[0]
    assert now[1][:2] == now[2][:2] == owned[0][:2]
    assert "twin" in h.situations
    freed = {*owned[1][:2], *owned[2][:2]}
    assert freed <= {*h.snapshot().free_list, *(p for t in now for p in t[2:])}
    h.run_model()
    h.settle()
    assert all(x.tokens == alone(text(9), 6) for x in made)


def test_least_recently_used_leaf_is_evicted() -> None:
    """Catches: eviction of a page that others stand behind, of a held one, or of the most recently used."""
    h, front = started(pages=2 + 8, token_budget=16, max_rows=2)
    old, new = text(9, 2), text(9, 5)
    submit(front, old, 1)
    h.settle()
    submit(front, new, 1)
    h.settle()
    again = submit(front, old, 1)  # used again: `new` is now the older one
    h.settle()
    assert again.cached == 8
    assert len(cached_pages(h)) == 4
    submit(front, text(18, 7), 1)  # 5 pages, 4 are free
    h.settle()
    evicted = [int(e["a"]) for e in h.entries(LogKind.PAGE_EVICT)]
    assert len(evicted) == 1
    for prompt, hit in ((old, 8), (new, 4)):
        x = submit(front, prompt, 1)
        h.settle()
        assert x.cached == hit


def test_pages_in_use_are_never_evicted() -> None:
    """Catches: a shared page given to another while a running request reads it."""
    h, front = started(pages=2 + 6, token_budget=16, max_rows=2)
    first = submit(front, text(9), 8)
    h.tick()
    h.tick()
    held = table(h, first)[:2]
    other = submit(front, text(13, 4), 8)
    for _ in range(40):
        h.tick()
        if first.terminal is None:
            assert table(h, first)[:2] == held
    assert first.tokens == alone(first.prompt, 8)
    h.settle()
    assert other.tokens == alone(other.prompt, 8)


def test_resume_takes_its_own_pages_back() -> None:
    """Catches: a preempted request that computes again what still lies in the cache."""
    h, front = started(pages=2 + 6, max_rows=2, token_budget=6)
    made = [submit(front, text(6, 1), 15), submit(front, text(6, 4), 15)]
    h.settle()
    assert int(h.state["header"]["preemptions"][0]) > 0
    assert "resume hit" in h.situations
    assert all(x.tokens == alone(x.prompt, 15) for x in made)
    assert [x.cached for x in made] == [0, 0], "a hit at resume is told as the first admission's"


@pytest.mark.parametrize("pages", [1, 3, 5])
def test_full_cache_never_stands_in_the_way(pages: int) -> None:
    """Catches: pages of past requests that are never given back, so that a request which fits is never admitted."""
    h, front = started(pages=2 + pages, token_budget=16, max_rows=3)
    for seed in range(1, 8):
        most = 4 * pages
        x = submit(front, text(most - 1, seed), 2)  # all pages: the last token's KV is not needed
        h.settle()
        assert x.terminal == (FINISH, FinishReason.LENGTH, 2)
    assert pages == 1 or h.snapshot().header["evictions"] > 0


def test_request_without_cache_leaves_no_trace() -> None:
    """Catches: NO_PREFIX_CACHE that only reads nothing, or only adds nothing."""
    h, front = started(token_budget=16)
    quiet = SlotFlag.IGNORE_EOS | SlotFlag.NO_PREFIX_CACHE
    submit(front, text(9), 4, flags=quiet)
    h.settle()
    assert not cached_pages(h)
    submit(front, text(9), 4)
    h.settle()
    assert cached_pages(h)
    x = submit(front, text(9), 4, flags=quiet)
    h.settle()
    assert x.cached == 0
    assert planned_tokens(h, x) == 9 + 3


def test_cache_can_be_switched_off() -> None:
    """Catches: Config.prefix_cache that is read in some places only."""
    h, front = started(token_budget=16, prefix_cache=0)
    for _ in range(3):
        x = submit(front, text(9), 4)
        h.settle()
        assert x.cached == 0
    assert not cached_pages(h)
    assert (int(h.state["header"]["lookups"][0]), int(h.state["header"]["hits"][0])) == (0, 0)


def test_hit_pages_are_not_counted_twice_at_admission() -> None:
    """Catches: idle cached pages counted both as found and as evictable, so that a request is admitted without room."""
    h, front = started(pages=2 + 5, token_budget=20, max_rows=2)
    submit(front, text(9), 2)
    h.settle()  # 2 pages cached, 3 free
    holder = submit(front, text(9, 4), 3)  # takes the 3 free ones
    h.tick()
    x = submit(front, text(14), 2)  # 4 pages: 2 found, 2 more than there are
    h.tick()
    assert request(h, x).state == RequestState.WAITING
    assert request(h, holder).preemptions == 0
    h.settle()
    assert x.terminal == (FINISH, FinishReason.LENGTH, 2)


def test_rings_share_one_cache() -> None:
    """Catches: a cache by ring, which would compute a common system prompt once for each worker."""
    h = Harness(small_config(rings=2, token_budget=16))
    h.attach()
    submit(h.fronts[0], text(9), 2)
    h.settle()
    x = submit(h.fronts[1], text(9), 2)
    h.settle()
    assert x.cached == 8
    h.fronts[0].attach()  # the ring's successor finds them too
    h.poll()
    y = submit(h.fronts[0], text(9), 2)
    h.settle()
    assert y.cached == 8
