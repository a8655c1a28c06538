"""Qwen2 and Qwen2.5: Llama with biases on query, key and value, and a sliding window in the upper layers on request."""

from __future__ import annotations

from blink_core.models.family import Family, Values
from blink_core.models.fields import Fields
from blink_core.models.layers import Decoder


class Qwen2(Decoder):
    """Qwen2ForCausalLM: the shared decoder; biases and windows are in its configuration."""


def windows(raw: Fields, layers: int) -> tuple[int | None, ...]:
    """Window of each layer: ``sliding_window`` where ``layer_types`` says so, or from ``max_window_layers`` on.

    Only with ``use_sliding_window``; without it the number that config.json has is not used.
    """
    window = raw.optional("sliding_window", int) if raw.get("use_sliding_window", bool, False) else None
    types = raw.optional("layer_types", list)
    if types is None:
        first = raw.get("max_window_layers", int)
        return tuple(window if i >= first else None for i in range(layers))
    if len(types) != layers:
        raise raw.fail(f"layer_types has {len(types)} entries for {layers} layers")
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise raw.fail(f"layer_types holds {kind!r}; supported are full_attention and sliding_attention")
    if window is None and "sliding_attention" in types:
        raise raw.fail("layer_types asks for sliding_attention, but no sliding_window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def from_hf(raw: Fields, layers: int) -> Values:
    """The biases are a part of the architecture and stand in no configuration."""
    return {"attention_bias": True, "windows": windows(raw, layers)}


def from_gguf(raw: Fields, layers: int) -> Values:
    """As in config.json; llama.cpp knows no window for this family."""
    raw.only(**{"attention.sliding_window": 0})
    return {"attention_bias": True}


DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

FAMILY = Family(
    model_type="qwen2",
    causal_lm="Qwen2ForCausalLM",
    gguf="qwen2",
    network=Qwen2,
    defaults=DEFAULTS,
    from_hf=from_hf,
    from_gguf=from_gguf,
)
