"""Checksum of slots and prompts: the front end's side of `device/checksum.hpp`."""

from __future__ import annotations

import numpy as np

from blink_core import _native
from blink_core.abi.dtypes import SLOT, Array


def words_checksum(words: Array) -> int:
    """64-bit checksum of an array, taken as little-endian 32-bit words. Raises ValueError if it is not whole words."""
    flat = np.ascontiguousarray(words).view(np.uint8).reshape(-1)
    if flat.size % 4:
        raise ValueError(f"{flat.size} bytes are not whole 32-bit words")
    return int(_native.checksum(flat.view(np.uint32)))


def seal_slot(slot: Array) -> None:
    """Writes the checksum of a one-element `Slot` array into it."""
    if slot.dtype != SLOT or slot.shape != (1,):
        raise ValueError(f"expected one Slot, got {slot.dtype} {slot.shape}")
    slot["checksum"] = 0
    slot["checksum"] = words_checksum(slot)
