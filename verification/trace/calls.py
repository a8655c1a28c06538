"""Which entries of a log belong to one call of the scheduler, and which inputs that call must have read (T3, T4).

The log holds no marks of calls. A boundary and a poll write different kinds of entries, and each in the order of T3 and
T4, so that a call's extent follows from the kinds; where it does not, both readings are tried (`monitor`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from blink_core.abi.enums import EngineState, ErrorReason, FinishReason, LogKind, Op
from verification.trace.format import Entry

Key = tuple[int, int, int]
_POLL = {LogKind.EPOCH, LogKind.CREDITS, LogKind.SQ_ENTRY, LogKind.LEASE, LogKind.MASK}
_POLL |= {LogKind.ACCEPT, LogKind.REJECT, LogKind.CANCEL}
_BOUNDARY = {LogKind.PAGE_UNQUARANTINE, LogKind.RESULT, LogKind.TOKEN, LogKind.CONTROL, LogKind.STATE, LogKind.PREEMPT}
_BOUNDARY |= {LogKind.PAGE_ALLOC, LogKind.PAGE_EVICT, LogKind.PAGE_SHARE, LogKind.PAGE_PUBLISH, LogKind.ADMIT}
_BOUNDARY |= {LogKind.PREFIX_HIT, LogKind.PLAN_ROW, LogKind.STEP}
_BEFORE_PLAN = (LogKind.PAGE_UNQUARANTINE, LogKind.RESULT, LogKind.CONTROL)
POLL, BOUNDARY, EITHER = "poll", "boundary", "either"


def key_of(entry: Entry) -> Key:
    return entry[2], entry[3], entry[4]


def writer_of(entry: Entry) -> str | None:
    """The call that writes such an entry; EITHER for a passed deadline, None where what follows decides."""
    kind, a = entry[1], entry[5]
    if kind in _POLL:
        return POLL
    if kind in _BOUNDARY:
        return BOUNDARY
    if kind == LogKind.FINISH:
        return POLL if a == FinishReason.CANCELLED else BOUNDARY
    if kind == LogKind.ERROR:
        return EITHER if a == ErrorReason.DEADLINE else POLL if a == ErrorReason.LEASE_LOST else BOUNDARY
    if kind == LogKind.RESERVATION:
        return BOUNDARY if a else None
    return None  # CLOCK, PAGE_FREE, PAGE_UNSHARE


def given_up_by_end(log: Sequence[Entry], at: int) -> bool:
    """Whether the RESERVATION 0 at `at` was given up because its holder ended; else a plan gave it up (E3)."""
    cleanup = (LogKind.PAGE_FREE, LogKind.PAGE_UNSHARE, LogKind.RESERVATION)
    after = next((entry for entry in log[at + 1 : at + 4097] if entry[1] not in cleanup), None)
    if after is None:
        return False
    if after[1] == LogKind.EPOCH:
        return after[2] == log[at][2]
    return after[1] in (LogKind.FINISH, LogKind.ERROR) and key_of(after) == key_of(log[at])


def calls_at(log: Sequence[Entry], at: int) -> tuple[str, ...]:
    """Which calls may have written the entry at `at`, the likelier first."""
    deadline = False
    for j in range(at, len(log)):
        if log[j][1] == LogKind.CLOCK and j > at:
            break
        if log[j][1] == LogKind.RESERVATION and not given_up_by_end(log, j):
            return (BOUNDARY, POLL) if deadline else (BOUNDARY,)
        writer = writer_of(log[j])
        if writer == EITHER:
            deadline = True
        elif writer is not None:
            other = BOUNDARY if writer == POLL else POLL
            return (writer, other) if deadline else (writer,)
    return (POLL, BOUNDARY) if deadline else (BOUNDARY,)


@dataclass(slots=True)
class PollInputs:
    """What one poll read. lapses, renewals: rings; entries: places of SQ_ENTRY in the log; masks: requests."""

    epochs: dict[int, int] = field(default_factory=dict)  # ring -> low 32 bits
    credits: dict[int, int] = field(default_factory=dict)  # ring -> head
    lapses: set[int] = field(default_factory=set)
    renewals: set[int] = field(default_factory=set)
    entries: list[int] = field(default_factory=list)
    masks: list[tuple[Key, int, int]] = field(default_factory=list)  # request, output index, mailbox


def poll_inputs(log: Sequence[Entry], at: int, order: dict[Key, int], end: int | None = None) -> PollInputs:
    """Inputs of the poll whose first entry is at `at`: as many as T4's order lets one poll take.

    order: place in the order of service of each running request. end: where the poll ends at the latest.
    """
    got = PollInputs()
    last: tuple[int, int] = (-1, 0)
    used: set[tuple[int, int]] = set()
    for j in range(at, len(log) if end is None else end):
        entry = log[j]
        kind, ring = entry[1], entry[2]
        if kind == LogKind.CLOCK and j > at and end is None:
            break
        if entry[0] != log[at][0]:
            break  # a plan was made meanwhile, if only an empty one (E1)
        if writer_of(entry) == BOUNDARY and end is None:
            break
        phase = _phase(entry, order)
        if phase is None:
            continue
        ended = last[0] == ring and last[1] == 0 and kind != LogKind.MASK  # nothing follows an EPOCH in its poll
        if phase < last or ended or (phase == last and kind != LogKind.SQ_ENTRY):
            break
        if kind == LogKind.SQ_ENTRY:
            word = entry[5] | entry[6] << 32
            if word >> 24 & 15 == Op.SUBMIT and end is None:
                if (ring, entry[3]) in used:
                    break  # one poll of ours reads one descriptor a slot; one that stops the engine reads none
                used.add((ring, entry[3]))
            got.entries.append(j)
        elif kind == LogKind.EPOCH:
            got.epochs[ring] = entry[5]
        elif kind == LogKind.CREDITS:
            got.credits[ring] = entry[5] | entry[6] << 32
        elif kind == LogKind.LEASE:
            (got.lapses if entry[5] else got.renewals).add(ring)
        else:
            got.masks.append((key_of(entry), entry[5], entry[6]))
        last = phase
    return got


def _phase(entry: Entry, order: dict[Key, int]) -> tuple[int, int] | None:
    """Place of an input in a poll."""
    kind, ring = entry[1], entry[2]
    if kind == LogKind.MASK:
        return 1 << 20, order.get(key_of(entry), 0)
    phases = {LogKind.EPOCH: 0, LogKind.CREDITS: 1, LogKind.LEASE: 2, LogKind.SQ_ENTRY: 3}
    return (ring, phases[LogKind(kind)]) if kind in phases else None


@dataclass(slots=True)
class BoundaryInputs:
    """What one boundary read, and the extent of its entries at most."""

    end: int
    results: dict[Key, tuple[int, int, int]] = field(default_factory=dict)  # token, status, bits of the logprob
    errors: set[tuple[Key, int]] = field(default_factory=set)
    control: int = 0  # 1 drain, 2 stop
    poll_at: int | None = None  # of a stopping boundary: where its poll's entries begin


def boundary_inputs(log: Sequence[Entry], at: int) -> BoundaryInputs:
    got = BoundaryInputs(at)
    for j in range(at, len(log)):
        entry = log[j]
        kind = entry[1]
        stopping = got.control == 2
        if kind == LogKind.CLOCK and j > at and not stopping:
            break
        if kind in _BEFORE_PLAN and entry[0] != log[at][0]:
            break  # of the next boundary: a plan has been made since, if only an empty one (T3, E1)
        if writer_of(entry) == POLL:
            if not stopping:
                break
            got.poll_at = j if got.poll_at is None else got.poll_at
        if kind == LogKind.RESULT:
            got.results.setdefault(key_of(entry), (entry[5], entry[6], entry[7]))
        elif kind == LogKind.ERROR:
            got.errors.add((key_of(entry), entry[5]))
        elif kind == LogKind.CONTROL:
            got.control = entry[5]
        got.end = j + 1
        if kind == LogKind.STEP or (kind == LogKind.STATE and entry[5] == EngineState.STOPPED):
            break
    return got
