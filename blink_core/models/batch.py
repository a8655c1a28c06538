"""The batch that a model runs in one step, the KV pool it reads and writes, and their check (design sections 4, 5)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from blink_core.models.config import ModelConfig
from blink_core.models.errors import ModelError, StepBatchError
from blink_core.ops.numpy_ops import F32, I32, I64


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one step computes: R rows (requests) with T new tokens in all; S rows get logits.

    Row r's tokens are ``row_starts[r]:row_starts[r+1]`` (at least one) and are the last of its context: the token at
    index j of n sees the first ``context_lens[r] - n + j + 1`` slots of its block table. ``positions`` only turn the
    rotary embedding.
    """

    token_ids: I32  # [T]
    positions: I32  # [T] absolute
    kv_slots: I64  # [T] page * page_size + offset, where each new token's key and value go
    row_starts: I32  # [R+1]
    context_lens: I32  # [R] key-value length, this step's tokens included
    block_tables: I32  # [R, P] page ids; entries beyond a row's context are not read
    sample_rows: I32  # [S] rows whose last token gets logits
    origin: I32 | None = None  # [R] of a part of a step: which of the whole step's rows these are; None: they are those


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """By slot of the pool: the token whose key it holds (-1: none), and whether LongRoPE's long table turned it."""

    token_ids: I32
    long: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class KVPool:
    """Paged keys (after rotary embedding) and values: float32 [layers, pages, page_size, kv_heads, head_dim] each.

    They may be views of memory owned elsewhere, as long as each layer is C-contiguous.
    """

    k: F32
    v: F32
    page_size: int
    _record: list[SlotRecord] = field(default_factory=list, init=False, repr=False, compare=False)

    def record(self) -> SlotRecord:
        """What the slots hold, made on first use; only models that need it (LongRoPE) keep it up."""
        if not self._record:
            slots = self.k.shape[1] * self.page_size
            self._record.append(SlotRecord(np.full(slots, -1, np.int32), np.zeros(slots, np.bool_)))
        return self._record[0]

    def __post_init__(self) -> None:
        for name, array in (("k", self.k), ("v", self.v)):
            if array.dtype != np.float32 or array.ndim != 5 or array.shape != self.k.shape:
                raise ModelError(
                    f"KV pool {name} must be float32 with 5 axes like k, got {array.dtype} {list(array.shape)}"
                )
            if array.shape[2] != self.page_size or 0 in array.shape:
                raise ModelError(
                    f"KV pool {name} has shape {list(array.shape)}, expected page_size {self.page_size} on axis 2"
                )
            if not array[0].flags.c_contiguous or not array.flags.writeable:
                raise ModelError(f"KV pool {name} must be writeable and C-contiguous within a layer")


def validate_step(batch: StepBatch, kv: KVPool, config: ModelConfig) -> None:
    """Check shapes, dtypes and every index of ``batch``; raises StepBatchError with the value and the limit."""
    pages, page_size = kv.k.shape[1:3]
    expected = (config.num_layers, pages, page_size, config.num_kv_heads, config.head_dim)
    if kv.k.shape != expected:
        raise StepBatchError(f"KV pool has shape {list(kv.k.shape)}, this model needs {list(expected)}")
    rows = batch.context_lens.size
    tokens = batch.token_ids.size
    shapes: tuple[tuple[str, type[np.generic], tuple[int, ...]], ...] = (
        ("token_ids", np.int32, (tokens,)),
        ("positions", np.int32, (tokens,)),
        ("kv_slots", np.int64, (tokens,)),
        ("row_starts", np.int32, (rows + 1,)),
        ("context_lens", np.int32, (rows,)),
        ("block_tables", np.int32, (rows, batch.block_tables.shape[-1] if batch.block_tables.ndim else 0)),
        ("sample_rows", np.int32, (batch.sample_rows.size,)),
    )
    for name, dtype, shape in shapes:
        array: npt.NDArray[Any] = getattr(batch, name)
        if array.dtype != dtype or array.shape != shape:
            raise StepBatchError(
                f"{name} must be {np.dtype(dtype)} {list(shape)}, got {array.dtype} {list(array.shape)}"
            )
    counts = np.diff(batch.row_starts)
    if batch.row_starts[0] != 0 or batch.row_starts[-1] != tokens or (rows and counts.min() < 1):
        raise StepBatchError(f"row_starts must rise from 0 to {tokens}, got {batch.row_starts.tolist()}")
    _within("token_ids", batch.token_ids, config.vocab_size)
    _within("positions", batch.positions, config.max_position_embeddings)
    _within("kv_slots", batch.kv_slots, pages * page_size)
    _within("sample_rows", batch.sample_rows, rows)
    if rows == 0:
        return
    limit = batch.block_tables.shape[1] * page_size
    if np.any(batch.context_lens < counts) or batch.context_lens.max() > limit:
        raise StepBatchError(
            f"context_lens {batch.context_lens.tolist()} must be at least the new tokens {counts.tolist()} and at most "
            f"the {limit} slots of a block table"
        )
    used = np.arange(batch.block_tables.shape[1]) * page_size < batch.context_lens[:, None]
    _within("block_tables", batch.block_tables[used], pages)


def _within(name: str, values: npt.NDArray[Any], limit: int) -> None:
    if values.size and (values.min() < 0 or values.max() >= limit):
        bad = values[(values < 0) | (values >= limit)]
        raise StepBatchError(f"{name} holds {int(bad[0])}, expected 0 to {limit - 1}")
