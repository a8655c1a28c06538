"""What a published descriptor deserves by itself, spelt out from the field table (design section 3)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from blink_core.abi.config import EngineConfig
from blink_core.abi.dtypes import Array
from blink_core.abi.enums import ErrorReason
from tests.unit.device.front_end import reference_checksum


def deserved(config: EngineConfig, slot: Any, generation: int, arena: Array) -> ErrorReason | None:
    """None if the descriptor (a Slot scalar) and its prompt may run, else why they must be refused.

    generation: the submission entry's. The order of the checks is the engine's: a torn descriptor says nothing else.
    """
    copy = np.array([slot])
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
    temperature, top_p = float(slot["temperature"]), float(slot["top_p"])
    if not (math.isfinite(temperature) and temperature >= 0 and 0 < top_p <= 1):
        return ErrorReason.BAD_PARAM
    if int(slot["flags"]) & ~1 or slot["priority"] or slot["deadline_us"] or int(slot["n_stop"]) > 8:
        return ErrorReason.BAD_PARAM
    if not all(0 <= token < config.vocab for token in slot["stop_ids"][: int(slot["n_stop"])].tolist()):
        return ErrorReason.BAD_TOKEN
    computed = min(length + most, config.max_len) - 1  # the last token's KV is never needed
    if -(-computed // config.page_size) > config.pages - 2:
        return ErrorReason.NEVER_FITS
    prompt = arena[start : start + length]
    if reference_checksum(prompt.view("<u4").tolist()) != int(slot["prompt_checksum"]):
        return ErrorReason.CHECKSUM
    return None if all(0 <= token < config.vocab for token in prompt.tolist()) else ErrorReason.BAD_TOKEN
