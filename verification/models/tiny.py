"""Tiny random models of every family, seeded, served and verified like real ones (design section 9).

Built with HuggingFace's classes and saved as a safetensors directory with tokeniser and chat template. The variants
stand in ``verification.models.variants``. A seed is kept only if the model is sensitive: see
``verification.models.sensitivity``.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from verification.models.sensitivity import Sensitivity, measure_sensitivity
from verification.models.tiny_tokenizer import BOS_ID, EOS_ID, save_tokenizer
from verification.models.variants import VOCAB_SIZE, tiny_names, variant
from verification.oracles.hf import HFOracle, quiet
from verification.result import plain
from verification.thresholds import TinyModelThresholds, default_thresholds

__all__ = ["MANIFEST", "NotSensitiveError", "TinyModel", "build_named", "tiny_names"]

MANIFEST = "tiny.json"


class NotSensitiveError(RuntimeError):
    """No seed in the allowed number gave a model that notices every planted fault."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A built model: its directory and name, the seed that was kept, and what its probes showed."""

    path: Path
    name: str
    seed: int
    sensitivity: Sensitivity


def build_named(
    name: str,
    directory: str | Path,
    *,
    seed: int = 0,
    max_positions: int | None = None,
    thresholds: TinyModelThresholds | None = None,
) -> TinyModel:
    """Build the sensitive model ``name`` (of ``tiny_names()``) in ``directory`` (created; a model there is replaced).

    max_positions: instead of the variant's own. Seeds are tried from ``seed`` upwards; the first whose model passes its
    probes is kept and written, with what the probes showed, to ``tiny.json`` there. The same arguments give the same
    bytes. Raises ``NotSensitiveError`` with the numbers of the last seed when none of ``thresholds.max_seeds`` passes,
    ``ValueError`` for an unknown name.
    """
    config, path = variant(name).config(), Path(directory)
    if max_positions is not None:
        config.max_position_embeddings = max_positions
    limits = thresholds or default_thresholds().tiny_models
    path.mkdir(parents=True, exist_ok=True)
    save_tokenizer(path, VOCAB_SIZE)
    missing: list[str] = []
    for candidate in range(seed, seed + limits.max_seeds):
        _save_weights(path, config, candidate)
        oracle64, oracle32 = HFOracle.load_pair(path, threads=1)
        sensitivity = measure_sensitivity(oracle64, oracle32, candidate)
        missing = sensitivity.shortfalls(limits)
        if not missing:
            built = TinyModel(path, name, candidate, sensitivity)
            _write_manifest(built, first_seed=seed)
            return built
    shutil.rmtree(path)
    raise NotSensitiveError(
        f"no tiny model {name} in seeds {seed} to {seed + limits.max_seeds - 1} is sensitive; the last: "
        f"{'; '.join(missing)}"
    )


def _save_weights(path: Path, config: PreTrainedConfig, seed: int) -> None:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw = np.random.default_rng([seed, 0])
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = draw.standard_normal(tuple(parameter.shape))
            mean, deviation = moments(name, tuple(parameter.shape), config)
            parameter.copy_(torch.from_numpy((mean + deviation * noise).astype(np.float32)))
    model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=EOS_ID)
    with quiet():
        model.save_pretrained(path)


# Deviation of a projection's outputs for inputs of deviation one; a fused projection has that of its parts.
GAINS = {
    "qkv_proj": 1.5,
    "q_proj": 1.75,
    "k_proj": 1.75,
    "v_proj": 1.0,
    "o_proj": 2.0,
    "gate_up_proj": 1.0,
    "gate_proj": 1.0,
    "up_proj": 1.0,
    "down_proj": 2.0,
    "mlp.gate.": 1.5,
    "lm_head": 4.0,
}


def moments(name: str, shape: tuple[int, ...], config: Any) -> tuple[float, float]:
    """Mean and standard deviation of a parameter.

    The usual 0.02 gives flat logits that hang on nothing. Here attention scores have a deviation of about three, so
    that single rows matter, both branches outweigh the embedding, and logits spread by about four.
    """
    if "q_norm" in name or "k_norm" in name:
        return 1.75, 0.1  # the norm takes away the projection's own scale
    if "norm" in name:
        return 1.0, 0.1
    if name.endswith("bias"):
        return 0.0, 0.15
    inputs = shape[-1]
    for part, gain in GAINS.items():
        if part in name:
            return 0.0, gain / math.sqrt(inputs)
    return 0.0, 4.0 / math.sqrt(inputs) if config.tie_word_embeddings else 1.0


def _write_manifest(built: TinyModel, *, first_seed: int) -> None:
    manifest = {
        "name": built.name,
        "seed": built.seed,
        "first_seed": first_seed,
        "sensitivity": plain(built.sensitivity.to_json()),
    }
    (built.path / MANIFEST).write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8")
