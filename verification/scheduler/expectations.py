"""What a published descriptor deserves by itself, spelt out from the field table (design section 3)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from blink_core.abi.config import EngineConfig
from blink_core.abi.dtypes import Array
from blink_core.abi.enums import ErrorReason, SlotFlag
from verification.scheduler.front_end import record_of, reference_checksum


def _fits_arena(config: EngineConfig, slot: Any) -> bool:
    words = int(slot["prompt_len"]) + 2 * int(slot["n_bias"])
    return int(slot["prompt_offset"]) + words <= config.arena_tokens


def _params(config: EngineConfig, slot: Any) -> bool:
    """Every sampling parameter inside its limits."""
    temperature, repetition = float(slot["temperature"]), float(slot["repetition_penalty"])
    events = 1 + -(-int(slot["logprobs"]) // 2)
    flags = int(slot["flags"])
    box = int(slot["mask_box"])
    return all(
        (
            math.isfinite(temperature) and temperature >= 0,
            0 < float(slot["top_p"]) <= 1,
            0 <= float(slot["min_p"]) <= 1,
            math.isfinite(repetition) and repetition > 0,
            math.isfinite(float(slot["presence_penalty"])),
            math.isfinite(float(slot["frequency_penalty"])),
            int(slot["min_tokens"]) <= int(slot["max_tokens"]),
            int(slot["priority"]) < 4,
            int(slot["logprobs"]) <= config.max_logprobs,
            events + config.slots <= config.cq_entries,
            flags < 8,
            box < config.masks if flags & SlotFlag.MASKED else box == 0,
            int(slot["n_stop"]) <= 8,
        )
    )


def deserved(config: EngineConfig, slot: Any, generation: int, arena: Array) -> ErrorReason | None:
    """None if the descriptor (a Slot scalar) and its payload may run, else why they must be refused.

    generation: the submission entry's. The order of the checks is the engine's: a torn descriptor says nothing else.
    """
    copy = record_of(slot)
    copy["checksum"] = 0
    if reference_checksum(np.frombuffer(copy.tobytes(), "<u4").tolist()) != int(slot["checksum"]):
        return ErrorReason.CHECKSUM
    if int(slot["generation"]) != generation:
        return ErrorReason.BAD_GENERATION
    length, most = int(slot["prompt_len"]), int(slot["max_tokens"])
    if not 1 <= length < config.max_len or not 1 <= most <= config.max_len:
        return ErrorReason.BAD_LENGTH
    start = int(slot["prompt_offset"])
    if start + length > config.arena_tokens:
        return ErrorReason.BAD_EXTENT
    if int(slot["n_bias"]) > config.max_bias:
        return ErrorReason.BAD_PARAM
    if not _fits_arena(config, slot):
        return ErrorReason.BAD_EXTENT
    if not _params(config, slot):
        return ErrorReason.BAD_PARAM
    if not all(0 <= token < config.vocab for token in slot["stop_ids"][: int(slot["n_stop"])].tolist()):
        return ErrorReason.BAD_TOKEN
    computed = min(length + most, config.max_len) - 1  # the last token's KV is never needed
    if -(-computed // config.page_size) > config.pages - 2:
        return ErrorReason.NEVER_FITS
    payload = arena[start : start + length + 2 * int(slot["n_bias"])]
    if reference_checksum(payload.view("<u4").tolist()) != int(slot["prompt_checksum"]):
        return ErrorReason.CHECKSUM
    ids = payload[:length].tolist() + payload[length::2].tolist()
    if not all(0 <= token < config.vocab for token in ids):
        return ErrorReason.BAD_TOKEN
    return None if np.isfinite(payload[length + 1 :: 2].view("<f4")).all() else ErrorReason.BAD_PARAM
