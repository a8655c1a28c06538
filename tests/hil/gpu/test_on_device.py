"""Layer shapes of large models, and ten thousand steps at once, on rig `gpu`; skipped without a GPU.

HuggingFace computes on the same GPU, in this process; each engine is a process of its own that has ended before.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hil_rigs.description import load_rig
from tests.hil.gpu.missing import MISSING
from verification.models.tiny import build_named
from verification.on_device.check_shape import DTYPES, check_shape
from verification.on_device.long_runs import (
    DEFAULT_LAUNCH,
    LAUNCHES,
    STEPS,
    LongRun,
    check_run,
    check_same,
    check_tokens,
    counts_of,
    run_long,
)
from verification.on_device.shapes import SHAPES
from verification.oracles.hf import HFOracle
from verification.thresholds import default_thresholds

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]


@pytest.mark.parametrize("name", SHAPES)
def test_tokens_at_the_shapes_of_large_models(name: str, tmp_path: Path) -> None:
    """Catches: a kernel that is right for small models only: a tile, an offset, a grid or an expert count of a real
    layer, and a vocabulary's end."""
    result = check_shape(name, load_rig("gpu"), folder=tmp_path)
    assert set(result.verdicts) == set(DTYPES)
    assert result.ok, {dtype: verdict.message for dtype, verdict in result.verdicts.items()}


def test_many_steps_in_one_go(tmp_path: Path) -> None:
    """Catches: a step that is lost or repeated where an execution of the scheduler's graph ends and the next begins, a
    heart that stands still there, a page that leaks, and drift over ten thousand steps."""
    model = build_named("llama-gqa3", tmp_path, max_positions=max(STEPS) + 64).path
    runs: dict[str, list[LongRun]] = {}
    for place, launch in enumerate(LAUNCHES):
        runs[launch] = run_long(load_rig("gpu"), model, launch, counts_of(place), longest=max(STEPS))
        for run in runs[launch]:
            result = check_run(run)
            assert result.ok(), f"{launch}, {run.asked} steps: {result.message}"
    assert check_same(runs).ok(), check_same(runs).message
    oracles = HFOracle.load_pair(model, threads=8, device="cuda")
    assert [run.asked for run in runs[DEFAULT_LAUNCH]] == list(STEPS)
    for run in runs[DEFAULT_LAUNCH]:
        result = check_tokens(run, *oracles, default_thresholds().tokens)
        assert result.ok(), result.message
