"""Programs that press on KV memory by their make, on the fastest engine there is: looks must meet what is wanted."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from blink_core.abi.enums import LogKind
from hil_rigs.local import LocalRig
from verification.drivers.ring import run_program
from verification.fixtures import RING, Subject
from verification.program import Program
from verification.properties.kv_schedules import MARKS, marks
from verification.run_context import RunContext
from verification.serving import TINY_SIZES, serving, shape_of
from verification.suite.pressure import KvPressure, crowd, long, neighbours
from verification.suite.test_kv_content import LOOKS

SEEDS = range(4)


@pytest.fixture
def fast(request: pytest.FixtureRequest) -> Iterator[LocalRig]:
    """An engine whose model costs nothing, so that it runs far ahead of any reader that it need not wait for."""
    run = RunContext("paced", "local", "smoke", None, 7, "given", None)
    sizes = TINY_SIZES | {"page_size": request.param, "pages": 2 + 256 // request.param, "token_budget": 13}
    with serving(run, "paced", None, sizes, http=False, capture=False) as rig:
        yield rig


def subject_of(rig: LocalRig) -> Subject:
    """What the programs are made for."""
    return cast(Subject, SimpleNamespace(rig=rig, shape=shape_of(rig, requests=(3, 10), most_new=40)))


def met(rig: LocalRig, program: Program, pressure: KvPressure) -> list[tuple[int, frozenset[str]]]:
    """Of each running request at each look: tokens computed, and what it had been through."""
    memory, looks = rig.memory, list[tuple[int, list[tuple[tuple[int, int, int], int]]]]()

    def look() -> None:
        with memory.hold():
            state = memory.snapshot(log_from=2**63)
        rows = [(int(r) % state.config.slots, state.requests[int(r)]) for r in state.running]
        running = [((RING, slot, int(q["generation"])), int(q["computed"])) for slot, q in rows]
        looks.append((int(state.header["log_tail"]), running))

    with memory.hold():
        start = int(memory.snapshot(log_from=2**63).header["log_tail"])
    history = run_program(rig.ring(RING), program, every=LOOKS, observe=look, first=memory.hold)
    assert history.complete, history.died
    with memory.hold():
        log = memory.snapshot(log_from=start).log
    assert (log["kind"] == LogKind.ACCEPT).sum() == len(program.requests)
    pressure.add(log)
    found: list[tuple[int, frozenset[str]]] = []
    for tail, running in looks:
        been: Any = marks(log[: tail - start], rig.descriptor.config.page_size)
        found += [(computed, been.get(key, frozenset())) for key, computed in running if computed]
    return found


@pytest.mark.parametrize("fast", [4, 16], indirect=True)
def test_looks_meet_what_is_wanted(fast: LocalRig) -> None:
    """Catches: a check of KV rows that is decided by the engine's pace: a resumed request that has ended before anybody
    looks, a neighbour that ends before its cancel, a crowd in which nobody gives way, pressure that is not complete.
    """
    subject = subject_of(fast)
    for seed in SEEDS:
        pressure = KvPressure(fast.descriptor.config)
        crowded = met(fast, crowd(subject, seed, paced=True), pressure)
        assert "preempted" in frozenset().union(*(names for _, names in crowded)), f"seed {seed}"
        beside = met(fast, neighbours(subject, seed), pressure)
        assert frozenset().union(*(names for _, names in beside)) >= set(MARKS) - {"preempted"}, f"seed {seed}"
        assert pressure.complete, pressure.counts
        longest = max(computed for computed, _ in met(fast, long(subject, seed, 96), pressure))
        assert longest > 96, f"seed {seed}"


@pytest.mark.parametrize("fast", [16], indirect=True)
def test_without_masks_nothing_is_paced(fast: LocalRig) -> None:
    """Catches: a paced program that is given to an engine without mailboxes, and waits for what nobody can post."""
    config = SimpleNamespace(**{name: getattr(fast.descriptor.config, name) for name in ("pages", "page_size")})
    config.max_rows, config.token_budget, config.masks = 6, 13, 1
    shape = shape_of(fast, requests=(3, 10), most_new=40)
    subject = cast(
        Subject, SimpleNamespace(rig=SimpleNamespace(descriptor=SimpleNamespace(config=config)), shape=shape)
    )
    with pytest.raises(ValueError, match="masks is 1, a paced program needs at least 4"):
        crowd(subject, 1, paced=True)
    assert len(crowd(subject, 1).requests) == 6
