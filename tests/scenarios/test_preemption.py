"""Corpus rows S: state over preemption, cancel and reuse of slots; on the compiled scheduler, stepped by hand.

The harness compares every planned token, position and KV slot with what the request's context says.
"""

from __future__ import annotations

import pytest

from blink_core.abi.enums import FinishReason, LogKind, RequestState
from tests.scenarios.common import FINISH, alone, of, request, started, submit, submit_tokens
from verification.scheduler.harness import EOS, VOCAB, Harness, next_token


@pytest.mark.parametrize("prefix_cache", [0, 1])
def test_s02_preempted_one_token_before_the_end(prefix_cache: int) -> None:
    """S02. Catches: a token in flight that counts towards max_tokens and ends a request whose pages are gone.

    Condition: a request is preempted that has all its tokens but the last.
    """
    before_last = 0
    for most in range(5, 15):
        h, front = started(pages=2 + 6, max_rows=2, prefix_cache=prefix_cache)
        old, young = submit(front, 4, 19), submit(front, 4, most)
        seen = 0
        for _ in range(300):
            times = request(h, young).preemptions
            h.tick()
            now = request(h, young)
            seen += now.preemptions > times and len(young.tokens) == most - 1
            if old.terminal and young.terminal:
                break
        before_last += seen
        assert young.terminal == (FINISH, FinishReason.LENGTH, most)
        assert young.tokens == alone(young.prompt, most)
        h.settle()
    assert before_last > 0


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_s02_r08_a_step_s_result_is_not_the_next_owner_s(length: int) -> None:
    """S02, R08. Catches: the result of a step in flight that goes to whoever has the slot when it is read.

    Condition: the request is cancelled while its step runs, and its slot has a new one, waiting, when the result is
    read; contexts of less than a page and more.
    """
    h, front = started(slots=1, sq_entries=8)
    old = submit(front, length, 8)
    h.poll()
    assert h.boundary()
    assert h.in_flight[0].sample
    front.cancel(old)
    h.poll()
    front.consume()
    new = submit(front, length, 6)
    h.poll()
    assert (new.slot, request(h, new).state) == (old.slot, RequestState.WAITING)
    h.run_model()
    h.boundary()
    assert new.tokens == [], "a token before it was computed"
    h.run_model()
    h.settle()
    assert new.tokens == alone(new.prompt, 6)


def test_s03_recompute_replays_what_was_generated() -> None:
    """S03. Catches: a resume that computes the prompt alone, so that the answer starts anew or goes on from nothing.

    Condition: the request has more than 20 tokens when it is preempted, without a prefix cache that could mend it.
    """
    h, front = started(max_len=64, pages=2 + 16, max_rows=2, prefix_cache=0)
    old, young = submit(front, 3, 45), submit(front, 3, 45)
    h.settle()
    known = [int(e["b"]) - len(young.prompt) for e in of(young, h.entries(LogKind.ADMIT)) if int(e["c"]) > 0]
    assert known
    assert max(known) > 20
    assert [x.tokens for x in (old, young)] == [alone(x.prompt, 45) for x in (old, young)]


def test_s05_inputs_of_a_running_step_stay_as_they_are() -> None:
    """S05. Catches: inputs of the next step written while the step in flight still reads its own.

    Condition: while a step runs, requests come, cancels end rows of it, masks and a new epoch arrive, and more than one
    look is taken at each.
    """
    h, front = started(slots=4, max_rows=3, sq_entries=32)
    rows = [submit(front, 5, 6) for _ in range(2)]
    h.poll()
    assert h.boundary()
    before = plan_of(h)
    waiting = [submit(front, 7, 3) for _ in range(2)]
    h.poll()
    assert plan_of(h) == before, "changed by requests that came"
    for x in [*rows, waiting[0]]:
        front.cancel(x)
    h.poll()
    h.poll()
    assert all(x.terminal for x in rows)
    assert plan_of(h) == before, "changed by the end of its rows"
    front.attach()
    h.poll()
    assert h.snapshot().header["live"] == 0
    assert plan_of(h) == before, "changed by a new front end"
    h.run_model()
    h.boundary()
    assert front.acknowledged
    again = submit(front, 4, 3)
    h.settle()
    assert again.tokens == alone(again.prompt, 3)


def plan_of(h: Harness) -> tuple[bytes, ...]:
    """What the model reads while a step runs: the plan without its results, and the block tables of its rows."""
    parts = [h.plan[name].tobytes() for name in ("header", "rows", "token_ids", "positions", "kv_slots")]
    tables = h.state["block_tables"].reshape(h.config.max_rows, h.config.max_pages)
    used = [(int(r["row"]), int(r["n_pages"])) for r in h.plan["rows"][: h.n_rows]]
    return (*parts, *(tables[row, :count].tobytes() for row, count in used))


def test_s08_a_short_request_after_a_long_one_in_its_slot() -> None:
    """S08. Catches: tokens of the slot's former owner read behind or instead of the new one's.

    Condition: one slot; its former owner knew more tokens than the new one ever will.
    """
    h, front = started(slots=1, sq_entries=8)
    long = submit(front, 15, 8)
    h.settle()
    for length in (1, 3, 4, 5):
        short = submit(front, length, 4)
        assert short.slot == long.slot
        pool = h.state["tokens"].reshape(-1, h.config.max_len)[0]
        assert pool[:20].tolist() == long.known[:20] or length > 1, "nothing was left behind"
        h.settle()
        assert len(short.known) < len(long.known)
        assert short.tokens == alone(short.prompt, 4)


def test_s08_nothing_of_the_former_owner_is_left() -> None:
    """S08. Catches: counters of a slot's former owner that its next one begins with.

    Condition: the former owner was preempted, computed, shared pages and emitted; the next one has just been accepted.
    """
    h, front = started(slots=2, pages=2 + 6, max_rows=2)
    made = [submit(front, 4, 19) for _ in range(2)]
    h.settle()
    victims = [x for x in made if of(x, h.entries(LogKind.PREEMPT))]
    assert victims
    new = [submit(front, 3, 4) for _ in range(2)]
    h.poll()
    for x in new:
        q = request(h, x)
        assert q.state == RequestState.WAITING
        left = (q.computed, q.emitted, q.n_pages, q.published, q.cached, q.preemptions, q.paused, q.admitted)
        assert left == (0,) * 8
    h.settle()
    first = [of(x, h.entries(LogKind.ADMIT))[0] for x in new]
    assert [int(e["c"]) for e in first] == [0, 0]


def ends_at(count: int) -> list[int]:
    """A prompt whose `count`-th token is the end of sequence, and none before it."""
    for first in range(VOCAB):
        for second in range(VOCAB):
            tokens = alone([first, second], count)
            if tokens[-1] == EOS and EOS not in tokens[:-1]:
                return [first, second]
    raise AssertionError(f"no prompt of two tokens ends after {count}")


@pytest.mark.parametrize("cancel_first", [False, True])
@pytest.mark.parametrize("model_first", [False, True])
def test_k12_s09_cancelled_while_the_last_step_runs(cancel_first: bool, model_first: bool) -> None:
    """K12, S09. Catches: an abort and the end of sequence in one step that both end the request, or free its pages.

    Condition: the step that runs when the cancel arrives is the one whose result is the end of sequence.
    """
    h, front = started(prefix_cache=0)
    x = submit_tokens(front, ends_at(4), 10, eos=True)
    other = submit(front, 5, 9)
    for _ in range(4):
        h.tick()
    assert h.boundary()
    assert len(x.tokens) == 3
    assert next_token(x.known) == EOS, "the step in flight does not end it"
    if model_first:
        h.run_model()
    front.cancel(x)
    if cancel_first:
        h.poll()
    if not model_first:
        h.run_model()
    h.boundary()
    if h.in_flight:
        h.run_model()
    h.settle()
    expected = FinishReason.CANCELLED if cancel_first else FinishReason.EOS
    assert x.terminal == (FINISH, expected, 3 if cancel_first else 4)
    assert other.tokens == alone(other.prompt, 9)
    taken, freed = (sorted(int(e["a"]) for e in of(x, h.entries(k))) for k in (LogKind.PAGE_ALLOC, LogKind.PAGE_FREE))
    assert taken == freed, "each page of it is freed once"
    assert len(h.entries(LogKind.FINISH)) == 2


def test_s09_an_end_is_known_before_the_next_step_is_planned() -> None:
    """S09. Catches: a request that has ended computed for one step more, whose result then ends it a second time.

    Condition: a step without a pause follows the one that ended it, as another request goes on.
    """
    h, front = started(prefix_cache=0)
    x, other = submit_tokens(front, ends_at(3), 10, eos=True), submit(front, 5, 14)
    h.settle()
    assert x.terminal == (FINISH, FinishReason.EOS, 3)
    last = max(int(e["step"]) for e in of(x, h.entries(LogKind.PLAN_ROW)))
    following = [int(e["step"]) for e in of(other, h.entries(LogKind.PLAN_ROW))]
    assert last + 1 in following
    assert len(of(x, h.entries(LogKind.FINISH))) == 1


def test_r06_the_slot_s_next_request_outlives_its_predecessor_s_cancels() -> None:
    """R06. Catches: a cancel under way for a request that has ended, which ends the next owner of its slot.

    Condition: cancels of the old request are read after the new one was accepted in the same slot, in one poll with its
    submission and later ones.
    """
    h, front = started(slots=1, sq_entries=16)
    old = submit(front, 3, 3)
    h.settle()
    front.cancel(old)
    new = submit(front, 3, 8)
    front.cancel(old)
    assert (new.slot, new.generation) == (old.slot, old.generation + 1)
    h.poll()
    front.cancel(old)
    h.poll()
    assert int(h.state["rings"]["stale_cancels"][0]) == 3
    h.settle()
    assert new.terminal == (FINISH, FinishReason.LENGTH, 8)
