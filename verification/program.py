"""A whole test program, drawn before anything runs: requests, arrivals and cancels (design section 9).

Nothing here depends on time or on what a rig did, so a program replays from its JSON.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from blink_core.abi.params import SamplingParams
from verification.sampling_draw import draw_sampling

FAR_DEADLINE_US = 3_600_000_000  # an hour: it is kept in view all the time, and passes in no run


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request. `after`: submitted once so many TOKEN and terminal events were seen in all, or once nothing else is
    outstanding.

    `cancel_after`: cancelled once so many of its own tokens were seen (0: right after its submission). `mask_seed`:
    each of its tokens has a grammar mask drawn from it (`verification.masks`); None: no masks.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    after: int = 0
    cancel_after: int | None = None
    mask_seed: int | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """Requests in the order of submission on one ring."""

    requests: tuple[RequestSpec, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Program:
        def params(raw: dict[str, Any]) -> SamplingParams:
            # JSON has lists where parameters have tuples.
            bias = tuple((token, value) for token, value in raw.get("logit_bias", ()))
            return SamplingParams(**(raw | {"stop_token_ids": tuple(raw["stop_token_ids"]), "logit_bias": bias}))

        return cls(
            tuple(
                RequestSpec(tuple(r["prompt"]), params(r["params"]), r["after"], r["cancel_after"], r.get("mask_seed"))
                for r in data["requests"]
            )
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """What programs are drawn for. All lengths are tokens; `page_size` is where they are biased to.

    requests: fewest and most. longest: of prompt and output together. cancels, sampled: share of requests that are
    cancelled, and that have a temperature above 0. masks: mask mailboxes of the ring; without one no request is masked.
    """

    vocab: int
    page_size: int
    longest: int
    requests: tuple[int, int] = (3, 10)
    most_new: int = 24
    cancels: float = 0.2
    sampled: float = 0.25
    ignore_eos: bool = True
    masks: int = 0


def _length(rng: random.Random, shape: Shape, most: int) -> int:
    """A length biased to page boundaries, where off-by-one faults live."""
    most = max(1, most)
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randint(1, min(3, most))
    if kind == 1:
        return rng.randint(1, most)
    pages = rng.randint(1, max(1, most // shape.page_size))
    return min(most, max(1, pages * shape.page_size + rng.choice((-1, 0, 1))))


def _continuation(rng: random.Random, shape: Shape, other: tuple[int, ...], own: tuple[int, ...]) -> tuple[int, ...]:
    """A prompt that begins like another one: for whole pages, give or take a token, or for any length."""
    pages = len(other) // shape.page_size
    if pages and rng.random() < 0.75:
        shared = rng.randint(1, pages) * shape.page_size + rng.choice((-1, 0, 1))
    else:
        shared = rng.randint(1, len(other))
    return other[:shared] + own


def draw_program(rng: random.Random, shape: Shape, texts: Sequence[Sequence[int]] = ()) -> Program:
    """Draws a program. texts: token ids of real prompts, mixed with random ids.

    Some prompts share a beginning; half of those come when whatever was before has ended, so that the prefix cache
    alone can have it.
    """
    count = rng.randint(*shape.requests)
    requests: list[RequestSpec] = []
    for index in range(count):
        new = min(_length(rng, shape, shape.most_new), shape.longest - 1)
        room = shape.longest - new
        if texts and rng.random() < 0.5:
            prompt = tuple(texts[rng.randrange(len(texts))])[:room]
        else:
            prompt = tuple(rng.randrange(shape.vocab) for _ in range(_length(rng, shape, room)))
        after = rng.randint(0, 3 * index) if index and rng.random() < 0.5 else 0
        if requests and rng.random() < 0.35:
            other = requests[rng.randrange(index)].prompt
            prompt = _continuation(rng, shape, other, prompt)[:room]
            if rng.random() < 0.5:
                after = sum(r.params.max_tokens + 1 for r in requests)  # or once nothing else is outstanding
        hot = rng.random() < shape.sampled
        params = SamplingParams(
            max_tokens=new,
            seed=rng.getrandbits(64),
            ignore_eos=shape.ignore_eos,
            priority=rng.choice((0, 1, 2, 3)) if rng.random() < 0.3 else 0,
            prefix_cache=rng.random() >= 0.1,
            deadline_us=FAR_DEADLINE_US if rng.random() < 0.1 else 0,
            **draw_sampling(rng, shape.vocab, new, hot=hot),
        )
        cancel = rng.randint(0, new) if rng.random() < shape.cancels else None
        mask = rng.getrandbits(32) if shape.masks and rng.random() < 0.15 else None
        requests.append(RequestSpec(prompt, params, after, cancel, mask))
    if all(r.cancel_after is not None for r in requests):  # a program of which nothing need finish decides nothing
        requests[-1] = replace(requests[-1], cancel_after=None)
    return Program(tuple(requests))
