"""Configuration of a HuggingFace directory: config.json, generation_config.json and the tokenizer's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blink_core.models import rope_config
from blink_core.models.config import MAX_DIMENSION, ModelConfig
from blink_core.models.errors import ModelError
from blink_core.models.fields import Fields
from blink_core.models.registry import by_model_type


def from_directory(path: Path) -> ModelConfig:
    """Configuration of the model in ``path``; ModelError, naming file, key and value, if it cannot be used."""
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"{path}: no config.json in this directory; expected a HuggingFace model or a .gguf file")
    values = read_json(file)
    plain = Fields(file, values)
    family = by_model_type(plain)
    # Absent keys have the value of transformers' configuration class, which the family knows.
    raw = Fields(file, values, defaults=family.defaults)
    raw.only(hidden_act="silu", pretraining_tp=1)
    if raw.raw("quantization_config") is not None:
        raise raw.fail("quantization_config is set; quantised safetensors are not supported (GGUF is)")
    hidden, heads = raw.get("hidden_size", int), raw.get("num_attention_heads", int)
    if heads <= 0:
        raise raw.fail(f"num_attention_heads is {heads}, expected at least 1")
    layers = raw.get("num_hidden_layers", int)
    if not 0 < layers <= MAX_DIMENSION:
        raise raw.fail(f"num_layers is {layers}, expected 1 to {MAX_DIMENSION}")
    head_dim = raw.get("head_dim", int, hidden // heads)
    positions = raw.get("max_position_embeddings", int)
    bos = _token_ids(file, "bos_token_id", raw.raw("bos_token_id"))
    common: dict[str, Any] = {
        "architecture": family.model_type,
        "hidden_size": hidden,
        "intermediate_size": raw.get("intermediate_size", int),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": raw.get("num_key_value_heads", int, heads),
        "head_dim": head_dim,
        "vocab_size": raw.get("vocab_size", int),
        "max_position_embeddings": positions,
        "rms_norm_eps": raw.get("rms_norm_eps", float),
        "rope": rope_config.from_hf(raw, family, head_dim, positions),
        "tie_word_embeddings": raw.get("tie_word_embeddings", bool, False),
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": _eos_token_ids(path, raw),
    }
    try:
        return ModelConfig(**(common | family.from_hf(raw, layers)))
    except ModelError as error:
        raise error if str(file) in str(error) else raw.fail(str(error)) from error


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``; ModelError if there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _eos_token_ids(path: Path, raw: Fields) -> tuple[int, ...]:
    generation = path / "generation_config.json"
    found = {
        *_token_ids(raw.file, "eos_token_id", raw.raw("eos_token_id")),
        *_token_ids(generation, "eos_token_id", _optional_json(generation).get("eos_token_id")),
    }
    try:
        return tuple(sorted(found.union(_tokenizer_eos(path))))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{path}: tokenizer_config.json or tokenizer.json is malformed, its eos_token cannot be found: {error!r}"
        ) from error


def _token_ids(file: Path, key: str, value: Any) -> list[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ModelError(f"{file}: {key!r} is {value!r}, expected a token id or a list of them")
    return list(ids)


def _tokenizer_eos(path: Path) -> list[int]:
    """Id of the tokenizer's ``eos_token``, which its configuration names by text."""
    settings = _optional_json(path / "tokenizer_config.json")
    eos = settings.get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    if text is None:
        return []
    for token, entry in (settings.get("added_tokens_decoder") or {}).items():
        if entry.get("content") == text:
            return [int(token)]
    if not (path / "tokenizer.json").is_file():
        return []
    tokenizer = read_json(path / "tokenizer.json")
    for entry in tokenizer.get("added_tokens") or []:
        if entry.get("content") == text:
            return [int(entry["id"])]
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    if isinstance(vocabulary, dict) and text in vocabulary:
        return [int(vocabulary[text])]
    raise ModelError(f"{path}: the tokenizer's eos_token {text!r} is not in its vocabulary")
