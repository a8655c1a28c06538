"""Draws sampling parameters for test programs: every parameter, alone and together, biased to its edges."""

from __future__ import annotations

import random
from typing import Any

from blink_core.abi.definition import MAX_LOGPROBS

MOST_BIASED = 8


def draw_sampling(rng: random.Random, vocab: int, max_tokens: int, *, hot: bool) -> dict[str, Any]:
    """Fields of `SamplingParams` beyond lengths and seed. hot: with a temperature above 0.

    Half of the hot requests and a fifth of the greedy ones use the parameters that change logits or candidates; the
    rest is plain, so that the greedy criterion, which judges raw argmaxima, keeps its rows.
    """
    fields: dict[str, Any] = {}
    if hot:
        fields |= {"temperature": rng.choice((0.5, 1.0, 1.5)), "top_p": rng.choice((0.3, 0.6, 0.9, 1.0))}
        fields["choice"] = rng.choice((0, 0, 1, 2**32 - 1))
    if rng.random() < 0.25:
        fields["logprobs"] = min(vocab, rng.choice((1, 2, 5, MAX_LOGPROBS)))
    if rng.random() >= (0.5 if hot else 0.2):
        return fields
    some: dict[str, Any] = {
        "repetition_penalty": rng.choice((0.8, 1.1, 2.0)),
        "presence_penalty": rng.choice((-2.0, 0.5, 2.0)),
        "frequency_penalty": rng.choice((-2.0, 0.3, 2.0)),
        "logit_bias": tuple(
            (token, rng.choice((-100.0, -1.5, 2.0, 100.0)))
            for token in rng.sample(range(vocab), min(vocab - 1, rng.randint(1, MOST_BIASED)))
        ),
        "min_tokens": rng.choice((1, max_tokens)),
        "stop_token_ids": tuple(rng.sample(range(vocab), min(vocab - 1, rng.randint(1, 3)))),
    }
    if hot:
        some |= {"top_k": rng.choice((1, 2, 20, vocab - 1, vocab, 2**32 - 1)), "min_p": rng.choice((0.02, 0.3, 1.0))}
    return fields | {name: value for name, value in some.items() if rng.random() < 0.4}
