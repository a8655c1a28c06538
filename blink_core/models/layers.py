"""The decoder that all families share: embedding, layers of attention and MLP, head (design section 7).

A family is a subclass of :class:`Decoder` that reads some part of a layer in its own way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from blink_core.models.batch import KVPool, StepBatch
from blink_core.models.config import ModelConfig
from blink_core.models.loaders import WeightReader
from blink_core.ops.numpy_ops import F32, LinearWeight, NumpyOps, RotaryTable


class Mlp(Protocol):
    """The second half of a layer."""

    def __call__(self, x: F32, ops: NumpyOps) -> F32:
        """float32 [T, hidden] -> [T, hidden]."""
        ...


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """SwiGLU; ``gate_up`` is the gate and up projections side by side."""

    gate_up: LinearWeight
    down: LinearWeight

    def __call__(self, x: F32, ops: NumpyOps) -> F32:
        """float32 [T, hidden] -> [T, hidden]."""
        return ops.linear(ops.silu_mul(ops.linear(x, self.gate_up)), self.down)


@dataclass(frozen=True, slots=True)
class Attention:
    """Weights of one attention: query, key and value are one projection.

    ``qk_norm``: weights of an RMS norm of each query and key head before the rotation, float32 [heads + kv_heads,
    head_dim]; None for none.
    """

    qkv: LinearWeight
    out: LinearWeight
    qk_norm: F32 | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer; ``window`` as in ModelConfig."""

    attention_norm: F32
    attention: Attention
    mlp_norm: F32
    mlp: Mlp
    window: int | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder, as its operations prepared them; ``embedding`` [vocab, hidden] is the transposed head
    where they are tied."""

    embedding: F32
    layers: tuple[Layer, ...]
    norm: F32
    head: LinearWeight


class Decoder:
    """Reads the weights of a family and runs its forward pass in terms of the layer operations."""

    def __init__(self, config: ModelConfig, reader: WeightReader, ops: NumpyOps) -> None:
        """Read the weights. Raises ModelError for a missing tensor, a wrong shape or a value that is not finite."""
        self.config = config
        self._ops = ops
        self._rotary_table = RotaryTable(config.rope.frequencies(), config.rope.attention_factor)
        hidden, vocab = config.hidden_size, config.vocab_size
        if config.tie_word_embeddings:
            # One copy serves both: the lookup reads columns of the head, which costs far less than a second table.
            head = reader.projection(["model.embed_tokens.weight"], [vocab], hidden)
            self._embedding = head.T
            if "lm_head.weight" in reader:
                reader.discard_copy("lm_head.weight", head)
        else:
            self._embedding = reader.table("model.embed_tokens.weight", vocab, hidden)
            head = reader.projection(["lm_head.weight"], [vocab], hidden)
        self._head = ops.prepare_linear(head)
        self._norm = reader.vector("model.norm.weight", hidden)
        windows = config.windows or (None,) * config.num_layers
        self._layers = [self._read_layer(reader, i, windows[i]) for i in range(config.num_layers)]

    # -- reading -------------------------------------------------------------------------------------------------------

    def _read_layer(self, reader: WeightReader, index: int, window: int | None) -> Layer:
        hidden, at = self.config.hidden_size, f"model.layers.{index}"
        return Layer(
            attention_norm=reader.vector(f"{at}.input_layernorm.weight", hidden),
            attention=self.read_attention(reader, f"{at}.self_attn"),
            mlp_norm=reader.vector(f"{at}.post_attention_layernorm.weight", hidden),
            mlp=self.read_mlp(reader, f"{at}.mlp", index),
            window=window,
        )

    def read_linear(
        self, reader: WeightReader, names: list[str], out_features: list[int], in_features: int, *, bias: bool = False
    ) -> LinearWeight:
        """Projections ``names`` (without ``.weight``) that share an input, as one weight."""
        kn = reader.projection([f"{name}.weight" for name in names], out_features, in_features)
        vectors = [reader.vector(f"{name}.bias", n) for name, n in zip(names, out_features, strict=True) if bias]
        return self._ops.prepare_linear(kn, np.concatenate(vectors) if bias else None)

    def read_attention(self, reader: WeightReader, at: str) -> Attention:
        """The attention of the layer whose tensors begin with ``at``."""
        c = self.config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        names = [f"{at}.{part}_proj" for part in "qkv"]
        return Attention(
            qkv=self.read_linear(reader, names, [q, kv, kv], c.hidden_size, bias=c.attention_bias),
            out=self.read_linear(reader, [f"{at}.o_proj"], [c.hidden_size], q, bias=c.output_bias),
        )

    def read_mlp(self, reader: WeightReader, at: str, index: int) -> Mlp:
        """The MLP of layer ``index``, whose tensors begin with ``at``."""
        c, names = self.config, [f"{at}.gate_proj", f"{at}.up_proj"]
        return GatedMlp(
            self.read_linear(reader, names, [c.intermediate_size] * 2, c.hidden_size, bias=c.mlp_bias),
            self.read_linear(reader, [f"{at}.down_proj"], [c.hidden_size], c.intermediate_size, bias=c.mlp_bias),
        )

    @property
    def weights(self) -> DecoderWeights:
        """What was read."""
        return DecoderWeights(self._embedding, tuple(self._layers), self._norm, self._head)

    # -- running -------------------------------------------------------------------------------------------------------

    def rotary(self, batch: StepBatch) -> tuple[F32, F32]:
        """Cosines and sines of the batch's tokens, float32 [T, 1, rotated/2] each."""
        return self._rotary_table(batch.positions)

    def forward(self, batch: StepBatch, kv: KVPool) -> F32:
        """Run one step; writes the new keys and values into ``kv`` and returns logits float32 [S, vocab]."""
        return self.run(batch, kv, *self.rotary(batch))

    def run(self, batch: StepBatch, kv: KVPool, cos: F32, sin: F32) -> F32:
        """The step with given cosines and sines."""
        ops, c = self._ops, self.config
        eps, tokens, heads = c.rms_norm_eps, batch.token_ids.size, c.num_heads + c.num_kv_heads
        ops.begin_run(batch.token_ids, batch.positions, batch.row_starts, batch.context_lens, batch.origin)
        plans = {
            window: ops.plan_attention(batch.row_starts, batch.context_lens, batch.block_tables, kv.page_size, window)
            for window in {layer.window for layer in self._layers}
        }
        x = ops.embedding(self._embedding, batch.token_ids)
        for layer, k_pages, v_pages in zip(self._layers, kv.k, kv.v, strict=True):
            weights = layer.attention
            qkv = ops.linear(ops.rms_norm(x, layer.attention_norm, eps), weights.qkv).reshape(tokens, -1, c.head_dim)
            qk = qkv[:, :heads]
            if weights.qk_norm is not None:
                qk = ops.rms_norm(qk, weights.qk_norm, eps)
            qk = ops.rotary(qk, cos, sin)
            ops.append_kv(k_pages, batch.kv_slots, qk[:, c.num_heads :])
            ops.append_kv(v_pages, batch.kv_slots, qkv[:, heads:])
            attended = ops.paged_attention(qk[:, : c.num_heads], k_pages, v_pages, plans[layer.window])
            x += ops.linear(attended, weights.out)
            x += layer.mlp(ops.rms_norm(x, layer.mlp_norm, eps), ops)
        last = batch.row_starts[1:][batch.sample_rows] - 1
        return ops.linear(ops.rms_norm(np.ascontiguousarray(x[last]), self._norm, eps), self._head)
