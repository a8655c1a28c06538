"""The submission queue on the compiled scheduler: wrap, duplicates, garbage, credits that make no sense."""

from __future__ import annotations

import numpy as np
import pytest

from blink_core.abi.enums import ErrorReason, FinishReason, LogKind, Op
from tests.unit.device.scenarios import ERROR, FINISH, started, submit
from verification.scheduler.front_end import GENERATIONS, SEQUENCES, entry
from verification.scheduler.harness import Harness, small_config


def test_rings_wrap_many_times() -> None:
    """Catches: an index that is not masked, or an entry of the last lap that is taken again."""
    h, front = started(slots=1, sq_entries=2, cq_entries=8, max_rows=2, token_budget=4)
    for i in range(60):
        assert front.submit([1 + i % 9, 2], 2, flags=1) is not None
        h.settle()
    assert front.sq_tail == 60 > 20 * h.config.sq_entries
    assert front.cq_head == 180 > 20 * h.config.cq_entries


def test_generation_wraps() -> None:
    """Catches: a generation compared as a plain number, which shuts a slot after 2^24 reuses."""
    h, front = started(slots=1, sq_entries=8)
    front.generation[0] = GENERATIONS - 2
    h.state["requests"]["judged"][0] = GENERATIONS - 2
    made = []
    for i in range(4):
        made.append(submit(front, 2, 2, first=i))
        h.settle()
    assert [x.generation for x in made] == [GENERATIONS - 1, GENERATIONS, 1, 2]
    assert all(x.terminal == (FINISH, FinishReason.LENGTH, 2) for x in made)


def test_sequence_numbers_wrap() -> None:
    """Catches: entries lost or cleared memory taken for an entry where the 24-bit sequence number wraps."""
    h, front = started(slots=1, sq_entries=4)
    start = SEQUENCES - 2
    h.state["rings"]["sq_next"][0] = front.sq_tail = start
    h.rings[0]["gpu"]["sq_head"][0] = start
    for i in range(5):
        made = submit(front, 2, 2, first=i)
        h.settle()
        assert made.terminal == (FINISH, FinishReason.LENGTH, 2)
        assert int(h.state["rings"]["sq_next"][0]) == start + i + 1
        h.rings[0]["sq"][:] = 0  # cleared memory is no entry at any index
        h.poll()
        assert int(h.state["rings"]["sq_next"][0]) == start + i + 1


def test_duplicate_submission_is_ignored() -> None:
    """Catches: one generation that runs or ends twice because its entry was published twice."""
    h, front = started(slots=2, sq_entries=16)
    x = submit(front, 3, 4)
    front.publish(entry(front.sq_tail, Op.SUBMIT, x.slot, x.generation))  # while it waits
    h.tick()
    front.publish(entry(front.sq_tail, Op.SUBMIT, x.slot, x.generation))  # while it runs
    h.settle()
    front.publish(entry(front.sq_tail, Op.SUBMIT, x.slot, x.generation))  # after its end
    h.settle()
    assert x.terminal == (FINISH, FinishReason.LENGTH, 4)
    assert int(h.state["rings"]["duplicates"][0]) == 3


def test_refused_generation_is_not_accepted_later() -> None:
    """Catches: a second terminal event for a generation refused as SLOT_BUSY, once its slot has become free."""
    h, front = started(slots=1, sq_entries=16)
    x = submit(front, 3, 4)
    h.tick()
    front.free.append(x.slot)  # a front end that does not honour its slots
    y = front.submit([1, 2], 3, flags=1, refusal=ErrorReason.SLOT_BUSY)
    assert y is not None
    h.tick()
    assert y.terminal == (ERROR, ErrorReason.SLOT_BUSY, 0)
    h.settle()
    assert x.terminal == (FINISH, FinishReason.LENGTH, 4)
    front.publish(entry(front.sq_tail, Op.SUBMIT, y.slot, y.generation))
    h.settle()
    assert int(h.state["rings"]["duplicates"][0]) == 1


@pytest.mark.parametrize(
    ("op", "slot", "reason"), [(7, 0, "BAD_ENTRY"), (0, 0, "BAD_ENTRY"), (Op.SUBMIT, 4095, "BAD_ENTRY")]
)
def test_unknown_entry_gets_an_error(op: int, slot: int, reason: str) -> None:
    """Catches: an entry of unknown operation or slot that is dropped silently, reads out of bounds, or shuts a slot."""
    h, front = started()
    far = 1 << 22
    h.strays.add((0, slot, far))
    front.publish(entry(front.sq_tail, op, slot, far))
    x = submit(front, 3, 4)
    h.settle()
    assert [ErrorReason(int(e["a"])).name for e in h.entries(LogKind.REJECT)] == [reason]
    assert x.terminal == (FINISH, FinishReason.LENGTH, 4)


def test_cancel_of_an_unknown_slot() -> None:
    """Catches: a cancel beyond the ring's slots that reaches another ring's request or memory."""
    h = Harness(small_config(rings=2))
    h.attach()
    other = submit(h.fronts[1], 3, 6)
    h.tick()
    h.fronts[0].publish(entry(h.fronts[0].sq_tail, Op.CANCEL, h.config.slots + other.slot, other.generation))
    h.settle()
    assert other.terminal == (FINISH, FinishReason.LENGTH, 6)
    assert h.state["rings"]["stale_cancels"].tolist() == [1, 0]


def test_words_out_of_sequence_are_ignored() -> None:
    """Catches: stale or foreign words in the submission queue that are taken for entries."""
    h, front = started()
    rng = np.random.default_rng(3)
    for word in rng.integers(0, 2**63, 400).tolist():
        if word % (1 << 24) == front.sq_tail % SEQUENCES + 1:
            continue
        front.views["sq"][:] = word
        assert h.poll() == 0
    front.views["sq"][:] = 0
    x = submit(front, 3, 4)
    h.settle()
    assert x.terminal == (FINISH, FinishReason.LENGTH, 4)


def test_credits_that_make_no_sense_are_ignored() -> None:
    """Catches: a completion-queue head that goes backwards or beyond the tail and lets events be overwritten."""
    h, front = started(slots=2, cq_entries=8, sq_entries=8, max_rows=2)
    front.withhold = True
    x = submit(front, 3, 12)
    for _ in range(8):
        h.tick()
    published = int(h.state["rings"]["cq_published"][0])
    assert published >= 3
    for head in (published + 1, published + 8, 2**63, 2**64 - 1):
        front.views["front_end"]["cq_head"] = head
        for _ in range(3):
            h.tick()
    assert int(h.state["rings"]["bad_heads"][0]) >= 12
    front.withhold = False
    h.settle()
    front.views["front_end"]["cq_head"] = 1
    h.poll()
    assert int(h.state["rings"]["cq_head"][0]) == front.cq_head
    assert x.terminal == (FINISH, FinishReason.LENGTH, 12)
