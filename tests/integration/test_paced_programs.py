"""Programs that press on KV memory by their make, on the fastest engine there is: looks must meet what is wanted."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from blink_core.abi.enums import LogKind
from hil_rigs.local import LocalRig
from verification.drivers.ring import run_program
from verification.fixtures import RING, Judge, Subject
from verification.program import Program, Shape
from verification.properties import kv_sanitizer
from verification.properties.kv_schedules import MARKS, marks
from verification.run_context import RunContext
from verification.serving import TINY_SIZES, serving, shape_of
from verification.suite import test_kv_content, test_kv_sanitizer, test_prefix_cache
from verification.suite.pressure import PACED, KvPressure, crowd, long, neighbours
from verification.suite.test_kv_content import LOOKS

SEEDS = range(4)


@pytest.fixture
def fast(request: pytest.FixtureRequest) -> Iterator[LocalRig]:
    """An engine whose model costs nothing, so that it runs far ahead of any reader that it need not wait for: with that
    page size and budget of a step."""
    run = RunContext(f"paced-{os.getpid()}", "local", "smoke", None, 7, "given", None)
    size, budget = request.param
    sizes = TINY_SIZES | {"page_size": size, "pages": 2 + 256 // size, "token_budget": budget}
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


# With the smallest budget of a step the first of a crowd is farthest when the last comes.
@pytest.mark.parametrize("fast", [(4, 13), (8, 29), (16, 9)], indirect=True)
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


SHAPE = Shape(vocab=256, page_size=16, longest=160)


def planned(masks: int, **others: Any) -> Any:
    """A subject of which no more than its sizes is asked."""
    config = SimpleNamespace(pages=18, page_size=16, max_rows=6, token_budget=13, masks=masks)
    return SimpleNamespace(rig=SimpleNamespace(descriptor=SimpleNamespace(config=config)), shape=SHAPE, **others)


def test_too_few_mailboxes() -> None:
    """Catches: a paced program that is given to an engine without mailboxes, and waits for what nobody can post."""
    with pytest.raises(ValueError, match="masks is 1, a paced program needs at least 4"):
        crowd(planned(1), 1, paced=True)
    assert len(crowd(planned(1), 1).requests) == 6


def test_crowd_has_no_more_round_trips_than_it_needs() -> None:
    """Catches: a paced crowd so long that a slow model on a busy machine is not done with it in the driver's time; one
    that fits into the pool."""
    requests = crowd(planned(4), 1, paced=True).requests
    assert [r.params.max_tokens for r in requests] == [2 * PACED] * 4
    assert sum(len(r.prompt) for r in requests) <= 256 - 4 * PACED
    assert sum(len(r.prompt) + r.params.max_tokens for r in requests) >= 256 + 4 * PACED


def test_long_has_room_for_looks() -> None:
    """Catches: a long request of so few tokens that no look need meet it beyond the length it is for."""
    lengths: Any = SimpleNamespace(limits={"beyond-window": 100, "beyond-rope-maximum": 160 - PACED + 1})
    refused = f"at most 160 tokens, {160 - PACED + 1} and {PACED} to be met in are wanted"
    with pytest.raises(ValueError, match=re.escape(refused)):
        long(planned(1), 1, 160 - PACED + 1)
    assert long(planned(1), 1, 160 - PACED).requests[0].params.max_tokens == PACED
    (program,) = test_kv_content._leading(planned(1), lengths, 1)
    assert len(program.requests[0].prompt) == 100
    lengths.limits.pop("beyond-window")
    assert test_kv_content._leading(planned(1), lengths, 1) == []


class Served(Exception):
    """Enough of a test's programs has been asked for."""


UNUSED: Any = None


def _schedules(subject: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    test_kv_content._schedules(subject, UNUSED, UNUSED, 1, (1, 1))


def _shared(subject: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    test_prefix_cache.test_shared_pages(subject, UNUSED, UNUSED, 1)


def _sanitizer(subject: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = SimpleNamespace(counters=lambda: None, reports=lambda: None)
    monkeypatch.setattr(test_kv_sanitizer, "KvReports", lambda descriptor: quiet)
    monkeypatch.setattr(kv_sanitizer, "check_quiet", lambda *args: None)
    pressure = SimpleNamespace(complete=False, add=lambda log: None)
    monkeypatch.setattr(test_kv_sanitizer, "KvPressure", lambda config: pressure)
    test_kv_sanitizer._run(subject, subject.draw(1, 1), 1, cast(Judge, lambda *args: None), 1)


@pytest.mark.parametrize("masks", [0, 1, 2, 3, 4])
@pytest.mark.parametrize(("run", "needed", "first"), [(_schedules, 4, 1), (_shared, 1, 1), (_sanitizer, 2, 2)])
def test_paces_where_the_engine_can(
    run: Callable[[Any, pytest.MonkeyPatch], None],
    needed: int,
    first: int,
    masks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: a test that ends as an error on an engine with too few mailboxes, or paces nothing on one with enough.

    first: which of its programs is to be paced, if one can be.
    """
    served: list[Program] = []

    def serve(subject: Any, program: Program, *args: Any, **options: Any) -> None:
        served.append(program)
        if len(served) == first:
            raise Served

    for module in (test_kv_content, test_kv_sanitizer, test_prefix_cache):
        monkeypatch.setattr(module, "serve", serve)
    others = {
        "oracles": (None, SimpleNamespace(rope_switch=None)),
        "draw": lambda *args: [crowd(planned(0), 2)],
        "snapshot": lambda **args: SimpleNamespace(header={"log_tail": 0}, log=None),
    }
    with pytest.raises(Served):
        run(planned(masks, **others), monkeypatch)
    assert any(r.mask_seed is not None for r in served[-1].requests) == (masks >= needed)
