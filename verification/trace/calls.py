"""Which entries of a log one call of the scheduler wrote, and which inputs that call must have read (E2, T3, T4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from blink_core.abi.enums import LogKind
from verification.trace.format import Entry

Key = tuple[int, int, int]


def key_of(entry: Entry) -> Key:
    return entry[2], entry[3], entry[4]


def clock_of(entry: Entry) -> int:
    """Microseconds that a CLOCK entry reads."""
    return entry[5] | entry[6] << 32


def begins_boundary(entry: Entry) -> bool:
    """Whether an entry is the first of a boundary."""
    return entry[1] == LogKind.CLOCK and entry[3] == 1


def end_of_call(log: Sequence[Entry], at: int) -> int:
    """Where the next call's entries begin, or the log ends, for the call whose CLOCK is at `at`."""
    end = at + 1
    while end < len(log) and log[end][1] != LogKind.CLOCK:
        end += 1
    return end


@dataclass(slots=True)
class PollInputs:
    """What one look at the rings read. lapses, renewals: rings; entries: places of SQ_ENTRY in the log."""

    epochs: dict[int, int] = field(default_factory=dict)  # ring -> low 32 bits
    credits: dict[int, int] = field(default_factory=dict)  # ring -> head
    lapses: set[int] = field(default_factory=set)
    renewals: set[int] = field(default_factory=set)
    entries: list[int] = field(default_factory=list)
    masks: list[tuple[Key, int, int]] = field(default_factory=list)  # request, output index, mailbox


def poll_inputs(log: Sequence[Entry], at: int, end: int) -> PollInputs:
    """Of the call whose entries are at `at` to `end - 1`; a boundary has some only if it stops the engine (L7)."""
    got = PollInputs()
    for j in range(at, end):
        kind, ring, a, b = log[j][1], log[j][2], log[j][5], log[j][6]
        if kind == LogKind.EPOCH:
            got.epochs[ring] = a
        elif kind == LogKind.CREDITS:
            got.credits[ring] = a | b << 32
        elif kind == LogKind.LEASE:
            (got.lapses if a else got.renewals).add(ring)
        elif kind == LogKind.SQ_ENTRY:
            got.entries.append(j)
        elif kind == LogKind.MASK:
            got.masks.append((key_of(log[j]), a, b))
    return got


@dataclass(slots=True)
class BoundaryInputs:
    """What one boundary read besides."""

    results: dict[Key, tuple[int, int, int]] = field(default_factory=dict)  # token, status, bits of the logprob
    errors: set[tuple[Key, int]] = field(default_factory=set)
    control: int = 0  # 1 drain, 2 stop


def boundary_inputs(log: Sequence[Entry], at: int, end: int) -> BoundaryInputs:
    got = BoundaryInputs()
    for entry in log[at:end]:
        if entry[1] == LogKind.RESULT:
            got.results.setdefault(key_of(entry), (entry[5], entry[6], entry[7]))
        elif entry[1] == LogKind.ERROR:
            got.errors.add((key_of(entry), entry[5]))
        elif entry[1] == LogKind.CONTROL:
            got.control = entry[5]
    return got
