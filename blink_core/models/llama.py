"""The Llama family: RMS norm, rotary attention with grouped key-value heads, SwiGLU (design section 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from blink_core.models.config import ModelConfig
from blink_core.models.loaders import WeightReader
from blink_core.ops.numpy_ops import F32, LinearWeight, NumpyOps, RotaryTable

if TYPE_CHECKING:
    from blink_core.models.model import KVPool, StepBatch


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """Weights of one decoder layer; query, key and value are one projection, gate and up another."""

    attention_norm: F32
    qkv: LinearWeight
    attention_out: LinearWeight
    mlp_norm: F32
    gate_up: LinearWeight
    down: LinearWeight


class Llama:
    """Forward pass of LlamaForCausalLM in terms of the layer operations."""

    def __init__(self, config: ModelConfig, reader: WeightReader, ops: NumpyOps) -> None:
        """Read the weights. Raises ModelError for a missing tensor or a wrong shape."""
        self.config = config
        self._ops = ops
        self._rotary = RotaryTable(config.rope_theta, config.head_dim)
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
        self._layers = [self._read_layer(reader, i) for i in range(config.num_layers)]

    def _read_layer(self, reader: WeightReader, index: int) -> LlamaLayer:
        c = self.config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        at = f"model.layers.{index}"

        def linear(names: list[str], out_features: list[int], in_features: int) -> LinearWeight:
            names = [f"{at}.{name}.weight" for name in names]
            return self._ops.prepare_linear(reader.projection(names, out_features, in_features))

        return LlamaLayer(
            attention_norm=reader.vector(f"{at}.input_layernorm.weight", c.hidden_size),
            qkv=linear(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], [q, kv, kv], c.hidden_size),
            attention_out=linear(["self_attn.o_proj"], [c.hidden_size], q),
            mlp_norm=reader.vector(f"{at}.post_attention_layernorm.weight", c.hidden_size),
            gate_up=linear(["mlp.gate_proj", "mlp.up_proj"], [c.intermediate_size] * 2, c.hidden_size),
            down=linear(["mlp.down_proj"], [c.hidden_size], c.intermediate_size),
        )

    def forward(self, batch: StepBatch, kv: KVPool) -> F32:
        """Run one step; writes the new keys and values into ``kv`` and returns logits float32 [S, vocab]."""
        ops, c = self._ops, self.config
        eps, tokens, heads = c.rms_norm_eps, batch.token_ids.size, c.num_heads + c.num_kv_heads
        cos, sin = self._rotary(batch.positions)
        plan = ops.plan_attention(batch.row_starts, batch.context_lens, batch.block_tables, kv.page_size)
        x = ops.embedding(self._embedding, batch.token_ids)
        for layer, k_pages, v_pages in zip(self._layers, kv.k, kv.v, strict=True):
            qkv = ops.linear(ops.rms_norm(x, layer.attention_norm, eps), layer.qkv).reshape(tokens, -1, c.head_dim)
            qk = ops.rotary(qkv[:, :heads], cos, sin)
            ops.append_kv(k_pages, batch.kv_slots, qk[:, c.num_heads :])
            ops.append_kv(v_pages, batch.kv_slots, qkv[:, heads:])
            attended = ops.paged_attention(qk[:, : c.num_heads], k_pages, v_pages, plan)
            x += ops.linear(attended, layer.attention_out)
            x += ops.linear(ops.silu_mul(ops.linear(ops.rms_norm(x, layer.mlp_norm, eps), layer.gate_up)), layer.down)
        last = batch.row_starts[1:][batch.sample_rows] - 1
        return ops.linear(ops.rms_norm(np.ascontiguousarray(x[last]), self._norm, eps), self._head)
