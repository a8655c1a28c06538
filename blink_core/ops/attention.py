"""Causal attention over paged keys and values in NumPy float32: decode and prefill, any ratio of heads.

Rows with one new token are computed together, padded to the longest; longer rows (prefill) one at a time. Slots beyond
a row's context are never used: their scores are masked and their values replaced by zero, whatever the pool holds.

Batch-invariant mode: keys are cut into blocks of BLOCK positions from position 0, each query does its own products of
one shape (query heads of a group x head_dim x BLOCK), and the blocks are added in order; positions after the query
weigh exactly zero. A query's result then depends on its context alone: not on the batch, and not on whether it came by
prefill, in what chunks, or by decode. In fast mode the block is the whole context, and a prefill's queries share one
product.

Sliding window: a query at position p sees the keys p - window + 1 to p. Only pages that some query of the row still
sees are read; in batch-invariant mode they are counted from the same blocks, so that leaving blocks out changes no bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

BLOCK = 128
MAX_SCORES = 1 << 23  # scores held at a time (32 MiB); bounds the memory of a long prefill
# Rows are padded together while the longest has at most this many times the pages of the shortest.
MAX_PADDING = 2


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows attended together. ``tokens`` intp [N*M]: N rows of M new tokens. ``pages`` intp [N, P]: the pages to read.

    ``lengths`` int32 [N]: slots used, counted from the first of these pages.
    """

    tokens: npt.NDArray[np.intp]
    pages: npt.NDArray[np.intp]
    lengths: I32


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Work list of one step, made once for each window and used by every layer that has it."""

    decode: tuple[_Group, ...]
    prefill: tuple[_Group, ...]
    window: int | None = None


def invariant_unit(page_size: int) -> int:
    """Positions that are left out together in batch-invariant mode: whole pages and whole blocks."""
    return math.lcm(page_size, BLOCK)


def plan_attention(
    row_starts: I32,
    context_lens: I32,
    block_tables: I32,
    page_size: int,
    *,
    window: int | None = None,
    unit: int | None = None,
) -> AttentionPlan:
    """Sort the rows of a step into groups.

    ``row_starts`` int32 [R+1]; ``context_lens`` int32 [R], including the new tokens; ``block_tables`` int32 [R, P].
    Row r's new tokens are the last of its context. ``window``: keys that a query sees, its own included; None for all.
    ``unit``: positions before the window are left out in multiples of this, itself a multiple of ``page_size``.
    """
    counts = np.diff(row_starts)
    if window is not None and context_lens.size:
        unit = unit or page_size
        unseen = np.maximum(context_lens - counts - window + 1, 0) // unit * unit  # before the row's first new token
        context_lens = context_lens - unseen.astype(context_lens.dtype)
        index = np.arange(block_tables.shape[1])[None, :] + unseen[:, None] // page_size
        block_tables = np.take_along_axis(block_tables, np.minimum(index, block_tables.shape[1] - 1), axis=1)
    pages = -(-context_lens // page_size)
    decode_rows = np.flatnonzero(counts == 1)
    decode_rows = decode_rows[np.argsort(pages[decode_rows], kind="stable")]
    groups: list[_Group] = []
    start = 0
    while start < decode_rows.size:
        limit = MAX_PADDING * pages[decode_rows[start]]
        stop = start + int(np.searchsorted(pages[decode_rows[start:]], limit, side="right"))
        rows = decode_rows[start:stop]
        used = np.arange(pages[rows[-1]])[None, :] < pages[rows][:, None]
        # Columns a row does not use may hold anything: read page 0 instead, and never look at it.
        table = np.where(used, block_tables[rows, : pages[rows[-1]]], 0).astype(np.intp)
        groups.append(_Group(row_starts[rows].astype(np.intp), table, context_lens[rows]))
        start = stop
    prefill = tuple(
        _Group(
            np.arange(row_starts[row], row_starts[row + 1]),
            block_tables[row : row + 1, : pages[row]].astype(np.intp),
            context_lens[row : row + 1],
        )
        for row in np.flatnonzero(counts > 1)
    )
    return AttentionPlan(tuple(groups), prefill, window)


def paged_attention(q: F32, k_pages: F32, v_pages: F32, plan: AttentionPlan, *, batch_invariant: bool) -> F32:
    """Attention of every new token over its row's context, its own position included.

    ``q`` float32 [T, heads, head_dim] after rotary embedding; ``k_pages`` and ``v_pages`` one layer of the pool,
    float32 [pages, page_size, kv_heads, head_dim], which already holds the new tokens. Returns float32
    [T, heads * head_dim]. Scores are scaled by 1/sqrt(head_dim); query head h reads key-value head
    h // (heads / kv_heads).
    """
    tokens, heads, head_dim = q.shape
    kv_heads = k_pages.shape[2]
    scaled = (q * np.float32(head_dim**-0.5)).reshape(tokens, kv_heads, heads // kv_heads, head_dim)
    out = np.empty_like(scaled)
    for group in plan.decode:
        k, v = (gather(pages, group, batch_invariant) for pages in (k_pages, v_pages))
        out[group.tokens] = _attend(scaled[group.tokens], k, v, group.lengths[:, None], plan.window)
    for group in plan.prefill:
        k, v = (gather(pages, group, batch_invariant) for pages in (k_pages, v_pages))
        _prefill(scaled, k, v, group, out, plan.window, batch_invariant)
    return out.reshape(tokens, heads * head_dim)


def gather(source: npt.NDArray[Any], group: _Group, batch_invariant: bool) -> npt.NDArray[Any]:
    """Rows of one layer's keys or values (or of their tags) that the group's rows read, in blocks.

    ``source`` [pages, page_size, ...] of any dtype -> [N, blocks, block, ...], zero beyond a row's length.
    """
    rows, pages = group.pages.shape
    slots = pages * source.shape[1]
    block = BLOCK if batch_invariant else slots
    blocks = -(-slots // block)
    target = np.empty((rows, blocks * block, *source.shape[2:]), dtype=source.dtype)
    target[:, :slots] = source[group.pages].reshape(rows, slots, *source.shape[2:])
    for row, length in enumerate(group.lengths):
        # Also the keys: a NaN there would survive as a masked score, but slow the products down.
        target[row, length:] = 0
    return target.reshape(rows, blocks, block, *source.shape[2:])


def _prefill(scaled: F32, k: F32, v: F32, group: _Group, out: F32, window: int | None, batch_invariant: bool) -> None:
    """Attention of one row's several new tokens into ``out``, some of them at a time."""
    _, kv_heads, per_group, head_dim = scaled.shape
    length = int(group.lengths[0])
    total = group.tokens.size
    step = max(1, MAX_SCORES // (kv_heads * per_group * k.shape[1] * k.shape[2]))
    if window is not None:
        step = min(step, max(window, BLOCK))  # else most of the products would be outside the window
    for start in range(0, total, step):
        tokens = group.tokens[start : start + step]
        count = tokens.size
        # Keys that a token sees: all up to its own position, in a window those from `low` on.
        visible = np.arange(length - total + start, length - total + start + count, dtype=np.int32) + 1
        low = 0 if window is None else max(0, int(visible[0]) - window)
        if batch_invariant:
            first, blocks = low // BLOCK, -(-int(visible[-1]) // BLOCK)
            shape = (count, blocks - first, *k.shape[2:])
            seen_k, seen_v = (np.broadcast_to(a[:, first:blocks], shape) for a in (k, v))
            out[tokens] = _attend(scaled[tokens], seen_k, seen_v, (visible - first * BLOCK)[:, None], window)
        else:
            # One product a key-value head: [kv_heads, count * per_group, head_dim] against all keys.
            queries = scaled[tokens].swapaxes(0, 1).reshape(1, kv_heads, count * per_group, head_dim)
            seen_k, seen_v = (a[:, :, low : int(visible[-1])] if window is not None else a for a in (k, v))
            result = _attend(queries, seen_k, seen_v, np.repeat(visible - low, per_group)[None, :], window)
            out[tokens] = result.reshape(kv_heads, count, per_group, head_dim).swapaxes(0, 1)


def _attend(q: F32, k: F32, v: F32, visible: I32, window: int | None) -> F32:
    """Softmax attention of N items with M queries a key-value head each.

    ``q`` [N, kv_heads, M, head_dim], scaled; ``k``, ``v`` [N, blocks, block, kv_heads, head_dim]; ``visible`` int32
    [N, M] or [N, 1]: how many keys, from the first, each query sees (at least 1), of which only the last ``window``.
    Returns float32 [N, kv_heads, M, head_dim].
    """
    blocks, block = k.shape[1:3]
    scores = np.matmul(q[:, :, None], k.transpose(0, 3, 1, 4, 2))  # [N, kv_heads, blocks, M, block]
    index = np.arange(blocks * block, dtype=np.int32).reshape(1, 1, blocks, 1, block)
    end = visible[:, None, None, :, None]
    np.copyto(scores, np.float32(-np.inf), where=index >= end)
    if window is not None:
        np.copyto(scores, np.float32(-np.inf), where=index < end - window)
    scores -= scores.max(axis=(2, 4), keepdims=True)
    weights = np.exp(scores, out=scores)
    sums = np.add.reduce(weights, axis=-1, keepdims=True)  # [N, kv_heads, blocks, M, 1]
    parts = np.matmul(weights, v.transpose(0, 3, 1, 2, 4))  # [N, kv_heads, blocks, M, head_dim]
    # Block after block, so that blocks without a visible key (exact zeros) change nothing.
    total, weight = parts[:, :, 0], sums[:, :, 0]
    for j in range(1, blocks):
        total = total + parts[:, :, j]
        weight = weight + sums[:, :, j]
    out: F32 = total / weight
    return out
