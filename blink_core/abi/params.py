"""Sampling parameters of one request, as a front end hands them to the ring client."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Limits and randomness of one request. The scheduler validates them again from the slot (design section 3).

    max_tokens: at least 1. temperature: 0 means greedy. top_p: in (0, 1]. seed: 64 bits. choice: 32 bits.
    stop_token_ids: at most 8 ids.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    choice: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
