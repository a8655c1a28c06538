"""Products of a few rows, cut into strips of the weight."""

from __future__ import annotations

import numpy as np
import pytest

from blink_core.ops import gemm
from blink_core.ops.gemm import LinearWeight, multiply


@pytest.mark.parametrize("rows", range(1, 11))
@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (7, 33), (576, 960), (1536, 577), (70_000, 20)])
@pytest.mark.parametrize("bias", [False, True])
def test_strips_cover_the_weight(
    rows: int, inner: int, outer: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: columns left out or computed twice where strips meet, a last strip that is cut short, a bias lost."""
    monkeypatch.setattr(gemm, "multiplies_in_place", lambda: True)
    rng = np.random.default_rng(rows)
    x, kn = rng.standard_normal((rows, inner), np.float32), rng.standard_normal((inner, outer), np.float32)
    added = rng.standard_normal(outer, np.float32) if bias else None
    expected = x.astype(np.float64) @ kn + (0 if added is None else added)
    found = multiply(x, LinearWeight(kn, bias=added))
    assert np.abs(found - expected).max() <= 1e-6 * inner**0.5 * 16
