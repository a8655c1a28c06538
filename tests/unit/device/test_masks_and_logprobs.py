"""Grammar masks and LOGPROBS events, stepped by hand (design section 3)."""

from __future__ import annotations

from typing import Any

import pytest

from blink_core.abi.enums import ErrorReason, EventKind, FinishReason, LogKind, SlotFlag
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
