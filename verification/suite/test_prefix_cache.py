"""Requests that begin alike share KV pages: what is shared is right, and nobody can tell by the answers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from blink_core.abi.params import SamplingParams
from verification.certificate.recorder import Recorder
from verification.fixtures import RING, Judge, Subject
from verification.history import History
from verification.plugin_session import leave_out
from verification.program import Program, RequestSpec, Shape
from verification.properties import kv_conservation, kv_content, prefix_cache, queue_ordering, token_equivalence
from verification.suite.observation import Observation
from verification.suite.pressure import can_pace
from verification.suite.running import serve

pytestmark = [pytest.mark.capability("cpu", "shared-memory", "oracle")]

FOLLOWERS = 6
NEW = 8  # output tokens of each


def draw_shared(rng: random.Random, shape: Shape, *, sampled: bool, paced: bool = False) -> Program:
    """One request, and when it has ended, several whose prompts begin like its own, up to places about page boundaries.

    The last of them has the very same prompt: at most all but one of its tokens can be found. paced: each of its tokens
    waits for a grammar mask, which comes when the one before has been read, so that a look meets it at any pace.
    """
    pages = min(3, (shape.longest - NEW) // shape.page_size - 1)
    base = tuple(rng.randrange(shape.vocab) for _ in range(pages * shape.page_size))
    room = shape.longest - NEW
    requests = [RequestSpec(base, _params(rng, hot=False))]
    for follower in range(FOLLOWERS):
        if follower == FOLLOWERS - 1:
            prompt = base
        else:
            same = rng.randint(1, pages) * shape.page_size + rng.choice((-1, 0, 1))
            fresh = tuple(rng.randrange(shape.vocab) for _ in range(rng.randint(1, shape.page_size)))
            prompt = (base[:same] + fresh)[:room]
        # Its tokens and its end: one event more than the first request has tokens.
        requests.append(RequestSpec(prompt, _params(rng, hot=sampled and follower % 2 == 1), after=NEW + 1))
    if paced:
        requests[-1] = replace(requests[-1], mask_seed=rng.getrandbits(32))
    return Program(tuple(requests))


def _params(rng: random.Random, *, hot: bool) -> SamplingParams:
    return SamplingParams(NEW, temperature=1.0 if hot else 0.0, seed=rng.getrandbits(64), ignore_eos=True)


def without_cache(program: Program) -> Program:
    """The same requests, none of which reads the prefix cache or adds to it."""
    return Program(tuple(replace(r, params=replace(r.params, prefix_cache=False)) for r in program.requests))


MOST_PROGRAMS = 6


@pytest.fixture
def sharing(request: pytest.FixtureRequest, family: Subject) -> Subject:
    """The model families whose requests may share pages; others are filtered."""
    switch = family.oracles[1].rope_switch
    if switch is not None and family.max_len > switch:
        leave_out(
            request.node,
            f"no prefix cache: LongRoPE computes keys anew beyond {switch} tokens, here up to {family.max_len}",
        )
    return family


@pytest.mark.blink_property("kv-content")
def test_shared_pages(sharing: Subject, record: Recorder, judge: Judge, seed: int) -> None:
    """KV of requests that took pages from the prefix cache, in a pool where nothing but the cache could give them.

    Catches: a hit on other tokens or at another place; a page shared before it was computed, or changed afterwards.
    """
    rng = random.Random(seed)
    rows: list[kv_content.Gathered] = []
    for _ in range(MOST_PROGRAMS):
        program = draw_shared(rng, sharing.shape, sampled=False, paced=can_pace(sharing))
        observation, before = Observation(sharing), sharing.snapshot(log_from=2**63)
        history = serve(sharing, program, judge, every=3, observe=observation)
        after = sharing.snapshot(log_from=int(before.header["log_tail"]))
        for result in [*observation.results, kv_conservation.check_log(before, after)]:
            judge(result, history)
        hits = [row for boundary in observation.rows for row in boundary if row.found > 0]
        if hits:  # the looks may have missed whoever is not paced
            judge(kv_content.check_tokens(history, hits), history)
        judge(prefix_cache.check_hits(history, sharing.shape.page_size, expected=True), history)
        latest = {(row.slot, row.generation): row for row in hits}
        rows += latest.values()
        if len(rows) >= sharing.thresholds.evidence.shared_requests:
            break
    record.situation("kv-after-prefix-hit", bool(rows))
    parts = [kv_content.score(rows, *sharing.oracles)] if rows else []
    judge(kv_content.judge(parts, sharing.thresholds.kv))


@pytest.fixture
def exact(sharing: Subject) -> Iterator[Subject]:
    """An engine with that model in batch-invariant mode: a token's logits depend on its context alone."""
    with sharing.start(batch_invariant=True) as engine:
        yield engine


def _run(exact: Subject, sharing: Subject, program: Program, judge: Judge) -> tuple[History, prefix_cache.Rows]:
    """A program's history and the logits behind each of its tokens."""
    capture = exact.rig.descriptor.capture
    assert capture is not None
    judge.case(program)
    history = exact.run(program)
    judge(queue_ordering.check_history(history, eos_ids=sharing.eos_ids, max_len=sharing.max_len), history)
    vocab = sharing.oracles[1].vocab_size
    records = token_equivalence.read_window(Path(capture), vocab, history.capture)
    rows, result = token_equivalence.index_capture(records, vocab)
    judge(result, history)
    judge(token_equivalence.check_capture(history, rows), history)
    return history, rows


@pytest.mark.blink_property("token-equivalence", id="prefix_cache_on_and_off")
def test_on_and_off(sharing: Subject, exact: Subject, record: Recorder, judge: Judge, seed: int) -> None:
    """The same requests with and without the prefix cache: every token and every bit of its logits is the same.

    Catches: a shared page that is nearly right, a position that is counted from the hit, a hit that changes a draw.
    """
    rng = random.Random(seed)
    for _ in range(2):
        program = draw_shared(rng, sharing.shape, sampled=True)
        off, off_rows = _run(exact, sharing, without_cache(program), judge)
        judge(prefix_cache.check_hits(off, sharing.shape.page_size, expected=False), off)
        on, on_rows = _run(exact, sharing, program, judge)
        judge(prefix_cache.check_hits(on, sharing.shape.page_size, expected=True), on)
        judge(prefix_cache.check_same(on, on_rows, off, off_rows), on, off)


@pytest.mark.blink_property("kv-conservation")
def test_opt_out(tiny: Subject, judge: Judge, seed: int) -> None:
    """Requests that ask for no prefix cache, among others that share theirs.

    Catches: the flag that keeps a request's content out of the cache, ignored one way or the other.
    """
    program = draw_shared(random.Random(seed), tiny.shape, sampled=False)
    requests = [
        replace(r, params=replace(r.params, prefix_cache=False)) if at % 2 else r
        for at, r in enumerate(program.requests)
    ]
    program = Program(tuple(requests))
    before = tiny.snapshot(log_from=2**63)
    history = serve(tiny, program, judge)
    after = tiny.snapshot(log_from=int(before.header["log_tail"]))
    judge(kv_conservation.check_log(before, after), history)
    private = {(s.slot, s.generation) for s in history.submitted if s.request % 2}
    judge(prefix_cache.check_opt_out(after.log[after.log["ring"] == RING], private), history)
    judge(prefix_cache.check_hits(history, tiny.shape.page_size, expected=True), history)
