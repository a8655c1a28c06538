"""Shadow tags of KV rows: what the KV sanitizer writes beside each row of keys or values, and expects where it is read.

One tag a row (page slot), of each layer, keys and values apart: a row is written and read by layer and kind, so that a
tag of its own is what shows an append that one layer lost, or values that went elsewhere than their keys. It costs 32
bytes beside a row of ``kv_heads * head_dim`` elements. Layout, the same on host and GPU
(`blink_core/device/kernels/kv_sanitizer.cu`), four little-endian 64-bit words:

    0  prefix   hash of all tokens up to and including this one (below)
    1  place    position | token id << 32
    2  owner    request index + 1 | generation << 32; 0: never written
    3  written  low 32 bits of the step | 1 << 32 if the request uses the prefix cache

``prefix`` of position p is the sum over i <= p of ``mix(token i, i)``, modulo 2^64: the checksum of
`blink_core/device/checksum.hpp` over the first p + 1 tokens. As K and V of a row are a function of exactly these
tokens, two rows of equal prefix and place hold the same content (LongRoPE's second table aside); and as it is a sum, a
group computes it by a scan.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

TAG_WORDS = 4
TAG_BYTES = 8 * TAG_WORDS
PREFIX, PLACE, OWNER, WRITTEN = range(TAG_WORDS)
CACHE_BIT = 1 << 32  # of WRITTEN

_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_STEP, _FIRST, _SECOND = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_SHIFTS = tuple(np.uint64(x) for x in (30, 27, 31))


def mix(tokens: npt.NDArray[Any], positions: npt.NDArray[Any]) -> U64:
    """`mix_word` of checksum.hpp for int32 tokens [n] at positions [n] -> uint64 [n]."""
    z: U64 = tokens.astype(np.int32).view(np.uint32).astype(np.uint64)
    z += (positions.astype(np.uint64) + np.uint64(1)) * _STEP
    z = (z ^ (z >> _SHIFTS[0])) * _FIRST
    z = (z ^ (z >> _SHIFTS[1])) * _SECOND
    return z ^ (z >> _SHIFTS[2])


def prefixes(tokens: npt.NDArray[Any], positions: npt.NDArray[Any], before: int = 0) -> U64:
    """The prefix word of each of some successive tokens, uint64 [n]; ``before``: that of the token ahead of them."""
    out: U64 = np.cumsum(mix(tokens, positions), dtype=np.uint64)
    out += np.uint64(before)
    return out


def places(tokens: npt.NDArray[Any], positions: npt.NDArray[Any]) -> U64:
    """The place word of each token, uint64 [n]."""
    out: U64 = tokens.astype(np.int32).view(np.uint32).astype(np.uint64) << _HALF
    out |= positions.astype(np.uint64) & _LOW
    return out


def owner_word(request: int, generation: int) -> int:
    """The owner word of a request."""
    return (request + 1) | generation << 32


def written_word(step: int, cached: bool) -> int:
    """The written word of a request's rows in a step; ``cached``: it uses the prefix cache."""
    return (step & 0xFFFFFFFF) | (CACHE_BIT if cached else 0)
