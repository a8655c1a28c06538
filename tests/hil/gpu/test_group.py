"""One history through the host's scheduler and through a block of 256 threads on the GPU; skipped without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from blink_core import _native
from blink_core.abi.enums import LogLevel
from tests.hil.gpu.missing import MISSING
from tests.unit.device.test_groups import drawn_history, steady_history
from verification.scheduler.harness import Harness
from verification.scheduler.programs import Program, perform, wind_up

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]


def run(program: Program, native: Any, group_size: int) -> dict[str, bytes]:
    """Final bytes of all regions: log and completion queues tell every plan and event of the run."""
    h = Harness(program.config, native=native, group_size=group_size, checks=False)
    h.attach()
    for tick in program.ticks:
        perform(h, tick)
    wind_up(h)
    return {name: region.tobytes() for name, region in h.regions.items()} | {"shared": h.shared.tobytes()}


HISTORIES: dict[str, Callable[[int], Program]] = {
    "everything logged": drawn_history,
    "decisions logged": partial(drawn_history, log_level=LogLevel.DECISIONS),
    "steady": steady_history,
}


@pytest.mark.parametrize("seed", [1, 2])  # admission reserve, optimistic
@pytest.mark.parametrize("name", HISTORIES)
def test_block_equals_host(name: str, seed: int) -> None:
    """Catches: work of a thread of the block that is lost, done twice or read before it is written, and anything that
    the GPU's compiler makes of the source which the host's does not."""
    from hil_rigs.gpu.scheduler import THREADS, GpuNative

    program = HISTORIES[name](seed)
    expected, got = run(program, _native, 1), run(program, GpuNative, THREADS)
    assert [name for name in expected if got[name] != expected[name]] == []
