"""The specification, led along a recorded log: call by call, in the state in which it is after the entries so far."""

from __future__ import annotations

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
    BoundaryInputs,
    Key,
    PollInputs,
    begins_boundary,
    boundary_inputs,
    clock_of,
    end_of_call,
    poll_inputs,
)
from verification.trace.feed import FedMemory
from verification.trace.format import Entry
from verification.trace.script import Call
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
    """What is known of the run."""

    config: EngineConfig
    log: Sequence[Entry]
    submissions: dict[int, Submission]
    redacted: bool


@dataclass(slots=True)
class Follower:
    """machine: without events and log. at: the next entry. signs: clock of each ring's last logged sign of life.

    calls: those made so far, also the silent ones. guessed: hits in the prefix cache were taken from later entries.
    """

    machine: Machine
    at: int = 0
    signs: list[int] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    guessed: bool = False
    unknown: int = UNKNOWN_BASE  # the next unknown token

    @classmethod
    def start(cls, config: EngineConfig) -> Follower:
        machine = Machine(config)
        for ring in machine.rings:
            ring.memory = cast(RingMemory, FedMemory(ring.index, config))
        return cls(machine, signs=[0] * config.rings)

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

    def call(self, recorded: Recorded) -> None:
        """The call that wrote the entry at `at`, after the boundaries before it that wrote none. Raises Mismatch."""
        log = recorded.log
        if log[self.at][1] != LogKind.CLOCK:
            raise Mismatch(self.at, ())
        end = end_of_call(log, self.at)
        self._catch_up(log)
        if begins_boundary(log[self.at]):
            self._boundary(recorded, end)
        else:
            polled = poll_inputs(log, self.at, end)
            self._publish_for(polled, recorded)
            self._run_poll(clock_of(log[self.at]), polled, recorded)
        self.match(log, end)

    def _boundary(self, recorded: Recorded, end: int) -> None:
        m, log, at = self.machine, recorded.log, self.at
        now, inputs, polled = clock_of(log[at]), boundary_inputs(log, at, end), PollInputs()
        if recorded.redacted:
            self.guessed |= prefixes.bind(m, log, at, end)
            self._stop_ids(inputs, log, end)
        failed = self._failed(inputs)
        if inputs.control == 2:
            m.stop, polled = 1, poll_inputs(log, at, end)
            self._publish_for(polled, recorded)
            self._feed(now, polled, recorded)
        elif inputs.control == 1:
            m.drain = 1
        results = {key: Result(_signed(a), c, b) for key, (a, b, c) in inputs.results.items()}
        self.calls.append(Call("boundary", now, m.boundaries, m.stop, m.drain, failed, results, polled))
        m.boundary(now, [results.get(row.request.key, _NO_RESULT) for row in m.plan or []], failed)
        self._end_call(polled, log)

    def _catch_up(self, log: Sequence[Entry]) -> None:
        """Makes the boundaries that left no entry since the last call that did (E2). Raises Mismatch if one would."""
        m = self.machine
        counted = log[self.at][7] - begins_boundary(log[self.at])
        silent = counted - m.boundaries & 0xFFFFFFFF
        if silent >> 31:
            raise Mismatch(self.at, [(*log[self.at][:7], m.boundaries + begins_boundary(log[self.at]))])
        if m.live or m.plan is not None:
            settled = m.config.paused_limit + m.config.reservation_steps + 2  # then each is like the last
            for _ in range(min(silent, settled)):
                self.calls.append(Call("boundary", m.clock, m.boundaries, m.stop, m.drain))
                m.boundary(m.clock, [_NO_RESULT] * len(m.plan or []))
                m.events.clear()
                if m.log:
                    raise Mismatch(self.at, m.log[1:])  # what it would write behind its CLOCK
            silent -= min(silent, settled)
            for request in m.running:
                request.paused += silent * (request.paused > 0)
        m.boundaries += silent

    # ---- inputs

    def _publish_for(self, inputs: PollInputs, recorded: Recorded) -> None:
        """Heads beyond what was published: a silent poll must have shown those events (R9)."""
        m = self.machine
        for ring, head in inputs.credits.items():
            if ring < len(m.rings) and m.rings[ring].cq_published < head <= m.rings[ring].cq_tail:
                self._run_poll(m.clock, PollInputs(), recorded)

    def _run_poll(self, now: int, inputs: PollInputs, recorded: Recorded) -> None:
        self._feed(now, inputs, recorded)
        m = self.machine
        self.calls.append(Call("poll", now, m.boundaries, m.stop, m.drain, polled=inputs))
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
        place = entry[7] % c.sq_entries
        memory.sq[place] = word
        slot, generation = word >> SQ_SLOT_SHIFT & 4095, word >> SQ_GENERATION_SHIFT
        if word >> SQ_OP_SHIFT & 15 != Op.SUBMIT:
            return
        after = log[j + 1] if j + 1 < len(log) else None
        reason = ErrorReason(after[5]) if after is not None and after[1] == LogKind.REJECT else None
        made = recorded.submissions.get(j)
        if made is not None and (reason is None or made.flags & EXACT):
            late = reason is None and not made.flags & EXACT
            if late and (made.generation != generation or not made.flags & INTACT):
                memory.missing[place] = f"the descriptor of {entry[2]}:{slot} g{generation} was gone when it was read"
                return
            descriptor, words = (made.accepted() if late else made).descriptor(self.unknown)
            self.unknown += 1 << 25
            if reason is not None and not made.flags & PAYLOAD and reason in _HIDDEN:
                descriptor, words = refused(c, generation, reason)
        elif reason is not None:
            descriptor, words = refused(c, generation, reason)
        else:
            memory.missing[place] = f"the descriptor of {entry[2]}:{slot} g{generation} was not recorded"
            return
        memory.fed[place] = descriptor, words
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

    def _failed(self, inputs: BoundaryInputs) -> bool:
        """Whether the step in flight failed as a whole: its first live row ends so, and without a result."""
        row: PlanRow | None = next(
            (row for row in self.machine.plan or [] if row.request.state == RequestState.RUNNING), None
        )
        if row is None or (row.sample and row.request.key in inputs.results):
            return False
        return (row.request.key, int(ErrorReason.MODEL_ERROR)) in inputs.errors

    def _stop_ids(self, inputs: BoundaryInputs, log: Sequence[Entry], end: int) -> None:
        """A stop id that was not recorded is the token that stopped."""
        for entry in log[self.at : end]:
            if entry[1] == LogKind.FINISH and entry[5] == FinishReason.STOP_TOKEN:
                request, result = self.request(entry[2:5]), inputs.results.get(entry[2:5])  # type: ignore[arg-type]
                if request is not None and result is not None and request.descriptor.n_stop:
                    unknown = request.descriptor.stop_ids
                    if isinstance(unknown[0], Unknown):
                        request.descriptor.stop_ids = (_signed(result[0]), *unknown[1:])

    def match(self, log: Sequence[Entry], end: int) -> None:
        """Compares what the call wrote with its entries; a log that ends inside the call is whole so far."""
        made, self.machine.log = self.machine.log, []
        for n, expected in enumerate(made):
            if self.at == len(log):
                return
            if log[self.at] != expected:
                raise Mismatch(self.at, made[n:])
            self.at += 1
        if self.at < end or not made:
            raise Mismatch(self.at, ())


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


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
