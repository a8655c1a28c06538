"""Programs that are made for a boundary: a page's end, the end of a sequence, the longest sequence, the last batch
row."""

from __future__ import annotations

import random

import pytest

from blink_core.abi.enums import EventKind, FinishReason
from blink_core.abi.params import SamplingParams
from verification.fixtures import Judge, Subject
from verification.history import History, enum_name
from verification.program import Program, RequestSpec
from verification.properties import prefix_cache, queue_ordering
from verification.result import CheckResult, Verdict
from verification.suite.running import serve

pytestmark = [pytest.mark.capability("cpu", "shared-memory", "oracle")]

FORCED = 100.0  # a bias beyond which no logit of a model reaches
NEAR = (-1, 0, 1)
PAGES = (1, 2)


def lengths_near_pages(page_size: int) -> list[int]:
    """15, 16, 17, 31, 32 and 33 for pages of 16 tokens."""
    return [pages * page_size + off for pages in PAGES for off in NEAR]


def ends_at(subject: Subject, rng: random.Random, total: int, new: int, **options: int) -> RequestSpec:
    """A request whose `new`-th token is an end-of-sequence id, with `total` tokens then; that id is barred before."""
    prompt = tuple(rng.randrange(subject.shape.vocab) for _ in range(total - new))
    bias = ((subject.eos_ids[0], FORCED),)
    params = SamplingParams(new + 4, logit_bias=bias, min_tokens=new - 1, prefix_cache=False)
    return RequestSpec(prompt, params, **options)


def check_ends(history: History, expected: dict[int, FinishReason], tokens: dict[int, int]) -> CheckResult:
    """Clause terminal: each of these requests ended for that reason, with as many tokens."""
    for s in history.submitted:
        if s.request not in expected:
            continue
        reasons = [int(e["reason"]) for e in history.events_of(s) if e["kind"] == EventKind.FINISH]
        count = len(history.tokens_of(s))
        if reasons != [int(expected[s.request])] or count != tokens[s.request]:
            found = [enum_name(FinishReason, reason) for reason in reasons]
            message = (
                f"request {s.request} ended by {found} with {count} tokens, expected {expected[s.request].name} with "
                f"{tokens[s.request]}"
            )
            return CheckResult(Verdict.INVALID, queue_ordering.PROPERTY, "terminal", message)
    return CheckResult(Verdict.VALID, queue_ordering.PROPERTY, "terminal", f"{len(expected)} requests ended as asked")


@pytest.mark.blink_property("queue-ordering")
def test_end_at_page_boundary(tiny: Subject, judge: Judge, seed: int) -> None:
    """Ends of sequence on, before and behind the end of a page, the longest sequence, and as many rows as a step has.

    Catches: an end that is missed or comes twice where a page is full, a page that is taken for a token nobody needs.
    """
    rng = random.Random(seed)
    config = tiny.rig.descriptor.config
    for rows in (config.max_rows - 1, config.max_rows):
        totals = [(lengths_near_pages(config.page_size) * rows)[i] for i in range(rows)]
        specs = [ends_at(tiny, rng, total, 3) for total in totals]
        program = Program(tuple(specs))
        history = serve(tiny, program, judge)
        everyone = range(len(specs))
        judge(check_ends(history, dict.fromkeys(everyone, FinishReason.EOS), dict.fromkeys(everyone, 3)), history)
    longest = tiny.shape.longest
    prompt = tuple(rng.randrange(tiny.shape.vocab) for _ in range(longest - 4))
    program = Program((RequestSpec(prompt, SamplingParams(longest, ignore_eos=True)),))
    history = serve(tiny, program, judge)
    judge(check_ends(history, {0: FinishReason.CONTEXT}, {0: 4}), history)


@pytest.mark.blink_property("kv-content")
def test_prefix_at_page_boundary(tiny: Subject, judge: Judge, seed: int) -> None:
    """One prompt, and once it has ended its beginnings of 15, 16, 17, 31, 32 and 33 tokens (with pages of 16), alone.

    Catches: a hit that counts the token which is left to compute, a page that is found although it is not whole.
    """
    rng = random.Random(seed)
    size = tiny.rig.descriptor.config.page_size
    base = tuple(rng.randrange(tiny.shape.vocab) for _ in range(max(PAGES) * size + 1))
    params = SamplingParams(1, ignore_eos=True)
    lengths = lengths_near_pages(size)
    # Each once all before it have ended: nothing but the cache can have its pages, and nobody takes them away.
    specs = [RequestSpec(base, params), *(RequestSpec(base[:n], params, after=10**6) for n in lengths)]
    history = serve(tiny, Program(tuple(specs)), judge)
    judge(prefix_cache.check_found(history, {i + 1: (n - 1) // size * size for i, n in enumerate(lengths)}), history)


@pytest.mark.blink_property("queue-ordering")
def test_cancel_at_end(engine: Subject, judge: Judge, seed: int) -> None:
    """Requests whose next token is an end-of-sequence id, cancelled while the step that samples it runs.

    Catches: two terminal events where a cancel and an end meet, or none; a token after the end.
    """
    rng = random.Random(seed)
    specs = [ends_at(engine, rng, 20 + i, 3 + i % 3, cancel_after=2 + i % 3) for i in range(7)]
    plain = RequestSpec(specs[0].prompt, SamplingParams(12, ignore_eos=True))  # somebody finishes
    serve(engine, Program((plain, *specs)), judge)
