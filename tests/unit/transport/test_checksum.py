"""Checksum of slots and prompts: the C++ function against plain integers, and what it tells apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blink_core.abi.dtypes import SLOT
from blink_core.transport.checksum import seal_slot, words_checksum
from verification.scheduler.front_end import reference_checksum

WORDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(WORDS)
def test_equals_the_reference(words: list[int]) -> None:
    """Catches: the native checksum drifting from its definition."""
    assert words_checksum(np.array(words, "<u4")) == reference_checksum(words)


def test_known_answers() -> None:
    """Catches: both implementations changed together."""
    assert words_checksum(np.zeros(0, np.uint32)) == 0
    assert words_checksum(np.array([0], np.uint32)) == 0xE220A8397B1DCDAF  # splitmix64's first output for seed 0
    assert words_checksum(np.array([0, 0], np.uint32)) == (0xE220A8397B1DCDAF + 0x6E789E6AA1B965F4) % 2**64


@given(WORDS.filter(bool), st.data())
def test_tells_changes_apart(words: list[int], data: st.DataObject) -> None:
    """Catches: a checksum blind to one word, to two words swapped, or to a prompt cut short."""
    whole = words_checksum(np.array(words, "<u4"))
    at = data.draw(st.integers(0, len(words) - 1))
    bit = data.draw(st.integers(0, 31))
    changed = list(words)
    changed[at] ^= 1 << bit
    assert words_checksum(np.array(changed, "<u4")) != whole
    other = data.draw(st.integers(0, len(words) - 1))
    swapped = list(words)
    swapped[at], swapped[other] = swapped[other], swapped[at]
    assert (words_checksum(np.array(swapped, "<u4")) == whole) == (words[at] == words[other])
    assert words_checksum(np.array(words[:-1], "<u4")) != whole


def test_takes_any_array_of_whole_words() -> None:
    """Catches: a strided or signed array read as other bytes than its own."""
    tokens = np.arange(20, dtype="<i4")
    assert words_checksum(tokens[::2]) == words_checksum(tokens[::2].copy())
    assert words_checksum(np.array([-1], "<i4")) == words_checksum(np.array([2**32 - 1], "<u4"))
    with pytest.raises(ValueError, match="3 bytes are not whole 32-bit words"):
        words_checksum(np.zeros(3, np.uint8))


def test_seal_takes_one_slot() -> None:
    """Catches: sealing a table of slots, or an array of another record, without a word."""
    slot = np.zeros(1, SLOT)
    slot["checksum"] = 99
    seal_slot(slot)
    once = int(slot["checksum"][0])
    seal_slot(slot)
    assert int(slot["checksum"][0]) == once != 99
    for wrong in (np.zeros(2, SLOT), np.zeros(1, np.uint32)):
        with pytest.raises(ValueError, match="expected one Slot"):
            seal_slot(wrong)
