"""One reading of a recorded log: the specification in the state in which it would be after the entries so far."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from blink_core.abi.config import EngineConfig
from blink_core.abi.definition import SQ_GENERATION_SHIFT, SQ_OP_SHIFT, SQ_SLOT_SHIFT
from blink_core.abi.enums import ErrorReason, FinishReason, LogKind, Op, RequestState, StepStatus
from verification.spec.machine import Machine
from verification.spec.state import Descriptor, PlanRow, Request, Result, RingMemory
from verification.trace import prefixes
from verification.trace.calls import (
    BOUNDARY,
    BoundaryInputs,
    Key,
    PollInputs,
    boundary_inputs,
    given_up_by_end,
    poll_inputs,
    writer_of,
)
from verification.trace.feed import FedMemory
from verification.trace.format import Entry
from verification.trace.script import Call, Script
from verification.trace.submission import EXACT, INTACT, PAYLOAD, UNKNOWN_BASE, Submission, Unknown

_NO_RESULT = Result(0, 0, StepStatus.FAILED)
_TORN = (ErrorReason.CHECKSUM, ErrorReason.BAD_GENERATION)


class Mismatch(Exception):
    """The specification gives another entry than the log holds.

    expected: what its call still writes, maybe nothing. raw: clause and words, where it is a snapshot that differs.
    """

    def __init__(self, at: int, expected: Sequence[Entry], raw: tuple[str, str] | None = None) -> None:
        super().__init__(at, expected)
        self.at, self.expected, self.raw = at, list(expected), raw


@dataclass(slots=True)
class Recorded:
    """The log that all candidates read."""

    config: EngineConfig
    log: Sequence[Entry]
    submissions: dict[int, Submission]
    redacted: bool


@dataclass(slots=True)
class Candidate:
    """machine: without events and log. at: the next entry. signs: clock of each ring's last logged sign of life.

    stalled: some silent boundary was possible since the reservation was taken. guessed: hits in the prefix cache were
    taken from what the log shows later. loose: there were calls since the last CLOCK that
    began without one, so that boundaries between them are not counted; counted: boundaries at that CLOCK.
    """

    machine: Machine
    at: int = 0
    signs: list[int] = field(default_factory=list)
    script: Script = None
    stalled: bool = False
    guessed: bool = False
    loose: bool = False
    counted: int = 0
    unknown: int = UNKNOWN_BASE  # the next unknown token

    @classmethod
    def start(cls, config: EngineConfig) -> Candidate:
        machine = Machine(config)
        for ring in machine.rings:
            ring.memory = cast(RingMemory, FedMemory(ring.index, config))
        return cls(machine, signs=[0] * config.rings)

    def copy(self) -> Candidate:
        other = Candidate(pickle.loads(pickle.dumps(self.machine, pickle.HIGHEST_PROTOCOL)), self.at, list(self.signs))
        other.script, other.stalled, other.guessed = self.script, self.stalled, self.guessed
        other.unknown, other.loose, other.counted = self.unknown, self.loose, self.counted
        return other

    def memory(self, ring: int) -> FedMemory:
        return cast(FedMemory, self.machine.rings[ring].memory)

    def request(self, key: Key) -> Request | None:
        """The live request of a key."""
        ring, slot, generation = key
        c = self.machine.config
        if ring >= c.rings or slot >= c.slots:
            return None
        request = self.machine.rings[ring].requests[slot]
        return request if request is not None and request.generation == generation else None

    # ---- calls

    def poll(self, recorded: Recorded) -> None:
        """The poll that wrote the entry at `at`. Raises Mismatch."""
        m, log = self.machine, recorded.log
        now = self._clock(log)
        order = {(q.ring.index, q.slot, q.generation): n for n, q in enumerate(m.running)}
        inputs = poll_inputs(log, self.at, order)
        self._publish_for(inputs, recorded)
        self.loose |= log[self.at][1] != LogKind.CLOCK or len(inputs.entries) > 0
        self._set_age(log, self.at, _poll_end(log, self.at), in_boundary=False)
        self._run_poll(now, inputs, recorded)
        self.match(log)

    def boundary(self, recorded: Recorded) -> None:
        """The boundary that wrote the entry at `at`. Raises Mismatch."""
        m, log = self.machine, recorded.log
        now = self._clock(log)
        inputs = boundary_inputs(log, self.at)
        self.loose |= log[self.at][1] != LogKind.CLOCK
        self._set_age(log, self.at, inputs.end, in_boundary=True)
        if recorded.redacted:
            self.guessed |= prefixes.bind(m, log, self.at, inputs.end)
            self._stop_ids(inputs, log)
        failed = self._failed(inputs)
        polled = PollInputs()
        if inputs.control == 2:
            m.stop = 1
            if inputs.poll_at is not None:
                polled = poll_inputs(log, inputs.poll_at, {}, inputs.end)
                self._publish_for(polled, recorded)
            self._feed(now, polled, recorded)
        elif inputs.control == 1:
            m.drain = 1
        results = {key: Result(_signed(a), c, b) for key, (a, b, c) in inputs.results.items()}
        self.script = Call("boundary", now, m.boundaries, m.stop, m.drain, failed, results, polled), self.script
        rows = [results.get(_key(row.request), _NO_RESULT) for row in m.plan or []]
        m.boundary(now, rows, failed)
        self._end_call(polled, log)
        self.match(log)

    def missing(self, log: Sequence[Entry], call: str) -> int:
        """Boundaries that left no entry since the last CLOCK, as the one at `at` counts them before its call."""
        return log[self.at][7] - (call == BOUNDARY) - self.machine.boundaries & 0xFFFFFFFF

    def catch_up(self, log: Sequence[Entry], call: str, earlier: int = 0, *, aged: bool = False) -> None:
        """Makes the missing boundaries; `earlier` of them at an entry where they changed nothing. Raises Mismatch.

        aged: those were while the reservation was held, if it was taken since the last CLOCK.
        """
        m = self.machine
        missing = self.missing(log, call)
        over = (1 << 32) - missing if missing >> 31 else 0  # too many were taken for granted
        if over and not self.loose:
            raise Mismatch(self.at, [(*log[self.at][:7], m.boundaries + (call == BOUNDARY))])
        shift = earlier - over
        if m.reserved is not None and m.reserved_since > self.counted and not aged:
            m.reserved_since += shift
        m.boundaries += shift
        self.loose = False
        missing = self.missing(log, call)
        self.counted = m.boundaries + missing
        if m.live or m.plan is not None:
            settled = m.config.paused_limit + m.config.reservation_steps + 2  # then each is like the last
            for _ in range(min(missing, settled)):
                if not self.silent_boundary():
                    raise Mismatch(self.at, m.log)
            missing -= min(missing, settled)
            for request in m.running:
                request.paused += missing * (request.paused > 0)
        m.boundaries += missing

    def silent_boundary(self) -> bool:
        """One boundary that leaves no entry; False, and the candidate is spoilt, if the specification writes one."""
        m = self.machine
        self.script = Call("boundary", m.clock, m.boundaries, m.stop, m.drain), self.script
        m.boundary(m.clock, [_NO_RESULT] * len(m.plan or []))
        m.events.clear()
        return not m.log

    def may_be_silent(self) -> bool:
        """Whether a boundary that leaves no entry, but changes something, is possible now; cheap and too generous."""
        m = self.machine
        if not m.live or m.quarantine:
            return False
        rows = m.plan or []
        return not any(row.sample and row.request.state == RequestState.RUNNING for row in rows)

    # ---- inputs

    def _clock(self, log: Sequence[Entry]) -> int:
        entry = log[self.at]
        return entry[5] | entry[6] << 32 if entry[1] == LogKind.CLOCK else self.machine.clock

    def _publish_for(self, inputs: PollInputs, recorded: Recorded) -> None:
        """Heads beyond what was published: a silent poll must have shown those events (R9)."""
        m = self.machine
        for ring, head in inputs.credits.items():
            if ring < len(m.rings) and m.rings[ring].cq_published < head <= m.rings[ring].cq_tail:
                self._run_poll(m.clock, PollInputs(), recorded)

    def _set_age(self, log: Sequence[Entry], start: int, end: int, *, in_boundary: bool) -> None:
        """Boundaries that left no entry are counted by the age that the reservation's next entry gives."""
        m = self.machine
        if m.reserved is None or not self.stalled:
            return
        key = _key(m.reserved)
        for j in range(start, end):
            entry = log[j]
            if not in_boundary and writer_of(entry) == BOUNDARY:
                return
            if entry[1] == LogKind.RESERVATION and entry[5] != 1 and entry[2:5] == key:
                if not in_boundary and not given_up_by_end(log, j):
                    return
                at = m.reserved_since + entry[6] - in_boundary
                m.boundaries = max(m.boundaries, at)
                return

    def _run_poll(self, now: int, inputs: PollInputs, recorded: Recorded) -> None:
        self._feed(now, inputs, recorded)
        m = self.machine
        self.script = Call("poll", now, m.boundaries, m.stop, m.drain, polled=inputs), self.script
        m.poll(now)
        self._end_call(inputs, recorded.log)

    def _feed(self, now: int, inputs: PollInputs, recorded: Recorded) -> None:
        m = self.machine
        clock = max(now, m.clock)
        for index, r in enumerate(m.rings):
            memory = self.memory(index)
            if index in inputs.epochs:
                old = memory.epoch
                new = old >> 32 << 32 | inputs.epochs[index]
                memory.epoch = new + (1 << 32) * (new == old)
                memory.cq_head = 0
            if index in inputs.credits:
                memory.cq_head = inputs.credits[index]
            memory.lease += index in inputs.renewals
            if index in inputs.lapses:
                if clock - self.signs[index] >= m.config.lease_us:
                    r.lease_at = clock - m.config.lease_us
            elif m.config.lease_us and r.live and clock - r.lease_at >= m.config.lease_us:
                r.lease_at = clock  # the word changed, or the engine was held: neither is in the log
        for j in inputs.entries:
            self._feed_entry(j, clock, recorded)
        for key, index, box in inputs.masks:
            if key[0] < len(m.rings):
                self.memory(key[0]).boxes.ready[box] = key[2] << 40 | key[1] << 28 | index + 1

    def _feed_entry(self, j: int, clock: int, recorded: Recorded) -> None:
        log, c = recorded.log, self.machine.config
        entry = log[j]
        if entry[2] >= c.rings:
            return
        memory, word = self.memory(entry[2]), entry[5] | entry[6] << 32
        memory.sq[entry[7] % c.sq_entries] = word
        slot, generation = word >> SQ_SLOT_SHIFT & 4095, word >> SQ_GENERATION_SHIFT
        if word >> SQ_OP_SHIFT & 15 != Op.SUBMIT:
            return
        after = log[j + 1] if j + 1 < len(log) else None
        reason = ErrorReason(after[5]) if after is not None and after[1] == LogKind.REJECT else None
        made = recorded.submissions.get(j)
        if made is not None and (reason is None or made.flags & EXACT):
            late = reason is None and not made.flags & EXACT
            if late and (made.generation != generation or not made.flags & INTACT):
                memory.slots.missing[slot] = (
                    f"the descriptor of {entry[2]}:{slot} g{generation} was gone when it was read"
                )
                return
            descriptor, words = (made.accepted() if late else made).descriptor(self.unknown)
            self.unknown += 1 << 25
            if reason is not None and not made.flags & PAYLOAD and reason in _HIDDEN:
                descriptor, words = refused(c, generation, reason)
        elif reason is not None:
            descriptor, words = refused(c, generation, reason)
        else:
            memory.slots.missing[slot] = f"the descriptor of {entry[2]}:{slot} g{generation} was not recorded"
            return
        memory.slots.fed[slot] = descriptor, words
        if reason in _TORN:
            r = self.machine.rings[entry[2]]
            r.torn_since = min(clock - c.visibility_us, clock if r.torn_since is None else r.torn_since)

    def _end_call(self, inputs: PollInputs, log: Sequence[Entry]) -> None:
        m = self.machine
        m.events.clear()
        for index in range(len(m.rings)):
            self.memory(index).clear()
        for ring in {*inputs.epochs, *inputs.renewals, *(log[j][2] for j in inputs.entries)}:
            if ring < len(self.signs):
                self.signs[ring] = m.clock
        if m.reserved is None:
            self.stalled = False

    def _failed(self, inputs: BoundaryInputs) -> bool:
        """Whether the step in flight failed as a whole: its first live row ends so, and without a result."""
        row: PlanRow | None = next(
            (row for row in self.machine.plan or [] if row.request.state == RequestState.RUNNING), None
        )
        if row is None or (row.sample and _key(row.request) in inputs.results):
            return False
        return (_key(row.request), int(ErrorReason.MODEL_ERROR)) in inputs.errors

    def _stop_ids(self, inputs: BoundaryInputs, log: Sequence[Entry]) -> None:
        """A stop id that was not recorded is the token that stopped."""
        for j in range(self.at, inputs.end):
            entry = log[j]
            if entry[1] == LogKind.FINISH and entry[5] == FinishReason.STOP_TOKEN:
                request, result = self.request(entry[2:5]), inputs.results.get(entry[2:5])  # type: ignore[arg-type]
                if request is not None and result is not None and request.descriptor.n_stop:
                    unknown = request.descriptor.stop_ids
                    if isinstance(unknown[0], Unknown):
                        request.descriptor.stop_ids = (_signed(result[0]), *unknown[1:])

    def match(self, log: Sequence[Entry]) -> None:
        """Compares what the call wrote with the log; a log that ends inside the call is whole so far."""
        made = self.machine.log
        if not made:
            raise Mismatch(self.at, ())
        for n, expected in enumerate(made):
            if self.at >= len(log):
                break
            if log[self.at] != expected:
                raise Mismatch(self.at, made[n:])
            self.at += 1
        made.clear()


_HIDDEN = (ErrorReason.BAD_TOKEN, ErrorReason.BAD_PARAM)  # may lie in what was left out
_BASE = Descriptor(prompt_len=1, max_tokens=1, intact=True, signed=(Unknown(UNKNOWN_BASE - 1),))


def refused(c: EngineConfig, generation: int, reason: ErrorReason) -> tuple[Descriptor, tuple[int, ...]]:
    """A descriptor that a clause refuses for this reason, where the one that the engine read was not recorded."""
    changes: dict[ErrorReason, dict[str, Any]] = {
        ErrorReason.BAD_LENGTH: {"prompt_len": 0},
        ErrorReason.BAD_EXTENT: {"prompt_offset": c.arena_tokens},
        ErrorReason.BAD_PARAM: {"top_p": -1.0},
        ErrorReason.BAD_TOKEN: {"n_stop": 1, "stop_ids": (-1,) * 8},
        ErrorReason.NEVER_FITS: {"prompt_len": c.max_len - 1, "max_tokens": c.max_len},
        ErrorReason.CHECKSUM: {"intact": False},
        ErrorReason.BAD_GENERATION: {"generation": generation + 1},
    }
    return replace(_BASE, **{"generation": generation, **changes.get(reason, {})}), _BASE.signed


def _key(request: Request) -> Key:
    return request.ring.index, request.slot, request.generation


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _poll_end(log: Sequence[Entry], at: int) -> int:
    end = at + 1
    while end < len(log) and log[end][1] != LogKind.CLOCK:
        end += 1
    return end
