"""Sampling parameters of one request, as a front end hands them to the ring client."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Limits, randomness and class of one request. The scheduler validates them again from the slot (design section 3).

    They are applied in this order (design section 7): logit_bias, min_tokens, repetition_penalty, presence and
    frequency penalties, temperature, top_k, top_p, min_p.
    max_tokens: at least 1. temperature: 0 means greedy. top_p: in (0, 1]. seed: 64 bits. choice: 32 bits, apart for
    each of n choices. stop_token_ids: at most 8 ids. top_k: 0 keeps all. min_p: in [0, 1]. repetition_penalty: above 0.
    logit_bias: (token id, bias) pairs with different ids, at most Config.max_bias. min_tokens: at most max_tokens.
    logprobs: alternatives reported with each token, at most Config.max_logprobs. priority: class below
    definition.PRIORITIES, 0 is served first. deadline_us: microseconds from acceptance, 0 for none. prefix_cache: False
    neither reads it nor adds to it. mask_box: mailbox from which each token's grammar mask is taken, None for none.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    choice: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int = 0
    priority: int = 0
    deadline_us: int = 0
    prefix_cache: bool = True
    mask_box: int | None = None
