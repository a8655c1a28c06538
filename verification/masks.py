"""Grammar masks of a drawn program: a fixed function of its seed and the output position, so that programs replay."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def allowed_ids(seed: int, index: int, vocab: int) -> NDArray[np.bool_]:
    """Ids that the mask of the token at output position `index` allows: bool [vocab], about half, at least one."""
    rng = np.random.default_rng([seed, index])
    allowed = rng.random(vocab) < 0.5
    allowed[rng.integers(vocab)] = True
    return allowed


def mask_words(allowed: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """The bits of a mask, uint32 [ceil(vocab / 32)]: bit i % 32 of word i // 32 allows id i."""
    padded = np.zeros(-(-len(allowed) // 32) * 32, np.bool_)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view("<u4")
