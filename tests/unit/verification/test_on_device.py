"""Checks at sizes of large models and over many steps, as far as they go without a GPU: small, and on rig `local`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hil_rigs.description import load_rig
from verification.criterion.kernels import judge_kernels
from verification.models.tiny import build_named
from verification.on_device.check_shape import check_shape, summary
from verification.on_device.long_runs import LongRun, check_run, check_same, check_tokens, counts_of, run_long
from verification.on_device.shapes import SHAPES, SMALL, build, config_of
from verification.oracles.hf import HFOracle
from verification.result import CheckResult, Verdict
from verification.thresholds import default_thresholds

PLANTED = Path(__file__).parents[2] / "planted" / "engine.py"
WHOLE = {"llama-3-8b": (32, 8.03), "phi-4": (40, 14.66), "qwen3-32b": (64, 32.76), "qwen3-30b-a3b": (48, 30.53)}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_those_of_the_models(name: str) -> None:
    """Catches: a hidden size, head count, expert count or vocabulary that is not the original's."""
    layers, billions = WHOLE[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(name, layers), dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)


def test_weights_hang_on_the_seed_alone(tmp_path: Path) -> None:
    """Catches: weights that another run cannot draw again; a tensor that keeps what its class drew."""
    digests = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        build(SMALL, tmp_path / name, seed=seed)
        digests.append((tmp_path / name / "model.safetensors").read_bytes())
    assert digests[0] == digests[1] != digests[2]
    with pytest.raises(ValueError, match="unknown shape 'gpt'"):
        config_of("gpt")


@pytest.mark.parametrize("planted", ["", "foreign-kv-row"])
def test_a_shape_is_checked_and_its_folder_removed(planted: str, tmp_path: Path) -> None:
    """Catches: a foreign KV row in a large model that passes; a check that fails whatever it is given; gigabytes of
    weights that stay."""
    rig = load_rig("local")
    if planted:
        rig = rig.model_copy(update={"engine_command": (str(PLANTED), planted)})
    dtypes = ("float32",) if planted else ("float32", "bfloat16")
    result = check_shape(SMALL, rig, dtypes=dtypes, device="cpu", folder=tmp_path)
    assert result.ok == (not planted), result
    assert summary(result).verdict is (Verdict.INVALID if planted else Verdict.VALID)
    assert list(tmp_path.iterdir()) == []


def test_kernels_are_held_to_huggingfaces_own_error() -> None:
    """Catches: kernels that round worse than HuggingFace, over all rows or in one of them; too few rows, or NaN, that
    pass."""
    limits = default_thresholds().kernels
    own = np.full(200, 0.01)
    backends = {"eager": own, "sdpa": own * 1.1}
    assert judge_kernels(own * 1.05, backends, limits).verdict is Verdict.VALID
    assert judge_kernels(own * 1.2, backends, limits).clause == "error"
    one = own * 0.9
    one[3] = 0.01 * 1.1 * limits.worst_row * 1.01
    assert judge_kernels(one, backends, limits).clause == "worst-row"
    assert judge_kernels(own[:50], {"eager": own[:50]}, limits).verdict is Verdict.UNKNOWN
    broken = own.copy()
    broken[7] = np.nan
    assert judge_kernels(broken, backends, limits).verdict is Verdict.INVALID
    assert judge_kernels(own, {"eager": broken}, limits).verdict is Verdict.UNKNOWN
    assert judge_kernels(own, {"eager": own * 0}, limits).verdict is Verdict.UNKNOWN


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_named("llama-gqa3", tmp_path_factory.mktemp("long")).path


@pytest.fixture(scope="module")
def ran(model: Path) -> LongRun:
    (run,) = run_long(load_rig("local"), model, None, (130,))
    return run


def test_a_long_run_is_as_huggingface_has_it(ran: LongRun, model: Path) -> None:
    """Catches: a check of long runs that no run passes; one that passes a single wrong token."""
    assert check_run(ran).ok(), check_run(ran)
    oracles, limits = HFOracle.load_pair(model), default_thresholds().tokens
    assert check_tokens(ran, *oracles, limits).ok()
    wrong = replace(ran, tokens=[*ran.tokens[:-1], (ran.tokens[-1] + 1) % 512])
    result = check_tokens(wrong, *oracles, limits)
    assert result.verdict is Verdict.INVALID
    assert "1 of 130 tokens are not HuggingFace's" in result.message
    assert f"index {len(ran.tokens) - 1}" in result.message
    assert check_same({"fire": [ran], "tail": [ran]}).ok()
    assert "index 129" in check_same({"fire": [ran], "tail": [wrong]}).message
    longer = replace(ran, asked=1000)
    assert "index 129" in check_same({"auto": [longer, ran], "tail": [wrong]}).message
    assert check_same({"auto": [longer, ran], "tail": [ran]}).ok()
    assert not check_same({"auto": [longer], "tail": [ran]}).ok()


def test_every_way_of_launching_runs_long() -> None:
    """Catches: the ten thousand steps that nobody runs any more, a way of launching that runs nothing."""
    assert [counts_of(place) for place in range(3)] == [(120, 1000, 10_000), (120, 1000), (120, 1000)]


def test_what_a_long_run_may_not_show(ran: LongRun) -> None:
    """Catches: a step that was done twice or is missing, an index that is skipped, a heart that falls or that nobody
    watched, pages that nobody counted or that stay taken."""
    assert check_run(replace(ran, steps=ran.steps + 1)).clause == "steps"
    assert check_run(replace(ran, indices=[*ran.indices[:-1], 999])).clause == "steps"
    assert check_run(replace(ran, ended="ERROR 5")).clause == "steps"
    assert check_run(replace(ran, heart=replace(ran.heart, fell="from 9 to 3"))).clause == "heartbeat"
    assert check_run(replace(ran, heart=replace(ran.heart, looks=0))).clause == "heartbeat"
    assert check_run(replace(ran, heart=replace(ran.heart, longest_s=60.0))).clause == "heartbeat"
    assert check_run(replace(ran, pages=None)).verdict is Verdict.UNKNOWN
    leak = CheckResult(Verdict.INVALID, "kv-conservation", "pages", "one is missing")
    assert (check_run(replace(ran, pages=leak)).clause, check_run(replace(ran, pages=leak)).verdict) == (
        "pages",
        Verdict.INVALID,
    )
