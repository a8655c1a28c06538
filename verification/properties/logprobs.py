"""LOGPROBS events of a history: the alternatives of the token that follows (design section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from blink_core.abi.definition import LOGPROBS_PER_EVENT
from verification.thresholds import default_thresholds

Pair = tuple[int, float]


def pairs_of(event: dict[str, Any]) -> list[Pair]:
    """(token, natural log) of one LOGPROBS event of a `History`."""
    return list(zip(event["tokens"], event["logprobs"], strict=True))[: event["count"]]


def check_alternatives(events: Sequence[Sequence[Pair]], token: dict[str, Any], asked: int) -> str | None:
    """What is wrong with the LOGPROBS events before a TOKEN event that should hold `asked` pairs; None if right."""
    tolerance = default_thresholds().sampling.repeated_tolerance
    pairs = [pair for event in events for pair in event]
    if len(pairs) != asked or len(events) != -(-asked // LOGPROBS_PER_EVENT):
        return f"token {token['index']} has {len(pairs)} alternatives in {len(events)} events, {asked} were asked for"
    if any(len(event) != LOGPROBS_PER_EVENT for event in events[:-1]):
        return f"alternatives of token {token['index']} are spread over more events than they need"
    ids = [one for one, _ in pairs]
    if len(set(ids)) != len(ids) or any(one < 0 for one in ids):
        return f"alternatives of token {token['index']} are not different ids: {ids}"
    values = [value for _, value in pairs]
    if not all(value <= tolerance for value in values):  # false for NaN
        return f"alternatives of token {token['index']} have log probabilities {values}"
    if any(after > before for before, after in pairwise(values)):
        return f"alternatives of token {token['index']} are not in order: {values}"
    mine = dict(pairs).get(token["token"])
    if mine is not None and abs(mine - token["logprob"]) > tolerance * max(1.0, abs(mine)):
        return f"token {token['index']} has log probability {token['logprob']}, among its alternatives {mine}"
    if mine is None and pairs and token["logprob"] > values[-1] + tolerance:
        return f"token {token['index']} is more probable than the last of its alternatives, and not among them"
    return None
