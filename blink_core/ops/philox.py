"""Philox4x32-10, the counter-based random number generator of sampling.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A pure function of counter
and key, so a token's number depends on neither batch, slot, nor what was drawn before.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ROUNDS = 10
MULTIPLIER_0 = np.uint64(0xD2511F53)
MULTIPLIER_1 = np.uint64(0xCD9E8D57)
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
LOW = np.uint64(0xFFFFFFFF)
HIGH = np.uint64(32)

U32 = npt.NDArray[np.uint32]


def philox4x32(counter: U32, key: tuple[int, int]) -> U32:
    """Random words for each counter: uint32 [..., 4] -> uint32 [..., 4], under one key of two 32-bit words."""
    if counter.dtype != np.uint32 or counter.shape[-1:] != (4,):
        raise ValueError(f"counter must be uint32 [..., 4], got {counter.dtype} {list(counter.shape)}")
    k0, k1 = key
    if not (0 <= k0 < 1 << 32 and 0 <= k1 < 1 << 32):
        raise ValueError(f"key words must be 32 bit, got {key}")
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    for _ in range(ROUNDS):
        product_0 = c0 * MULTIPLIER_0
        product_1 = c2 * MULTIPLIER_1
        c0 = (product_1 >> HIGH) ^ c1 ^ np.uint64(k0)
        c2 = (product_0 >> HIGH) ^ c3 ^ np.uint64(k1)
        c1 = product_1 & LOW
        c3 = product_0 & LOW
        k0 = (k0 + WEYL_0) & 0xFFFFFFFF
        k1 = (k1 + WEYL_1) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3), axis=-1).astype(np.uint32)
