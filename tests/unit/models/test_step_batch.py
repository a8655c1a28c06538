"""Step batches and KV pools that do not fit are refused before anything is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from blink_core.models import KVPool, ModelError, StepBatchError, load_model


def i32(*values: int) -> Any:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": i32(5, 101, 5, 5)}, "token_ids holds 101, expected 0 to 100"),
        ({"token_ids": i32(5, -1, 5, 5)}, "token_ids holds -1"),
        ({"token_ids": np.array([5, 5, 5, 5])}, r"token_ids must be int32 \[4\], got int64 \[4\]"),
        ({"token_ids": i32(5, 5, 5)}, r"positions must be int32 \[3\], got int32 \[4\]"),
        ({"positions": i32(0, 1, 2, 512)}, "positions holds 512, expected 0 to 511"),
        ({"kv_slots": np.array([0, 1, 2, 32])}, "kv_slots holds 32, expected 0 to 31"),
        ({"kv_slots": i32(0, 1, 2, 3)}, "kv_slots must be int64"),
        ({"row_starts": i32(0, 3)}, r"row_starts must be int32 \[3\], got int32 \[2\]"),
        ({"row_starts": i32(0, 3, 5)}, "row_starts must rise from 0 to 4"),
        ({"row_starts": i32(1, 3, 4)}, "row_starts must rise from 0 to 4"),
        ({"row_starts": i32(0, 4, 4)}, "row_starts must rise from 0 to 4"),
        ({"row_starts": i32(0, 5, 4)}, "row_starts must rise from 0 to 4"),
        ({"context_lens": i32(2, 1)}, "must be at least the new tokens"),
        ({"context_lens": i32(3, 9)}, "at most the 8 slots of a block table"),
        ({"block_tables": np.array([[8, 0], [1, 0]], np.int32)}, "block_tables holds 8, expected 0 to 7"),
        ({"block_tables": np.array([[-1, 0], [1, 0]], np.int32)}, "block_tables holds -1"),
        ({"block_tables": i32(0, 1)}, r"block_tables must be int32 \[2, 2\], got int32 \[2\]"),
        ({"sample_rows": i32(0, 2)}, "sample_rows holds 2, expected 0 to 1"),
        ({"sample_rows": np.zeros((1, 1), np.int32)}, r"sample_rows must be int32 \[1\]"),
    ],
)
def test_bad_batch(
    make_tiny: Callable[..., Any], make_driver: Callable[..., Any], changes: dict[str, Any], message: str
) -> None:
    """Catches: an index out of range that would read or write another request's memory."""
    driver = make_driver(load_model(make_tiny().path), pages=8, page_size=4)
    good = driver.batch([("a", [1, 2, 3]), ("b", [4])], [0, 1])
    # The unused column holds a negative page id: only entries within the context are read or checked.
    good = dataclasses.replace(good, block_tables=np.array([[3, -9], [5, -9]], np.int32))
    driver.model.forward(good, driver.pool)
    driver.pool.k[:] = driver.pool.v[:] = np.nan
    with pytest.raises(StepBatchError, match=message):
        driver.model.forward(dataclasses.replace(good, **changes), driver.pool)
    assert np.isnan(driver.pool.k).all()
    assert np.isnan(driver.pool.v).all()


def test_rows_without_sampling(make_tiny: Callable[..., Any], make_driver: Callable[..., Any]) -> None:
    """Catches: logits of the wrong rows, and a chunk without a sampled row that fails."""
    driver = make_driver(load_model(make_tiny().path), pages=8, page_size=4)
    every = driver.step([("a", [1, 2, 3]), ("b", [4])])
    again = make_driver(driver.model, pages=8, page_size=4)
    some = again.model.forward(again.batch([("a", [1, 2, 3]), ("b", [4])], [1, 0, 1]), again.pool)
    np.testing.assert_allclose(some, every[[1, 0, 1]], rtol=1e-5, atol=1e-5)
    assert again.model.forward(again.batch([("a", [5])], []), again.pool).shape == (0, 101)
    empty = driver.batch([("a", [1])], [])
    nothing = {f.name: v[:0] for f in dataclasses.fields(empty) if (v := getattr(empty, f.name)) is not None} | {
        "row_starts": i32(0)
    }
    assert driver.model.forward(dataclasses.replace(empty, **nothing), driver.pool).shape == (0, 101)


def test_pool_shapes(make_tiny: Callable[..., Any], make_driver: Callable[..., Any]) -> None:
    """Catches: a pool of another model, dtype or layout; views of memory owned elsewhere must be accepted."""
    driver = make_driver(load_model(make_tiny().path), pages=8, page_size=4)
    batch = driver.batch([("a", [1, 2, 3])], [0])
    shape = (2, 8, 4, 2, 8)
    memory = bytearray(2 * 2 * int(np.prod(shape[1:])) * 4)
    both = np.frombuffer(memory, np.float32).reshape(2, 2, *shape[1:])  # layer by layer, keys then values
    view = KVPool(both[:, 0], both[:, 1], 4)
    logits = driver.model.forward(batch, view)
    np.testing.assert_array_equal(logits, driver.model.forward(batch, driver.pool))
    assert any(memory)
    good = np.zeros(shape, np.float32)
    misfits: list[tuple[Any, Any, int, str]] = [
        (good.astype(np.float64), good, 4, "k must be float32"),
        (good, good[:1], 4, "v must be float32 with 5 axes like k"),
        (good, good, 8, "expected page_size 8"),
        (good[..., ::2], good[..., ::2], 4, "C-contiguous"),
    ]
    for k, v, size, message in misfits:
        with pytest.raises(ModelError, match=message):
            KVPool(k, v, size)
    wrong = KVPool(good[:1], good[:1], 4)
    with pytest.raises(
        StepBatchError, match=r"KV pool has shape \[1, 8, 4, 2, 8\], this model needs \[2, 8, 4, 2, 8\]"
    ):
        driver.model.forward(batch, wrong)
