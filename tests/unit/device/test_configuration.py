"""The configuration in shared memory, which front ends map writable: the scheduler goes by a copy of its own."""

from __future__ import annotations

import pytest

from blink_core.abi.enums import ErrorReason, FinishReason, LogKind, Op
from tests.unit.device.scenarios import ERROR, FINISH, started, submit
from verification.scheduler.front_end import entry


def test_slot_beyond_the_ring_after_the_shared_configuration_was_overwritten() -> None:
    """Catches: bounds taken from memory that a front end writes: request records read and written out of bounds."""
    h, front = started(visibility_us=3)
    shared = h.control["config"]
    shared["slots"], shared["max_len"], shared["rings"], shared["pages"] = 4096, 1 << 24, 256, 2**31 - 1
    h.strays.add((0, 4000, 9))
    front.publish(entry(front.sq_tail, Op.SUBMIT, 4000, 9))
    longest = submit(front, h.config.max_len, 2)
    longest.refusal = ErrorReason.BAD_LENGTH
    other = submit(front, 3, 4)
    h.settle()
    assert [ErrorReason(int(e["a"])).name for e in h.entries(LogKind.REJECT)] == ["BAD_ENTRY", "BAD_LENGTH"]
    assert longest.terminal == (ERROR, ErrorReason.BAD_LENGTH, 0)
    assert other.terminal == (FINISH, FinishReason.LENGTH, 4)


@pytest.mark.parametrize("value", [0, 0xFF])
def test_every_byte_of_the_shared_configuration_is_for_readers_only(value: int) -> None:
    """Catches: any one size still read from the shared copy: a division by zero, a mask or stride gone wrong."""
    h, front = started()
    first = submit(front, 5, 6)
    h.tick()
    h.control["config"].view("u1")[:] = value
    made = [submit(front, 3, 4, first=i) for i in range(3)]
    h.settle()
    assert first.terminal == (FINISH, FinishReason.LENGTH, 6)
    assert all(x.terminal == (FINISH, FinishReason.LENGTH, 4) for x in made)
