"""LongRoPE beyond its original maximum on the GPU; skipped without a GPU."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from tests.hil.gpu.missing import MISSING

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

if MISSING is None:
    from hil_rigs.gpu.runtime_check import serve
    from hil_rigs.gpu.step_diff import diff

NAMES = ["phi3-longrope", "phi4-longrope"]  # whole and partial rotation


def path_of(name: str) -> Path:
    pytest.importorskip("transformers", reason="the small models are HuggingFace's")
    from tests.tiny_models import tiny_model

    return tiny_model(name).path


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_steps_equal_numpy(name: str, graphs: bool) -> None:
    """Catches: a row turned by the wrong table, one that outgrows the original maximum in decode or in a chunk and is
    not computed anew, keys computed anew that land elsewhere, a pass that samples or disturbs the other rows."""
    found = diff(path_of(name), "float32", graphs=graphs)
    assert [d for d in found if not d.ok] == []
    assert len({d.step for d in found if d.name.startswith("anew")}) >= 2  # in decode, and in a chunk


@pytest.mark.parametrize("strategy", ["fire", "tail"])
@pytest.mark.parametrize("name", NAMES)
def test_resident_scheduler_makes_the_passes(name: str, strategy: str, tmp_path: Path) -> None:
    """Catches: passes that the device launches too late, too few of, or for another row; a plan that is committed
    before its passes have ended; one lost between two executions. Control: the host-driven loop, each request alone."""
    (tmp_path / name).symlink_to(path_of(name))
    serve(strategy, Namespace(models=tmp_path))
