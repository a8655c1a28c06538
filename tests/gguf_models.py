"""Writes a HuggingFace directory as a GGUF file the way llama.cpp's converter does, with the ``gguf`` package."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import quantize
from safetensors import safe_open

F32 = npt.NDArray[np.float32]

ARCHITECTURES = {"mistral": "llama", "qwen3_moe": "qwen3moe"}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def read_directory(path: Path) -> tuple[dict[str, Any], dict[str, F32]]:
    """config.json and the float32 tensors of a HuggingFace directory with a single file."""
    with safe_open(path / "model.safetensors", "numpy") as file:
        tensors = {name: file.get_tensor(name).astype(np.float32) for name in file.keys()}  # noqa: SIM118
    return json.loads((path / "config.json").read_text(encoding="utf-8")), tensors


def stack_experts(tensors: Mapping[str, F32]) -> dict[str, F32]:
    """One tensor [experts, out, in] for each projection of a layer, as llama.cpp keeps experts."""
    out = dict(tensors)
    parts: dict[str, dict[int, F32]] = {}
    for name in tensors:
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name):
            parts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = out.pop(name)
    return out | {name: np.stack([own[i] for i in range(len(own))]) for name, own in parts.items()}


def interleave(weights: F32, heads: int) -> F32:
    """llama.cpp's row order of a query or key projection, or its bias: rotary pairs side by side within each head."""
    shape = (heads, 2, len(weights) // heads // 2, *weights.shape[1:])
    return weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape)


def gguf_tensors(config: dict[str, Any], tensors: Mapping[str, F32]) -> dict[str, F32]:
    """Tensors under their GGUF names and in llama.cpp's row order."""
    llama = config["model_type"] in ("llama", "mistral")
    out: dict[str, F32] = {}
    for name, value in stack_experts(tensors).items():
        stem, _, kind = name.rpartition(".")
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(stem.rpartition(".")[2])
        stored = interleave(value, config[heads]) if llama and heads else value
        if match := re.fullmatch(r"model\.layers\.(\d+)\.(.*)", stem):
            out[f"blk.{match[1]}.{NAMES[match[2]]}.{kind}"] = stored
        else:
            out[f"{TOP[stem]}.{kind}"] = stored
    rope = config["rope_parameters"]
    if rope["rope_type"] == "llama3":
        out["rope_freqs.weight"] = llama3_divisors(config)
    if rope["rope_type"] == "longrope":
        for length in ("long", "short"):
            out[f"rope_factors_{length}.weight"] = np.array(rope[f"{length}_factor"], np.float32)
    return out


def llama3_divisors(config: dict[str, Any]) -> F32:
    """What llama.cpp divides each frequency by: 1 for short waves, the factor for long ones, blended between."""
    rope, dim = config["rope_parameters"], config["head_dim"]
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    out = []
    for i in range(0, dim, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (i / dim)
        smooth = (original / wave - low) / (high - low)
        smooth = min(max(smooth, 0.0), 1.0)
        out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


def gguf_metadata(config: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """Metadata under full keys."""
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    rope, heads = config["rope_parameters"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    positions = config["max_position_embeddings"]
    values: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": positions,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "vocab_size": vocabulary,
    }
    if config["model_type"] == "phi3":
        values["attention.sliding_window"] = config["sliding_window"] or 0
        values["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
    elif config["model_type"] == "mistral" and config["sliding_window"]:
        values["attention.sliding_window"] = config["sliding_window"]
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        values |= {"rope.scaling.type": kind, "rope.scaling.factor": rope["factor"]}
    if kind == "yarn":
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if kind == "longrope":
        scale = positions / rope["original_max_position_embeddings"]
        attention = math.sqrt(1 + math.log(scale) / math.log(rope["original_max_position_embeddings"]))
        values |= {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": attention}
    if config["model_type"] == "qwen3_moe":
        values["expert_count"] = config.get("num_experts") or config["num_local_experts"]
        values["expert_used_count"] = config["num_experts_per_tok"]
        values["expert_feed_forward_length"] = config["moe_intermediate_size"]
        values["expert_weights_norm"] = config["norm_topk_prob"]
    named = {f"{architecture}.{key}": value for key, value in values.items()}
    return {**named, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}


def add_metadata(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    """Each value with the type that llama.cpp gives it; None is left out."""
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)


def write_gguf_model(
    directory: Path,
    target: Path,
    kind: Kind = Kind.F32,
    *,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, F32 | None] | None = None,
    split_tensors: int = 0,
) -> None:
    """Write the model in ``directory`` to ``target``; matrices in ``kind`` but for the router, the rest in float32.

    ``metadata`` and ``tensors``: changes, None removes. ``split_tensors``: that many tensors a file, 0 for one file.
    """
    config, weights = read_directory(directory)
    values = gguf_metadata(config, config["vocab_size"]) | dict(metadata or {})
    stored = {n: t for n, t in (gguf_tensors(config, weights) | dict(tensors or {})).items() if t is not None}
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(target, architecture, split_max_tensors=split_tensors)
    add_metadata(writer, values)
    for name, value in stored.items():
        used = kind if value.ndim > 1 and "ffn_gate_inp" not in name else Kind.F32
        writer.add_tensor(name, quantize(value, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
