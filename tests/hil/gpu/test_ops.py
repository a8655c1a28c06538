"""Each GPU operation against its NumPy twin, as `hil_rigs.gpu.ops_check` draws them; skipped without a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from tests.hil.gpu.missing import MISSING

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

if MISSING is None:
    from blink_core.ops.cuda_ops import CudaOps
    from hil_rigs.gpu.ops_check import CHECKS
    from hil_rigs.gpu.sampler_cases import sampler

PARTS = (
    *("rows", "products", "own", "invariance", "rope", "attention", "append", "far", "joined", "torch", "moe", "one"),
    "fixed",
)
NONE = {(part, "float32") for part in ("torch", "far", "own", "joined", "one", "fixed")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("part", PARTS)
def test_operation_equals_numpy(part: str, dtype: str) -> None:
    """Catches: a wrong page, head, position, window or split, a read beyond a context (NaN and noise are there), a lost
    residual or bias, bits that depend on the batch, and an error above that of the element type."""
    outcomes = list(CHECKS[part](CudaOps(dtype), np.random.default_rng(1)))
    if part == "far" and not outcomes and dtype != "float32":
        pytest.skip("no room for pools of 2^32 elements")
    assert outcomes or (part, dtype) in NONE
    assert [o for o in outcomes if not o.ok] == []


def test_parts_are_complete() -> None:
    """Catches: a part of the check that is not run by these tests."""
    assert set(PARTS) == set(CHECKS)


def test_sampler_equals_reference() -> None:
    """Catches: a processor out of order, a token past the true vocabulary, a tie broken upwards, counts of another
    request, a random number that depends on the row, and a NaN row that yields a token."""
    outcomes = list(sampler(CudaOps("float32"), np.random.default_rng(1)))
    assert outcomes
    assert [o for o in outcomes if not o.ok] == []
