"""Mistral: Llama without biases, with a sliding window in every layer.

Key-value pages before the window stay allocated: they are not read again, but only the scheduler frees pages.

GGUF files of Mistral have the architecture llama; llama.cpp's converter drops the window, so that such a file is served
without one, as llama.cpp does, unless it states ``llama.attention.sliding_window``.
"""

from __future__ import annotations

from blink_core.models import llama
from blink_core.models.family import Family, Values
from blink_core.models.fields import Fields
from blink_core.models.layers import Decoder


class Mistral(Decoder):
    """MistralForCausalLM: the shared decoder; the windows are in its configuration."""


def from_hf(raw: Fields, layers: int) -> Values:
    """``sliding_window``: null for none; absent means 4096, transformers' default."""
    return {"windows": (raw.optional("sliding_window", int),) * layers}


def from_gguf(raw: Fields, layers: int) -> Values:
    """The window, where the file states one."""
    return llama.from_gguf(raw, layers) | {"windows": (raw.get("attention.sliding_window", int),) * layers}


FAMILY = Family(
    model_type="mistral",
    causal_lm="MistralForCausalLM",
    gguf="llama",
    network=Mistral,
    defaults={
        "max_position_embeddings": 4096 * 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    },
    from_hf=from_hf,
    from_gguf=from_gguf,
    gguf_interleaved=True,
)
