"""What a front end submitted, as the engine read it: a descriptor, and its payload if that is to be kept.

Without the payload the content is left out: prompt, logit bias and stop ids. The specification then sees unknown
tokens in their place (`Unknown`), of which only what the log tells is ever known.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import numpy as np

from blink_core import _native
from blink_core.abi.config import EngineConfig
from blink_core.abi.dtypes import SLOT, Array
from verification.spec.state import Descriptor

_HEAD = struct.Struct("<QIII")  # log index, flags, words of payload, SQ index
RECORD_BYTES = _HEAD.size + SLOT.itemsize
INTACT, PAYLOAD_INTACT, PAYLOAD, EXACT = 1, 2, 4, 8
_SAME = (
    "generation prompt_len prompt_offset max_tokens seed choice flags n_stop priority deadline_us tag top_k min_tokens "
    "n_bias logprobs mask_box temperature top_p min_p repetition_penalty presence_penalty frequency_penalty"
).split()
UNKNOWN_BASE = 1 << 40


class Unknown(int):
    """A token id that was not recorded: equal to itself only, and inside every vocabulary."""

    def __ge__(self, other: int) -> bool:
        return True

    def __lt__(self, other: int) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Submission:
    """slot: Slot[1] bytes as they lay, stop ids 0 without PAYLOAD. payload: uint32 words, empty without PAYLOAD.

    flags: INTACT, the descriptor's checksum held; PAYLOAD_INTACT, the payload's; PAYLOAD, it is here; EXACT, this is
    what the engine read, and not what lay there some time later.
    """

    log_index: int
    sq_index: int
    flags: int
    slot: bytes
    payload: tuple[int, ...] = ()

    def pack(self) -> bytes:
        head = _HEAD.pack(self.log_index, self.flags, len(self.payload), self.sq_index)
        return head + self.slot + struct.pack(f"<{len(self.payload)}I", *self.payload)

    @classmethod
    def unpack(cls, body: bytes) -> Submission:
        log_index, flags, count, sq_index = _HEAD.unpack_from(body)
        payload = struct.unpack_from(f"<{count}I", body, RECORD_BYTES)
        return cls(log_index, sq_index, flags, body[_HEAD.size : RECORD_BYTES], payload)

    @property
    def whole(self) -> bool:
        """Descriptor and payload are those that were signed."""
        return bool(self.flags & INTACT and self.flags & PAYLOAD_INTACT)

    def accepted(self) -> Submission:
        """What an accepted request's must have been, where the payload was read too late: whole, but not here."""
        return self if self.whole else replace(self, flags=self.flags & ~PAYLOAD | INTACT | PAYLOAD_INTACT, payload=())

    @property
    def generation(self) -> int:
        return int(np.frombuffer(self.slot, SLOT)["generation"][0])

    def descriptor(self, unknown_from: int) -> tuple[Descriptor, tuple[int, ...]]:
        """As the specification reads it, and the arena's words; tokens not here are Unknown(unknown_from...)."""
        record = np.frombuffer(self.slot, SLOT)[0]
        fields = {name: record[name].item() for name in _SAME}
        stop = tuple(record["stop_ids"].tolist())
        if self.flags & PAYLOAD:
            words = tuple(word - (1 << 32) if word >> 31 else word for word in self.payload)
        else:
            known = bool(self.flags & PAYLOAD_INTACT)  # else it is judged by its fields alone, or never seen whole
            words = tuple(Unknown(unknown_from + i) for i in range(fields["prompt_len"] * known))
            words += (Unknown(unknown_from), 0) * (fields["n_bias"] * known)
            stop = tuple(Unknown(unknown_from + (1 << 24) + i) for i in range(len(stop)))
        signed = words if self.flags & PAYLOAD_INTACT else (*words, 0)
        return Descriptor(**fields, stop_ids=stop, intact=bool(self.flags & INTACT), signed=signed), words


def capture(
    log_index: int, sq_index: int, config: EngineConfig, slot: bytes, arena: Array, *, payloads: bool, exact: bool
) -> Submission:
    """slot: bytes of one Slot; arena: uint32[arena_tokens], of its ring."""
    record = np.frombuffer(slot, SLOT)
    start, count = int(record["prompt_offset"][0]), int(record["prompt_len"][0]) + 2 * int(record["n_bias"][0])
    fits = start + count <= config.arena_tokens
    words = arena[start : start + count].copy() if fits else np.zeros(0, np.uint32)
    return capture_words(log_index, sq_index, slot, words if fits else None, payloads=payloads, exact=exact)


def capture_words(
    log_index: int, sq_index: int, slot: bytes, words: Array | None, *, payloads: bool, exact: bool
) -> Submission:
    """words: uint32 of the payload, None if the descriptor leads to none."""
    raw = bytearray(slot)  # a NumPy copy would leave reserved bytes undefined
    record = np.frombuffer(raw, SLOT)
    signed = int(record["checksum"][0])
    record["checksum"] = 0
    flags = INTACT * (int(_native.checksum(np.frombuffer(raw, np.uint32))) == signed) | EXACT * exact
    record["checksum"] = signed
    if words is not None:
        flags |= PAYLOAD_INTACT * (int(_native.checksum(words)) == int(record["prompt_checksum"][0]))
    if payloads:
        return Submission(
            log_index, sq_index, flags | PAYLOAD, bytes(raw), tuple(words.tolist() if words is not None else ())
        )
    record["stop_ids"] = 0
    return Submission(log_index, sq_index, flags, bytes(raw))
