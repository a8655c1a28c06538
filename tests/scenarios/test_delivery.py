"""Corpus rows R: lost, doubled and reordered tokens; on the compiled scheduler, stepped by hand.

The harness holds every event to the model of the whole context as it is written: index, token, order, one end.
"""

from __future__ import annotations

from collections import Counter

import pytest

from blink_core.abi.enums import EventKind, FinishReason, LogKind
from tests.scenarios.common import FINISH, alone, of, preemptions, request, started, submit
from verification.scheduler.front_end import FrontEnd
from verification.scheduler.harness import Harness, small_config


def taken_at_once(front: FrontEnd) -> list[int]:
    """Consumes what is published: how many TOKEN events of each slot there were, most first."""
    tail, size = int(front.views["gpu"]["cq_tail"][0]), front.config.cq_entries
    events = [front.views["cq"][at % size] for at in range(front.cq_head, tail)]
    slots = [int(e["slot"]) for e in events if e["kind"] == EventKind.TOKEN]
    front.consume()
    return sorted((slots.count(slot) for slot in set(slots)), reverse=True)


@pytest.mark.parametrize("interval", [1, 2, 7])
def test_r02_r05_a_reader_that_comes_every_so_many_steps(interval: int) -> None:
    """R02, R05. Catches: only the last of several tokens that lie ready handed on; those in between dropped.

    Condition: one look at the ring finds as many tokens of one request as steps have passed since the last. Four rows
    run together; some have alternatives, in odd and even numbers, between their tokens.
    """
    h, front = started(cq_entries=128, max_rows=4)
    made = [submit(front, 3, 15, logprobs=count) for count in (0, 0, 2, 3)]
    front.withhold, most = True, 0
    for step in range(1, 200):
        h.tick()
        if step % interval == 0:
            front.withhold = False
            most = max([most, *taken_at_once(front)])
            front.withhold = True
        if all(x.terminal for x in made):
            break
    assert most == interval
    assert all(x.tokens == alone(x.prompt, 15) for x in made)
    front.withhold = False
    h.settle()


def test_r03_each_event_is_one_token() -> None:
    """R03. Catches: everything so far written again with each token, which a reader then counts as new.

    Condition: 32 tokens, so that a cumulative event would show from the second token on; some after a preemption.
    """
    h, front = started(max_len=48, pages=2 + 12, max_rows=2, cq_entries=128)
    made = [submit(front, 3, 32) for _ in range(2)]
    h.settle()
    assert preemptions(h) > 0
    for x in made:
        assert x.terminal == (FINISH, FinishReason.LENGTH, 32)
        events = [e for e in front.views["cq"] if e["kind"] == EventKind.TOKEN and e["slot"] == x.slot]
        assert len(of(x, h.entries(LogKind.TOKEN))) == len(x.tokens) == len(events) == 32
        assert sorted(int(e["index"]) for e in events) == list(range(32))


@pytest.mark.parametrize("prefix_cache", [0, 1])
def test_r08_r09_preempted_at_the_boundary_that_emits(prefix_cache: int) -> None:
    """R08, R09. Catches: the token of the step that a preemption follows emitted again after the resume, or dropped.

    Condition: one boundary commits a request's token and preempts that request, more than once. Every row that was
    launched to be sampled gives one token: nobody is cancelled, and nobody preempted while a step runs.
    """
    h, front = started(slots=4, max_rows=4, pages=2 + 8, token_budget=8, prefix_cache=prefix_cache)
    made = [submit(front, 4, 16) for _ in range(4)]
    both, sampled = 0, Counter[int]()
    for _ in range(200):
        emitted = [len(x.tokens) for x in made]
        rows = [request(h, x).preemptions for x in made]
        h.boundary()
        for x, tokens, times in zip(made, emitted, rows, strict=True):
            both += len(x.tokens) > tokens and request(h, x).preemptions > times
        if h.in_flight:
            sampled.update(p.submission.slot for p in h.in_flight if p.sample)
            h.run_model()
        h.poll()
        front.consume()
        if all(x.terminal for x in made):
            break
    assert both >= 2
    assert all(x.tokens == alone(x.prompt, 16) for x in made)
    assert [sampled[x.slot] for x in made] == [len(x.tokens) for x in made], "a token was dropped, and sampled again"
    h.settle()


def test_r11_counts_of_events_in_flight_never_underflow() -> None:
    """R11. Catches: the count of results to come set to 0 by a preemption, and lowered again by the late result.

    Condition: preemptions, cancels and failed steps while results are counted as coming, with so few credits that the
    count decides.
    """
    h = Harness(small_config(rings=2, slots=3, max_rows=6, cq_entries=16, sq_entries=16, pages=2 + 9))
    h.attach()
    in_flight, cancelled = 0, 0
    for step in range(120):
        for front in h.fronts:
            while front.free:
                submit(front, 3 + step % 4, 8)
        h.poll()
        launched = h.boundary()
        planned = [int(r["planned"]) for r in h.state["rings"]]
        in_flight += launched and sum(planned) > 0
        assert max(planned) <= 3
        victim = next(iter(h.fronts[step % 2].live.values()), None)
        if launched and step % 5 == 0 and victim is not None:
            h.fronts[step % 2].cancel(victim)
            cancelled += 1
        h.poll()  # the cancel comes while the step runs
        if launched:
            h.run_model(failed=step % 11 == 10)
        h.boundary()
        expected = [0, 0]
        for p in h.in_flight:
            expected[p.submission.ring] += p.sample  # one event each: none has alternatives
        assert [int(r["planned"]) for r in h.state["rings"]] == expected
        if h.in_flight:
            h.run_model()
        h.poll()
        for front in h.fronts:
            front.consume()
    assert in_flight > 50
    assert cancelled > 10
    assert preemptions(h) > 5
    h.settle()
    assert [int(r["planned"]) for r in h.state["rings"]] == [0, 0]
