"""Phi-3 and Phi-4: fused query-key-value and gate-up projections, partial rotary embedding, LongRoPE, a window.

LongRoPE has two tables of frequencies: a sequence of up to ``original_max`` tokens is computed with the short one, a
longer one with the long one, *all* its positions. HuggingFace chooses by the longest position of a call, and its
``generate`` computes the cache anew when a sequence outgrows the original maximum. So the logits after n tokens are
those of n tokens run from scratch, and that is what this engine gives, for each request by itself and in any chunks:

* A row whose context is at most ``original_max`` after the step uses the short table.
* The step in which a row passes ``original_max`` (in decode, or in a chunk of a long prompt) first computes the row's
  earlier positions anew with the long table, from the token ids that the KV pool remembers, over the old keys and
  values. That step takes as long as a prefill of ``original_max`` tokens; it happens once in a request's life.
* A row never reads keys of both tables: the pool remembers the table of each slot, and a mismatch, as when a prefix
  cache shares pages between a short and a long request, raises StepBatchError.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from blink_core.models.batch import KVPool, StepBatch
from blink_core.models.config import ModelConfig
from blink_core.models.errors import StepBatchError
from blink_core.models.family import Family, Values
from blink_core.models.fields import Fields
from blink_core.models.layers import Attention, Decoder, GatedMlp, Mlp
from blink_core.models.loaders import WeightReader
from blink_core.ops.numpy_ops import F32, I64, NumpyOps, RotaryTable

RECOMPUTE_TOKENS = 512  # positions computed anew at a time: bounds the memory of activations


class Phi3(Decoder):
    """Phi3ForCausalLM."""

    def __init__(self, config: ModelConfig, reader: WeightReader, ops: NumpyOps) -> None:
        super().__init__(config, reader, ops)
        rope = config.rope
        self._original_max = rope.original_max if rope.kind == "longrope" else None
        self._long_table = RotaryTable(rope.frequencies(long=True), rope.attention_factor)

    def read_attention(self, reader: WeightReader, at: str) -> Attention:
        """``qkv_proj`` is query, key and value in this order."""
        c = self.config
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        return Attention(
            qkv=self.read_linear(reader, [f"{at}.qkv_proj"], [q + 2 * kv], c.hidden_size),
            out=self.read_linear(reader, [f"{at}.o_proj"], [c.hidden_size], q),
        )

    def read_mlp(self, reader: WeightReader, at: str, index: int) -> Mlp:
        """``gate_up_proj`` is gate and up in this order."""
        c = self.config
        return GatedMlp(
            self.read_linear(reader, [f"{at}.gate_up_proj"], [2 * c.intermediate_size], c.hidden_size),
            self.read_linear(reader, [f"{at}.down_proj"], [c.hidden_size], c.intermediate_size),
        )

    def forward(self, batch: StepBatch, kv: KVPool) -> F32:
        """As :meth:`Decoder.forward`, with LongRoPE's choice of table (see the module)."""
        if self._original_max is None:
            return super().forward(batch, kv)
        record = kv.record()
        long = batch.context_lens > self._original_max
        redo = list(self._outgrown(batch, kv, self._original_max))
        for step in redo:
            self.run(step, kv, *self._long_table(step.positions))
            record.long[step.kv_slots] = True
        counts = np.diff(batch.row_starts)
        by_token = np.repeat(long, counts)
        tables = zip(self.rotary(batch), self._long_table(batch.positions), strict=True)
        cos, sin = (np.where(by_token[:, None, None], beyond, within) for within, beyond in tables)
        record.token_ids[batch.kv_slots] = batch.token_ids
        record.long[batch.kv_slots] = by_token
        return self.run(batch, kv, cos, sin)

    def _outgrown(self, batch: StepBatch, kv: KVPool, original_max: int) -> Iterator[StepBatch]:
        """Check the table of every row's keys; the steps that compute anew those of rows that pass ``original_max``."""
        record, starts = kv.record(), batch.context_lens - np.diff(batch.row_starts)
        for row, (start, length) in enumerate(zip(starts.tolist(), batch.context_lens.tolist(), strict=True)):
            slots = _slots(batch, kv, row, start)
            if np.any(record.token_ids[slots] < 0) or np.any(record.long[slots] != (start > original_max)):
                raise StepBatchError(
                    f"row {row}: its {start} earlier keys were not all computed with the frequencies of a sequence of "
                    f"{start} tokens (LongRoPE's original maximum is {original_max}); are its pages shared?"
                )
            if start <= original_max < length:
                for first in range(0, start, RECOMPUTE_TOKENS):
                    stop = min(start, first + RECOMPUTE_TOKENS)
                    yield StepBatch(
                        token_ids=record.token_ids[slots[first:stop]],
                        positions=np.arange(first, stop, dtype=np.int32),
                        kv_slots=slots[first:stop],
                        row_starts=np.array([0, stop - first], np.int32),
                        context_lens=np.array([stop], np.int32),
                        block_tables=batch.block_tables[row : row + 1],
                        sample_rows=np.empty(0, np.int32),
                        origin=np.array([row], np.int32),
                    )


def _slots(batch: StepBatch, kv: KVPool, row: int, count: int) -> I64:
    """Slots of the first ``count`` positions of a row, int64 [count]."""
    pages = batch.block_tables[row, : -(-count // kv.page_size)].astype(np.int64)
    return (pages[:, None] * kv.page_size + np.arange(kv.page_size)).reshape(-1)[:count]


def from_hf(raw: Fields, layers: int) -> Values:
    """``sliding_window``, null or absent for none, is every layer's. The rotary settings are the common reader's."""
    return {"windows": (raw.optional("sliding_window", int),) * layers}


def from_gguf(raw: Fields, layers: int) -> Values:
    """The window; the converter writes 0 for none."""
    return {"windows": (raw.get("attention.sliding_window", int, 0) or None,) * layers}


FAMILY = Family(
    model_type="phi3",
    causal_lm="Phi3ForCausalLM",
    gguf="phi3",
    network=Phi3,
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    from_hf=from_hf,
    from_gguf=from_gguf,
    gguf_names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    rope_kinds=("default", "longrope"),
    partial_rotary=True,
)
