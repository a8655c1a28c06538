"""Philox4x32-10 against the published known-answer vectors of Random123."""

from __future__ import annotations

import numpy as np
import pytest

from blink_core.ops.philox import philox4x32

KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    """Catches: a wrong constant, round count, word order or key schedule."""
    k0, k1 = words(key)
    assert philox4x32(np.array(words(counter), np.uint32), (k0, k1)).tolist() == words(expected)


def test_vectorised_is_elementwise() -> None:
    """Catches: words of one counter leaking into another when many are computed at once."""
    counters = np.random.default_rng(0).integers(0, 1 << 32, (5, 7, 4), dtype=np.uint32)
    together = philox4x32(counters, (3, 4))
    for index in np.ndindex(5, 7):
        assert together[index].tolist() == philox4x32(counters[index], (3, 4)).tolist()


@pytest.mark.parametrize("counter", [np.zeros(4, np.int64), np.zeros(3, np.uint32)])
def test_bad_counter(counter: np.ndarray) -> None:
    """Catches: a counter that would wrap or broadcast silently."""
    with pytest.raises(ValueError, match="counter must be uint32"):
        philox4x32(counter, (0, 0))


@pytest.mark.parametrize("key", [(1 << 32, 0), (0, -1)])
def test_bad_key(key: tuple[int, int]) -> None:
    """Catches: a 64-bit seed passed as one word."""
    with pytest.raises(ValueError, match="key words"):
        philox4x32(np.zeros(4, np.uint32), key)
