"""The families that the engine knows, by HuggingFace's ``model_type`` and by GGUF's ``general.architecture``."""

from __future__ import annotations

from blink_core.models import llama, mistral, phi3, qwen2, qwen3, qwen3_moe
from blink_core.models.family import Family
from blink_core.models.fields import Fields

FAMILIES: dict[str, Family] = {
    module.FAMILY.model_type: module.FAMILY for module in (llama, mistral, phi3, qwen2, qwen3, qwen3_moe)
}


def by_model_type(raw: Fields) -> Family:
    """The family of a config.json. ModelError for another architecture, or another head than the language model's."""
    model_type = raw.get("model_type", str)
    family = FAMILIES.get(model_type)
    classes = raw.raw("architectures")
    if family is None or (classes and classes != [family.causal_lm]):
        supported = ", ".join(f"{f.model_type} ({f.causal_lm})" for f in FAMILIES.values())
        raise raw.fail(f"architecture {model_type!r} ({classes}) is not supported; supported are: {supported}")
    return family


def by_gguf(meta: Fields) -> Family:
    """The family of a GGUF file. Mistral's files say llama; only the window, where one is stated, tells them apart."""
    architecture = meta.get("general.architecture", str)
    if architecture == "llama" and meta.raw("llama.attention.sliding_window"):
        return FAMILIES["mistral"]
    for family in FAMILIES.values():
        if family.gguf == architecture:
            return family
    supported = ", ".join(sorted({f.gguf for f in FAMILIES.values()}))
    raise meta.fail(f"architecture {architecture!r} is not supported; supported are: {supported}")
