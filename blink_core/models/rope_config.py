"""The rotary embedding that a configuration asks for: config.json in its old and new spelling, and GGUF metadata."""

from __future__ import annotations

import math
from typing import Any

from blink_core.models.config import RopeConfig
from blink_core.models.errors import ModelError
from blink_core.models.family import Family
from blink_core.models.fields import Fields

# What each kind may hold beside rope_type (or type), rope_theta, partial_rotary_factor and the original maximum.
KNOWN = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "truncate"},
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor"},
}


def attention_factor(kind: str, factor: float, original: int) -> float:
    """The default factor of cosines and sines: YaRN's (arXiv 2309.00071, 3.4), LongRoPE's, and 1 for the others."""
    if factor <= 1 or kind not in ("yarn", "longrope"):
        return 1.0
    if kind == "yarn":
        return 0.1 * math.log(factor) + 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original))


def from_hf(raw: Fields, family: Family, head_dim: int, max_positions: int) -> RopeConfig:
    """From ``rope_parameters`` (transformers 5) or ``rope_scaling`` with ``rope_theta`` beside it; the latter wins, as
    it does in transformers."""
    key = "rope_scaling" if raw.raw("rope_scaling") else "rope_parameters"
    entries = raw.get(key, dict, {})
    kind = str(entries.get("rope_type", entries.get("type", "default")))
    if family.model_type == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # the names that early Phi-3 files had for it
    if kind not in KNOWN or kind not in family.rope_kinds:
        supported = ", ".join(family.rope_kinds)
        raise raw.fail(
            f"{key} asks for RoPE scaling {kind!r}, which is not supported for {family.model_type}; supported are "
            f"{supported}"
        )
    common = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
    unknown = sorted(set(entries) - common - KNOWN[kind])
    if unknown:
        raise raw.fail(f"{key} has unsupported entries {unknown} for RoPE scaling {kind!r}")
    scope = Fields(raw.file, entries)
    theta = scope.optional("rope_theta", float)
    partial = scope.optional("partial_rotary_factor", float)
    if partial is None:
        partial = raw.get("partial_rotary_factor", float, 1.0)
    if not 0 < partial <= 1 or (partial != 1 and not family.partial_rotary):
        raise raw.fail(f"partial_rotary_factor is {partial}, which is not supported for {family.model_type}")
    values: dict[str, Any] = {
        "theta": raw.get("rope_theta", float, 10000.0) if theta is None else theta,
        "dim": int(head_dim * partial),
        "kind": kind,
    }
    if kind != "default":
        values |= _scaling(scope, raw, kind, max_positions)
    return _checked(raw, values)


def _checked(raw: Fields, values: dict[str, Any]) -> RopeConfig:
    try:
        return RopeConfig(**values)
    except ModelError as error:
        raise raw.fail(str(error)) from error


def _scaling(scope: Fields, raw: Fields, kind: str, max_positions: int) -> dict[str, Any]:
    original = scope.get("original_max_position_embeddings", int, max_positions)
    if raw.has("original_max_position_embeddings") or kind == "longrope":  # Phi-3's own key wins, or its default
        original = raw.get("original_max_position_embeddings", int, original)
    factor = scope.optional("factor", float)
    if factor is None:
        if kind in ("linear", "llama3"):
            raise raw.fail(f"RoPE scaling {kind!r} has no 'factor'")
        factor = max_positions / original if original > 0 else 1.0  # a maximum of 0 is refused by RopeConfig
    if kind == "linear":
        return {"factor": factor}
    values: dict[str, Any] = {"factor": factor, "original_max": original}
    if kind == "llama3":
        return values | {name: scope.get(name, float) for name in ("low_freq_factor", "high_freq_factor")}
    given = scope.optional("attention_factor", float)
    values["attention_factor"] = attention_factor(kind, factor, original) if given is None else given
    if kind == "yarn":
        values |= {"beta_fast": scope.get("beta_fast", float, 32.0), "beta_slow": scope.get("beta_slow", float, 1.0)}
        return values | {"truncate": scope.get("truncate", bool, True)}
    for name in ("short_factor", "long_factor"):
        table = scope.get(name, list)
        values[name] = tuple(scope.check(f"{name}[{i}]", value, float) for i, value in enumerate(table))
    return values


def from_gguf(raw: Fields, family: Family, head_dim: int, max_positions: int) -> RopeConfig:
    """From ``rope.*`` metadata and the tensors ``rope_freqs`` (llama3) and ``rope_factors_short``/``_long`` (LongRoPE).

    llama.cpp's converter turns llama3's scaling into divisors of the frequencies, one a pair.
    """
    kind = raw.get("rope.scaling.type", str, "none")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise raw.fail(f"RoPE scaling {kind!r} is not supported; supported are none, linear, yarn, longrope")
    if "rope_freqs.weight" in raw.tensors:
        kind = "factors"
    elif "rope_factors_long.weight" in raw.tensors or "rope_factors_short.weight" in raw.tensors:
        kind = "longrope"
    if kind in ("linear", "yarn", "longrope") and kind not in family.rope_kinds:
        raise raw.fail(f"RoPE scaling {kind!r} is not supported for {family.model_type}")
    factor = raw.get("rope.scaling.factor", float, raw.get("rope.scale_linear", float, 1.0))
    if kind == "none" and factor != 1.0:
        kind = "linear"
    values: dict[str, Any] = {
        "theta": raw.get("rope.freq_base", float, 10000.0),
        "dim": raw.get("rope.dimension_count", int, head_dim),
        "kind": "default" if kind == "none" else kind,
    }
    if values["dim"] != head_dim and not family.partial_rotary:
        raise raw.fail(f"rope.dimension_count is {values['dim']}, only the head size {head_dim} is supported")
    if kind in ("linear", "yarn"):
        values["factor"] = factor
    if kind in ("yarn", "longrope"):
        original = raw.get("rope.scaling.original_context_length", int, max_positions)
        scale = factor if kind == "yarn" else max_positions / max(original, 1)
        values["original_max"] = original
        default = attention_factor(kind, scale, max(original, 2))
        values["attention_factor"] = (
            raw.get("rope.scaling.attn_factor", float, default) if kind == "longrope" else default
        )
    if kind == "yarn":
        raw.only(**{"rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.yarn_attn_factor": 1.0})
        values["beta_fast"] = raw.get("rope.scaling.yarn_beta_fast", float, 32.0)
        values["beta_slow"] = raw.get("rope.scaling.yarn_beta_slow", float, 1.0)
    if kind == "factors":
        values["short_factor"] = raw.read_table("rope_freqs.weight")
    if kind == "longrope":
        for name, tensor in (("short_factor", "rope_factors_short"), ("long_factor", "rope_factors_long")):
            values[name] = raw.read_table(f"{tensor}.weight")
    return _checked(raw, values)
