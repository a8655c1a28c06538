"""A front end of one ring that writes raw memory by the field table alone, so that it can also misbehave.

It shares no code with `blink_core.frontend.ring_client`: words, checksum and slot rules are spelt out again here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from blink_core.abi.config import EngineConfig
from blink_core.abi.dtypes import SLOT, Array
from blink_core.abi.enums import ErrorReason, Op

MASK64 = (1 << 64) - 1
GENERATIONS = (1 << 24) - 1  # 1 .. 2^24 - 1, never 0
SEQUENCES = (1 << 24) - 1


def entry(index: int, op: int, slot: int, generation: int) -> int:
    """The submission word at `index`."""
    return (index % SEQUENCES + 1) | op << 24 | slot << 28 | generation << 40


@lru_cache(maxsize=1 << 16)
def _mix(word: int, index: int) -> int:
    z = (word + (index + 1) * 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def reference_checksum(words: Sequence[int]) -> int:
    """The checksum in plain integers: sum over words of splitmix64(word + (index + 1) * golden ratio)."""
    return sum(_mix(word, index) for index, word in enumerate(words)) & MASK64


def seal(slot: Array) -> None:
    """Writes the descriptor's checksum."""
    slot["checksum"] = 0
    slot["checksum"] = reference_checksum(np.frombuffer(slot.tobytes(), "<u4").tolist())


@dataclass
class Submission:
    """One published SUBMIT and everything heard of it."""

    ring: int
    epoch: int
    slot: int
    generation: int
    sq_index: int
    descriptor: Any  # one Slot scalar as published
    prompt: list[int]
    refusal: ErrorReason | None = None  # what the published bytes deserve by themselves
    cancelled: bool = False
    spoiled: bool = False  # a model failure was injected into one of its rows
    tokens: list[int] = field(default_factory=list)
    terminal: tuple[int, int, int] | None = None  # kind, reason, index

    @property
    def known(self) -> list[int]:
        return self.prompt + self.tokens


class FrontEnd:
    """Ring `index`: publishes into `views` (the ring's sections as arrays) and consumes events."""

    def __init__(self, index: int, config: EngineConfig, views: dict[str, Array], history: list[Submission]) -> None:
        self.index, self.config, self.views, self.history = index, config, views, history
        self.epoch = 0
        self.withhold = False
        self.forget()

    def forget(self) -> None:
        self.sq_tail = self.cq_head = 0
        self.generation = [0] * self.config.slots
        self.free: deque[int] = deque(range(self.config.slots))
        self.live: dict[tuple[int, int], Submission] = {}

    def attach(self) -> None:
        """A new epoch; nothing may be published until `acknowledged`."""
        self.views["sq"][:] = 0
        self.views["front_end"]["cq_head"] = 0
        self.epoch += 1
        self.views["front_end"]["epoch"] = self.epoch
        self.forget()

    @property
    def acknowledged(self) -> bool:
        return bool(self.views["gpu"]["epoch_ack"][0] == self.epoch)

    def sq_space(self) -> int:
        return self.config.sq_entries - (self.sq_tail - int(self.views["gpu"]["sq_head"][0]))

    def publish(self, word: int) -> None:
        self.views["sq"][self.sq_tail % self.config.sq_entries] = word
        self.sq_tail += 1

    def descriptor(self, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Array:
        """A descriptor for `prompt`; `fields` override. Generation, extent and checksums are written by `submit`."""
        slot = np.zeros(1, SLOT)
        slot["prompt_len"], slot["max_tokens"], slot["top_p"] = len(prompt), max_tokens, 1.0
        stops = fields.pop("stop_ids", ())
        slot["n_stop"], slot["stop_ids"][0, : len(stops)] = len(stops), stops
        for name, value in fields.items():
            slot[name] = value
        return slot

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        corrupt: dict[str, Any] | None = None,
        sealed: bool = True,
        refusal: ErrorReason | None = None,
        **fields: Any,
    ) -> Submission | None:
        """Publishes a request; None when the ring has no slot or entry. `corrupt` overwrites fields after the fact,
        before the checksum if `sealed`, else after it."""
        if not self.acknowledged or not self.free or self.sq_space() <= len(self.live) + 1:
            return None
        index = self.free.popleft()
        generation = self.generation[index] % GENERATIONS + 1
        self.generation[index] = generation
        slot = self.descriptor(prompt, max_tokens, **fields)
        slot["generation"] = generation
        start = index * (self.config.arena_tokens // self.config.slots)
        slot["prompt_offset"] = start
        stored = np.asarray(prompt, "<i4")[: self.config.arena_tokens // self.config.slots]
        self.views["arena"][start : start + len(stored)] = stored
        slot["prompt_checksum"] = reference_checksum(stored.view("<u4").tolist())
        if not sealed:
            seal(slot)
        for name, value in (corrupt or {}).items():
            slot[name] = value
        if sealed and "checksum" not in (corrupt or {}):
            seal(slot)
        self.views["slots"][index] = slot[0]
        made = Submission(
            self.index, self.epoch, index, generation, self.sq_tail, slot[0].copy(), list(map(int, prompt)), refusal
        )
        self.live[index, generation] = made
        self.history.append(made)
        self.publish(entry(self.sq_tail, Op.SUBMIT, index, generation))
        return made

    def cancel(self, submission: Submission) -> None:
        if self.acknowledged and self.sq_space() > 0:
            submission.cancelled = True
            self.publish(entry(self.sq_tail, Op.CANCEL, submission.slot, submission.generation))

    def consume(self) -> None:
        """Takes every published event and gives the credits back, unless they are withheld."""
        if self.withhold or not self.acknowledged:
            return
        tail = int(self.views["gpu"]["cq_tail"][0])
        size = self.config.cq_entries
        for at in range(self.cq_head, tail):
            event = self.views["cq"][at % size]
            key = int(event["slot"]), int(event["generation"])
            if event["kind"] >= 3 and self.live.pop(key, None) is not None:
                self.free.append(key[0])
        self.cq_head = tail
        self.views["front_end"]["cq_head"] = tail
