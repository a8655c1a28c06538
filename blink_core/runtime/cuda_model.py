"""A model's weights on the GPU: read through the same families as the host's, or drawn at random for measurements."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import cupy as cp
import numpy as np

from blink_core.models.config import ModelConfig
from blink_core.models.errors import ModelError
from blink_core.models.layers import Decoder, GatedMlp
from blink_core.models.load_config import load_config
from blink_core.models.loaders import WeightReader, open_source
from blink_core.models.qwen3_moe import SparseMlp
from blink_core.models.registry import FAMILIES
from blink_core.ops.cuda_gemm import SKINNY_K, CudaWeight
from blink_core.ops.cuda_ops import CudaOps, to_device
from blink_core.ops.rope import RotaryTable


@dataclass(frozen=True, slots=True)
class CudaExperts:
    """A mixture of experts: ``gate_up`` [experts, 2 * inner, hidden], ``down`` [experts, hidden, inner]."""

    router: CudaWeight
    gate_up: CudaWeight
    down: CudaWeight


@dataclass(frozen=True, slots=True)
class CudaLayer:
    """One decoder layer; norms are of the element type. Either ``experts`` or ``gate_up`` and ``down`` are there."""

    attention_norm: cp.ndarray
    qkv: CudaWeight
    out: CudaWeight
    qk_norm: cp.ndarray | None
    mlp_norm: cp.ndarray
    gate_up: CudaWeight | None
    down: CudaWeight | None
    experts: CudaExperts | None
    window: int | None


@dataclass(frozen=True, slots=True)
class CudaNetwork:
    """``embedding`` and ``head.nk`` [vocab padded to a multiple of 4, hidden]; ``tables``: cosines and sines float32
    [positions, rotated / 2]. ``original_max``: 0, or LongRoPE's original maximum where sequences may outgrow it: then
    the long table's positions follow the short one's."""

    config: ModelConfig
    ops: CudaOps
    layers: tuple[CudaLayer, ...]
    embedding: cp.ndarray
    head: CudaWeight
    norm: cp.ndarray
    tables: tuple[cp.ndarray, cp.ndarray]
    original_max: int = 0

    @property
    def nbytes(self) -> int:
        """Device memory of the weights, each counted once."""
        found: dict[int, int] = {}

        def count(array: cp.ndarray | None) -> None:
            if array is not None:
                found[int(array.data.ptr)] = int(array.nbytes)

        for layer in self.layers:
            for weight in (layer.qkv, layer.out, layer.gate_up, layer.down):
                if weight is not None:
                    count(weight.nk)
            if layer.experts is not None:
                count(layer.experts.gate_up.nk)
                count(layer.experts.down.nk)
        count(self.embedding)
        count(self.head.nk)
        return sum(found.values())


def load_network(path: Path, ops: CudaOps, max_len: int) -> CudaNetwork:
    """Reads a GGUF file or a HuggingFace folder into device memory, one weight at a time. Raises ModelError."""
    config = load_config(path)
    check_supported(config, ops)
    family = FAMILIES[config.architecture]
    reader = WeightReader(open_source(path, family, config))
    # The families prepare their weights through the operations they are given: CudaOps' are uploaded as they are read.
    decoder = family.network(config, reader, cast(Any, ops))
    reader.finish()
    return upload(decoder, ops, max_len)


def check_supported(config: ModelConfig, ops: CudaOps) -> None:
    """Raises ModelError for what the GPU runtime cannot compute."""
    dtype = ops.dtype
    if dtype != "float32" and config.head_dim not in (64, 96, 128):
        raise ModelError(f"head_dim is {config.head_dim}: {dtype} attention has kernels for 64, 96 and 128")
    # gemm_skinny.cu's and gemm_fixed.cu's chunks; cuBLASLt and float32 have no such limit.
    unit = SKINNY_K if ops.batch_invariant and dtype != "float32" else 8
    sizes = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size}
    sizes["num_heads * head_dim"] = config.num_heads * config.head_dim
    if config.experts is not None:
        sizes["intermediate_size of an expert"] = config.experts.intermediate_size
    for name, size in sizes.items():
        if size % unit:
            mode = f" in batch-invariant {dtype}" if unit == SKINNY_K else ""
            raise ModelError(f"{name} is {size}: GPU products{mode} need a multiple of {unit}")


def upload(decoder: Decoder, ops: CudaOps, max_len: int) -> CudaNetwork:
    """The network of a decoder that was read with ``ops``."""
    config, weights = decoder.config, decoder.weights
    head = _part("head", _padded(cast(CudaWeight, weights.head)))
    embedding = head.nk
    if not config.tie_word_embeddings:
        embedding = to_device(np.ascontiguousarray(weights.embedding), ops.dtype)
    layers = []
    for layer in weights.layers:
        gate_up = down = experts = None
        if isinstance(layer.mlp, SparseMlp):
            stacked = [
                CudaWeight(cp.stack([cast(CudaWeight, getattr(e, name)).nk for e in layer.mlp.experts]))
                for name in ("gate_up", "down")
            ]
            experts = CudaExperts(cast(CudaWeight, layer.mlp.router), *stacked)
        elif isinstance(layer.mlp, GatedMlp):
            gate_up, down = _part("gate_up", layer.mlp.gate_up), _part("down", layer.mlp.down)
        else:
            raise ModelError(f"the GPU runtime has no {type(layer.mlp).__name__}")
        norm = layer.attention.qk_norm
        layers.append(
            CudaLayer(
                attention_norm=to_device(layer.attention_norm, ops.dtype),
                qkv=_part("qkv", layer.attention.qkv),
                out=_part("out", layer.attention.out),
                qk_norm=None if norm is None else to_device(norm, ops.dtype),
                mlp_norm=to_device(layer.mlp_norm, ops.dtype),
                gate_up=gate_up,
                down=down,
                experts=experts,
                window=layer.window,
            )
        )
    return CudaNetwork(
        config, ops, tuple(layers), embedding, head, to_device(weights.norm, ops.dtype), rotary_tables(config, max_len),
        original_max(config, max_len),
    )  # fmt: skip


def random_network(config: ModelConfig, ops: CudaOps, max_len: int, seed: int = 0) -> CudaNetwork:
    """A network of any shape with seeded random weights, made on the GPU: for measurements of time.

    bfloat16 only. Values have the magnitude of trained weights (0.008 to 0.06); a tied head is the embedding.
    """
    if ops.dtype != "bfloat16":
        raise ModelError(f"random weights are bfloat16, not {ops.dtype}")
    check_supported(config, ops)
    rng = cp.random.RandomState(seed)
    ones = cp.full(config.hidden_size, 0x3F80, cp.uint16)

    def draw(*shape: int) -> cp.ndarray:
        out = cp.empty(int(np.prod(shape)), cp.uint16)
        for start in range(0, out.size, 1 << 27):
            n = min(1 << 27, out.size - start)
            # Random sign and mantissa, an exponent of -7 to -5.
            out[start : start + n] = (rng.randint(0, 1 << 16, n, dtype=cp.uint16) & 0x80FF) + 0x3C00
        return out.reshape(shape)

    c, q, kv = config, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    normed = cp.full((c.num_heads + c.num_kv_heads, c.head_dim), 0x3F80, cp.uint16)
    windows = c.windows or (None,) * c.num_layers
    layers = []
    for index in range(c.num_layers):
        experts = gate_up = down = None
        if c.experts is not None and index in c.experts.layers:
            e = c.experts
            experts = CudaExperts(
                CudaWeight(draw(e.count, c.hidden_size)),
                CudaWeight(draw(e.count, 2 * e.intermediate_size, c.hidden_size)),
                CudaWeight(draw(e.count, c.hidden_size, e.intermediate_size)),
            )
        else:
            gate_up = CudaWeight(draw(2 * c.intermediate_size, c.hidden_size), part="gate_up")
            down = CudaWeight(draw(c.hidden_size, c.intermediate_size), part="down")
        layers.append(
            CudaLayer(
                attention_norm=ones,
                qkv=CudaWeight(draw(q + 2 * kv, c.hidden_size), part="qkv"),
                out=CudaWeight(draw(c.hidden_size, q), part="out"),
                qk_norm=normed if c.architecture.startswith("qwen3") else None,
                mlp_norm=ones,
                gate_up=gate_up,
                down=down,
                experts=experts,
                window=windows[index],
            )
        )
    head = CudaWeight(draw(-(-c.vocab_size // 4) * 4, c.hidden_size), part="head")
    embedding = head.nk if c.tie_word_embeddings else draw(c.vocab_size, c.hidden_size)
    return CudaNetwork(
        config, ops, tuple(layers), embedding, head, ones, rotary_tables(config, max_len), original_max(config, max_len)
    )


def rotary_tables(config: ModelConfig, max_len: int) -> tuple[cp.ndarray, cp.ndarray]:
    """Cosines and sines of positions up to ``max_len``: float32 [max_len, rotated / 2] each, as the host computes
    them. With :func:`original_max` [2 * max_len, ...]: those of the long table behind those of the short one."""
    rope = config.rope
    kinds = [rope.frequencies()] + [rope.frequencies(long=True)] * bool(original_max(config, max_len))
    tables = [RotaryTable(f, rope.attention_factor)(np.arange(max_len, dtype=np.int32)) for f in kinds]
    cos, sin = (np.concatenate([table[i][:, 0] for table in tables]) for i in range(2))
    return cp.asarray(cos), cp.asarray(sin)


def original_max(config: ModelConfig, max_len: int) -> int:
    """LongRoPE's original maximum if sequences of ``max_len`` tokens outgrow it, else 0."""
    return 0 if config.keys_are_final(max_len) else int(config.rope.original_max or 0)


def _part(name: str, weight: object) -> CudaWeight:
    return replace(cast(CudaWeight, weight), part=name)


def _padded(weight: CudaWeight) -> CudaWeight:
    """The head with rows of zeros up to a multiple of 4: rows of logits are read 16 bytes at a time."""
    rows = weight.nk.shape[0]
    if rows % 4 == 0:
        return weight
    nk = cp.zeros((-(-rows // 4) * 4, weight.nk.shape[1]), weight.nk.dtype)
    nk[:rows] = weight.nk
    return CudaWeight(nk)
