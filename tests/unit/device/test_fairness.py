"""Classes, deficit round robin over rings, and the reservation of a head that does not fit (design section 4)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from blink_core.abi.enums import Admission, FinishReason, LogKind, RequestState
from tests.unit.device.scenarios import FINISH, request, started
from verification.scheduler.front_end import FrontEnd, Submission
from verification.scheduler.harness import VOCAB, Harness, small_config

MODES = [Admission.OPTIMISTIC, Admission.RESERVE]


def submit(front: FrontEnd, length: int, max_tokens: int, **fields: Any) -> Submission:
    """A valid request whose prompt shares no page with any other of the test, without end of sequence."""
    n = len(front.history) + 1
    prompt = [(n + 5 * i * n) % VOCAB for i in range(length)]
    made = front.submit(prompt, max_tokens, flags=1, **fields)
    assert made is not None
    return made


def keep_busy(front: FrontEnd, length: int, max_tokens: int, **fields: Any) -> None:
    """Fills the ring with equal requests."""
    while front.free:
        n = len(front.history) + 1
        prompt = [(n + 5 * i * n) % VOCAB for i in range(length)]
        if front.submit(prompt, max_tokens, flags=1, **fields) is None:
            return


def admitted(h: Harness) -> list[tuple[int, int]]:
    """(ring, cost) of first admissions in order; the cost is prompt and max_tokens."""
    found = []
    for e in h.entries(LogKind.ADMIT):
        x = h.find(int(e["ring"]), int(e["slot"]), int(e["generation"]))
        if int(e["c"]) == 0 and x is not None:
            found.append((x.ring, len(x.prompt) + int(x.descriptor["max_tokens"])))
    return found


# ---- classes


def test_urgent_requests_go_first() -> None:
    """Catches: classes that are mixed, or in the wrong order, within a ring or between rings."""
    h = Harness(small_config(rings=2, max_rows=1, slots=8, sq_entries=32, cq_entries=64))
    h.attach()
    made = [submit(h.fronts[i % 2], 2, 2, priority=p) for i, p in enumerate((3, 1, 2, 0, 0, 3, 1, 2))]
    h.settle()
    order = [h.find(int(e["ring"]), int(e["slot"]), int(e["generation"])) for e in h.entries(LogKind.ADMIT)]
    priorities = [int(x.descriptor["priority"]) for x in order if x is not None]
    assert priorities == sorted(priorities)
    assert len(order) == len(made)


def test_least_urgent_gives_way_first() -> None:
    """Catches: preemption of the youngest whatever its class, so that an urgent late-comer loses its pages."""
    h, front = started(pages=2 + 6, max_rows=3, token_budget=8)
    lazy = submit(front, 4, 14, priority=2)
    old = submit(front, 4, 12, priority=1)
    h.tick()
    urgent = submit(front, 4, 12, priority=0)
    h.settle()
    slots = [int(e["slot"]) for e in h.entries(LogKind.PREEMPT)]
    assert slots[:1] == [lazy.slot]
    assert urgent.slot not in slots
    assert all(x.terminal and x.terminal[0] == FINISH for x in (lazy, old, urgent))


def test_classes_of_other_rings_do_not_cost_a_ring_its_turn() -> None:
    """Catches: one deficit or one turn for all classes, so that a ring's urgent requests buy its lazy ones quanta."""
    h = Harness(small_config(rings=2, max_rows=2, slots=8, sq_entries=32, cq_entries=64, quantum=24), checks=False)
    h.attach()
    mixed = h.fronts[0]
    charged: Counter[int] = Counter()
    for _ in range(300):
        urgent = [x for x in mixed.live.values() if x.descriptor["priority"] == 0]
        if not urgent:
            submit(mixed, 1, 1, priority=0)
        for front in h.fronts:
            while len(front.free) > 1:
                submit(front, 2, 2, priority=3)
        h.tick()
    for e in h.entries(LogKind.ADMIT):
        x = h.find(int(e["ring"]), int(e["slot"]), int(e["generation"]))
        if x is not None and x.descriptor["priority"] == 3:
            charged[x.ring] += 4
    assert abs(charged[0] - charged[1]) <= 24 + 4, f"tokens admitted of class 3 by ring: {charged}"
    assert charged[1] > 100


# ---- deficit round robin


@pytest.mark.parametrize("quantum", [1, 5, 40])
def test_rings_are_charged_alike(quantum: int) -> None:
    """Catches: turns counted in requests, so that a ring of large ones gets ten times the tokens of another."""
    fields = {"rings": 2, "max_rows": 2, "slots": 32, "sq_entries": 64, "cq_entries": 128, "quantum": quantum}
    h = Harness(small_config(**fields), checks=False)
    h.attach()
    for _ in range(400):
        keep_busy(h.fronts[0], 1, 1)
        keep_busy(h.fronts[1], 12, 8)
        h.tick()
    charged = [0, 0]
    worst = 0
    for ring, cost in admitted(h):
        charged[ring] += cost
        worst = max(worst, abs(charged[0] - charged[1]))
    assert min(charged) > 400
    assert worst <= 2 * (quantum + 20), f"{charged} tokens charged, {worst} apart at worst"


def test_an_idle_ring_keeps_no_credit() -> None:
    """Catches: a ring that saves up quanta while it is idle, or with small requests, and then shuts out the others."""
    fields = {"rings": 2, "max_rows": 1, "slots": 8, "sq_entries": 32, "cq_entries": 64, "quantum": 30}
    h = Harness(small_config(**fields), checks=False)
    h.attach()
    sparse, busy = h.fronts
    for _ in range(300):  # one small request at a time, there whenever its turn comes
        keep_busy(busy, 2, 1)
        if not sparse.live:
            submit(sparse, 1, 1)
        h.tick()
    before = len(admitted(h))
    for _ in range(60):
        keep_busy(busy, 2, 1)
        keep_busy(sparse, 2, 1)
        h.tick()
    late = admitted(h)[before:]
    longest = max(len(run) for run in "".join(str(ring) for ring, _ in late).split("1"))
    assert longest * 3 <= 30 + 24, f"ring 0 admitted {longest} requests in a row"
    assert {ring for ring, _ in late} == {0, 1}


def test_preemption_is_not_charged_again() -> None:
    """Catches: a ring that pays a second time for a request that had to give way."""
    h = Harness(small_config(rings=2, pages=2 + 5, max_rows=2, quantum=18, token_budget=5))
    h.attach()
    for _ in range(3):
        for front in h.fronts:
            submit(front, 4, 14)
    h.settle()
    assert int(h.state["header"]["preemptions"][0]) > 0
    assert len(admitted(h)) == 6
    again = [e for e in h.entries(LogKind.ADMIT) if int(e["c"]) > 0]
    assert again
    charged = [0, 0]
    for ring, cost in admitted(h):
        charged[ring] += cost
        assert abs(charged[0] - charged[1]) <= 2 * 18, f"{charged} tokens charged"


def test_a_quantum_of_one_token_does_not_take_for_ever() -> None:
    """Catches: a turn of empty rounds, one quantum each, while the step boundary waits."""
    most = 1 << 20
    fields = {"max_len": most, "pages": 2 + (most >> 12) + 1, "page_size": 4096, "quantum": 1, "slots": 1}
    h = Harness(small_config(rings=4, arena_tokens=most, sq_entries=4, log_entries=64, **fields), checks=False)
    h.attach()
    made = [front.submit([1 + front.index, 2], most, flags=1) for front in h.fronts]
    h.poll()
    assert h.boundary()  # 4 rings x 2^20 rounds would take seconds
    assert None not in made
    assert int(h.state["header"]["admissions"][0]) == 3


# ---- reservation


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", [1, 3, 7])
@pytest.mark.parametrize("page_size", [1, 4])
def test_large_head_is_admitted_under_a_stream_of_small_ones(mode: Admission, steps: int, page_size: int) -> None:
    """Catches: a head that never finds all its pages free at once, because small requests take each as it comes."""
    fields = {"page_size": page_size, "pages": 2 + 32 // page_size, "max_rows": 4, "token_budget": 16, "slots": 6}
    fields |= {"admission": mode, "reservation_steps": steps, "sq_entries": 32, "rings": 2, "quantum": 24}
    h = Harness(small_config(**fields))
    h.attach()
    small, large = h.fronts
    for _ in range(6):
        keep_busy(small, 3, 9)
        h.tick()
    for _ in range(3):
        x = submit(large, 20, 4)
        waited = 0
        while request(h, x).state != RequestState.RUNNING and x.terminal is None:
            keep_busy(small, 3, 9)
            h.tick()
            waited += 1
            assert waited <= 20 + 2 * steps, f"a large head has waited for {waited} steps"
        for _ in range(400):
            if x.terminal is not None:
                break
            keep_busy(small, 3, 9)
            h.tick()
        assert x.terminal == (FINISH, FinishReason.LENGTH, 4)
    assert sum(int(e["a"]) == 1 for e in h.entries(LogKind.RESERVATION)) > 0


@pytest.mark.parametrize("steps", [2, 5])
def test_reservation_blocks_others_for_so_many_boundaries_only(steps: int) -> None:
    """Catches: a head that does not fit, behind older requests that run for long, and shuts out every other ring."""
    fields = {"pages": 2 + 8, "max_rows": 4, "reservation_steps": steps, "rings": 3, "quantum": 24, "prefix_cache": 0}
    h = Harness(small_config(**fields))
    h.attach()
    elder, large, small = h.fronts
    old = submit(elder, 4, 20)
    while request(h, old).n_pages < 3:
        h.tick()
    big = submit(large, 22, 1)  # 6 pages, 5 are free
    x = submit(small, 2, 2)
    waits = 0
    while not x.tokens and waits < 60:
        h.tick()
        waits += 1
    assert waits <= steps + 3, f"a small request of another ring waited for {waits} steps"
    h.settle()
    assert big.terminal == (FINISH, FinishReason.LENGTH, 1)
    assert old.terminal == (FINISH, FinishReason.LENGTH, 20)


def test_reservation_never_takes_from_elders_or_planned_rows() -> None:
    """Catches: a reservation that is enforced against requests that came before its holder."""
    fields = {"pages": 2 + 8, "max_rows": 4, "reservation_steps": 2, "rings": 2, "quantum": 24, "token_budget": 8}
    h = Harness(small_config(**fields))
    h.attach()
    others, large = h.fronts
    elder = submit(others, 4, 16)
    h.tick()
    big = submit(large, 20, 3)
    young = [submit(others, 4, 12) for _ in range(2)]
    h.settle()
    assert elder.slot not in {int(e["slot"]) for e in h.entries(LogKind.PREEMPT) if int(e["ring"]) == 0}
    assert all(x.terminal and x.terminal[0] == FINISH for x in (elder, big, *young))


def test_holder_without_credits_does_not_force_anybody_out() -> None:
    """Catches: a frozen front end whose waiting head goes on preempting the rows of other rings."""
    fields = {"pages": 2 + 12, "max_rows": 3, "reservation_steps": 2, "rings": 2, "quantum": 24, "slots": 2}
    h = Harness(small_config(cq_entries=8, sq_entries=8, prefix_cache=0, paused_limit=1000, **fields))
    h.attach()
    slow, quick = h.fronts
    first, elder = submit(slow, 2, 20), submit(quick, 4, 16)
    while request(h, elder).n_pages < 4:
        h.tick()
    head = submit(slow, 20, 2)  # 5 pages, 4 are free: it takes the reservation
    h.tick()
    h.tick()
    assert int(h.state["header"]["reserved_for"][0]) == head.slot
    slow.withhold = True
    while elder.terminal is None:
        h.tick()
    later = submit(quick, 4, 12)  # the head would fit but for this one, and has no credit
    for _ in range(25):
        h.tick()
    assert later.terminal == (FINISH, FinishReason.LENGTH, 12)
    assert not [e for e in h.entries(LogKind.PREEMPT) if int(e["ring"]) == 1]
    slow.withhold = False
    h.settle()
    assert head.terminal == (FINISH, FinishReason.LENGTH, 2)
    assert first.terminal == (FINISH, FinishReason.LENGTH, 20)


# ---- reserve


def test_reserve_never_preempts_for_growth() -> None:
    """Catches: admission by the pages needed now, in a mode that promises every running request its longest output."""
    for mode, preempts in ((Admission.OPTIMISTIC, True), (Admission.RESERVE, False)):
        h, front = started(pages=2 + 8, max_rows=4, slots=8, sq_entries=32, admission=mode, reservation_steps=1000)
        made = [submit(front, 3, 13) for _ in range(8)]
        h.settle()
        assert all(x.terminal == (FINISH, FinishReason.LENGTH, 13) for x in made)
        assert (int(h.state["header"]["preemptions"][0]) > 0) == preempts, mode
