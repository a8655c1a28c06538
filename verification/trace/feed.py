"""Ring memory whose words come from a recorded log: what the specification reads in place of a front end's writes."""

from __future__ import annotations

from dataclasses import dataclass, field

from blink_core.abi.config import EngineConfig
from verification.spec.state import Descriptor, Mailbox


class NotRecorded(Exception):
    """The specification reads a descriptor that the recording does not hold; the message says which."""


@dataclass
class Queue:
    """Submission words by place; what was not fed is not there yet (0). at: the place read last."""

    fed: dict[int, int] = field(default_factory=dict)
    at: int = 0

    def __getitem__(self, place: int) -> int:
        self.at = place
        return self.fed.get(place, 0)

    def __setitem__(self, place: int, word: int) -> None:
        self.fed[place] = word


@dataclass
class Boxes:
    """Mask mailboxes that were found ready in one poll."""

    mask_words: int
    ready: dict[int, int] = field(default_factory=dict)

    def __getitem__(self, box: int) -> Mailbox:
        bits = (0,) * self.mask_words
        return Mailbox(self.ready.get(box, 0), bits, bits)


class FedMemory:
    """In place of `spec.state.RingMemory`, for one call.

    fed: by place of the submission that led to it, descriptor and payload as the engine found them then: one slot may
    show several in one call. missing: why there is none.
    """

    def __init__(self, ring: int, config: EngineConfig) -> None:
        self.ring, self.sq, self.boxes = ring, Queue(), Boxes(config.mask_words)
        self.fed: dict[int, tuple[Descriptor, tuple[int, ...]]] = {}
        self.missing: dict[int, str] = {}
        self.slots, self.arena = _Slots(self), _Arena(self)
        self.epoch = self.lease = self.cq_head = 0
        self.epoch_ack = self.sq_head = self.cq_tail = 0

    def read(self, slot: int | None) -> tuple[Descriptor, tuple[int, ...]]:
        """What the submission read last leads to. Raises NotRecorded."""
        place = self.sq.at
        if place not in self.fed:
            raise NotRecorded(self.missing.get(place, f"descriptor of slot {self.ring}:{slot} was not recorded"))
        return self.fed[place]

    def clear(self) -> None:
        """Takes away what was fed for one call."""
        for words in (self.sq.fed, self.fed, self.missing, self.boxes.ready):
            words.clear()


@dataclass
class _Slots:
    memory: FedMemory

    def __getitem__(self, slot: int) -> Descriptor:
        return self.memory.read(slot)[0]


@dataclass
class _Arena:
    memory: FedMemory

    def __getitem__(self, extent: slice) -> tuple[int, ...]:
        return self.memory.read(None)[1]
