"""Model configuration from GGUF metadata or from a HuggingFace directory (design section 7)."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from blink_core.models.errors import ModelError
from blink_core.models.loaders.gguf_file import ArrayExtent, GGUFFile

__all__ = ["ModelConfig", "ModelError", "load_config"]

SUPPORTED_ARCHITECTURES = ("llama",)
MAX_DIMENSION = 1 << 24  # no real size comes near; products of two still fit 64 bits


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of a model; all sizes in elements.

    ``eos_token_ids`` is the union of what the configuration, the generation configuration and the tokenizer name,
    ascending. Raises ModelError if the values do not fit each other.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.architecture not in SUPPORTED_ARCHITECTURES:
            raise ModelError(
                f"architecture {self.architecture!r} is not supported; supported are: "
                f"{', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and not 0 < value <= MAX_DIMENSION:
                raise ModelError(f"{field.name} is {value}, expected 1 to {MAX_DIMENSION}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}, rotary embedding needs an even number")
        for name, number in (("rms_norm_eps", self.rms_norm_eps), ("rope_theta", self.rope_theta)):
            if not 0 < number < float("inf"):
                raise ModelError(f"{name} is {number}, expected a positive finite number")
        for token in self.eos_token_ids if self.bos_token_id is None else (*self.eos_token_ids, self.bos_token_id):
            if not 0 <= token < self.vocab_size:
                raise ModelError(f"special token id {token} is outside the vocabulary of {self.vocab_size}")


def load_config(path: str | Path) -> ModelConfig:
    """Configuration of the model at ``path``: a ``.gguf`` file, or a HuggingFace directory with ``config.json``.

    Raises ModelError, naming value and limit, if it is damaged or asks for anything the engine would compute wrongly:
    another architecture, RoPE scaling, biases, another activation, partial rotary embedding, quantised weights.
    """
    path = Path(path)
    if path.is_dir():
        return _from_directory(path)
    if not path.exists():
        raise ModelError(f"{path}: no such file or directory")
    if path.suffix != ".gguf":
        raise ModelError(f"{path}: expected a .gguf file or a HuggingFace directory with config.json")
    return _from_gguf(GGUFFile(path))


def _located(path: Path, **values: Any) -> ModelConfig:
    try:
        return ModelConfig(**values)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


# --- GGUF ------------------------------------------------------------------------------------------------------------


def _from_gguf(file: GGUFFile) -> ModelConfig:
    meta, path = file.metadata, file.path

    def get(key: str, kind: type, default: Any = None) -> Any:
        value = meta.get(key, default)
        if value is None:
            raise ModelError(f"{path}: GGUF metadata {key!r} is missing")
        # A bool is an int to Python and to GGUF an own type; a whole number is acceptable where a float is meant.
        accepted = (int, float) if kind is float else (kind,)
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise ModelError(f"{path}: GGUF metadata {key!r} is {value!r}, expected {kind.__name__}")
        return kind(value)

    architecture = get("general.architecture", str)
    if architecture not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ModelError(f"{path}: architecture {architecture!r} is not supported; supported are: {supported}")
    hidden = get("llama.embedding_length", int)
    heads = get("llama.attention.head_count", int)
    if heads <= 0:
        raise ModelError(f"{path}: llama.attention.head_count is {heads}, expected at least 1")
    head_dim = get("llama.attention.key_length", int, hidden // heads)
    _refuse_gguf_variants(file, head_dim, get)
    embedding = file.tensors.get("token_embd.weight")
    vocab = get("llama.vocab_size", int, embedding.shape[0] if embedding else None)
    tokens = meta.get("tokenizer.ggml.tokens")
    if isinstance(tokens, ArrayExtent) and tokens.length > vocab:
        raise ModelError(f"{path}: the tokenizer has {tokens.length} tokens, the model's vocabulary {vocab}")
    eos = {get(k, int) for k in (f"tokenizer.ggml.{n}_token_id" for n in ("eos", "eot", "eom")) if k in meta}
    return _located(
        path,
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=get("llama.feed_forward_length", int),
        num_layers=get("llama.block_count", int),
        num_heads=heads,
        num_kv_heads=get("llama.attention.head_count_kv", int, heads),
        head_dim=head_dim,
        vocab_size=vocab,
        max_position_embeddings=get("llama.context_length", int),
        rms_norm_eps=get("llama.attention.layer_norm_rms_epsilon", float),
        rope_theta=get("llama.rope.freq_base", float, 10000.0),
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=get("tokenizer.ggml.bos_token_id", int) if "tokenizer.ggml.bos_token_id" in meta else None,
        eos_token_ids=tuple(sorted(eos)),
    )


def _refuse_gguf_variants(file: GGUFFile, head_dim: int, get: Any) -> None:
    path, meta = file.path, file.metadata
    scaling = get("llama.rope.scaling.type", str, "none")
    if scaling != "none" or "rope_freqs.weight" in file.tensors:
        kind = scaling if scaling != "none" else "llama3 (tensor rope_freqs.weight)"
        raise ModelError(f"{path}: RoPE scaling {kind!r} is not supported; only models without RoPE scaling are")
    for key in ("llama.rope.scaling.factor", "llama.rope.scale_linear"):
        if get(key, float, 1.0) != 1.0:
            raise ModelError(f"{path}: RoPE scaling ({key} = {meta[key]}) is not supported")
    for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if get(key, int, head_dim) != head_dim:
            raise ModelError(f"{path}: {key} is {meta[key]}, only the head size {head_dim} is supported")
    for key in ("llama.expert_count", "llama.attention.sliding_window"):
        if get(key, int, 0) != 0:
            raise ModelError(f"{path}: {key} is {meta[key]}, which is not supported (only 0 is)")


# --- HuggingFace directory -------------------------------------------------------------------------------------------


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content


def _optional_json(file: Path) -> dict[str, Any]:
    return _read_json(file) if file.is_file() else {}


def _from_directory(path: Path) -> ModelConfig:
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"{path}: no config.json in this directory; expected a HuggingFace model or a .gguf file")
    raw = _read_json(file)

    def get(key: str, kind: type, default: Any = None) -> Any:
        value = raw.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f"{file}: {key!r} is missing")
        accepted = (int, float) if kind is float else (kind,)
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise ModelError(f"{file}: {key!r} is {value!r}, expected {kind.__name__}")
        return kind(value)

    architecture = get("model_type", str)
    classes = raw.get("architectures") or ["LlamaForCausalLM"]
    if architecture not in SUPPORTED_ARCHITECTURES or classes != ["LlamaForCausalLM"]:
        raise ModelError(
            f"{file}: architecture {architecture!r} ({classes}) is not supported; supported are: "
            f"{', '.join(SUPPORTED_ARCHITECTURES)} (LlamaForCausalLM)"
        )
    hidden, heads = get("hidden_size", int), get("num_attention_heads", int)
    if heads <= 0:
        raise ModelError(f"{file}: num_attention_heads is {heads}, expected at least 1")
    _refuse_huggingface_variants(file, raw)
    rope = raw.get("rope_parameters") or {}
    generation = _optional_json(path / "generation_config.json")
    eos = {
        *_token_ids(file, "eos_token_id", raw.get("eos_token_id")),
        *_token_ids(path / "generation_config.json", "eos_token_id", generation.get("eos_token_id")),
        *_tokenizer_eos(path),
    }
    bos = _token_ids(file, "bos_token_id", raw.get("bos_token_id"))
    # Defaults are those of transformers' LlamaConfig, which leaves out of the file nothing that differs from them.
    return _located(
        file,
        architecture=architecture,
        hidden_size=hidden,
        intermediate_size=get("intermediate_size", int),
        num_layers=get("num_hidden_layers", int),
        num_heads=heads,
        num_kv_heads=get("num_key_value_heads", int, heads),
        head_dim=get("head_dim", int, hidden // heads),
        vocab_size=get("vocab_size", int),
        max_position_embeddings=get("max_position_embeddings", int, 2048),
        rms_norm_eps=get("rms_norm_eps", float, 1e-6),
        rope_theta=float(rope.get("rope_theta") or get("rope_theta", float, 10000.0)),
        tie_word_embeddings=get("tie_word_embeddings", bool, False),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(sorted(eos)),
    )


def _refuse_huggingface_variants(file: Path, raw: dict[str, Any]) -> None:
    """Refuse what transformers would compute and this engine does not. RoPE has an old and a new (v5) spelling."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise ModelError(f"{file}: {key} is {rope!r}, expected an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ModelError(f"{file}: {key} asks for RoPE scaling {kind!r}, which is not supported; only 'default' is")
        known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        if set(rope) - known:
            raise ModelError(f"{file}: {key} has unsupported entries {sorted(set(rope) - known)}")
        theta = rope.get("rope_theta", 10000.0)
        if isinstance(theta, bool) or not isinstance(theta, (int, float)):
            raise ModelError(f"{file}: rope_theta is {theta!r}, expected float")
    partial = (raw.get("rope_parameters") or {}).get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    only: tuple[tuple[str, Any, Any], ...] = (
        ("partial_rotary_factor", partial, 1.0),
        ("attention_bias", raw.get("attention_bias"), False),
        ("mlp_bias", raw.get("mlp_bias"), False),
        ("hidden_act", raw.get("hidden_act"), "silu"),
        ("pretraining_tp", raw.get("pretraining_tp"), 1),
    )
    for key, value, supported in only:
        if value is not None and value != supported:
            raise ModelError(f"{file}: {key} is {value!r}, which is not supported; only {supported!r} is")
    if raw.get("quantization_config") is not None:
        raise ModelError(f"{file}: quantization_config is set; quantised safetensors are not supported (GGUF is)")


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
    tokenizer = _read_json(path / "tokenizer.json")
    for entry in tokenizer.get("added_tokens") or []:
        if entry.get("content") == text:
            return [int(entry["id"])]
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    if isinstance(vocabulary, dict) and text in vocabulary:
        return [int(vocabulary[text])]
    raise ModelError(f"{path}: the tokenizer's eos_token {text!r} is not in its vocabulary")
