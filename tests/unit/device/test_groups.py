"""One history through groups of 1, 3 and 4 threads (design section 4)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from blink_core.abi.enums import LogLevel
from verification.scheduler.harness import Harness, small_config
from verification.scheduler.programs import CORRUPTIONS, Act, Program, Submit, Tick, perform, wind_up


def drawn_history(seed: int, log_level: int = LogLevel.ALL) -> Program:
    """A program with everything that the group does together: long prompts, bias, torn descriptors, epochs, masks."""
    rng = np.random.default_rng(seed)
    config = small_config(
        rings=2, pages=2 + 6, max_len=24, visibility_us=4, lease_us=12, cq_entries=64, admission=seed % 2, quantum=6,
        log_level=log_level,
    )  # fmt: skip
    acts = ["cancel", "withhold", "release", "silence", "silence", "speak", "duplicate", "attach"]
    acts += ["mask_torn", "mask_early", "mask_other", "later", "earlier"]

    def action() -> Submit | Act:
        ring, pick = int(rng.integers(2)), int(rng.integers(8))
        if rng.random() < 0.3:
            return Act(str(rng.choice(acts)), ring, pick)
        corruption = int(rng.integers(len(CORRUPTIONS))) if rng.random() < 0.2 else None
        length, most = rng.integers(1, 24, 2).tolist()
        bias = tuple((int(t), 0.5) for t in rng.integers(0, 37, rng.integers(0, 4)))
        return Submit(
            *(ring, length, most),
            token=pick % 3,
            corruption=corruption,
            sealed=bool(rng.integers(2)),
            priority=int(rng.integers(3)),
            masked=bool(rng.integers(2)),
            logprobs=int(rng.integers(5)),
            deadline=int(rng.choice([0, 0, 0, 12])),
            bias=bias,
        )

    ticks = []
    for _ in range(40):
        before = tuple(action() for _ in range(rng.integers(0, 3)))
        during = tuple(action() for _ in range(rng.integers(0, 2)))
        fault = "nan" if rng.random() < 0.05 else None
        order, polls, masks = bool(rng.integers(2)), int(rng.integers(1, 3)), int(rng.integers(3))
        ticks.append(Tick(before, during, order, polls, fault, masks=masks))
    return Program(config, tuple(ticks))


def steady_history(seed: int) -> Program:
    """Requests of two rings that decode side by side for long, some with equal prompts: pages are published, found and
    taken at every few boundaries; some end, are cancelled or lack credits meanwhile."""
    rng = np.random.default_rng(seed)
    config = small_config(
        rings=2, slots=4, max_rows=6, pages=2 + 60, max_len=64, token_budget=16, cq_entries=64, log_level=1, vocab=37,
        prefix_cache=1, quantum=64, lease_us=0, arena_tokens=1 << 10,
    )  # fmt: skip

    def submit() -> Submit:
        length, most = int(rng.integers(1, 12)), int(rng.integers(20, 50))
        return Submit(
            int(rng.integers(2)), length, most, token=int(rng.integers(2)), masked=False,
            logprobs=int(rng.random() < 0.05), deadline=0,
        )  # fmt: skip

    ticks = []
    for i in range(120):
        acts: tuple[Any, ...] = (submit(),) if i < 6 or rng.random() < 0.08 else ()
        if rng.random() < 0.03:
            acts += (Act(str(rng.choice(["cancel", "withhold", "release"])), int(rng.integers(2)), 0),)
        ticks.append(Tick(acts, (), False, 1, None))
    return Program(config, tuple(ticks))


def trace(program: Program, group_size: int) -> tuple[list[Any], dict[str, bytes]]:
    """Every plan of a run, and the final bytes of log, state and completion queues."""
    h = Harness(program.config, group_size=group_size, checks=False)
    plans: list[Any] = []

    def record() -> None:
        n, t = (int(h.plan["header"][0][k]) for k in ("n_rows", "n_tokens"))
        arrays = [h.plan["rows"][:n], *(h.plan[k][:t] for k in ("token_ids", "positions", "kv_slots"))]
        plans.append([a.tobytes() for a in arrays])

    run_boundary = h.boundary

    def boundary() -> bool:
        launched = run_boundary()
        if launched:
            record()
        return launched

    h.boundary = boundary  # type: ignore[method-assign]
    h.attach()
    for tick in program.ticks:
        perform(h, tick)
    wind_up(h)
    if program.config.log_level == LogLevel.ALL:
        reached = {"MASK", "PREFIX_HIT", "PREEMPT", "EPOCH", "LEASE 1", "logprobs", "PAGE_EVICT"}
        assert reached <= h.situations, f"this history misses {reached - h.situations}"
    STEADY[group_size] = h.scheduler.steady_boundaries
    final = {name: region.tobytes() for name, region in h.regions.items() if name != "Plan"}
    return plans, final | {"shared": h.shared.tobytes()}


STEADY: dict[int, int] = {}  # boundaries of the last trace by group size that all members worked on together


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("draw", [steady_history, partial(drawn_history, log_level=LogLevel.DECISIONS)])
def test_steady_boundaries_leave_the_same(draw: Callable[[int], Program], seed: int) -> None:
    """Catches: a boundary that all members work on together and that one alone would have made otherwise: an event out
    of place, a page published or taken in another order, a credit, an end or a cancel overlooked."""
    program = draw(seed)
    plans, final = trace(program, 1)
    for size in (3, 4):
        other_plans, other_final = trace(program, size)
        assert other_plans == plans, f"a group of {size} plans otherwise"
        for region, content in final.items():
            assert other_final[region] == content, f"a group of {size} leaves another {region}"
        if draw is steady_history:
            assert STEADY[size] > 20, f"only {STEADY[size]} boundaries of a group of {size} were steady"


@pytest.mark.parametrize("seed", [1, 2])  # admission reserve, optimistic
def test_group_size_does_not_matter(seed: int) -> None:
    """Catches: work of a group member that is lost, done twice or read before it is written."""
    program = drawn_history(seed)
    plans, final = trace(program, 1)
    assert len(plans) > 40
    for size in (3, 4):
        other_plans, other_final = trace(program, size)
        assert other_plans == plans, f"a group of {size} plans otherwise"
        for region, content in final.items():
            assert other_final[region] == content, f"a group of {size} leaves another {region}"


@pytest.mark.parametrize("size", [0, 257])
def test_group_size_has_limits(size: int) -> None:
    """Catches: a group of no threads that waits for ever at its first barrier."""
    with pytest.raises(ValueError, match="group_size"):
        Harness(small_config(), group_size=size)
