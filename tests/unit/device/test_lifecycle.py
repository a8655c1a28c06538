"""Named scenarios of admission, preemption, cancel and delivery on the compiled scheduler, stepped by hand."""

from __future__ import annotations

import numpy as np
import pytest

from blink_core.abi.enums import EngineState, ErrorReason, FinishReason, LogKind, RequestState
from tests.unit.device.scenarios import ERROR, FINISH, request, started, submit
from verification.scheduler import cache_invariants, invariants
from verification.scheduler.front_end import FrontEnd
from verification.scheduler.harness import EOS, Harness, next_token, order_of_acceptance, small_config

# ---- admission


def test_request_that_never_fits() -> None:
    """Catches: Q01, a request larger than the pool that is retried for ever and blocks everyone behind it."""
    h, front = started(pages=2 + 3, slots=8, sq_entries=32)
    big = submit(front, 10, 10)  # 19 tokens of KV, 12 there are
    big.refusal = ErrorReason.NEVER_FITS
    small = [submit(front, 3, 2, first=i) for i in range(5)]
    h.poll()
    assert big.terminal == (ERROR, ErrorReason.NEVER_FITS, 0)
    h.settle()
    assert all(x.terminal == (FINISH, FinishReason.LENGTH, 2) for x in small)


def test_largest_request_that_fits() -> None:
    """Catches: the refusal of a request whose last token needs no KV, or a stall at the last page."""
    h, front = started(pages=2 + 3)
    x = submit(front, 10, 3)  # KV of 12 tokens: the last token's is never needed
    h.settle()
    assert x.terminal == (FINISH, FinishReason.LENGTH, 3)


@pytest.mark.parametrize(
    ("length", "max_tokens", "end"),
    [
        (23, 1, (FINISH, FinishReason.LENGTH, 1)),
        (23, 24, (FINISH, FinishReason.CONTEXT, 1)),
        (22, 24, (FINISH, FinishReason.CONTEXT, 2)),
        (24, 1, (ERROR, ErrorReason.BAD_LENGTH, 0)),
        (240, 1, (ERROR, ErrorReason.BAD_LENGTH, 0)),
        (0, 1, (ERROR, ErrorReason.BAD_LENGTH, 0)),
        (1, 0, (ERROR, ErrorReason.BAD_LENGTH, 0)),
        (1, 25, (ERROR, ErrorReason.BAD_LENGTH, 0)),
        (1, 2**32 - 1, (ERROR, ErrorReason.BAD_LENGTH, 0)),
    ],
)
def test_limits_of_length(length: int, max_tokens: int, end: tuple[int, int, int]) -> None:
    """Catches: B01 and Q11, a length at or over a limit that hangs, overruns the token pool or gets no answer."""
    h, front = started()
    x = submit(front, length, max_tokens)
    x.refusal = ErrorReason.BAD_LENGTH if end[0] == ERROR else None
    other = submit(front, 2, 2)
    h.settle()
    assert x.terminal == end
    assert other.terminal == (FINISH, FinishReason.LENGTH, 2)


def test_admission_follows_the_submission_queue() -> None:
    """Catches: ADMIT_YOUNGEST_FIRST and any other disorder between submission queue, age and first admission."""
    h, front = started(max_rows=1, slots=6, sq_entries=32)
    made = [submit(front, 2, 2, first=i) for i in range(6)]
    h.settle()
    accepted = order_of_acceptance(h.entries(LogKind.ACCEPT))
    assert accepted == [(0, x.sq_index) for x in made]
    assert [int(e["slot"]) for e in h.entries(LogKind.ADMIT)] == [x.slot for x in made]


def test_rings_take_turns() -> None:
    """Catches: one ring's backlog that is admitted before another ring's first request."""
    h = Harness(small_config(rings=3, max_rows=1, quantum=4))
    h.attach()
    for front in h.fronts:
        for i in range(3):
            submit(front, 2, 2, first=i)
    h.settle()
    assert [int(e["ring"]) for e in h.entries(LogKind.ADMIT)] == [0, 1, 2] * 3


def test_decodes_go_before_prefill() -> None:
    """Catches: Q10, a long prefill in an early row that eats the budget of a decode in a late one."""
    h = Harness(small_config(rings=2, slots=1, max_rows=2, cq_entries=4, sq_entries=4, pages=2 + 7, token_budget=3))
    h.attach()
    slow, quick = h.fronts
    slow.withhold = True
    old = submit(slow, 17, 7)
    for _ in range(12):
        h.tick()
    young = submit(quick, 12, 12, first=2)  # the elder gives way: it is paused
    for _ in range(6):
        h.tick()
    assert request(h, old).preemptions == 1
    quick.cancel(young)
    h.tick()
    late = submit(quick, 2, 10, first=3)
    h.tick()
    h.tick()
    h.tick()
    assert late.tokens
    slow.withhold = False
    for _ in range(3):  # consumed, credit read, admitted
        h.tick()
    assert request(h, old).state == RequestState.RUNNING
    for _ in range(4):
        before, computed = len(late.tokens), request(h, old).computed
        h.tick()
        assert len(late.tokens) == before + 1
        assert 0 < request(h, old).computed - computed < 3
    h.settle()


# ---- preemption


def test_resume_feeds_prompt_and_output_again() -> None:
    """Catches: S03, R12 and S08: recompute of the prompt alone, a stale or shifted token, a token emitted twice."""
    h, front = started(pages=2 + 5, max_rows=2, token_budget=5)
    old, young = submit(front, 4, 14), submit(front, 4, 14, first=2)
    h.settle()
    assert int(h.state["header"]["preemptions"][0]) > 0
    for x in (old, young):  # what the model gives when the request runs alone
        alone: list[int] = []
        for _ in range(14):
            alone.append(next_token(x.prompt + alone))
        assert x.tokens == alone
    assert {int(e["slot"]) for e in h.entries(LogKind.PREEMPT)} == {young.slot}, "the elder was preempted"
    resumed = [e for e in h.entries(LogKind.ADMIT) if int(e["c"]) > 0]
    assert any(int(e["b"]) > len(young.prompt) for e in resumed), "no resume after a first output token"


def test_preempted_rows_leave_the_running_list() -> None:
    """Catches: Q05, preempted rows that stay in the running list and starve the other decodes."""
    h, front = started(slots=4, max_rows=4, pages=2 + 6, token_budget=8)
    made = [submit(front, 4, 9, first=i) for i in range(4)]
    h.settle()
    assert int(h.state["header"]["preemptions"][0]) > 0
    assert all(x.terminal == (FINISH, FinishReason.LENGTH, 9) for x in made)


def test_paused_rows_give_way_first() -> None:
    """Catches: a slow consumer's rows that keep their pages while another ring's rows are preempted for want of any."""
    h = Harness(small_config(rings=2, slots=1, max_rows=2, cq_entries=4, sq_entries=4, pages=2 + 5, paused_limit=2))
    h.attach()
    slow, quick = h.fronts
    paused = submit(slow, 4, 15)
    slow.withhold = True
    for _ in range(6):
        h.tick()
    assert request(h, paused).paused >= 2
    x = submit(quick, 4, 12, first=2)
    h.settle_only(quick)
    assert x.terminal == (FINISH, FinishReason.LENGTH, 12)
    assert {int(e["ring"]) for e in h.entries(LogKind.PREEMPT)} == {0}
    slow.withhold = False
    h.settle()
    assert paused.terminal == (FINISH, FinishReason.LENGTH, 15)


@pytest.mark.parametrize(("rows", "pages"), [(1, 12), (2, 5)])
def test_paused_rows_do_not_shut_out_others(rows: int, pages: int) -> None:
    """Catches: rows (1) or pages (2) held for ever by a front end that stopped reading, so that other rings starve."""
    h = Harness(
        small_config(rings=2, slots=1, max_rows=rows, cq_entries=4, sq_entries=4, pages=2 + pages, paused_limit=2)
    )
    h.attach()
    slow, quick = h.fronts
    slow.withhold = True
    paused = submit(slow, 16, 4)
    for _ in range(8):
        h.tick()
    x = submit(quick, 12, 4, first=2)
    h.settle_only(quick)
    assert x.terminal == (FINISH, FinishReason.LENGTH, 4)
    assert paused.terminal is None
    slow.withhold = False
    h.settle()
    assert paused.terminal == (FINISH, FinishReason.LENGTH, 4)


def test_slow_consumer_pauses_its_own_ring_only() -> None:
    """Catches: credits that are counted over all rings, or a full completion queue that is overwritten."""
    h = Harness(small_config(rings=2, slots=2, max_rows=4, cq_entries=8, sq_entries=8))
    h.attach()
    slow, quick = h.fronts
    slow.withhold = True
    held = [submit(slow, 3, 10, first=i) for i in range(2)]
    for i in range(6):
        x = submit(quick, 3, 6, first=i)
        h.settle_only(quick)
        assert x.terminal == (FINISH, FinishReason.LENGTH, 6)
    assert sum(len(x.tokens) for x in held) <= h.config.cq_entries - h.config.slots
    slow.withhold = False
    h.settle()
    assert all(x.terminal == (FINISH, FinishReason.LENGTH, 10) for x in held)


def test_paused_decodes_keep_no_token_of_the_budget() -> None:
    """Catches: a prompt read a token a step, because another ring's rows, which nobody reads, keep the rest of the
    budget."""
    h = Harness(small_config(rings=2, slots=3, cq_entries=8, sq_entries=8, max_rows=4, token_budget=4, paused_limit=99))
    h.attach()
    slow, quick = h.fronts
    slow.withhold = True
    held = [slow.submit([1 + i, 2], 9, flags=1, priority=1) for i in range(3)]
    for _ in range(8):
        h.tick()
    assert all(x and request(h, x).paused > 0 for x in held)
    x = submit(quick, 16, 2)
    h.poll()
    for _ in range(4):
        assert h.boundary()
        h.run_model()
        h.poll()
    h.boundary()
    assert len(x.tokens) == 1
    h.run_model()
    slow.withhold = False
    h.settle()


def test_cancels_pass_when_credits_are_short() -> None:
    """Catches: a submission queue that is not read while credits are short, so that cancels starve."""
    h, front = started(slots=2, max_rows=2, cq_entries=4, sq_entries=8)
    front.withhold = True
    held = [submit(front, 3, 10), submit(front, 3, 10, first=2)]
    for _ in range(6):
        h.tick()
    for x in held:
        front.cancel(x)
    h.tick()
    assert [x.terminal and x.terminal[:2] for x in held] == [(FINISH, FinishReason.CANCELLED)] * 2
    front.withhold = False
    h.settle()


# ---- cancel, ends, faults of the model


def test_stale_cancel_after_slot_reuse() -> None:
    """Catches: R06, a cancel of the slot's former request that ends the new one."""
    h, front = started(slots=1, sq_entries=8)
    old = submit(front, 3, 8)
    h.tick()
    h.tick()
    front.cancel(old)
    h.tick()
    assert old.terminal is not None
    new = submit(front, 3, 8, first=2)
    assert new.slot == old.slot
    front.cancel(old)  # arrives after the reuse
    h.settle()
    assert new.terminal == (FINISH, FinishReason.LENGTH, 8)
    assert int(h.state["rings"]["stale_cancels"][0]) == 1


@pytest.mark.parametrize("model_first", [True, False])
def test_cancel_in_the_step_that_ends(model_first: bool) -> None:
    """Catches: K12 and S02, a cancel and a natural end in one step that finish a request twice or free pages twice."""
    h, front = started()
    x = submit(front, 4, 1)
    h.poll()
    assert h.boundary()
    if model_first:
        h.run_model()
    front.cancel(x)
    h.poll()
    assert x.terminal == (FINISH, FinishReason.CANCELLED, 0)
    assert h.snapshot().quarantine, "pages of a row in flight were freed at once"
    if not model_first:
        h.run_model()
    h.settle()
    late = submit(front, 4, 1, first=2)
    h.poll()
    h.boundary()
    h.run_model()
    h.boundary()  # the end is committed before the cancel is read
    front.cancel(late)
    h.settle()
    assert late.terminal == (FINISH, FinishReason.LENGTH, 1)


def test_slot_is_reused_while_the_old_step_runs() -> None:
    """Catches: S09 and K06, a cancelled row's result given to the slot's next owner, or its pages reused at once."""
    h, front = started(slots=1, sq_entries=8)
    old = submit(front, 4, 8)
    h.poll()
    h.boundary()
    front.cancel(old)
    h.poll()
    front.consume()
    new = submit(front, 4, 8, first=5)
    h.poll()
    assert request(h, new).state == RequestState.WAITING
    h.run_model()
    h.settle()
    assert new.terminal == (FINISH, FinishReason.LENGTH, 8)


def test_end_of_sequence_on_a_page_boundary() -> None:
    """Catches: an end exactly where a page fills, with a page too many or too few released."""
    for length in range(1, 14):
        h, front = started(page_size=4)
        x = submit(front, length, 10, eos=True, first=length)
        h.settle()
        assert x.terminal is not None
        ended = x.tokens[-1] == EOS
        assert x.terminal[1] == (FinishReason.EOS if ended else FinishReason.LENGTH)


@pytest.mark.parametrize(("least", "ends"), [(0, 1), (1, None), (2, None)])
def test_stop_ids_count_after_min_tokens(least: int, ends: int | None) -> None:
    """Catches: a stop id that ends a request before min_tokens, or one token later than it may."""
    h, front = started()
    first = next_token([1, 2, 3])
    x = front.submit([1, 2, 3], 6, flags=1, stop_ids=(first,), min_tokens=least)
    h.settle()
    assert x is not None
    later = [i + 1 for i, token in enumerate(x.tokens) if token == first and i + 1 > least]
    assert x.terminal is not None
    assert x.terminal[2] == (ends or min([*later, 6]))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("nan", ErrorReason.NAN_LOGITS), ("range", ErrorReason.MODEL_ERROR), ("unwritten", ErrorReason.MODEL_ERROR)],
)
def test_bad_row_ends_its_request_only(fault: str, reason: ErrorReason) -> None:
    """Catches: a NaN row, an id outside the vocabulary or an earlier step's result that reaches a client as a token."""
    h, front = started()
    bad, good = submit(front, 3, 6), submit(front, 3, 6, first=2)
    h.tick()
    h.tick()
    assert h.boundary()
    h.run_model({0: fault})
    h.settle()
    assert bad.terminal == (ERROR, reason, 1)
    assert good.terminal == (FINISH, FinishReason.LENGTH, 6)


def test_failed_step_ends_its_rows_and_the_engine_goes_on() -> None:
    """Catches: a model step that raises and leaves requests without an end, or takes the engine with it."""
    h, front = started(max_rows=2)
    hit = [submit(front, 3, 6, first=i) for i in range(2)]
    behind = submit(front, 3, 6, first=4)
    h.tick()
    assert h.boundary()
    h.run_model(failed=True)
    h.settle()
    assert [x.terminal for x in hit] == [(ERROR, ErrorReason.MODEL_ERROR, 0)] * 2
    assert behind.terminal == (FINISH, FinishReason.LENGTH, 6)
    assert int(h.control["status"]["failures"][0]) == 1


@pytest.mark.parametrize("prefix_cache", [0, 1])
def test_ten_thousand_short_requests(prefix_cache: int) -> None:
    """Catches: Q14 and K02, pages, rows, list entries or counters that a request leaves behind."""
    fields = {"log_level": 0, "slots": 8, "sq_entries": 32, "max_rows": 8, "prefix_cache": prefix_cache}
    h = Harness(small_config(**fields), checks=False)
    h.attach()
    front, rng = h.fronts[0], np.random.default_rng(7)
    done = 0
    while done < 10_000:
        while done < 10_000 and submit_some(front, rng):
            done += 1
        h.tick()
        if done % 1000 < 8:
            invariants.check_all(h.snapshot())
            cache_invariants.check_cache(h.snapshot())
    h.settle()
    end = h.snapshot()
    assert len(h.history) == 10_000
    assert end.header["arrivals"] == end.header["admissions"] - end.header["preemptions"] == 10_000


def submit_some(front: FrontEnd, rng: np.random.Generator) -> bool:
    length, most = rng.integers(1, 6, 2).tolist()
    return front.submit([1 + length] * length, most) is not None


# ---- epochs, drain, stop


def test_new_epoch_drops_the_predecessors_requests() -> None:
    """Catches: pages of a dead front end that stay owned, or its events mixed into its successor's queue."""
    h, front = started()
    old = [submit(front, 4, 8, first=i) for i in range(4)]
    for _ in range(3):
        h.tick()
    h.boundary()
    front.attach()
    h.poll()
    assert h.snapshot().header["live"] == 0
    assert h.snapshot().quarantine
    early = front.acknowledged
    h.run_model()
    h.boundary()
    assert front.acknowledged
    assert not early, "acknowledged while the predecessor's pages are in quarantine"
    assert all(x.terminal is None for x in old)
    new = submit(front, 4, 8)
    h.settle()
    assert new.terminal == (FINISH, FinishReason.LENGTH, 8)
    assert int(h.state["rings"]["bad_heads"][0]) == 0, "attaching counts as a bad head"


def test_drain_finishes_the_living_and_refuses_the_new() -> None:
    """Catches: a drain that drops live requests, takes new ones, or never reports its end."""
    h, front = started()
    live = submit(front, 4, 6)
    h.tick()
    h.control["control"]["drain_request"] = 1
    h.tick()
    late = submit(front, 4, 6)
    h.settle()
    assert live.terminal == (FINISH, FinishReason.LENGTH, 6)
    assert late.terminal == (ERROR, ErrorReason.DRAINING, 0)
    assert int(h.control["status"]["state"][0]) == EngineState.DRAINED
    assert int(h.rings[0]["gpu"]["state"][0]) == EngineState.DRAINED


def test_stop_ends_everything_that_was_published() -> None:
    """Catches: submissions that lie in the queue when the engine stops and never get a terminal event."""
    h, front = started()
    live = submit(front, 4, 6)
    h.tick()
    unread = submit(front, 4, 6)
    h.control["control"]["stop_request"] = 1
    h.boundary()
    assert live.terminal == unread.terminal == (ERROR, ErrorReason.DRAINING, 0)
    assert int(h.control["status"]["state"][0]) == EngineState.STOPPED
    assert int(h.rings[0]["gpu"]["cq_tail"][0]) == int(h.state["rings"]["cq_tail"][0]), "events are not published"
    h.finish()
