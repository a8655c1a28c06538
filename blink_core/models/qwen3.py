"""Qwen3: Qwen2 without biases, with an RMS norm of every query and key head before the rotation."""

from __future__ import annotations

import dataclasses

import numpy as np

from blink_core.models import qwen2
from blink_core.models.family import Family, Values
from blink_core.models.fields import Fields
from blink_core.models.layers import Attention, Decoder
from blink_core.models.loaders import WeightReader


class Qwen3(Decoder):
    """Qwen3ForCausalLM."""

    def read_attention(self, reader: WeightReader, at: str) -> Attention:
        """Adds ``q_norm`` and ``k_norm``, each one weight [head_dim] for all its heads."""
        c = self.config
        norms = [
            np.broadcast_to(reader.vector(f"{at}.{name}_norm.weight", c.head_dim), (heads, c.head_dim))
            for name, heads in (("q", c.num_heads), ("k", c.num_kv_heads))
        ]
        return dataclasses.replace(super().read_attention(reader, at), qk_norm=np.concatenate(norms))


def attention_bias(raw: Fields) -> Values:
    """``attention_bias`` gives all four projections a bias; no published model has it."""
    bias = raw.get("attention_bias", bool, False)
    return {"attention_bias": bias, "output_bias": bias}


def from_hf(raw: Fields, layers: int) -> Values:
    """Windows as in Qwen2."""
    return attention_bias(raw) | {"windows": qwen2.windows(raw, layers)}


def from_gguf(raw: Fields, layers: int) -> Values:
    """Nothing beyond the common keys; llama.cpp knows no window for this family."""
    raw.only(**{"attention.sliding_window": 0})
    return {}


NORM_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}

FAMILY = Family(
    model_type="qwen3",
    causal_lm="Qwen3ForCausalLM",
    gguf="qwen3",
    network=Qwen3,
    defaults=qwen2.DEFAULTS | {"head_dim": 128},
    from_hf=from_hf,
    from_gguf=from_gguf,
    gguf_names=NORM_NAMES,
)
