"""Batch-invariant mode: bits of operations and of whole engines, in 16-bit types and float32; skipped without a GPU.

What a minute allows; `hil_rigs.gpu.batch_invariance` does it for every model, type and size of batch.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.hil.gpu.missing import MISSING

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

if MISSING is None:
    from blink_core.ops.cuda_ops import CudaOps
    from blink_core.runtime.cuda_model import load_network
    from hil_rigs.gpu.batch_invariance import LONGEST, check_engine
    from hil_rigs.gpu.invariance_cases import bits, differing, values

DTYPES = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_have_the_same_bits_in_any_step(dtype: str) -> None:
    """Catches: an order of additions that depends on the number of rows, a row's place, its chunk, or decode against
    prefill, in any operation."""
    outcomes = list(bits(CudaOps(dtype, batch_invariant=True), np.random.default_rng(1)))
    assert outcomes
    assert [o for o in outcomes if not o.ok] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # float16 has bfloat16's kernels
def test_operations_are_right_in_this_mode(dtype: str) -> None:
    """Catches: a product or an attention that is the same in any batch, and wrong."""
    outcomes = list(values(CudaOps(dtype, batch_invariant=True), np.random.default_rng(2)))
    assert outcomes
    assert [o for o in outcomes if not o.ok] == []


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_normal_mode_is_not_invariant(dtype: str) -> None:
    """Catches: a comparison of bits that cannot fail."""
    assert differing(CudaOps(dtype), np.random.default_rng(1)) > 0


# Heads of 64, and of 128 with their norm.
ENGINES = [("float32", "llama-rope-llama3"), ("bfloat16", "qwen3"), ("float16", "llama-rope-llama3")]


@pytest.mark.parametrize(("dtype", "name"), ENGINES)
def test_requests_have_the_same_bits_in_any_company(dtype: str, name: str) -> None:
    """Catches: tokens or logits of a request that depend on its batch, its place, a prefix hit, the size of chunks or a
    preemption: KV rows computed anew that are not the old ones to the bit."""
    pytest.importorskip("transformers", reason="the small models are HuggingFace's")
    from tests.tiny_models import tiny_model

    network = load_network(tiny_model(name).path, CudaOps(dtype, batch_invariant=True), LONGEST)
    result = check_engine(network, few=True)
    assert result["wrong"] == []
    assert sum(result["rows"].values()) > 900
