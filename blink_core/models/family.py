"""What sets a model family apart: its names in both formats, its quirks of configuration, its network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blink_core.models.fields import Fields

if TYPE_CHECKING:
    from blink_core.models.layers import Decoder

Values = dict[str, Any]  # fields of ModelConfig


@dataclass(frozen=True, slots=True)
class Family:
    """One family.

    ``model_type`` and ``causal_lm``: HuggingFace's ``model_type`` and class. ``gguf``: ``general.architecture``.
    ``defaults``: values that HuggingFace's configuration class has where config.json lacks the key. ``from_hf`` and
    ``from_gguf``: fields of ModelConfig beyond the common ones, from the opened configuration and the head size.
    ``gguf_names``: HuggingFace's names of tensors in a layer, beyond or instead of the common ones.
    ``gguf_interleaved``: query and key rows have neighbouring rotary pairs. ``rope_kinds``: RoPE scalings that
    HuggingFace computes for this family, and so this engine. ``partial_rotary``: heads may be rotated in part.
    """

    model_type: str
    causal_lm: str
    gguf: str
    network: type[Decoder]
    defaults: Mapping[str, Any]
    from_hf: Callable[[Fields, int], Values] = lambda raw, layers: {}
    from_gguf: Callable[[Fields, int], Values] = lambda raw, layers: {}
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_interleaved: bool = False
    rope_kinds: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    partial_rotary: bool = False
