"""Corpus rows P: prefix reuse and page boundaries; on the compiled scheduler, stepped by hand."""

from __future__ import annotations

import pytest

from blink_core.abi.enums import FinishReason, LogKind
from tests.scenarios.common import FINISH, alone, of, request, started, submit_tokens, text
from verification.scheduler.harness import EOS


@pytest.mark.parametrize("pages", [1, 2, 3])
def test_p08_p09_repeats_at_a_page_boundary(pages: int) -> None:
    """P08, P09. Catches: a prompt of whole pages cached and never found, or found whole with nothing to compute.

    Condition: prompts of exactly n pages and one token about it, each repeated three times after the first.
    """
    for length in (4 * pages - 1, 4 * pages, 4 * pages + 1):
        h, front = started(token_budget=16, pages=2 + 20)
        repeats = []
        for _ in range(4):
            repeats.append(submit_tokens(front, text(length), 3))
            h.settle()
        expected = (length - 1) // 4 * 4
        assert [x.cached for x in repeats] == [0, *[expected] * 3], f"length {length}"
        assert all(x.tokens == alone(text(length), 3) for x in repeats)
        computed = [sum(int(e["a"]) for e in of(x, h.entries(LogKind.PLAN_ROW))) for x in repeats]
        assert computed == [length + 2, *[length - expected + 2] * 3]


@pytest.mark.parametrize("length", [4, 8, 12])
def test_p11_the_last_page_is_full(length: int) -> None:
    """P11. Catches: tokens in the last page counted as 0 where the length divides the page size.

    Condition: prompt, prompt and output, and the end of sequence each end exactly with a page.
    """
    h, front = started(token_budget=16, page_size=4, prefix_cache=0)
    x = submit_tokens(front, text(length), 4)
    h.poll()
    h.boundary()
    assert request(h, x).n_pages == length // 4
    h.run_model()
    h.settle()
    assert (len(x.known) - 4) % 4 == 0
    assert x.tokens == alone(text(length), 4)
    taken = [int(e["b"]) for e in of(x, h.entries(LogKind.PAGE_ALLOC))]
    assert taken == list(range(-(-(length + 3) // 4)))  # the last token's KV is not needed
    ended = 0
    for first in range(1, 400):
        prompt = [first % 37, first // 37, *text(length - 2)]
        tokens = alone(prompt, 4)
        if tokens[3] != EOS or EOS in tokens[:3]:
            continue
        y = submit_tokens(front, prompt, 9, eos=True)
        h.settle()
        assert y.terminal == (FINISH, FinishReason.EOS, 4)
        assert len(of(y, h.entries(LogKind.PAGE_FREE))) == len(of(y, h.entries(LogKind.PAGE_ALLOC)))
        ended += 1
    assert ended > 0


def test_p05_a_prefill_that_starts_behind_cached_pages() -> None:
    """P05. Catches: positions, slots or lengths of a prefill that ignore what was found before it.

    Condition: the second prefill starts at a position that is not 0, in one chunk and in several, with another tail.
    """
    for budget in (3, 30):
        h, front = started(token_budget=budget, max_len=48, pages=2 + 30)
        submit_tokens(front, text(22), 2)
        h.settle()
        for tail in ([], [5, 6, 7], text(14, 4)):
            x = submit_tokens(front, [*text(20), 1, *tail], 4)
            h.settle()
            rows = of(x, h.entries(LogKind.PLAN_ROW))
            assert int(rows[0]["b"]) - int(rows[0]["a"]) == x.cached == 20
            assert x.tokens == alone(x.prompt, 4)
