"""One history through groups of 1, 3 and 4 threads (design section 4)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.device.harness import Harness, small_config
from tests.unit.device.program import Act, Program, Submit, Tick, perform


def drawn_history(seed: int) -> Program:
    """A program with everything that the group does together: long prompts, torn descriptors, epochs, preemption."""
    rng = np.random.default_rng(seed)
    config = small_config(rings=2, pages=2 + 6, max_len=24, visibility_polls=2)

    def action() -> Submit | Act:
        ring, pick = int(rng.integers(2)), int(rng.integers(8))
        if rng.random() < 0.25:
            return Act(str(rng.choice(["cancel", "withhold", "release", "duplicate", "attach"])), ring, pick)
        corruption = int(rng.integers(13)) if rng.random() < 0.25 else None
        length, most = rng.integers(1, 24, 2).tolist()
        return Submit(ring, length, most, token=pick, corruption=corruption, sealed=bool(rng.integers(2)))

    ticks = []
    for _ in range(25):
        before = tuple(action() for _ in range(rng.integers(0, 3)))
        during = tuple(action() for _ in range(rng.integers(0, 2)))
        fault = "nan" if rng.random() < 0.05 else None
        ticks.append(Tick(before, during, bool(rng.integers(2)), int(rng.integers(1, 3)), fault))
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
    for front in h.fronts:
        front.withhold = False
        h.poll()
        front.consume()
    h.settle()
    final = {name: region.tobytes() for name, region in h.regions.items() if name != "Plan"}
    return plans, final | {"shared": h.shared.tobytes()}


def test_group_size_does_not_matter() -> None:
    """Catches: work of a group member that is lost, done twice or read before it is written."""
    program = drawn_history(5)
    plans, final = trace(program, 1)
    assert len(plans) > 25
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
