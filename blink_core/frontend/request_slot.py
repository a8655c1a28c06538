"""Sampling parameters as a request descriptor and its logit-bias records (design section 3)."""

from __future__ import annotations

import numpy as np

from blink_core.abi.dtypes import BIAS_PAIR, SLOT, Array
from blink_core.abi.enums import SlotFlag
from blink_core.abi.params import SamplingParams

# Bits of each unsigned field.
_WIDTHS = {
    "max_tokens": 32,
    "seed": 64,
    "choice": 32,
    "top_k": 32,
    "min_tokens": 32,
    "logprobs": 32,
    "priority": 32,
    "deadline_us": 64,
}
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def describe(params: SamplingParams) -> tuple[Array, Array]:
    """(a one-element `Slot` array with everything that `params` says but the mailbox, its `BiasPair` array).

    Raises ValueError for a value that its field cannot hold, and for two biases of one id, which name no one value.
    """
    slot = np.zeros(1, SLOT)
    for name, width in _WIDTHS.items():
        value = getattr(params, name)
        if not 0 <= value < 1 << width:
            raise ValueError(f"{name} is {value}, must be from 0 to {(1 << width) - 1}")
        slot[name] = value
    with np.errstate(over="ignore"):  # beyond float32 it is infinite, which the engine refuses
        for name in _FLOATS:
            slot[name] = getattr(params, name)
    slot["flags"] = (SlotFlag.IGNORE_EOS if params.ignore_eos else 0) | (
        0 if params.prefix_cache else SlotFlag.NO_PREFIX_CACHE
    )
    stops = params.stop_token_ids
    room = slot["stop_ids"].shape[1]
    if len(stops) > room:
        raise ValueError(f"{len(stops)} stop token ids, at most {room}")
    ids = [token for token, _ in params.logit_bias]
    for what, given in (("stop", stops), ("logit-bias", ids)):
        for token in given:
            if not -(2**31) <= token < 2**31:
                raise ValueError(f"{what} token id {token} is beyond 32 bits")
    if len(set(ids)) < len(ids):
        twice = next(token for at, token in enumerate(ids) if token in ids[:at])
        raise ValueError(f"logit bias names token id {twice} twice")
    slot["n_stop"], slot["n_bias"] = len(stops), len(ids)
    slot["stop_ids"][0, : len(stops)] = stops
    bias = np.zeros(len(ids), BIAS_PAIR)
    with np.errstate(over="ignore"):
        bias["token"], bias["bias"] = ids, [value for _, value in params.logit_bias]
    return slot, bias
