"""Ring memory whose words come from a recorded log: what the specification reads in place of a front end's writes."""

from __future__ import annotations

from dataclasses import dataclass, field

from blink_core.abi.config import EngineConfig
from verification.spec.state import Descriptor, Mailbox


class NotRecorded(Exception):
    """The specification reads a descriptor that the recording does not hold; the message says which."""


class Words(dict[int, int]):
    """Submission words by place; what was not fed is not there yet (0)."""

    def __missing__(self, index: int) -> int:
        return 0


@dataclass
class Slots:
    """Descriptors of one poll by slot, with the payload words that the arena then shows."""

    ring: int
    fed: dict[int, tuple[Descriptor, tuple[int, ...]]] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)
    words: tuple[int, ...] = ()

    def __getitem__(self, slot: int) -> Descriptor:
        if slot not in self.fed:
            raise NotRecorded(self.missing.get(slot, f"descriptor of slot {self.ring}:{slot} was not recorded"))
        descriptor, self.words = self.fed[slot]
        return descriptor


@dataclass
class Arena:
    """The payload of the descriptor read last; the specification reads it right after, at the descriptor's extent."""

    slots: Slots

    def __getitem__(self, extent: slice) -> tuple[int, ...]:
        return self.slots.words


@dataclass
class Boxes:
    """Mask mailboxes that were found ready in one poll."""

    mask_words: int
    ready: dict[int, int] = field(default_factory=dict)

    def __getitem__(self, box: int) -> Mailbox:
        bits = (0,) * self.mask_words
        return Mailbox(self.ready.get(box, 0), bits, bits)


class FedMemory:
    """In place of `spec.state.RingMemory`."""

    def __init__(self, ring: int, config: EngineConfig) -> None:
        self.sq, self.slots, self.boxes = Words(), Slots(ring), Boxes(config.mask_words)
        self.arena = Arena(self.slots)
        self.epoch = self.lease = self.cq_head = 0
        self.epoch_ack = self.sq_head = self.cq_tail = 0

    def clear(self) -> None:
        """Takes away what was fed for one call."""
        self.sq.clear()
        self.slots.fed.clear()
        self.slots.missing.clear()
        self.boxes.ready.clear()
