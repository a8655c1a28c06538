"""Tiny random Llama models, seeded, served and verified like real ones (design section 9).

Built with HuggingFace's classes and saved as a safetensors directory with tokeniser and chat template. The query to KV
head ratios are 3:1 and 7:1 with two KV heads, so that neither ``h % kv_heads`` nor ``h // kv_heads`` is right by luck.
A seed is kept only if the model is sensitive: see ``verification.models.sensitivity``.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from verification.models.sensitivity import Sensitivity, measure_sensitivity
from verification.models.tiny_tokenizer import BOS_ID, EOS_ID, save_tokenizer
from verification.oracles.hf import HFOracle, quiet
from verification.result import plain
from verification.thresholds import TinyModelThresholds, default_thresholds

Ratio = Literal["3:1", "7:1"]
MANIFEST = "tiny.json"
VOCAB_SIZE = 512
HEAD_DIM = 16


class NotSensitiveError(RuntimeError):
    """No seed in the allowed number gave a model that notices every planted fault."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A built model: its directory, the seed that was kept, and what its probes showed."""

    path: Path
    ratio: Ratio
    tied: bool
    seed: int
    sensitivity: Sensitivity


def tiny_config(ratio: Ratio, *, tied: bool, max_positions: int = 512) -> LlamaConfig:
    """Configuration of a tiny Llama with ``ratio`` query heads to a KV head. ``ValueError`` for another ratio."""
    shapes = {"3:1": (6, 3, 96), "7:1": (14, 2, 112)}
    if ratio not in shapes:
        raise ValueError(f"ratio {ratio!r}: known are {', '.join(shapes)}")
    heads, layers, hidden = shapes[ratio]
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=max_positions,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=tied,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
    )


def build_tiny(
    directory: str | Path,
    *,
    ratio: Ratio = "3:1",
    tied: bool = False,
    seed: int = 0,
    max_positions: int = 512,
    thresholds: TinyModelThresholds | None = None,
) -> TinyModel:
    """Build a sensitive model in ``directory`` (created; a model there is replaced).

    Seeds are tried from ``seed`` upwards; the first whose model passes its probes is kept and written, with what the
    probes showed, to ``tiny.json`` there. The same arguments give the same bytes. Raises ``NotSensitiveError`` with the
    numbers of the last seed when none of ``thresholds.max_seeds`` passes.
    """
    limits = thresholds or default_thresholds().tiny_models
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    save_tokenizer(path, VOCAB_SIZE)
    config = tiny_config(ratio, tied=tied, max_positions=max_positions)
    missing: list[str] = []
    for candidate in range(seed, seed + limits.max_seeds):
        _save_weights(path, config, candidate)
        oracle64, oracle32 = HFOracle.load_pair(path, threads=1)
        sensitivity = measure_sensitivity(oracle64, oracle32, candidate)
        missing = sensitivity.shortfalls(limits)
        if not missing:
            built = TinyModel(path, ratio, tied, candidate, sensitivity)
            _write_manifest(built, first_seed=seed)
            return built
    shutil.rmtree(path)
    raise NotSensitiveError(
        f"no tiny model of ratio {ratio} ({'tied' if tied else 'untied'}) in seeds {seed} to "
        f"{seed + limits.max_seeds - 1} is sensitive; the last: {'; '.join(missing)}"
    )


def _save_weights(path: Path, config: LlamaConfig, seed: int) -> None:
    model = LlamaForCausalLM._from_config(config, dtype=torch.float32)
    draw = np.random.default_rng([seed, 0])
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = draw.standard_normal(tuple(parameter.shape))
            mean, deviation = _moments(name, tuple(parameter.shape), config)
            parameter.copy_(torch.from_numpy((mean + deviation * noise).astype(np.float32)))
    model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=EOS_ID)
    with quiet():
        model.save_pretrained(path)


def _moments(name: str, shape: tuple[int, ...], config: LlamaConfig) -> tuple[float, float]:
    """Mean and standard deviation of a parameter.

    The usual 0.02 gives flat logits that hang on nothing. Here attention scores have a deviation of about three, so
    that single rows matter, both branches outweigh the embedding, and logits spread by about four.
    """
    if "norm" in name:
        return 1.0, 0.1
    inputs = shape[1]
    gains = {"q_proj": 1.75, "k_proj": 1.75, "v_proj": 1.0, "o_proj": 2.0, "gate_proj": 1.0, "up_proj": 1.0}
    gains |= {"down_proj": 2.0, "lm_head": 4.0}
    for part, gain in gains.items():
        if part in name:
            return 0.0, gain / math.sqrt(inputs)
    return 0.0, 4.0 / math.sqrt(inputs) if config.tie_word_embeddings else 1.0


def _write_manifest(built: TinyModel, *, first_seed: int) -> None:
    manifest = {
        "ratio": built.ratio,
        "tied": built.tied,
        "seed": built.seed,
        "first_seed": first_seed,
        "sensitivity": plain(built.sensitivity.to_json()),
    }
    (built.path / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8")
