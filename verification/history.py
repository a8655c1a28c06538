"""The history of one program on one ring: what was asked for, and every event that came back (design section 9).

Checkers read histories and event logs only, never the rig.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from blink_core.abi.dtypes import EVENT, Array
from blink_core.abi.enums import EventKind
from blink_core.frontend.ring_client import decode_logprobs
from verification.program import Program


def enum_name(kind: type[IntEnum], value: int) -> str:
    """Name of an enumeration's value; one that is none is shown as it is, for what an engine writes may be garbage."""
    return next((member.name for member in kind if member.value == value), f"{value} (no {kind.__name__})")


@dataclass(frozen=True, slots=True)
class Submitted:
    """An accepted request: its place in the program, slot, generation and submission index."""

    request: int
    slot: int
    generation: int
    sq_index: int


@dataclass(slots=True)
class History:
    """One run. `events` are in the order of delivery: fields of `Event`, or for LOGPROBS seq, slot, generation, kind,
    count, tokens and logprobs, lists of count. `cancels` are requests whose cancel was published.

    broken: what the ring client itself refused (an event out of sequence), else None. died: how the engine was found
    dead or out of reach, else None. complete: every request was submitted, and had its terminal event before the
    driver's deadline. calls: what the driver called, in order: ("submit" or "cancel", request), ("poll", events that it
    gave); empty where that was not recorded. capture: byte range of the logits capture that was written meanwhile.
    subject: the engine's name.
    """

    program: Program
    ring: int
    submitted: list[Submitted] = field(default_factory=list)
    cancels: set[int] = field(default_factory=set)
    events: list[dict[str, Any]] = field(default_factory=list)
    broken: str | None = None
    died: str | None = None
    complete: bool = False
    calls: list[tuple[str, int]] = field(default_factory=list)
    capture: tuple[int, int] = (0, 0)
    subject: str = ""

    def deliver(self, events: Array) -> None:
        """Appends a batch of `Event` records, as `RingClient.poll` gives them."""
        names = EVENT.names or ()
        decoded: list[dict[str, Any]] = [dict(zip(names, row, strict=True)) for row in events.tolist()]
        pairs = decode_logprobs(events)
        for at in np.flatnonzero(events["kind"] == EventKind.LOGPROBS).tolist():
            one, count = pairs[at], int(pairs[at]["count"])
            decoded[at] = {name: int(one[name]) for name in ("seq", "slot", "generation", "kind", "count")}
            decoded[at] |= {name: one[name][:count].tolist() for name in ("tokens", "logprobs")}
        self.events += decoded

    def events_of(self, submitted: Submitted) -> Iterator[dict[str, Any]]:
        for event in self.events:
            if event["slot"] == submitted.slot and event["generation"] == submitted.generation:
                yield event

    def tokens_of(self, submitted: Submitted) -> list[int]:
        """Token ids delivered, in order."""
        return [e["token"] for e in self.events_of(submitted) if e["kind"] == EventKind.TOKEN]

    def to_json(self) -> dict[str, Any]:
        return {
            "program": self.program.to_json(),
            "ring": self.ring,
            "submitted": [[s.request, s.slot, s.generation, s.sq_index] for s in self.submitted],
            "cancels": sorted(self.cancels),
            "events": self.events,
            "broken": self.broken,
            "died": self.died,
            "complete": self.complete,
            "calls": [list(call) for call in self.calls],
            "subject": self.subject,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> History:
        """The history that `to_json` gave; raises KeyError, TypeError or ValueError for anything else."""
        return cls(
            program=Program.from_json(data["program"]),
            ring=int(data["ring"]),
            submitted=[Submitted(*map(int, entry)) for entry in data["submitted"]],
            cancels=set(data["cancels"]),
            events=[dict(event) for event in data["events"]],
            broken=data["broken"],
            died=data["died"],
            complete=bool(data["complete"]),
            calls=[(str(call), int(number)) for call, number in data.get("calls", ())],
            subject=str(data.get("subject", "")),
        )
