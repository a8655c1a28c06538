"""Weights and configurations that do not belong together, or hold no numbers: refused at load, with name and value."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from blink_core.models import ModelError, load_config, load_model
from tests.gguf_models import read_directory, write_gguf_model
from tests.tiny_models import tiny_model


def copy_of(
    name: str, target: Path, config: dict[str, Any] | None = None, tensors: Mapping[str, Any] | None = None
) -> Path:
    """The tiny model ``name`` with changes of config.json and of tensors (None removes)."""
    shutil.copytree(tiny_model(name).path, target)
    values, weights = read_directory(target)
    merged = {k: v for k, v in (values | (config or {})).items() if v is not ...}
    (target / "config.json").write_text(json.dumps(merged))
    changed: dict[str, Any] = {n: w for n, w in {**weights, **(tensors or {})}.items() if w is not None}
    save_file(changed, target / "model.safetensors")
    return target


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(
    ("model", "tensor", "at"),
    [
        ("llama-gqa3", "model.embed_tokens.weight", (7, 3)),
        ("llama-gqa3", "model.norm.weight", (5,)),
        ("llama-gqa3", "model.layers.2.mlp.down_proj.weight", (95, 191)),
        ("llama-bias", "model.layers.1.self_attn.k_proj.bias", (31,)),
        ("qwen3-moe", "model.layers.1.mlp.experts.5.up_proj.weight", (0, 0)),
        ("qwen3-moe", "model.layers.0.mlp.gate.weight", (5, 95)),
    ],
)
def test_weights_that_are_no_numbers(
    tmp_path: Path, model: str, tensor: str, at: tuple[int, ...], dtype: type, bad: float
) -> None:
    """Catches: a NaN or infinite weight that is served: every answer is then an error, or silently wrong."""
    _, weights = read_directory(tiny_model(model).path)
    value: npt.NDArray[Any] = weights[tensor].astype(dtype)
    value[at] = bad
    path = copy_of(model, tmp_path / "m", tensors={tensor: value})
    with pytest.raises(ModelError, match=rf"m: tensor '{tensor}' holds {bad} at \[{', '.join(map(str, at))}\]"):
        load_model(path)


def test_no_number_in_a_gguf_file_is_named_by_its_row(tmp_path: Path) -> None:
    """Catches: a place counted in llama.cpp's row order, or a scan that only safetensors go through."""
    path = tiny_model("llama-gqa3").path
    config, weights = read_directory(path)
    stored = weights["model.layers.0.self_attn.q_proj.weight"].copy()
    stored[9, 5] = np.nan  # row 9 of head 0 is the second of pair 1 in the file, so row 3 there
    heads = config["num_attention_heads"]
    interleaved = stored.reshape(heads, 2, 8, -1).swapaxes(1, 2).reshape(stored.shape)
    assert np.isnan(interleaved[3, 5])
    write_gguf_model(path, tmp_path / "m.gguf", tensors={"blk.0.attn_q.weight": interleaved})
    with pytest.raises(
        ModelError, match=r"m\.gguf: tensor 'model\.layers\.0\.self_attn\.q_proj\.weight' .* at \[9, 5\]"
    ):
        load_model(tmp_path / "m.gguf")


def test_large_finite_weights_are_no_error(tmp_path: Path) -> None:
    """Catches: finite weights refused because a sum of them overflows."""
    _, weights = read_directory(tiny_model("llama-gqa3").path)
    huge = np.full_like(weights["model.norm.weight"], 3e38)
    load_model(copy_of("llama-gqa3", tmp_path / "m", tensors={"model.norm.weight": huge}))


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        ("qwen2", {"num_hidden_layers": 4, "layer_types": ...}, "'model.layers.3.input_layernorm.weight' is missing"),
        ("qwen2", {"num_hidden_layers": 2, "layer_types": ...}, "12 unexpected tensor"),
        ("qwen2", {"num_hidden_layers": 2}, "layer_types has 3 entries for 2 layers"),
        ("qwen2", {"layer_types": ["full_attention", "x", "full_attention"]}, "layer_types holds 'x'"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "no sliding_window is in use"),
        ("qwen2-window", {"sliding_window": 0}, "sliding_window is 0, expected at least 1"),
        ("qwen2-window", {"sliding_window": 2.5}, "'sliding_window' is 2.5, expected int"),
        ("qwen2-window", {"use_sliding_window": "no"}, "'use_sliding_window' is 'no', expected bool"),
        (
            "qwen2",
            {"num_key_value_heads": 7},
            r"k_proj.weight' has the wrong shape: got \[32, 112\], expected \[112, 112\]",
        ),
        ("qwen2", {"tie_word_embeddings": False}, "'lm_head.weight' is missing"),
        ("llama-gqa3", {"attention_bias": True}, "q_proj.bias' is missing"),
        ("llama-bias", {"attention_bias": False}, r"12 unexpected tensor.*bias"),
        ("llama-bias", {"mlp_bias": False}, r"9 unexpected tensor.*down_proj.bias"),
        ("qwen3", {"head_dim": 64}, r"q_norm.weight' has the wrong shape: got \[128\], expected \[64\]"),
        ("qwen3", {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, r"q_proj.bias' is missing"),
        ("qwen3", {"architectures": ["Qwen2ForCausalLM"]}, r"architecture 'qwen3' \(\['Qwen2ForCausalLM'\]\) is not"),
        ("phi3", {"rope_parameters": {"rope_type": "llama3"}}, "'llama3', which is not supported for phi3"),
        (
            "phi4-longrope",
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 12}},
            "long_factor' is missing",
        ),
        (
            "phi4-longrope",
            {"rope_parameters": {"rope_type": "su", "short_factor": [1, 2], "long_factor": []}},
            "has 2 values",
        ),
        (
            "phi4-longrope",
            {"rope_parameters": {"rope_type": "longrope", "short_factor": ["a"], "long_factor": []}},
            r"'short_factor\[0\]' is 'a', expected float",
        ),
        ("phi4-longrope", {"original_max_position_embeddings": 0}, "original_max_position_embeddings 0"),
        (
            "llama-gqa3",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor is 0.5, which is not supported for llama",
        ),
        (
            "qwen3-moe",
            {"num_local_experts": 7},
            r"experts.6.gate_proj.weight' is missing|got \[6, 96\], expected \[7, 96\]",
        ),
        ("qwen3-moe", {"num_local_experts": 0}, r"\(count\) is 0, expected 1"),
        ("qwen3-moe", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7, expected 1 to the 6"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3-moe", {"mlp_only_layers": "none"}, "'mlp_only_layers' is 'none', expected a list"),
        ("qwen3-moe", {"mlp_only_layers": [1]}, r"layers.1.mlp.gate_proj.weight' is missing"),
        ("qwen3-moe", {"moe_intermediate_size": 32}, r"got \[64, 96\], expected \[32, 96\]"),
    ],
)
def test_configuration_that_disagrees(tmp_path: Path, model: str, config: dict[str, Any], message: str) -> None:
    """Catches: a model computed with another shape, window, routing or scaling than its weights were trained for."""
    path = copy_of(model, tmp_path / "m", config)
    with pytest.raises(ModelError, match=message) as raised:
        load_model(path)
    assert str(path) in str(raised.value)


def test_fused_experts_are_those_of_single_names(tmp_path: Path, make_driver: Callable[..., Any]) -> None:
    """Catches: transformers' in-memory layout of experts read across experts, or gate and up exchanged."""
    _, weights = read_directory(tiny_model("qwen3-moe").path)
    changes: dict[str, npt.NDArray[Any] | None] = {n: None for n in weights if ".experts." in n}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        own = [[weights[f"{at}.{i}.{p}_proj.weight"] for p in ("gate", "up", "down")] for i in range(6)]
        changes[f"{at}.gate_up_proj"] = np.stack([np.concatenate(parts[:2]) for parts in own])
        changes[f"{at}.down_proj"] = np.stack([parts[2] for parts in own])
    fused, single = copy_of("qwen3-moe", tmp_path / "m", tensors=changes), tiny_model("qwen3-moe").path
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blink_core.models.loaders.safetensors.CHUNK_ELEMENTS", 96 * 50)  # pieces across experts
        models = [load_model(path) for path in (fused, single)]
    logits = [make_driver(m, pages=4, page_size=16).step([("r", [5, 6, 7, 8])]) for m in models]
    assert logits[0].tobytes() == logits[1].tobytes()


@pytest.mark.parametrize("cut", [1, 100, 5000])
def test_truncated_shards(tmp_path: Path, cut: int) -> None:
    """Catches: a shard that ended early and whose missing weights are whatever lies there."""
    path = copy_of("qwen3-moe", tmp_path / "m")
    _, weights = read_directory(path)
    (path / "model.safetensors").unlink()
    names = sorted(weights)
    placed = {name: f"model-{1 + 2 * i // len(names):05}-of-00002.safetensors" for i, name in enumerate(names)}
    for shard in sorted(set(placed.values())):
        save_file({n: weights[n] for n in names if placed[n] == shard}, path / shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    load_model(path)
    last = path / "model-00002-of-00002.safetensors"
    last.write_bytes(last.read_bytes()[:-cut])
    with pytest.raises(ModelError, match=rf"{last.name}: truncated safetensors file: \d+ bytes, .* \d+"):
        load_model(path)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"eos_token": 3}),
        ("tokenizer_config.json", {"eos_token": "x", "added_tokens_decoder": {"a": {"content": "x"}}}),
        ("tokenizer_config.json", {"eos_token": "x", "added_tokens_decoder": [1]}),
        ("tokenizer_config.json", {"eos_token": "x", "added_tokens_decoder": {"1": 2}}),
        ("tokenizer.json", {"added_tokens": [1]}),
        ("tokenizer.json", {"added_tokens": [{"content": "<|im_end|>"}]}),
        ("tokenizer.json", {"model": 4}),
        ("generation_config.json", {"eos_token_id": ["a"]}),
    ],
)
def test_odd_tokenizer_files(tmp_path: Path, file: str, content: dict[str, Any]) -> None:
    """Catches: a malformed file beside the weights that ends in a Python error without a file name."""
    path = copy_of("llama-gqa3", tmp_path / "m")
    (path / file).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=str(path)):
        load_config(path)
