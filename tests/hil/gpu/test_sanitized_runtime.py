"""The KV sanitizer as a mode of the GPU engine; skipped without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blink_core.abi.config import EngineConfig
from blink_core.abi.params import SamplingParams
from blink_core.runtime.cpu import CpuRuntime
from blink_core.runtime.descriptor import KV_COUNTERS
from tests.hil.gpu.missing import MISSING
from verification.faults import wrong_plans

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

if MISSING is None:
    from blink_core.ops.cuda_ops import CudaOps
    from blink_core.runtime.cuda_model import load_network
    from blink_core.runtime.launch import LaunchOptions
    from hil_rigs.gpu.session import Answer, ask, client_of, running
    from hil_rigs.gpu.step_diff import drawn_requests

STRATEGIES = ["host", "fire", "tail"]


def served(
    name: str, dtype: str, strategy: str, folder: Path, requests: list[Any] | None = None
) -> tuple[list[Answer], dict[str, int], list[dict[str, Any]]]:
    """Answers, counters and reports of an engine with few pages under the sanitizer."""
    pytest.importorskip("transformers", reason="the small models are HuggingFace's")
    from tests.tiny_models import tiny_model

    network = load_network(tiny_model(name).path, CudaOps(dtype), 256)
    config = EngineConfig(
        vocab=network.config.vocab_size, eos_ids=network.config.eos_token_ids, slots=64, sq_entries=256,
        cq_entries=2048, max_rows=8, arena_tokens=1 << 14, max_len=256, pages=40, token_budget=23,
    )  # fmt: skip
    config = replace(config, prefix_cache=int(network.original_max == 0))
    file = folder / "kv-sanitizer.jsonl"
    todo = drawn_requests(np.random.default_rng(5), 30, config) if requests is None else requests
    options = LaunchOptions(strategy=strategy, kv_sanitizer=file, step_limit_s=20.0, tune=False)
    with running(config, network, options) as runtime:
        answers = ask(client_of(runtime), todo, 60.0)
        reporter = runtime._built.reporter  # type: ignore[union-attr]
        assert reporter is not None
        values = reporter._counters.array(np.uint64, (len(KV_COUNTERS),)).tolist()
        counters = dict(zip(KV_COUNTERS, values, strict=True))
        reports = [json.loads(line) for line in file.read_text().splitlines()]
    return answers, counters, reports


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("name", "dtype"), [("llama-rope-llama3", "bfloat16"), ("mistral-window", "float32"),
                                             ("phi3-longrope", "float32")])  # fmt: skip
def test_quiet_under_pressure(name: str, dtype: str, strategy: str, tmp_path: Path) -> None:
    """Catches: a false alarm at a preemption, prefix hit, reuse, window or pass of LongRoPE; a page whose record the
    resident scheduler writes after it has launched the step; kernels that are not part of the graphs."""
    answers, counters, reports = served(name, dtype, strategy, tmp_path)
    assert reports == []
    assert {a.ended for a in answers} <= {"LENGTH", "EOS", "STOP_TOKEN", "CONTEXT"}
    assert counters["reports"] == 0
    assert counters["steps"] > 50
    assert counters["rows"] > 1000


@pytest.mark.parametrize("fault", ["swapped-pages", "lost-append", "wrong-token"])
def test_wrong_plan_ends_its_request(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a fault in the memory that the graphs read which nobody reports, a report that comes after its request
    has ended, and one that ends a bystander."""
    for method in ("current_plan", "_run", "serve"):
        monkeypatch.setattr(CpuRuntime, method, getattr(CpuRuntime, method))  # put back at the end
    wrong_plans.install(tmp_path)
    prompts = np.random.default_rng(3).integers(3, 100, (2, 40))
    params = SamplingParams(20, ignore_eos=True)
    requests = [(prompts[0], params), (prompts[1], replace(params, seed=wrong_plans.seed_of(fault)))]
    answers, counters, reports = served("llama-rope-llama3", "bfloat16", "host", tmp_path, requests)
    planted = [json.loads(line) for line in (tmp_path / wrong_plans.FILE).read_text().splitlines()]
    assert [p["fault"] for p in planted] == [fault]
    assert [a.ended for a in answers] == ["LENGTH", "ERROR MODEL_ERROR"]
    assert (len(reports), counters["reports"]) == (1, 1)
