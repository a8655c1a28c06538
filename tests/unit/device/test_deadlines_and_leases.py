"""Deadlines, leases, epochs, visibility and the clock they go by, stepped by hand (design sections 3, 4)."""

from __future__ import annotations

import pytest

from blink_core.abi.enums import ErrorReason, FinishReason, LogKind, RequestState
from tests.unit.device.scenarios import ERROR, FINISH, request, started, submit
from verification.scheduler.harness import Harness, small_config

# ---- deadlines


def test_deadline_of_a_waiting_request() -> None:
    """Catches: a deadline that is looked at only while a request runs."""
    h, front = started(max_rows=1)
    runs = submit(front, 3, 12)
    waits = front.submit([1, 2], 4, flags=1, deadline_us=20)
    assert waits is not None
    h.poll()
    h.now += 18
    h.boundary()
    h.run_model()
    early = waits.terminal
    h.poll()
    assert early is None, "a microsecond early"
    assert waits.terminal == (ERROR, ErrorReason.DEADLINE, 0)
    h.settle()
    assert runs.terminal == (FINISH, FinishReason.LENGTH, 12)


def test_deadline_of_a_running_request() -> None:
    """Catches: a request that goes on beyond its deadline, or ends without its pages freed."""
    h, front = started()
    x = front.submit([1, 2, 3], 15, flags=1, deadline_us=30)
    assert x is not None
    h.tick()
    h.tick()
    h.tick()
    emitted = len(x.tokens)
    assert emitted > 0
    h.now += 30
    h.tick()
    assert x.terminal is not None
    assert x.terminal[:2] == (ERROR, ErrorReason.DEADLINE)
    h.settle()


def test_deadline_in_flight_drops_the_result() -> None:
    """Catches: a deadline that waits for a step without end, or pages that are reused while that step writes them."""
    h, front = started()
    x = front.submit([1, 2, 3], 5, flags=1, deadline_us=10)
    assert x is not None
    h.poll()
    assert h.boundary()
    h.now += 10
    h.poll()  # the step runs on
    assert x.terminal == (ERROR, ErrorReason.DEADLINE, 0)
    assert h.snapshot().quarantine
    h.run_model()
    h.settle()
    assert x.tokens == []


def test_deadlines_of_many() -> None:
    """Catches: the next deadline remembered as that of a request that has ended, or lost when another comes."""
    h, front = started(max_rows=1, slots=6, sq_entries=32)
    due = [50, 5, 30, 2**64 - 1, 0, 31]
    made = [front.submit([1 + i], 20, flags=1, deadline_us=us) for i, us in enumerate(due)]
    for _ in range(30):
        h.tick()
    ended = [x.terminal[1] if x and x.terminal else None for x in made]
    late = ErrorReason.DEADLINE
    assert ended == [FinishReason.LENGTH, late, late, None, None, late]
    h.settle()


def test_deadline_beyond_the_clock() -> None:
    """Catches: clock plus deadline beyond 64 bits, which would have passed long ago."""
    h, front = started()
    h.now = 2**63
    x = front.submit([1, 2], 3, flags=1, deadline_us=2**64 - 5)
    h.settle()
    assert x is not None
    assert x.terminal == (FINISH, FinishReason.LENGTH, 3)


# ---- leases


def leased(**fields: object) -> Harness:
    h = Harness(small_config(rings=2, lease_us=20, **fields))
    h.attach()
    return h


def test_lapsed_lease_ends_everything_of_its_ring() -> None:
    """Catches: a dead front end whose requests keep rows and pages; another's that end with it; two ends of one."""
    h = leased(max_rows=3, slots=3)
    dead, alive = h.fronts
    gone = [submit(dead, 4, 16, first=i) for i in range(3)]
    h.tick()
    h.tick()
    dead.silent = dead.withhold = True
    other = submit(alive, 4, 16, first=9)
    for _ in range(20):
        h.tick()
    assert [x.terminal and x.terminal[:2] for x in gone] == [(ERROR, ErrorReason.LEASE_LOST)] * 3
    assert int(h.rings[0]["gpu"]["lapses"][0]) == 1
    assert int(h.state["rings"]["live"][0]) == 0
    h.settle_only(alive)
    assert other.terminal == (FINISH, FinishReason.LENGTH, 16)
    assert int(h.rings[1]["gpu"]["lapses"][0]) == 0
    dead.silent = dead.withhold = False  # it was only frozen
    h.tick()
    again = submit(dead, 4, 6)
    h.settle()
    assert again.terminal == (FINISH, FinishReason.LENGTH, 6)
    assert [int(e["a"]) for e in h.entries(LogKind.LEASE)] == [1, 0]
    assert [int(e["b"]) for e in h.entries(LogKind.LEASE)] == [3, 0]


def test_lapse_while_a_step_runs() -> None:
    """Catches: pages of a lapsed ring that are reused while the step in flight writes them."""
    h = leased()
    x = submit(h.fronts[0], 4, 8)
    h.poll()
    h.boundary()
    h.now += 25
    h.poll()
    assert x.terminal == (ERROR, ErrorReason.LEASE_LOST, 0)
    assert h.snapshot().quarantine
    h.run_model()
    h.settle()


@pytest.mark.parametrize("sign", ["lease", "submit", "cancel"])
def test_signs_of_life(sign: str) -> None:
    """Catches: a front end cut off while it submits or cancels, because its lease word came late."""
    h = leased(slots=8, sq_entries=32, cq_entries=64)
    front = h.fronts[0]
    x = submit(front, 3, 20)
    other = submit(front, 3, 1, first=4)
    front.silent = True
    for step in range(18):
        if step % 5 == 0:
            if sign == "lease":
                front.views["front_end"]["lease"] += 1
            elif sign == "submit":
                submit(front, 2, 1, first=step)
            else:
                front.cancel(other)
        h.tick()
        assert x.terminal is None or x.terminal[0] == FINISH
    assert len(x.tokens) > 10


def test_idle_ring_has_no_lease_to_lose() -> None:
    """Catches: a front end that had nothing to do punished for its silence with its first request."""
    h = leased()
    front = h.fronts[0]
    front.silent = True
    for _ in range(40):
        h.poll()
    assert not h.entries(LogKind.LEASE)
    x = submit(front, 3, 4)
    h.settle()
    assert x.terminal == (FINISH, FinishReason.LENGTH, 4)


def test_frozen_front_end_pauses_its_own_rows_until_its_lease_lapses() -> None:
    """Catches: a frozen front end that costs others their rows, or that holds its pages for ever."""
    h = Harness(small_config(rings=2, lease_us=60, slots=2, cq_entries=8, sq_entries=8, max_rows=4, paused_limit=100))
    h.attach()
    frozen, quick = h.fronts
    held = [submit(frozen, 3, 20, first=i) for i in range(2)]
    h.tick()
    frozen.silent = frozen.withhold = True
    served = 0
    for i in range(30):
        x = submit(quick, 3, 4, first=i) if quick.free else None
        before = all(y.terminal is None for y in held)
        h.tick()
        served += before and x is not None
    assert served > 3
    assert [x.terminal and x.terminal[:2] for x in held] == [(ERROR, ErrorReason.LEASE_LOST)] * 2
    assert sum(len(x.tokens) for x in held) <= 8 - 2
    assert not [e for e in h.entries(LogKind.PREEMPT) if int(e["ring"]) == 1]
    frozen.silent = frozen.withhold = False
    h.settle()


# ---- epochs


def test_epoch_changes_twice_while_a_step_runs() -> None:
    """Catches: an epoch acknowledged while pages of its predecessor are written, or one that is skipped."""
    h, front = started()
    submit(front, 4, 8)
    h.poll()
    h.boundary()
    front.attach()
    h.poll()
    front.attach()
    h.poll()
    assert int(h.rings[0]["gpu"]["epoch_ack"][0]) == 1
    h.run_model()
    h.boundary()
    assert int(h.rings[0]["gpu"]["epoch_ack"][0]) == 3
    x = submit(front, 4, 8)
    h.settle()
    assert x.terminal == (FINISH, FinishReason.LENGTH, 8)


def test_hasty_successor_gets_no_result_of_its_predecessor() -> None:
    """Catches: a front end that does not wait for the acknowledgement, given the old request's token: same slot, same
    generation, another owner."""
    h, front = started(slots=1, sq_entries=4)
    submit(front, 4, 8)
    h.poll()
    h.boundary()
    front.attach()
    h.poll()
    front.views["gpu"]["epoch_ack"][0] = front.epoch  # as if it had been acknowledged
    x = submit(front, 4, 8, first=5)
    assert x.generation == 1
    front.views["gpu"]["epoch_ack"][0] = front.epoch - 1
    h.poll()
    h.run_model()
    h.boundary()
    assert x.tokens == []
    h.run_model()
    h.settle()
    assert x.terminal == (FINISH, FinishReason.LENGTH, 8)


# ---- visibility and clock


@pytest.mark.parametrize("polls", [1, 7])
def test_visibility_deadline_goes_by_the_clock(polls: int) -> None:
    """Catches: a torn descriptor given up after so many looks, which a fast engine takes in no time."""
    h, front = started(visibility_us=100)
    x = front.submit([1, 2, 3], 2, flags=1, corrupt={"tag": 7}, sealed=False, refusal=ErrorReason.CHECKSUM)
    assert x is not None
    h.poll()
    first = h.clock
    while h.clock + 1 < first + 100:
        h.now += max(0, min(100 // polls, first + 99 - h.clock) - 1)
        h.poll()
        assert x.terminal is None, f"given up after {h.clock - first} us"
    h.poll()
    assert x.terminal == (ERROR, ErrorReason.CHECKSUM, 0)
    assert int(h.state["rings"]["torn"][0]) == int(h.control["status"]["torn"][0]) == 1


def test_clock_that_goes_back() -> None:
    """Catches: a difference of times below 0, which ends every lease and deadline at once."""
    h = leased(visibility_us=10)
    h.now = 1000
    h.tick()
    x = h.fronts[0].submit([1, 2, 3], 6, flags=1, deadline_us=100)
    torn = h.fronts[1].submit([1, 2], 2, flags=1, corrupt={"tag": 7}, sealed=False, refusal=ErrorReason.CHECKSUM)
    assert x is not None
    assert torn is not None
    h.poll()
    h.now = 3
    for _ in range(4):
        h.tick()
    assert h.clock > 1000 > h.now
    assert [x.terminal, torn.terminal] == [None, None]
    assert request(h, x).state == RequestState.RUNNING
    h.now = 1001
    h.settle()
    assert x.terminal == (FINISH, FinishReason.LENGTH, 6)
