"""Decode attention's variants, their source run on the host: each against NumPy, and all to the same bits."""

from __future__ import annotations

import ctypes
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import numpy.typing as npt
import pytest

from blink_core.ops.numpy_ops import NumpyOps
from tests.cuda_on_host import build, set_late

U16 = npt.NDArray[np.uint16]
PLAN = """
extern "C" void run(const StepSizes* sizes, const int* starts, const int* lens, const int* rows, const PlanParams* p,
                    int* counts, int4* items, int4* tiles, int* token_rows) {
  launch(1, THREADS, [&] { attention_plan(sizes, starts, lens, rows, *p, counts, items, tiles, token_rows); });
}
"""
ROPE = """
extern "C" void run(int grid, T* qkv, const int* positions, const i64* slots, const float* cos, const float* sin,
                    const T* norm, T* k, T* v, int tokens, int heads, int kv_heads, int half, float eps) {
  launch(grid, 128, [&] {
    rope_append(qkv, positions, slots, cos, sin, norm, k, v, tokens, heads, kv_heads, half, eps);
  });
}
"""
DECODE = """
extern "C" void run(int grid, const DecodeParams* p) { launch(grid, WARPS * 32, [&] { KERNEL(*p); }); }
extern "C" int size() { return sizeof(DecodeParams); }
"""
EPS = 1e-6


def rounded(values: npt.NDArray[Any]) -> U16:
    """bfloat16 bits of values."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widened(bits: U16) -> npt.NDArray[np.float32]:
    """float32 of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class Case:
    """Contexts of rows with one new token, and a model's heads. ``chunk``: keys of a split at least."""

    heads: int
    kv_heads: int
    head_dim: int
    half: int
    normed: bool
    contexts: tuple[int, ...]
    window: int = 0
    chunk: int = 64
    page: int = 16


CASES = (
    Case(8, 2, 128, 64, True, (1, 16, 17, 193, 64, 65), chunk=256),
    Case(20, 1, 64, 16, True, (40, 1, 300)),
    Case(6, 3, 128, 48, False, (129, 33, 2), window=40),
    Case(4, 4, 64, 32, False, (15, 700)),
)
VARIANTS: tuple[dict[str, int], ...] = (
    {}, {"STAGES": 2, "LEAVE": 1}, {"STAGES": 2, "LEAVE": 1, "JOINED": 1}, {"STAGES": 3, "JOINED": 1},
)  # fmt: skip


class Step:
    """What a step has before attention: the QKV product, pages with older keys and poison, the work list."""

    def __init__(self, folder: Path, case: Case, seed: int) -> None:
        with patch.dict(sys.modules, {"cupy": MagicMock()}):
            self.module = importlib.import_module("blink_core.ops.cuda_attention")
        rng = np.random.default_rng(seed)
        self.folder, self.case, rows = folder, case, len(case.contexts)
        self.qkv = rounded(rng.standard_normal((rows, case.heads + 2 * case.kv_heads, case.head_dim)))
        self.norm = rounded(rng.uniform(0.5, 2, (case.heads + case.kv_heads, case.head_dim)))
        needed = [-(-c // case.page) for c in case.contexts]
        pages = sum(needed) + 2
        free = rng.permutation(np.arange(2, pages))
        self.tables = np.full((rows, max(needed)), pages + 1000, np.uint32)
        self.k, self.v = (np.full((pages, case.page, case.kv_heads, case.head_dim), 0xFFFF, np.uint16) for _ in "kv")
        self.positions = np.array(case.contexts, np.int32) - 1
        self.slots = np.zeros(rows, np.int64)
        for r, context in enumerate(case.contexts):
            mine, free = free[: needed[r]], free[needed[r] :]
            self.tables[r, : needed[r]] = mine
            slots = (mine[:, None] * case.page + np.arange(case.page)).ravel()[:context]
            self.slots[r] = slots[-1]
            for pool in (self.k, self.v):
                pool.reshape(-1, case.kv_heads, case.head_dim)[slots[:-1]] = rounded(
                    rng.standard_normal((context - 1, case.kv_heads, case.head_dim))
                )
        angles = rng.uniform(0, 6, (max(case.contexts), case.half)).astype(np.float32)
        self.cos, self.sin = np.cos(angles), np.sin(angles)
        self.per_item = case.kv_heads * -(-(case.heads // case.kv_heads) // 16)
        self.max_items = rows + 4096
        self.counts, self.items = np.zeros(4, np.int32), np.zeros((self.max_items, 8), np.int32)
        self._plan()

    def _plan(self) -> None:
        case, rows = self.case, len(self.case.contexts)
        params = self.module.PlanParams(
            self.per_item, 4096 * self.per_item, 0, case.chunk, 16, case.window, self.max_items, rows + 4, 0, 0
        )
        sizes, starts = np.array([rows, rows, rows, 0], np.int32), np.arange(rows + 1, dtype=np.int32)
        lens, tables = np.array(case.contexts, np.int32), np.arange(rows, dtype=np.int32)
        tiles, tokens = np.zeros((rows + 4, 4), np.int32), np.zeros(rows, np.int32)
        library = build(self.folder, "attention_plan.cu", PLAN)
        set_late(library, [])
        arrays = (sizes, starts, lens, tables)
        library.run(
            *(pointer(a) for a in arrays), ctypes.byref(params),
            *(pointer(a) for a in (self.counts, self.items, tiles, tokens)),
        )  # fmt: skip
        assert self.counts[0] > 0
        assert self.counts[1:].tolist() == [0, 0, 0]

    def rope(self) -> tuple[U16, U16, U16]:
        """rope_append's queries with what came after them, keys and values."""
        case, rows = self.case, len(self.case.contexts)
        qkv, k, v = self.qkv.copy(), self.k.copy(), self.v.copy()
        library = build(self.folder, "rope_kv.cu", ROPE, HEAD_DIM=case.head_dim)
        set_late(library, [])  # it writes in place what it waits for
        lanes = 4 if case.head_dim <= 64 else 8
        library.run(
            -(-rows * (case.heads + 2 * case.kv_heads) * lanes // 128), pointer(qkv), pointer(self.positions),
            pointer(self.slots), pointer(self.cos), pointer(self.sin), pointer(self.norm if case.normed else None),
            pointer(k), pointer(v), rows, case.heads, case.kv_heads, case.half, ctypes.c_float(EPS),
        )  # fmt: skip
        return qkv, k, v

    def attend(self, grid: int, variant: dict[str, int], works: bool = True) -> tuple[U16, U16, U16, list[int]]:
        """Output, keys and values after attention, and which blocks waited for the kernel before."""
        case, rows, m = self.case, len(self.case.contexts), self.module
        joined = variant.get("JOINED", 0) == 1
        if joined:
            qkv, k, v = self.qkv.copy(), self.k.copy(), self.v.copy()
            late = [(qkv, self.qkv)]
        else:
            turned, new_k, new_v = self.rope()
            qkv, k, v = turned.copy(), new_k.copy(), new_v.copy()
            late = [(qkv, turned)]
            for pool, values in ((k, new_k), (v, new_v)):
                late += [
                    (pool[s // case.page, s % case.page], values[s // case.page, s % case.page]) for s in self.slots
                ]
        out = np.full((rows, case.heads * case.head_dim), 0xFFFF, np.uint16)
        partial = np.full((self.max_items, case.heads, case.head_dim), np.nan, np.float32)
        sums = np.full((self.max_items, case.heads, 2), np.nan, np.float32)
        arrived = np.zeros((rows, self.per_item), np.int32)
        counts = self.counts if works else np.zeros(4, np.int32)
        params = m.DecodeParams(
            *(address(qkv), qkv[0].size, address(k), address(v), address(out), address(counts), address(self.items)),
            address(self.tables), address(partial), address(sums), address(arrived), self.tables.shape[1], case.heads,
            case.kv_heads, self.max_items, float(np.float32(case.head_dim**-0.5)) * 1.4426950408889634,
        )  # fmt: skip
        if joined:
            arrays = (self.cos, self.sin, self.positions, self.slots, self.norm if case.normed else None, k, v)
            rope = m.RopeParams(*(address(a) for a in arrays), case.heads, case.kv_heads, case.half, EPS)
            params = m.JoinedParams(params, rope)
        heads = {"HEAD_DIM": case.head_dim, "PAGE_SIZE": case.page}
        library = build(self.folder, "attention_decode.cu", DECODE, **heads, **variant)
        assert library.size() == ctypes.sizeof(params)
        set_late(library, late)
        library.run(grid, ctypes.byref(params))
        assert not arrived.any()
        return out, k, v, [library.has_waited(i) for i in range(grid)]

    def expected(self) -> npt.NDArray[np.float32]:
        """The same by NumpyOps in float32."""
        case, numpy, rows = self.case, NumpyOps(), len(self.case.contexts)
        host, heads = widened(self.qkv), case.heads + case.kv_heads
        qk = host[:, :heads]
        if case.normed:
            qk = numpy.rms_norm(qk, widened(self.norm), EPS)
        qk = numpy.rotary(qk, self.cos[self.positions][:, None], self.sin[self.positions][:, None])
        k, v = widened(self.k), widened(self.v)
        numpy.append_kv(k, self.slots, np.ascontiguousarray(qk[:, case.heads :]))
        numpy.append_kv(v, self.slots, np.ascontiguousarray(host[:, heads:]))
        plan = numpy.plan_attention(
            np.arange(rows + 1, dtype=np.int32), np.array(case.contexts, np.int32), self.tables.astype(np.int32),
            case.page, case.window or None,
        )  # fmt: skip
        return numpy.paged_attention(np.ascontiguousarray(qk[:, : case.heads]), k, v, plan)


def address(array: npt.NDArray[Any] | None) -> int | None:
    return None if array is None else array.ctypes.data


def pointer(array: npt.NDArray[Any] | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(address(array))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("on_host")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_variants_agree(folder: Path, case: Case) -> None:
    """Catches: a joined kernel that reads the QKV product before it is there, takes the new key from the pages, turns a
    head as another, skips a split's or a chunk's share, or writes a slot that is not its own; a ring that is read
    before its copies have landed; a difference in one bit to the two kernels."""
    step = Step(folder, case, 7)
    expected = step.expected()
    first = None
    for variant in VARIANTS:
        out, k, v, _ = step.attend(5, variant)
        got = widened(out).astype(np.float64)
        error = np.linalg.norm(got - expected.reshape(got.shape)) / np.linalg.norm(expected)
        assert error <= 4e-3, variant  # NaN never passes
        first = first or (out, k, v)
        for name, a, b in zip(("output", "keys", "values"), (out, k, v), first, strict=True):
            assert np.array_equal(a, b), (variant, name)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_first_block_always_waits(folder: Path, variant: dict[str, int]) -> None:
    """Catches: a kernel that may be over before the one ahead of it: what follows would wait for it alone. And blocks
    without work that stay although they were to leave."""
    step = Step(folder, CASES[3], 8)
    grid = int(step.counts[0]) * step.per_item + 3
    idle = 0 if variant.get("LEAVE") else 1
    assert step.attend(grid, variant)[3] == [1] * (grid - 3) + [idle] * 3
    assert step.attend(4, variant, works=False)[3] == [1, idle, idle, idle]
