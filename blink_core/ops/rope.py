"""Rotary frequencies of every kind of RoPE scaling, and tables of their cosines and sines (design section 7).

Each kind rounds to float32 where HuggingFace's modelling code does, so that the angles are the same but for rare last
bits. Sources: linear scaling (kaiokendev), llama3 (Llama 3.1's reference code), YaRN (arXiv 2309.00071), LongRoPE
(arXiv 2402.13753).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


def _powers(rope_theta: float, dim: int) -> F32:
    """``theta ** (2i / dim)``, float32 [dim/2].

    Exponent and power are each rounded to float32. The power is taken in float64 and rounded, which matches torch's in
    all but rare last bits; NumPy's own float32 power does not.
    """
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(np.float64(rope_theta), exponent.astype(np.float64)).astype(np.float32)


def inverse_frequencies(rope_theta: float, dim: int) -> F32:
    """Rotary frequencies of each pair, float32 [dim/2]: ``1 / theta ** (2i / dim)``. ``dim``: rotated elements."""
    return np.float32(1) / _powers(rope_theta, dim)


def factored_frequencies(rope_theta: float, dim: int, factors: F32) -> F32:
    """Frequencies divided by a factor each (LongRoPE, GGUF's tables): ``factors`` and the result float32 [dim/2]."""
    return np.float32(1) / (factors.astype(np.float32) * _powers(rope_theta, dim))


def llama3_frequencies(frequencies: F32, factor: float, low: float, high: float, original: int) -> F32:
    """Llama 3.1: long waves are divided by ``factor``, short ones kept, those between blended; float32 [dim/2].

    ``low``, ``high``: turns within ``original`` positions below which a wave counts as long, above which as short.
    """
    wavelength = np.float32(2 * math.pi) / frequencies
    scaled = np.where(wavelength > original / low, frequencies / np.float32(factor), frequencies)
    smooth = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - smooth) * scaled / np.float32(factor) + smooth * scaled
    between = ~(wavelength < original / high) & ~(wavelength > original / low)
    return np.where(between, blended, scaled).astype(np.float32)


def yarn_frequencies(
    rope_theta: float, dim: int, factor: float, original: int, fast: float, slow: float, *, truncate: bool = True
) -> F32:
    """YaRN: pairs that turn more than ``fast`` times within ``original`` positions are kept, those that turn less than
    ``slow`` times divided by ``factor``, a linear ramp between; float32 [dim/2]."""

    def pair(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope_theta))

    first, last = pair(fast), pair(slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # as in HuggingFace: a step instead of a division by zero
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(last - first)
    kept = np.float32(1) - np.clip(ramp, 0, 1)
    powers = _powers(rope_theta, dim)
    out: F32 = np.float32(1) / (np.float32(factor) * powers) * (np.float32(1) - kept) + np.float32(1) / powers * kept
    return out


class RotaryTable:
    """Cosines and sines by position, computed once for each position, CHUNK positions at a time as they are needed."""

    CHUNK = 1024

    def __init__(self, frequencies: F32, scale: float = 1.0) -> None:
        """``frequencies`` float32 [dim/2]; ``scale`` multiplies cosines and sines (YaRN's and LongRoPE's factor)."""
        self._frequencies = frequencies
        self._scale = np.float32(scale)
        self._cos = np.empty((0, frequencies.size), dtype=np.float32)
        self._sin = np.empty((0, frequencies.size), dtype=np.float32)

    def __call__(self, positions: I32) -> tuple[F32, F32]:
        """``(cos, sin)`` of int32 positions [T], each float32 [T, 1, dim/2].

        The angle is rounded to float32 as in HuggingFace; its cosine and sine are correct to the last bit, and then
        scaled in float32.
        """
        needed = int(positions.max(initial=0)) + 1
        while self._cos.shape[0] < needed:
            start = self._cos.shape[0]
            at = np.arange(start, start + self.CHUNK, dtype=np.float32)
            angles = (at[:, None] * self._frequencies).astype(np.float64)
            self._cos = np.concatenate((self._cos, np.cos(angles).astype(np.float32) * self._scale))
            self._sin = np.concatenate((self._sin, np.sin(angles).astype(np.float32) * self._scale))
        return self._cos[positions][:, None, :], self._sin[positions][:, None, :]
