"""Models with the layers of large ones, few of them, and seeded random weights by HuggingFace's own classes.

Every size is the original's (its published config.json) but the number of layers, so that float64 fits beside the
engine; the vocabulary stays whole. Weights are bfloat16 numbers, which float32 and float64 hold as they are: one folder
serves every element type. Their moments are the tiny models', so that attention and logits hang on every row.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from verification.models.tiny import moments
from verification.models.tiny_tokenizer import EOS_ID, save_tokenizer
from verification.models.variants import VOCAB_SIZE
from verification.oracles.hf import quiet

LAYERS = 2
PIECE = 1 << 26  # elements drawn at a time


def _default_rope(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def _llama_3_8b(layers: int) -> PreTrainedConfig:
    return transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=False,
        bos_token_id=128000, eos_token_id=128001, **_default_rope(5e5),
    )  # fmt: skip


def _phi_4(layers: int) -> PreTrainedConfig:
    return transformers.Phi3Config(
        vocab_size=100352, hidden_size=5120, intermediate_size=17920, num_hidden_layers=layers, num_attention_heads=40,
        num_key_value_heads=10, max_position_embeddings=16384, original_max_position_embeddings=16384,
        rms_norm_eps=1e-5, tie_word_embeddings=False, sliding_window=None, bos_token_id=100257, eos_token_id=100265,
        pad_token_id=100349, **_default_rope(2.5e5),
    )  # fmt: skip


def _qwen3_32b(layers: int) -> PreTrainedConfig:
    return transformers.Qwen3Config(
        vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_hidden_layers=layers, num_attention_heads=64,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6,
        tie_word_embeddings=False, bos_token_id=151643, eos_token_id=151645, **_default_rope(1e6),
    )  # fmt: skip


def _qwen3_30b_a3b(layers: int) -> PreTrainedConfig:
    return transformers.Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        max_position_embeddings=40960, rms_norm_eps=1e-6, tie_word_embeddings=False, bos_token_id=151643,
        eos_token_id=151645, **_default_rope(1e6),
    )  # fmt: skip


def _small(layers: int) -> PreTrainedConfig:
    return transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=96, intermediate_size=192, num_hidden_layers=layers, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512, rms_norm_eps=1e-5, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=EOS_ID, **_default_rope(1e4),
    )  # fmt: skip


SHAPES: Final[Mapping[str, Callable[[int], PreTrainedConfig]]] = MappingProxyType(
    {"llama-3-8b": _llama_3_8b, "phi-4": _phi_4, "qwen3-32b": _qwen3_32b, "qwen3-30b-a3b": _qwen3_30b_a3b}
)
SMALL: Final = "small"  # of no model: for tests of this check itself, where there is no GPU


def config_of(name: str, layers: int = LAYERS) -> PreTrainedConfig:
    """HuggingFace's configuration of a shape. Raises ValueError with the known names, or for no layers."""
    if layers < 1:
        raise ValueError(f"{layers} layers; at least one is needed")
    if name == SMALL:
        return _small(layers)
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}; known: {', '.join(SHAPES)}")
    return SHAPES[name](layers)


def build(name: str, directory: Path, *, layers: int = LAYERS, seed: int = 0, device: str = "cpu") -> int:
    """Writes the model as safetensors with a tokeniser; returns its parameters.

    device: where the weights are drawn; each kind of device draws others from a seed.
    """
    config = config_of(name, layers)
    with torch.device(device), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        count = 0
        for key, parameter in sorted(model.named_parameters()):
            mean, deviation = moments(key, tuple(parameter.shape), config)
            digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
            draw = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
            flat = parameter.view(-1)
            for start in range(0, flat.numel(), PIECE):
                size = min(PIECE, flat.numel() - start)
                noise = torch.randn(size, generator=draw, device=device, dtype=torch.float32)
                flat[start : start + size] = mean + deviation * noise
            count += flat.numel()
        if not all(math.isfinite(float(p.sum())) for p in model.parameters()):
            raise ValueError(f"{name}: a parameter was not drawn")
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.eos_token_id)
    save_tokenizer(directory, VOCAB_SIZE)  # of a few ids: prompts are drawn as ids
    with quiet():
        model.save_pretrained(directory)
    return count
