"""Paged attention against dense float64 attention, on drawn page layouts over a NaN-poisoned pool."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blink_core.ops import attention
from blink_core.ops.numpy_ops import NumpyOps


def dense(
    q: npt.NDArray[Any], k: npt.NDArray[Any], v: npt.NDArray[Any], window: int | None = None
) -> npt.NDArray[np.float64]:
    """Causal attention in float64: q [n, heads, dim] are the last n of k, v [length, kv_heads, dim]."""
    count, heads, dim = q.shape
    length, kv_heads, _ = k.shape
    out = np.empty((count, heads, dim))
    for i in range(count):
        seen = length - count + i + 1
        first = 0 if window is None else max(0, seen - window)
        for h in range(heads):
            g = h // (heads // kv_heads)
            scores = k[first:seen, g].astype(np.float64) @ q[i, h].astype(np.float64) / np.sqrt(dim)
            p = np.exp(scores - scores.max())
            out[i, h] = p @ v[first:seen, g].astype(np.float64) / p.sum()
    return out.reshape(count, heads * dim)


rows_strategy = st.lists(
    # (tokens before this step, new tokens): decode and prefill, short and past a block of 128
    st.tuples(st.sampled_from([0, 1, 3, 15, 16, 17, 126, 127, 128, 129, 260]), st.sampled_from([1, 1, 2, 7, 40, 130])),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60)
@given(
    rows=rows_strategy,
    ratio=st.sampled_from([1, 3, 7]),
    kv_heads=st.integers(1, 3),
    page_size=st.sampled_from([1, 4, 16, 24, 32]),
    seed=st.integers(0, 2**32 - 1),
    batch_invariant=st.booleans(),
    window=st.sampled_from([None, None, 1, 2, 16, 17, 100, 128, 129, 1000]),
)
def test_matches_dense(
    rows: list[tuple[int, int]],
    ratio: int,
    kv_heads: int,
    page_size: int,
    seed: int,
    batch_invariant: bool,
    window: int | None,
) -> None:
    """Catches: a wrong page, head, mask or window edge or scale, and any read of a slot the row does not own (NaN)."""
    rng = np.random.default_rng(seed)
    dim, heads = 6, ratio * kv_heads
    needed = [-(-(past + new) // page_size) for past, new in rows]
    pages = sum(needed) + 3
    free = rng.permutation(pages).tolist()
    k_pool = np.full((pages, page_size, kv_heads, dim), np.nan, np.float32)
    v_pool = k_pool.copy()
    tables = np.full((len(rows), max(needed) + 2), -1, np.int32)
    queries, expected = [], []
    ops = NumpyOps(batch_invariant=batch_invariant)
    for r, (past, new) in enumerate(rows):
        tables[r, : needed[r]] = [free.pop() for _ in range(needed[r])]
        k, v = rng.standard_normal((2, past + new, kv_heads, dim), dtype=np.float32) * 2
        at = np.arange(past + new)
        slots = tables[r, at // page_size].astype(np.int64) * page_size + at % page_size
        ops.append_kv(k_pool, slots, k)
        ops.append_kv(v_pool, slots, v)
        queries.append(rng.standard_normal((new, heads, dim), dtype=np.float32) * 2)
        expected.append(dense(queries[-1], k, v, window))
    starts = np.concatenate(([0], np.cumsum([new for _, new in rows]))).astype(np.int32)
    lens = np.array([past + new for past, new in rows], np.int32)
    plan = ops.plan_attention(starts, lens, tables, page_size, window)
    got = ops.paged_attention(np.concatenate(queries), k_pool, v_pool, plan)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, np.concatenate(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_long_prefill_in_pieces(monkeypatch: pytest.MonkeyPatch, batch_invariant: bool) -> None:
    """Catches: a wrong causal edge where a prefill's scores do not fit the memory bound and are done in pieces."""
    monkeypatch.setattr(attention, "MAX_SCORES", 5000)
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 200, 2, 8), dtype=np.float32)
    q = rng.standard_normal((150, 4, 8), dtype=np.float32)
    ops = NumpyOps(batch_invariant=batch_invariant)
    starts, lens, table = np.array([0, 150], np.int32), np.array([200], np.int32), np.arange(10, dtype=np.int32)[None]
    plan = ops.plan_attention(starts, lens, table, 20)
    got = ops.paged_attention(q, k.reshape(10, 20, 2, 8), v.reshape(10, 20, 2, 8), plan)
    np.testing.assert_allclose(got, dense(q, k, v), rtol=1e-4, atol=1e-5)


def test_decode_rows_of_unlike_lengths_are_not_padded_together() -> None:
    """Catches: one long row that makes every short one pay its length."""
    lens = np.array([8000, 10, 30, 8, 5000], np.int32)
    plan = attention.plan_attention(np.arange(6, dtype=np.int32), lens, np.zeros((5, 500), np.int32), 16)
    assert [sorted(group.lengths.tolist()) for group in plan.decode] == [[8, 10, 30], [5000, 8000]]
    assert not plan.prefill


@pytest.mark.parametrize("page_size", [16, 24, 128])
@pytest.mark.parametrize("window", [5, 100, 128, 300])
def test_a_window_is_bitwise_however_it_is_reached(window: int, page_size: int) -> None:
    """Catches: blocks before the window left out in one way in decode and in another in prefill: other sums."""
    rng = np.random.default_rng(window)
    length, unit = 700, 30
    pages = -(-length // page_size)
    k, v = rng.standard_normal((2, pages * page_size, 2, 8), dtype=np.float32)
    q = rng.standard_normal((length, 6, 8), dtype=np.float32)
    table = rng.permutation(pages).astype(np.int32)[None]
    pool = [np.empty((pages, page_size, 2, 8), np.float32) for _ in range(2)]
    for target, source in zip(pool, (k, v), strict=True):
        target[table[0]] = source.reshape(pages, page_size, 2, 8)
    ops = NumpyOps(batch_invariant=True)

    def run(start: int, stop: int) -> npt.NDArray[np.float32]:
        starts, lens = np.array([0, stop - start], np.int32), np.array([stop], np.int32)
        plan = ops.plan_attention(starts, lens, table, page_size, window)
        return ops.paged_attention(q[start:stop], pool[0], pool[1], plan)

    whole = run(0, length)
    for start in range(0, length, unit):
        stop = min(length, start + unit)
        assert run(start, stop).tobytes() == whole[start:stop].tobytes(), start
        assert run(stop - 1, stop).tobytes() == whole[stop - 1 : stop].tobytes(), stop


def test_pages_before_a_window_are_not_read() -> None:
    """Catches: attention over the whole context in a layer that sees a window: right, but as slow as without one."""
    table = np.arange(100, dtype=np.int32)[None]
    lens = np.array([1600], np.int32)
    decode = attention.plan_attention(np.array([0, 1], np.int32), lens, table, 16, window=40)
    assert decode.decode[0].pages.tolist() == [[97, 98, 99]]
    assert decode.decode[0].lengths.tolist() == [48]
    prefill = attention.plan_attention(np.array([0, 50], np.int32), lens, table, 16, window=40)
    assert prefill.prefill[0].pages[0, 0] == (1600 - 50 - 39) // 16
    invariant = NumpyOps(batch_invariant=True).plan_attention(np.array([0, 1], np.int32), lens, table, 16, 40)
    assert invariant.decode[0].pages[0, 0] == 1560 // 128 * 8
