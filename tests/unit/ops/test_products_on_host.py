"""Rings of the decode products, their source run on the host: bits do not depend on them."""

from __future__ import annotations

import ctypes
import importlib
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import numpy.typing as npt
import pytest

from tests.cuda_on_host import build, set_late
from tests.unit.ops.test_attention_on_host import U16, address, rounded, widened

SKINNY = """
extern "C" void run(int grid, int kernel, const SkinnyParams* p) {
  void (*const kernels[])(const SkinnyParams) = {skinny_8_1, skinny_16_2, skinny_32_3, skinny_norm_8_1};
  launch(grid, 256, [&] { kernels[kernel](*p); });
}
"""
FIXED = """
extern "C" void run(int grid, int kernel, const MatmulParams* p) {
  launch(grid, THREADS, [&] { fixed_32(*p); });
}
"""
RINGS: tuple[dict[str, int], ...] = ({}, {"RING": 16}, {"RING": 15, "NORM_RING": 17})
OUTPUTS, INPUTS, GRID = 83, 1312, 3  # 41 chunks of 32: not all warps have as many; several tiles a block, the last cut


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("on_host")


class Product:
    """Operands of x [rows, INPUTS] weight [OUTPUTS, INPUTS]^T + residual."""

    def __init__(self, folder: Path, rows: int) -> None:
        with patch.dict(sys.modules, {"cupy": MagicMock()}):
            self.module = importlib.import_module("blink_core.ops.cuda_gemm")
        rng = np.random.default_rng(rows)
        self.folder, self.rows = folder, rows
        self.x, self.weight = (rounded(rng.standard_normal((n, INPUTS))) for n in (rows, OUTPUTS))
        self.residual = rounded(rng.standard_normal((rows, OUTPUTS)))
        self.norm = rounded(rng.uniform(0.5, 2, INPUTS))

    def run(self, file: str, tail: str, kernel: int, macros: dict[str, int], *, normed: bool = False) -> U16:
        """The product, its x and residual poison until a block has waited for the kernel before."""
        out = np.full((self.rows, OUTPUTS), 0xFFFF, np.uint16)
        x, residual = self.x.copy(), self.residual.copy()
        params: Any = self.module.MatmulParams(
            *(address(a) for a in (self.weight, x, out)), None, address(residual), self.rows, OUTPUTS, INPUTS, 0
        )
        if file == "gemm_skinny.cu":
            params = self.module.SkinnyParams(params, address(self.norm) if normed else None, 1e-6, None)
        library = build(self.folder, file, tail, **macros)
        set_late(library, [(x, self.x), (residual, self.residual)])
        library.run(GRID, kernel, ctypes.byref(params))
        return out

    def expected(self, *, normed: bool = False) -> npt.NDArray[np.float64]:
        """The same in float64."""
        x = widened(self.x).astype(np.float64)
        if normed:
            x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6) * widened(self.norm)
        return x @ widened(self.weight).astype(np.float64).T + widened(self.residual)


@pytest.mark.parametrize(("kernel", "rows"), [(0, 1), (0, 8), (1, 13), (2, 32)])
def test_rings_leave_the_bits(folder: Path, kernel: int, rows: int) -> None:
    """Catches: a ring whose chunks are taken out of order, or before they have landed; an order of additions that
    depends on it, so that a row had other bits in batch-invariant mode than alone."""
    product = Product(folder, rows)
    fixed = product.run("gemm_fixed.cu", FIXED, 0, {})
    expected = product.expected()
    assert np.linalg.norm(widened(fixed) - expected) <= 2.5e-3 * np.linalg.norm(expected)
    for ring in RINGS:
        assert np.array_equal(product.run("gemm_skinny.cu", SKINNY, kernel, ring), fixed), ring


def test_rings_leave_the_bits_behind_a_norm(folder: Path) -> None:
    """Catches: the same where the product norms its input, whose rows lie behind the ring."""
    product = Product(folder, 3)
    expected, first = product.expected(normed=True), None
    for ring in RINGS:
        got = product.run("gemm_skinny.cu", SKINNY, 3, ring, normed=True)
        assert np.linalg.norm(widened(got) - expected) <= 5e-3 * np.linalg.norm(expected)
        first = got if first is None else first
        assert np.array_equal(got, first), ring
