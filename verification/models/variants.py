"""The tiny models that there are: every family, and what can go wrong in each (design sections 7, 9).

Head counts are no powers of two, query to KV head ratios 3:1, 5:1 and 7:1 with two KV heads, so that neither
``h % kv_heads`` nor ``h // kv_heads`` is right by luck. A probe is a prompt of 44 tokens and 24 more: windows are
shorter. The original maximum of a RoPE scaling lies below the prompt, so that probes are beyond it, but for
phi4-longrope, whose probes are within: a probe must not cross it, because HuggingFace computes the cache anew there,
and a probe does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import PreTrainedConfig

from verification.models.tiny_tokenizer import BOS_ID, EOS_ID

VOCAB_SIZE = 512


@dataclass(frozen=True, slots=True)
class Variant:
    """A tiny model: HuggingFace's configuration class and its arguments beyond the common ones."""

    config_class: type[PreTrainedConfig]
    heads: int
    head_dim: int
    layers: int = 2
    hidden: int = 0  # 0: heads * head_dim
    kv_heads: int = 2
    tied: bool = False
    max_positions: int = 512
    arguments: Mapping[str, Any] | None = None

    def config(self) -> PreTrainedConfig:
        """The configuration that the model is built with."""
        hidden = self.hidden or self.heads * self.head_dim
        values: dict[str, Any] = {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": self.tied,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "pad_token_id": EOS_ID,
            **(self.arguments or {}),
        }
        return self.config_class(**values)


def _rope(kind: str, original: int | None = None, **values: Any) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, **values}
    if original is not None:
        rope["original_max_position_embeddings"] = original
    return {"rope_parameters": rope}


def _long_rope(original: int, rotated: int) -> dict[str, Any]:
    """LongRoPE whose two tables differ in every pair but the first."""
    pairs = range(rotated // 2)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in pairs],
        "long_factor": [1.0 + 1.5 * i for i in pairs],
        "original_max_position_embeddings": original,
    }
    return {"rope_parameters": rope, "original_max_position_embeddings": original}


LLAMA3 = _rope("llama3", 32, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

VARIANTS: Mapping[str, Callable[[], Variant]] = {
    "llama-gqa3": lambda: Variant(transformers.LlamaConfig, heads=6, head_dim=16, layers=3),
    "llama-gqa7": lambda: Variant(transformers.LlamaConfig, heads=14, head_dim=16, hidden=112),
    "llama-bias": lambda: Variant(
        transformers.LlamaConfig, 6, 16, layers=3, tied=True, arguments={"attention_bias": True, "mlp_bias": True}
    ),
    "llama-rope-llama3": lambda: Variant(transformers.LlamaConfig, heads=6, head_dim=64, hidden=96, arguments=LLAMA3),
    "llama-rope-linear": lambda: Variant(
        transformers.LlamaConfig, 6, 16, layers=3, arguments=_rope("linear", factor=2.0)
    ),
    "mistral-window": lambda: Variant(transformers.MistralConfig, 6, 16, arguments={"sliding_window": 24}),
    "mistral-full": lambda: Variant(transformers.MistralConfig, 10, 16, arguments={"sliding_window": None}),
    "qwen2": lambda: Variant(transformers.Qwen2Config, heads=14, head_dim=16, hidden=112, layers=3, tied=True),
    "qwen2-window": lambda: Variant(
        transformers.Qwen2Config,
        heads=6,
        head_dim=16,
        layers=3,
        arguments={"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen2-yarn": lambda: Variant(transformers.Qwen2Config, 6, 16, arguments=_rope("yarn", 32, factor=4.0)),
    "qwen3": lambda: Variant(transformers.Qwen3Config, heads=6, head_dim=128, hidden=96, tied=True),
    "qwen3-untied": lambda: Variant(transformers.Qwen3Config, heads=10, head_dim=16),
    "phi3": lambda: Variant(transformers.Phi3Config, 6, 96, hidden=96, arguments={"sliding_window": 24}),
    "phi3-longrope": lambda: Variant(transformers.Phi3Config, 6, 32, arguments=_long_rope(32, 32)),
    "phi4-longrope": lambda: Variant(
        transformers.Phi3Config,
        heads=6,
        head_dim=32,
        tied=True,
        arguments={**_long_rope(96, 24), "partial_rotary_factor": 0.75},
    ),
    "qwen3-moe": lambda: Variant(
        transformers.Qwen3MoeConfig, 6, 16, arguments={**EXPERTS, "norm_topk_prob": True}, layers=2
    ),
    "qwen3-moe-mixed": lambda: Variant(
        transformers.Qwen3MoeConfig,
        heads=6,
        head_dim=16,
        layers=4,
        tied=True,
        arguments={**EXPERTS, "norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
}


def tiny_names() -> tuple[str, ...]:
    """Names of the tiny models, for ``build_named``."""
    return tuple(VARIANTS)


def variant(name: str) -> Variant:
    """The variant ``name``; ``ValueError`` for a name that is not known."""
    if name not in VARIANTS:
        raise ValueError(f"tiny model {name!r}: known are {', '.join(VARIANTS)}")
    return VARIANTS[name]()
