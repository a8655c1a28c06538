"""Kernels that the sanitizers launch by themselves make what they should, here without one; skipped without a GPU."""

from __future__ import annotations

import pytest

from tests.hil.gpu.missing import MISSING

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

if MISSING is None:
    from blink_core.ops.cuda_ops import CudaOps
    from hil_rigs.gpu.sanitize_kernels import LIMIT, all_launched


def test_launches_are_those_of_a_step() -> None:
    """Catches: parameters that a kernel reads otherwise than they are given, so that a sanitizer looks at something
    that no step does."""
    errors = {x.case: x.error for x in all_launched(CudaOps("bfloat16"), CudaOps("bfloat16", batch_invariant=True))}
    assert len(errors) > 40
    assert {case: error for case, error in errors.items() if not error <= LIMIT} == {}
