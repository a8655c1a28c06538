"""How products are chosen at start, on a GPU: refusals under capture, and choices compared in whole steps; skipped
without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from blink_core.abi.config import EngineConfig
from blink_core.abi.params import SamplingParams
from tests.hil.gpu.missing import MISSING

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

if MISSING is None:
    import cupy as cp

    from blink_core.ops.cublaslt import CublasLt
    from blink_core.ops.cuda_capture import captured
    from blink_core.ops.cuda_ops import CudaOps, CudaWeight, to_host
    from blink_core.runtime.cuda_model import random_network
    from blink_core.runtime.launch import LaunchOptions
    from hil_rigs.gpu.bench import LLAMA_3_8B
    from hil_rigs.gpu.comparison import LIMITS, drawn, error_of
    from hil_rigs.gpu.session import ask, client_of, running


def test_an_algorithm_refused_under_capture_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a stream that stays in capture mode, so that the next candidate's capture, or the first step, fails."""
    ops, rng = CudaOps("bfloat16"), np.random.default_rng(3)
    x, x_host = drawn(rng, "bfloat16", 64, 512)
    w, w_host = drawn(rng, "bfloat16", 1024, 512, scale=512**-0.5)
    launch, refused = CublasLt.launch, []

    def refusing(self: Any, x: Any, weight: Any, out: Any, residual: Any, choice: Any) -> None:
        if choice.algorithm == 0 and cp.cuda.runtime.streamIsCapturing(cp.cuda.get_current_stream().ptr):
            refused.append(choice)
            raise self.refusal(15)  # CUBLAS_STATUS_NOT_SUPPORTED
        launch(self, x, weight, out, residual, choice)

    monkeypatch.setattr(CublasLt, "launch", refusing)
    tuning = ops.gemm.tune(x, [CudaWeight(w)] * 4, ops.empty(64, 1024))
    assert refused
    assert tuning is not None
    assert all(choice.algorithm != 0 for choice in tuning.us)
    out = to_host(ops.linear(x, CudaWeight(w)), "bfloat16")
    assert error_of(out, x_host.astype(np.float64) @ w_host.T) <= LIMITS["bfloat16"]


def test_a_capture_that_the_driver_ends_leaves_its_stream_free() -> None:
    """Catches: the driver's word that a capture is invalid in place of the reason, and a stream that captures on."""
    stream = cp.cuda.Stream(non_blocking=True)
    array = cp.ones(4)

    def waits() -> None:
        stream.synchronize()  # forbidden in a capture, and invalidates it

    with pytest.raises(cp.cuda.runtime.CUDARuntimeError, match="Capturing|capturing|StreamCapture"):
        captured(stream, waits)
    with stream:
        array += 1
    stream.synchronize()
    assert float(array.sum()) == 8.0


def test_steps_of_9_to_32_rows_are_compared_whole() -> None:
    """Catches: an engine that measures products alone, or does not start, or whose answers do not come, after choices
    were compared in its own steps on the empty plan."""
    shape = replace(
        LLAMA_3_8B, hidden_size=512, intermediate_size=1024, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=1024,
        max_position_embeddings=256,
    )  # fmt: skip
    config = EngineConfig(
        vocab=1024, slots=16, max_rows=16, token_budget=32, pages=2 + 16 * 8, max_len=128, arena_tokens=4096,
    )  # fmt: skip
    network = random_network(shape, CudaOps("bfloat16"), config.max_len)
    with running(config, network, LaunchOptions(mirror=False, step_limit_s=20.0)) as runtime:
        records = {(r["bucket"], r["resident"]): r for r in runtime.report["products"]}
        assert ("decode 16", True) in records
        record = records["decode 16", True]
        assert {"qkv", "out", "gate_up", "down"} <= record["alone"].keys()
        assert (len(record["in_step"]) > 0) == (len(record["options"]) > 0)
        prompts = np.random.default_rng(5).integers(0, 1024, (12, 9))
        answers = ask(client_of(runtime), [(p, SamplingParams(max_tokens=8, ignore_eos=True)) for p in prompts])
    assert [(a.ended, len(a.tokens)) for a in answers] == [("LENGTH", 8)] * 12
