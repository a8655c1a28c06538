"""Grammar masks and LOGPROBS events, stepped by hand (design section 3)."""

from __future__ import annotations

from typing import Any

import pytest

from blink_core.abi.enums import EngineState, ErrorReason, EventKind, FinishReason, LogKind, SlotFlag
from tests.unit.device.scenarios import ERROR, FINISH, request, started
from verification.scheduler.front_end import FrontEnd, Submission
from verification.scheduler.harness import Harness, small_config

MASKED = SlotFlag.IGNORE_EOS | SlotFlag.MASKED


def submit(front: FrontEnd, length: int, max_tokens: int, *, flags: int = MASKED, **fields: Any) -> Submission:
    made = front.submit([1 + (2 * i) % 30 for i in range(length)], max_tokens, flags=flags, **fields)
    assert made is not None
    return made


def step(h: Harness) -> bool:
    """A tick that posts no masks."""
    launched = h.boundary()
    if launched:
        h.run_model()
    h.poll()
    for front in h.fronts:
        front.consume()
    return launched


def test_row_without_mask_waits_and_others_go_on() -> None:
    """Catches: a token chosen without its mask, or a row without mask that holds up the step."""
    h, front = started(token_budget=12)
    masked, free = submit(front, 5, 4), submit(front, 5, 8, flags=1)
    for _ in range(5):
        step(h)
    assert masked.tokens == []
    assert request(h, masked).computed == 4, "a prefill stops at the token that needs the mask"
    assert len(free.tokens) >= 3
    for count in range(1, 5):
        front.post_mask(masked)
        h.poll()
        step(h)
        h.boundary()
        assert len(masked.tokens) == count
        for _ in range(2):
            if h.in_flight:
                h.run_model()
            step(h)
        assert len(masked.tokens) == count, "one mask, two tokens"
    h.settle()
    assert masked.terminal == (FINISH, FinishReason.LENGTH, 4)


@pytest.mark.parametrize("what", ["torn", "early", "late", "generation", "slot"])
def test_mask_that_is_not_this_one(what: str) -> None:
    """Catches: torn bits, the mask of another index, or that of another request with the same mailbox."""
    h, front = started(masks=1)
    x = submit(front, 3, 3)
    step(h)
    index = {"early": 1, "late": 0}.get(what)
    if what == "late":
        for _ in range(3):
            h.tick()
        assert len(x.tokens) == 1
    before = len(x.tokens)
    front.post_mask(x, index=index, torn=what == "torn")
    ready = front.views["mask_boxes"]["ready"]
    if what == "generation":
        ready[0] += 1 << 40
    if what == "slot":
        ready[0] += 1 << 28
    for _ in range(4):
        step(h)
    assert len(x.tokens) == before
    assert (int(h.state["rings"]["bad_masks"][0]) > 0) == (what == "torn")
    h.settle()
    assert x.terminal == (FINISH, FinishReason.LENGTH, 3)


def test_mailbox_passes_to_another_slot_with_the_same_generation() -> None:
    """Catches: a ready word without the slot: what the last request left there is taken for the next one's mask."""
    h, front = started(masks=1)
    first = submit(front, 3, 1)
    h.settle()
    second = submit(front, 4, 1)
    assert (first.slot, first.generation) != (second.slot, second.generation)
    assert first.generation == second.generation
    for _ in range(4):
        step(h)
    assert second.tokens == []
    h.settle()
    assert second.terminal == (FINISH, FinishReason.LENGTH, 1)


def test_masks_come_again_after_preemption() -> None:
    """Catches: the mask of a preempted row lost, or another row's used in its place, when it is admitted again."""
    h, front = started(pages=2 + 6, max_rows=3, token_budget=8)
    made = [front.submit([1 + i, 2, 3, 4], 12, flags=MASKED) for i in range(3)]
    h.settle()
    assert int(h.state["header"]["preemptions"][0]) > 0
    assert [x and x.terminal for x in made] == [(FINISH, FinishReason.LENGTH, 12)] * 3


def test_rows_without_mask_give_way_in_the_end() -> None:
    """Catches: rows that wait for a mask for ever and keep everybody else's pages."""
    h = Harness(small_config(rings=2, slots=1, max_rows=1, paused_limit=3))
    h.attach()
    stuck = submit(h.fronts[0], 4, 4)
    for _ in range(6):
        step(h)
    other = submit(h.fronts[1], 3, 4, flags=1)
    for _ in range(12):
        step(h)
    assert other.terminal == (FINISH, FinishReason.LENGTH, 4)
    h.settle()
    assert stuck.terminal == (FINISH, FinishReason.LENGTH, 4)


def late(boundaries: int) -> tuple[int, int]:
    """Steps and preemptions of four masked requests that outgrow the pool; at each fifth token their front end does
    nothing for so many boundaries."""
    fields = {"max_rows": 6, "token_budget": 11, "masks": 4, "max_len": 40, "cq_entries": 64}
    h, front = started(pages=2 + 16, **fields)
    made = [front.submit([1 + (7 * i + 3 * j * (i + 1)) % 30 for j in range(12)], 8, flags=MASKED) for i in range(4)]
    steps = heard = 0
    for _ in range(400):
        h.post_masks()
        steps += step(h)
        if len(front.live) == 0:
            break
        if (tokens := sum(len(x.tokens) for x in made if x)) >= heard + 5:
            heard = tokens
            for _ in range(boundaries):
                if h.boundary():
                    h.run_model()
                    steps += 1
                h.poll()
    assert [x and x.terminal for x in made] == [(FINISH, FinishReason.LENGTH, 8)] * 4
    return steps, int(h.state["header"]["preemptions"][0])


def test_late_masks_make_no_work() -> None:
    """Catches: rows without masks that make room for each other, compute all they had again and give way again, as
    often as the masks are late; so does a page pool that holds three of four."""
    steps, preemptions = late(40)
    assert late(160) == (steps, preemptions), "what is done hangs on how late the masks are"
    assert preemptions > 0
    assert steps <= 60


def asleep(**fields: Any) -> tuple[Harness, FrontEnd, Submission]:
    """A request that gave the only row to another one, and has no mask."""
    h, front = started(max_rows=1, paused_limit=2, **fields)
    sleeper, other = submit(front, 4, 4), submit(front, 3, 2, flags=1)
    for _ in range(12):
        step(h)
    assert other.terminal == (FINISH, FinishReason.LENGTH, 2)
    return h, front, sleeper


def test_who_gave_way_sleeps_until_its_mask_is_there() -> None:
    """Catches: a request admitted again before its mask is there, or not when it is; one behind it in its ring that
    waits for that mask too; a mask that counts though it is torn, an old one's or another's."""
    h, front, sleeper = asleep()
    admissions = int(h.state["header"]["admissions"][0])
    assert request(h, sleeper).row == -1
    front.post_mask(sleeper, index=1)
    step(h)
    front.post_mask(sleeper, torn=True)
    step(h)
    assert int(h.state["rings"]["bad_masks"][0]) == 1
    younger = submit(front, 5, 2, flags=1)
    for _ in range(6):
        step(h)
    assert younger.terminal == (FINISH, FinishReason.LENGTH, 2)
    assert int(h.state["header"]["admissions"][0]) == admissions + 1
    front.post_mask(sleeper)
    step(h)
    step(h)
    assert request(h, sleeper).row >= 0
    h.settle()
    assert sleeper.terminal == (FINISH, FinishReason.LENGTH, 4)


@pytest.mark.parametrize("end", ["cancel", "lease", "deadline", "drain"])
def test_a_sleeper_ends_like_any_other(end: str) -> None:
    """Catches: a sleeping request that no cancel, lease or deadline reaches, or that a drain does not wait for."""
    h, front, sleeper = asleep(lease_us=40 if end == "lease" else 0)
    if end == "cancel":
        front.cancel(sleeper)
        step(h)
        assert sleeper.terminal == (FINISH, FinishReason.CANCELLED, 0)
    elif end == "lease":
        for _ in range(40):
            step(h)
        assert sleeper.terminal == (ERROR, ErrorReason.LEASE_LOST, 0)
    elif end == "deadline":
        doomed = submit(front, 4, 4, deadline_us=60)
        for _ in range(60):
            step(h)
        assert doomed.terminal == (ERROR, ErrorReason.DEADLINE, 0)
    else:
        h.control["control"]["drain_request"] = 1
        for _ in range(20):
            step(h)
        assert int(h.state["header"]["state"][0]) == EngineState.DRAINING
        front.post_mask(sleeper)
        h.settle()
        assert sleeper.terminal == (FINISH, FinishReason.LENGTH, 4)
        assert int(h.state["header"]["state"][0]) == EngineState.DRAINED


def test_nobody_gives_way_to_a_prompt_without_its_mask() -> None:
    """Catches: a row that cannot sample yet and makes others give up pages for its prompt; one that does not take them
    when its mask has come."""
    h, front = started(pages=2 + 6, max_rows=3, token_budget=3, prefix_cache=0, paused_limit=100)
    speak = [submit(front, 1, 14, flags=1, priority=1)]
    for _ in range(4):
        step(h)
    speak.append(submit(front, 1, 14, flags=1, priority=1))
    for _ in range(3):
        step(h)
    waits = submit(front, 8, 2)
    while request(h, waits).paused == 0:
        assert request(h, waits).computed < 7, "no page was wanted"
        step(h)
    assert int(h.state["header"]["free_pages"][0]) == 0
    assert request(h, waits).computed == 4, "what its pages hold is computed"
    assert [request(h, x).preemptions for x in speak] == [0, 0]
    front.post_mask(waits)
    h.poll()
    h.boundary()
    assert [request(h, x).preemptions for x in speak] == [0, 1]
    assert request(h, waits).n_pages == 2
    h.run_model()
    h.settle()
    assert waits.terminal == (FINISH, FinishReason.LENGTH, 2)
    assert [x.terminal for x in speak] == [(FINISH, FinishReason.LENGTH, 14)] * 2


def test_masks_are_refused_without_mailboxes() -> None:
    """Catches: a mailbox read beyond the ring's, or a request that waits for a mask that cannot come."""
    for masks, fields in ((0, {}), (2, {"mask_box": 2}), (2, {"mask_box": 2**32 - 1})):
        h, front = started(masks=masks)
        x = submit(front, 3, 3, refusal=ErrorReason.BAD_PARAM, **fields)
        y = submit(front, 3, 3, flags=1, mask_box=1, refusal=ErrorReason.BAD_PARAM)
        h.settle()
        assert x.terminal == y.terminal == (ERROR, ErrorReason.BAD_PARAM, 0)


# ---- logprobs


@pytest.mark.parametrize("count", [0, 1, 2, 3, 19, 20])
def test_alternatives_precede_their_token(count: int) -> None:
    """Catches: LOGPROBS events behind their token, too few of them, of another row, or without credits."""
    h, front = started(token_budget=12)
    made = [submit(front, 3, 5, flags=1, logprobs=n) for n in (count, 0, 7)]
    h.settle()
    assert all(x.terminal == (FINISH, FinishReason.LENGTH, 5) for x in made)
    events = int(h.state["rings"]["cq_tail"][0])
    assert events == 5 * (3 + -(-count // 2) + 4) + 3


def test_alternatives_take_credits() -> None:
    """Catches: LOGPROBS events written over events that nobody has consumed."""
    h, front = started(slots=2, max_rows=2, cq_entries=16, sq_entries=8)
    front.withhold = True
    made = [submit(front, 3, 6, flags=1, logprobs=20), submit(front, 3, 6, flags=1, logprobs=4)]
    for _ in range(10):
        h.tick()
    assert [len(x.tokens) for x in made] == [1, 1]  # 11 + 3 events, two terminal ones owed
    front.withhold = False
    h.settle()
    assert all(x.terminal == (FINISH, FinishReason.LENGTH, 6) for x in made)


@pytest.mark.parametrize(("count", "fits"), [(0, True), (2, True), (12, True), (13, False), (20, False)])
def test_ring_too_small_for_the_alternatives(count: int, fits: bool) -> None:
    """Catches: a request whose events never fit into its completion queue, accepted and paused for ever."""
    h, front = started(slots=1, max_rows=1, cq_entries=8, sq_entries=4)
    x = submit(front, 3, 3, flags=1, logprobs=count, refusal=None if fits else ErrorReason.BAD_PARAM)
    h.settle()
    assert x.terminal == ((FINISH, FinishReason.LENGTH, 3) if fits else (ERROR, ErrorReason.BAD_PARAM, 0))


def test_limit_of_alternatives() -> None:
    """Catches: more alternatives asked for than the plan has room for."""
    h, front = started(max_logprobs=4)
    x = submit(front, 3, 3, flags=1, logprobs=5, refusal=ErrorReason.BAD_PARAM)
    y = submit(front, 3, 3, flags=1, logprobs=4)
    h.settle()
    assert x.terminal == (ERROR, ErrorReason.BAD_PARAM, 0)
    assert y.terminal == (FINISH, FinishReason.LENGTH, 3)


def test_end_in_flight_drops_the_alternatives_too() -> None:
    """Catches: alternatives of a token that is dropped, because its request ended while the step ran."""
    h, front = started()
    x = submit(front, 3, 3, flags=1, logprobs=4)
    h.poll()
    h.boundary()
    front.cancel(x)
    h.poll()
    h.run_model()
    h.settle()
    kinds = [int(e["kind"]) for e in front.views["cq"][: int(h.state["rings"]["cq_tail"][0])]]
    assert kinds == [EventKind.FINISH]
    assert [int(e["a"]) for e in h.entries(LogKind.FINISH)] == [FinishReason.CANCELLED]
