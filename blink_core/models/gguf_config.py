"""Configuration of a GGUF file, from its metadata and the names of its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from blink_core.models import rope_config
from blink_core.models.config import MAX_DIMENSION, ModelConfig
from blink_core.models.errors import ModelError
from blink_core.models.fields import Fields
from blink_core.models.loaders.gguf_file import ArrayExtent, GGUFFile, TensorExtent
from blink_core.models.loaders.gguf_split import open_split
from blink_core.models.registry import by_gguf


def from_gguf(path: Path) -> ModelConfig:
    """Configuration of the model whose (first) file is ``path``; ModelError, naming key and value, if unusable."""
    files = open_split(path)
    file, extents = files[0], {name: (part, extent) for part in files for name, extent in part.tensors.items()}
    meta = Fields(file.path, file.metadata)
    family = by_gguf(meta)
    tensors = frozenset(extents)
    raw = Fields(
        file.path,
        file.metadata,
        prefix=f"{family.gguf}.",
        tensors=tensors,
        read_table=lambda name: _read_table(path, name, extents.get(name)),
    )
    hidden, heads = raw.get("embedding_length", int), raw.get("attention.head_count", int)
    if heads <= 0:
        raise raw.fail(f"{family.gguf}.attention.head_count is {heads}, expected at least 1")
    head_dim = raw.get("attention.key_length", int, hidden // heads)
    if raw.get("attention.value_length", int, head_dim) != head_dim:
        length = raw.raw("attention.value_length")
        raise raw.fail(f"attention.value_length is {length}, only the head size {head_dim} is supported")
    layers = raw.get("block_count", int)
    if not 0 < layers <= MAX_DIMENSION:
        raise raw.fail(f"num_layers is {layers}, expected 1 to {MAX_DIMENSION}")
    positions = raw.get("context_length", int)
    embedding = extents.get("token_embd.weight")
    vocab = raw.get("vocab_size", int, embedding[1].shape[0] if embedding else None)
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, ArrayExtent) and tokens.length > vocab:
        raise raw.fail(f"the tokenizer has {tokens.length} tokens, the model's vocabulary {vocab}")
    special = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    bos = "tokenizer.ggml.bos_token_id"
    common: dict[str, Any] = {
        "architecture": family.model_type,
        "hidden_size": hidden,
        "intermediate_size": raw.get("feed_forward_length", int),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": raw.get("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "rms_norm_eps": raw.get("attention.layer_norm_rms_epsilon", float),
        "rope": rope_config.from_gguf(raw, family, head_dim, positions),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": meta.get(bos, int) if meta.has(bos) else None,
        "eos_token_ids": tuple(sorted({meta.get(key, int) for key in special if meta.has(key)})),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "output_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
    }
    try:
        return ModelConfig(**(common | family.from_gguf(raw, layers)))
    except ModelError as error:
        raise error if str(path) in str(error) else raw.fail(str(error)) from error


def _read_table(path: Path, name: str, place: tuple[GGUFFile, TensorExtent] | None) -> tuple[float, ...]:
    """A short float32 tensor that is a part of the configuration; ModelError if it is missing or something else."""
    if place is None:
        raise ModelError(f"{path}: tensor {name!r} is missing")
    file, extent = place
    if extent.type != GGMLQuantizationType.F32 or len(extent.shape) != 1:
        raise ModelError(
            f"{file.path}: tensor {name!r} is {extent.type.name} {list(extent.shape)}, expected F32 with one axis"
        )
    return tuple(np.frombuffer(file.data, "<f4", extent.shape[0], extent.offset).tolist())
