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
from blink_core.abi.dtypes import BIAS_PAIR, SLOT, Array
from blink_core.abi.enums import ErrorReason, Op, SlotFlag

MASK64 = (1 << 64) - 1
GENERATIONS = (1 << 24) - 1  # 1 .. 2^24 - 1, never 0
SEQUENCES = (1 << 24) - 1


def entry(index: int, op: int, slot: int, generation: int) -> int:
    """The submission word at `index`."""
    return (index % SEQUENCES + 1) | op << 24 | slot << 28 | generation << 40


def ready_word(slot: int, generation: int, index: int) -> int:
    """What a mask mailbox says of the bits in it: whose they are and for which output index."""
    return (index + 1) | slot << 28 | generation << 40


@lru_cache(maxsize=1 << 16)
def mix(word: int, index: int) -> int:
    """splitmix64 of word + (index + 1) * golden ratio."""
    z = (word + (index + 1) * 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def reference_checksum(words: Sequence[int]) -> int:
    """The checksum in plain integers: sum of the mixed words."""
    return sum(mix(word, index) for index, word in enumerate(words)) & MASK64


def record_of(slot: Any) -> Array:
    """One-element array of a Slot scalar; NumPy's own copy would leave the reserved bytes undefined."""
    made = np.zeros(1, SLOT)
    for name in SLOT.names or ():
        made[name] = slot[name]
    return made


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
    bias: list[tuple[int, float]] = field(default_factory=list)
    refusal: ErrorReason | None = None  # what the published bytes deserve by themselves
    cancelled: bool = False
    spoiled: bool = False  # a model failure was injected into one of its rows
    tokens: list[int] = field(default_factory=list)
    alternatives: list[tuple[int, float]] = field(default_factory=list)  # heard, their token not yet
    terminal: tuple[int, int, int] | None = None  # kind, reason, index
    accepted_at: int | None = None  # clock of the call that accepted it
    cached: int = 0  # prompt tokens found in the prefix cache, by the event log

    @property
    def known(self) -> list[int]:
        return self.prompt + self.tokens

    @property
    def masked(self) -> bool:
        return bool(int(self.descriptor["flags"]) & SlotFlag.MASKED)

    def mask(self, index: int, words: int, vocab: int) -> list[int]:
        """The grammar mask of output `index`: a function of the request, at least one id allowed."""
        key = (self.generation << 20) + (index << 8) + len(self.prompt)
        allowed = [mix(w + 1, key) & 0xFFFFFFFF for w in range(words)]
        allowed[index % vocab // 32] |= 1 << (index % vocab % 32)
        if vocab % 32:
            allowed[-1] &= (1 << vocab % 32) - 1
        return allowed


class FrontEnd:
    """Ring `index`: publishes into `views` (the ring's sections as arrays) and consumes events."""

    def __init__(self, index: int, config: EngineConfig, views: dict[str, Array], history: list[Submission]) -> None:
        self.index, self.config, self.views, self.history = index, config, views, history
        self.epoch = 0
        self.withhold = self.silent = False
        self.extent = config.arena_tokens // config.slots
        self.forget()

    def forget(self) -> None:
        self.sq_tail = self.cq_head = 0
        self.generation = [0] * self.config.slots
        self.free: deque[int] = deque(range(self.config.slots))
        self.live: dict[tuple[int, int], Submission] = {}
        self.spoilt: set[int] = set()  # mailboxes whose bits were left wrong

    def attach(self) -> None:
        """A new epoch; nothing may be published until `acknowledged`."""
        self.views["sq"][:] = 0
        self.views["mask_boxes"]["ready"] = 0
        self.views["front_end"]["cq_head"] = 0
        self.epoch += 1
        self.views["front_end"]["epoch"] = self.epoch
        self.forget()

    @property
    def acknowledged(self) -> bool:
        return bool(self.views["gpu"]["epoch_ack"][0] == self.epoch)

    def renew(self) -> None:
        """A sign of life, unless the front end is frozen."""
        if not self.silent:
            self.views["front_end"]["lease"] += 1

    def sq_space(self) -> int:
        return self.config.sq_entries - (self.sq_tail - int(self.views["gpu"]["sq_head"][0]))

    def publish(self, word: int) -> None:
        self.views["sq"][self.sq_tail % self.config.sq_entries] = word
        self.sq_tail += 1

    def descriptor(self, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Array:
        """A descriptor for `prompt`; `fields` override. Generation, extent and checksums are written by `submit`."""
        slot = np.zeros(1, SLOT)
        slot["prompt_len"], slot["max_tokens"], slot["top_p"] = len(prompt), max_tokens, 1.0
        slot["repetition_penalty"] = 1.0
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
        bias: Sequence[tuple[int, float]] = (),
        **fields: Any,
    ) -> Submission | None:
        """Publishes a request; None when the ring has no slot or entry. `corrupt` overwrites fields after the fact,
        before the checksum if `sealed`, else after it."""
        if not self.acknowledged or not self.free or self.sq_space() <= len(self.live) + 1:
            return None
        index = self.free.popleft()
        generation = self.generation[index] % GENERATIONS + 1
        self.generation[index] = generation
        if int(fields.get("flags", 0)) & SlotFlag.MASKED:
            fields.setdefault("mask_box", index % max(1, self.config.masks))
        slot = self.descriptor(prompt, max_tokens, n_bias=len(bias), **fields)
        slot["generation"] = generation
        start = index * self.extent
        slot["prompt_offset"] = start
        pairs = np.array([tuple(p) for p in bias], BIAS_PAIR).view("<i4")
        stored = np.concatenate([np.asarray(prompt, "<i4"), pairs])[: self.extent]
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
            self.index,
            self.epoch,
            index,
            generation,
            self.sq_tail,
            slot[0].copy(),
            list(map(int, prompt)),
            [(int(t), float(np.float32(b))) for t, b in bias],
            refusal,
        )
        self.live[index, generation] = made
        self.history.append(made)
        self.publish(entry(self.sq_tail, Op.SUBMIT, index, generation))
        return made

    def cancel(self, submission: Submission) -> None:
        if self.acknowledged and self.sq_space() > 0:
            submission.cancelled = True
            self.publish(entry(self.sq_tail, Op.CANCEL, submission.slot, submission.generation))

    def post_mask(self, x: Submission, *, index: int | None = None, torn: bool = False) -> None:
        """Fills the request's mailbox for its next output index, or for `index`; `torn` leaves a bit wrong."""
        at, box = len(x.tokens) if index is None else index, int(x.descriptor["mask_box"])
        words = self.config.mask_words
        bits = np.array(x.mask(at, words, self.config.vocab), "<u4")
        self.views["mask_boxes"]["checksum"][box] = reference_checksum(bits.tolist())
        if torn:
            bits[at % words] ^= 1 << (at % 32)
        self.views["mask_bits"][box * words : (box + 1) * words] = bits
        self.views["mask_boxes"]["ready"][box] = ready_word(x.slot, x.generation, at)
        (self.spoilt.add if torn else self.spoilt.discard)(box)

    def has_posted(self, x: Submission) -> bool:
        """True if the mailbox says that it holds the mask of the request's next token."""
        box = int(x.descriptor["mask_box"])
        found = int(self.views["mask_boxes"]["ready"][box])
        return box not in self.spoilt and found == ready_word(x.slot, x.generation, len(x.tokens))

    def consume(self, until: int | None = None) -> None:
        """Takes every published event, or those before `until`, and gives credits back, unless they are withheld."""
        if self.withhold or not self.acknowledged:
            return
        tail = int(self.views["gpu"]["cq_tail"][0]) if until is None else until
        size = self.config.cq_entries
        for at in range(self.cq_head, tail):
            event = self.views["cq"][at % size]
            key = int(event["slot"]), int(event["generation"])
            if event["kind"] >= 3 and self.live.pop(key, None) is not None:
                self.free.append(key[0])
        self.cq_head = tail
        self.views["front_end"]["cq_head"] = tail
