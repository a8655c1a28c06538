"""Corpus rows A, and those of M and V about heads and offsets: paged attention in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from blink_core.ops.numpy_ops import NumpyOps
from tests.unit.ops.test_attention import dense

F32 = npt.NDArray[np.float32]
MODES = [False, True]


def one_row(ops: NumpyOps, q: F32, k_pool: F32, v_pool: F32, table: list[int], length: int, window: Any = None) -> F32:
    """Attention of the last queries of one request of `length` tokens."""
    starts, lens = np.array([0, q.shape[0]], np.int32), np.array([length], np.int32)
    plan = ops.plan_attention(starts, lens, np.array([table], np.int32), k_pool.shape[1], window)
    return ops.paged_attention(q, k_pool, v_pool, plan)


@pytest.mark.parametrize("batch_invariant", MODES)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("queries", [1, 4])
def test_a02_a03_what_lies_in_unused_places_does_not_matter(
    queries: int, window: int | None, batch_invariant: bool
) -> None:
    """A02, A03. Catches: a mask that is added to what lies there: NaN stays NaN, a large value outweighs it.

    Condition: every place that the request does not own holds NaN, infinity or a large finite value, in K and in V, the
    rest of its own last page included; the answer is the same bit for bit as with zeros there.
    """
    rng = np.random.default_rng(0)
    length, size, table = 21, 16, [3, 1]
    k, v = rng.standard_normal((2, length, 2, 8), dtype=np.float32)
    q = rng.standard_normal((queries, 6, 8), dtype=np.float32)
    ops = NumpyOps(batch_invariant=batch_invariant)
    slots = np.array(table)[np.arange(length) // size] * size + np.arange(length) % size
    answers = {}
    for value in (0.0, 1e3, -1e3, 1e30, np.inf, np.nan):
        pools = [np.full((5, size, 2, 8), value, np.float32) for _ in range(2)]
        for pool, rows in zip(pools, (k, v), strict=True):
            ops.append_kv(pool, slots, rows)
            unused = pool[1, length % size :]
            assert unused.size
            np.testing.assert_array_equal(unused, np.float32(value))
        with np.errstate(all="ignore"):
            answers[value] = one_row(ops, q, pools[0], pools[1], table, length, window)
    assert np.isfinite(answers[0.0]).all()
    assert {a.tobytes() for a in answers.values()} == {answers[0.0].tobytes()}


def keys_seen(length: int, window: int, chunks: list[int], *, batch_invariant: bool) -> list[set[int]]:
    """Which positions each query sees: with zero queries every key weighs alike, and V says which they were."""
    ops, size = NumpyOps(batch_invariant=batch_invariant), 4
    pages = -(-length // size)
    k_pool = np.full((pages, size, 1, length), np.nan, np.float32)
    v_pool = k_pool.copy()
    slots = np.arange(length)
    ops.append_kv(k_pool, slots, np.zeros((length, 1, length), np.float32))
    ops.append_kv(v_pool, slots, np.eye(length, dtype=np.float32)[:, None])
    seen, at = [], 0
    for chunk in chunks:
        at += chunk
        q = np.zeros((chunk, 1, length), np.float32)
        out = one_row(ops, q, k_pool, v_pool, list(range(pages)), at, window)
        seen += [set(np.flatnonzero(row).tolist()) for row in out.reshape(chunk, length)]
    return seen


def huggingface_sees(length: int, window: int) -> list[set[int]]:
    import torch
    import transformers

    config = transformers.MistralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        sliding_window=window,
        attn_implementation="eager",
    )
    model = transformers.MistralModel(config).eval()
    with torch.no_grad():
        weights = model(torch.arange(length)[None] % 32, output_attentions=True).attentions[0][0, 0]
    return [set(np.flatnonzero(row).tolist()) for row in weights.numpy()]


@pytest.mark.parametrize("batch_invariant", MODES)
@pytest.mark.parametrize("window", [1, 8])
def test_a05_a06_a08_the_window_has_w_keys_on_every_path(window: int, batch_invariant: bool) -> None:
    """A05, A06, A08. Catches: a window of w or w + 1 keys by path; a decode path that ignores it.

    Condition: 20 tokens and a window of 8, so that positions w and w + 1 and all later ones are there, as one prefill,
    token by token, and in chunks that cross the window's edge. The reference is HuggingFace's eager mask.
    """
    expected = huggingface_sees(20, window)
    assert [len(keys) for keys in expected] == [min(i + 1, window) for i in range(20)]
    for chunks in ([20], [1] * 20, [7, 1, 1, 6, 5], [8, 1, 11]):
        assert keys_seen(20, window, chunks, batch_invariant=batch_invariant) == expected, chunks


@pytest.mark.parametrize("batch_invariant", MODES)
@pytest.mark.parametrize("page_size", [1, 16, 64, 128, 256])
def test_a09_pages_of_any_size(page_size: int, batch_invariant: bool) -> None:
    """A09. Catches: a path that is right up to a block of 128 keys and wrong for larger pages.

    Condition: pages smaller than, equal to and larger than a block; contexts within one page, at its end and beyond.
    """
    rng = np.random.default_rng(page_size)
    ops = NumpyOps(batch_invariant=batch_invariant)
    lengths = [page_size - 1 or 1, page_size, page_size + 1, 300]
    needed = [-(-n // page_size) for n in lengths]
    k_pool = np.full((sum(needed) + 1, page_size, 2, 8), np.nan, np.float32)
    v_pool, free = k_pool.copy(), rng.permutation(sum(needed) + 1).tolist()
    for length, count in zip(lengths, needed, strict=True):
        table = [free.pop() for _ in range(count)]
        k, v = rng.standard_normal((2, length, 2, 8), dtype=np.float32)
        slots = np.array(table, np.int64)[np.arange(length) // page_size] * page_size + np.arange(length) % page_size
        ops.append_kv(k_pool, slots, k)
        ops.append_kv(v_pool, slots, v)
        for queries in (1, min(length, 40)):
            q = rng.standard_normal((queries, 6, 8), dtype=np.float32)
            got = one_row(ops, q, k_pool, v_pool, table, length)
            np.testing.assert_allclose(got, dense(q, k, v), rtol=1e-4, atol=1e-4)


HIDING = [(64, 8), (8, 8), (7, 1)]  # group = KV heads, one query head each, one KV head: some wrong rule is right here
RATIOS = [(28, 4), (32, 8), (40, 10), *HIDING]


@pytest.mark.parametrize("batch_invariant", MODES)
@pytest.mark.parametrize(("heads", "kv_heads"), RATIOS)
def test_m01_m02_m04_each_query_head_reads_its_group_s_values(heads: int, kv_heads: int, batch_invariant: bool) -> None:
    """M01, M02, M04. Catches: kv head = h / kv_heads or h % kv_heads instead of h / group; tiles instead of repeats.

    Condition: every KV head has its own value, and for these ratios each wrong rule gives another answer somewhere.
    """
    right = [h // (heads // kv_heads) for h in range(heads)]
    wrong = [[min(h // kv_heads, kv_heads - 1) for h in range(heads)], [h % kv_heads for h in range(heads)]]
    assert all(rule != right for rule in wrong) == ((heads, kv_heads) not in HIDING)
    ops, length = NumpyOps(batch_invariant=batch_invariant), 9
    k_pool = np.zeros((1, 16, kv_heads, 4), np.float32)
    v_pool = np.broadcast_to(np.arange(kv_heads, dtype=np.float32)[:, None], k_pool.shape).copy()
    for queries in (1, 5):
        out = one_row(ops, np.ones((queries, heads, 4), np.float32), k_pool, v_pool, [0], length)
        got = out.reshape(queries, heads, 4)
        np.testing.assert_allclose(got, np.broadcast_to(np.array(right, np.float32)[:, None], got.shape), rtol=1e-6)


def test_b04_the_last_pages_of_a_pool_beyond_32_bits(tmp_path: Path) -> None:
    """B04. Catches: an offset kept in 32 bits, which wraps once the pool has 2^31 elements.

    Condition: the request has only the highest pages of a pool of more than 2^31 elements, each beyond 2^31; where a
    wrapped offset would lead, other values lie.
    """
    size, kv_heads, dim = 16, 2, 64
    page = size * kv_heads * dim
    pages = (2**31 + 2**24) // page
    # Sparse files: nothing is allocated but the pages that are touched.
    pools = [np.memmap(tmp_path / name, np.float32, "w+", shape=(pages, size, kv_heads, dim)) for name in "kv"]
    rng = np.random.default_rng(0)
    length = 40
    table = [pages - 1, pages - 3, pages - 2]
    assert min(table) * page > 2**31 - 1
    wrapped = [(p * page - 2**31) // page for p in table]
    for pool in pools:
        pool[wrapped] = 100.0
    k, v = rng.standard_normal((2, length, kv_heads, dim), dtype=np.float32)
    slots = np.array(table, np.int64)[np.arange(length) // size] * size + np.arange(length) % size
    ops = NumpyOps()
    ops.append_kv(pools[0], slots, k)
    ops.append_kv(pools[1], slots, v)
    assert all((pool[wrapped] == 100.0).all() for pool in pools)
    for queries in (1, 12):
        q = rng.standard_normal((queries, 6, dim), dtype=np.float32)
        got = one_row(ops, q, pools[0], pools[1], table, length)
        np.testing.assert_allclose(got, dense(q, k, v), rtol=1e-4, atol=1e-4)
    for name in "kv":
        (tmp_path / name).unlink()
