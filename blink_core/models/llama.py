"""Llama 2 and 3: RMS norm, rotary attention with grouped key-value heads, SwiGLU; optional biases.

Llama 3.1's RoPE scaling ("llama3") is in config.json as numbers, and in GGUF files as the tensor ``rope_freqs``. GGUF
interleaves the rows of the query and key projections.
"""

from __future__ import annotations

from blink_core.models.family import Family, Values
from blink_core.models.fields import Fields
from blink_core.models.layers import Decoder


class Llama(Decoder):
    """LlamaForCausalLM: the shared decoder as it is."""


def from_hf(raw: Fields, layers: int) -> Values:
    """``attention_bias`` and ``mlp_bias`` give every projection of the block a bias."""
    attention = raw.get("attention_bias", bool, False)
    return {"attention_bias": attention, "output_bias": attention, "mlp_bias": raw.get("mlp_bias", bool, False)}


def from_gguf(raw: Fields, layers: int) -> Values:
    """Mixtral's files say llama too, and are refused."""
    if raw.get("expert_count", int, 0):
        raise raw.fail(f"llama.expert_count is {raw.raw('expert_count')}, which is not supported (only 0 is)")
    return {}


FAMILY = Family(
    model_type="llama",
    causal_lm="LlamaForCausalLM",
    gguf="llama",
    network=Llama,
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    from_hf=from_hf,
    from_gguf=from_gguf,
    gguf_interleaved=True,
)
