"""`check`: the specification as monitor of a recorded log.

The inputs in the log are fed to the specification, which predicts every other entry; the first one that differs names
the violated clause. Where the log does not tell how often the engine planned nothing, or which call ended a request
whose deadline had passed, every reading is followed as a candidate, and the log is violated when none is left.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from blink_core.abi.enums import LogKind
from verification.spec.machine import Machine
from verification.trace import clauses, snapshot
from verification.trace.calls import POLL, calls_at
from verification.trace.candidate import Candidate, Mismatch, Recorded
from verification.trace.feed import NotRecorded
from verification.trace.format import Trace, why_not_conformance
from verification.trace.script import Script
from verification.trace.words import excerpt, in_words

VALID, VIOLATED, UNKNOWN = "valid", "violated", "unknown"
MAX_CANDIDATES = 256
MAX_SPLIT = 8  # boundaries without entry of which any number may have been earlier
CHECKPOINT_EVERY = 64  # entries
EXACT_PAUSES = 8  # Config.paused_limit up to which every number of silent boundaries is tried at once


@dataclass(slots=True)
class Verdict:
    """word: valid, violated or unknown. entry: index in the engine's log of the first entry that differs.

    checked: entries that the specification predicted. unknown: clauses of which this recording cannot tell, with why.
    """

    word: str
    checked: int
    total: int
    clause: str = ""
    way: str = ""
    entry: int = -1
    step: int = -1
    expected: str = ""
    found: str = ""
    excerpt: str = ""
    reasons: list[str] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    script: Script = None

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "script"}

    def __str__(self) -> str:
        lines = []
        if self.word == VIOLATED:
            lines += [f"clause {self.clause} is violated at entry {self.entry}, step {self.step}: {self.way}"]
            lines += [f"  expected: {self.expected}", f"  found:    {self.found}", self.excerpt]
        lines += [f"reason: {reason}" for reason in self.reasons]
        lines += [f"not checked: {clause}: {why}" for clause, why in self.unknown.items()]
        return "\n".join([*lines, f"checked {self.checked} of {self.total} entries"])


def check(trace: Trace) -> Verdict:
    """The verdict on a whole trace. A gap or a cut end leaves it unknown, unless a clause is violated before."""
    total = len(trace.entries) + len(trace.after_gap)
    why = why_not_conformance(trace)
    if why is not None:
        return Verdict(UNKNOWN, 0, total, reasons=[why])
    verdict = _Monitor(trace).run()
    verdict.total, verdict.unknown = total, {**verdict.unknown, **not_checked(trace)}
    reasons = []
    if trace.gap is not None:
        reasons.append(f"{trace.gap[1]} entries from entry {trace.gap[0]} on were overwritten before they were read")
    if trace.problem is not None:
        reasons.append(f"the file is not whole: {trace.problem}")
    verdict.reasons += reasons
    if verdict.word == VALID and reasons:
        verdict.word = UNKNOWN
    return verdict


def not_checked(trace: Trace) -> dict[str, str]:
    """Clauses that a log cannot show, or this one does not."""
    out = {
        "L4": "lease words are not logged: a lapse that is too early is found, one that is missing is not",
        "R5": "the log does not say when an entry was published: only what was taken is checked",
        "R8": "looks at a torn entry are not logged",
        "R9": "publication of events is not logged: credits show that it came in time",
    }
    if not _all_payloads(trace):
        out["K6, K7"] = "prompts are not in the file: shared pages are taken to hold equal tokens where they may"
        out["R6, R7"] = "payloads are not in the file: a refusal for what they hold is believed"
        out["C4"] = "stop ids are not in the file: the token that stopped is taken for one"
    elif any(not made.flags & 8 for made in trace.submissions.values()):
        out["R6, R7"] = "descriptors were read after the engine had read them: a refusal is believed"
    return out


def _all_payloads(trace: Trace) -> bool:
    """Whether no prompt is unknown: payloads were asked for, and all of those accepted were read in time."""
    accepted = (
        j for j in trace.submissions if j + 1 < len(trace.entries) and trace.entries[j + 1][1] == LogKind.ACCEPT
    )
    return trace.header.payloads and all(trace.submissions[j].whole for j in accepted)


class _Monitor:
    """exact: every number of boundaries that left no entry is a candidate, not only the least and the most.

    It is not at first where the pauses are long. Then a log without a reading is read again, exactly, from the last
    `checkpoint`: the one candidate there was when nothing depended on how often the engine had planned nothing.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace, header = trace, trace.header
        self.recorded = Recorded(header.config, trace.entries, trace.submissions, not _all_payloads(trace))
        self.snapshots = {index - trace.first: state for index, state in trace.snapshots}
        self.always = header.config.paused_limit <= EXACT_PAUSES
        self.exact = self.always
        self.exact_until = 0
        self.frontier: list[Candidate] = []
        self.checkpoint: Candidate | None = None
        self.tried: tuple[int, set[Any]] = (-1, set())  # states at the entry being read
        self.failure: tuple[Mismatch, Candidate] | None = None
        self.doubt = ""

    def run(self) -> Verdict:
        log = self.recorded.log
        candidate = Candidate.start(self.recorded.config)
        try:
            candidate.match(log)  # STATE READY, before any call
            self.frontier = [candidate]
            while self.frontier or self._again():
                at = min(range(len(self.frontier)), key=lambda i: self.frontier[i].at)
                candidate = self.frontier.pop(at)
                if not self._as_in_memory(candidate):
                    continue
                if candidate.at >= len(log):
                    return Verdict(VALID, len(log), 0, script=candidate.script)
                if not self.frontier and not self.always:
                    self._mark(candidate)
                self._expand(candidate)
        except Mismatch as mismatch:
            self._fail(mismatch, candidate)
        except NotRecorded as missing:
            return Verdict(UNKNOWN, candidate.at, 0, reasons=[str(missing)], script=candidate.script)
        return self._violated()

    def _mark(self, candidate: Candidate) -> None:
        """Takes a checkpoint, if nothing is paused and nobody holds the reservation."""
        m = candidate.machine
        if m.reserved is not None or any(q.paused for q in m.running):
            return
        if candidate.at >= self.exact_until:
            self.exact = False
        if self.checkpoint is None or candidate.at - self.checkpoint.at >= CHECKPOINT_EVERY:
            self.checkpoint = candidate.copy()

    def _again(self) -> bool:
        """Whether no reading was left of those tried, and there are more: then they follow."""
        if self.exact or self.failure is None or self.checkpoint is None:
            return False
        self.exact, self.exact_until = True, self.failure[0].at + 1
        self.failure = None
        self.doubt = ""
        self.tried = -1, set()
        self.frontier = [self.checkpoint.copy()]
        return True

    def _as_in_memory(self, candidate: Candidate) -> bool:
        """Whether the snapshot at this entry, if there is one, shows what the candidate says."""
        kept = self.snapshots.get(candidate.at)
        raw = None if kept is None else snapshot.difference(candidate.machine, kept)
        if raw is not None:
            self._fail(Mismatch(candidate.at, (), raw), candidate)
        return raw is None

    def _expand(self, candidate: Candidate) -> None:
        """Every reading of the next call."""
        if self.tried[0] != candidate.at:
            self.tried = candidate.at, set()
        log, bases = self.recorded.log, [candidate]
        clocked = log[candidate.at][1] == LogKind.CLOCK
        if not clocked and candidate.may_be_silent():
            key = key_of(candidate.machine)
            if key in self.tried[1]:
                return
            self.tried[1].add(key)
            bases = [*self._silent(candidate, key), candidate]
        calls = calls_at(self.recorded.log, candidate.at)
        for base in bases:
            for call in calls:
                missing = base.missing(log, call) if clocked and base.loose else 0
                most = 0 if missing >> 31 else min(missing, MAX_SPLIT)
                aged = (True, False) if missing and base.machine.reserved is not None else (False,)
                readings = [(earlier, age) for earlier in range(most, -1, -1) for age in aged]
                for reading in readings:
                    last = call == calls[-1] and reading == readings[-1]
                    self._try(base if last else base.copy(), call, *reading)
        if len(self.frontier) > 1:
            self._merge()

    def _try(self, candidate: Candidate, call: str, earlier: int, aged: bool) -> None:
        try:
            if self.recorded.log[candidate.at][1] == LogKind.CLOCK:
                candidate.catch_up(self.recorded.log, call, earlier, aged=aged)
            if call == POLL:
                candidate.poll(self.recorded)
            else:
                candidate.boundary(self.recorded)
        except Mismatch as mismatch:
            self._fail(mismatch, candidate)
        else:
            self.frontier.append(candidate)

    def _fail(self, mismatch: Mismatch, candidate: Candidate) -> None:
        if candidate.guessed:
            self.doubt = "prefix hits of a request that was not admitted at once were guessed"
        if self.failure is None or _rank(mismatch) > _rank(self.failure[0]):
            self.failure = mismatch, candidate

    def _silent(self, candidate: Candidate, key: Any) -> list[Candidate]:
        """Candidates in which 1, 2, ... boundaries left no entry, until more of them change nothing or were tried.

        Unless `exact`, only a few of those numbers, the least and the most among them.
        """
        limit, tried = self.recorded.config.paused_limit, self.tried[1]
        current, most = candidate.copy(), 0
        made: dict[int, Candidate] = {}
        for k in range(1, limit + 2):
            before = key
            if not current.silent_boundary():
                break
            if (key := key_of(current.machine)) == before:
                break
            candidate.stalled = current.stalled = True
            if self.exact and key in tried:
                break
            most = k
            if self.exact or k <= 2 or k >= limit - 1:
                tried.add(key)
                made[k], current = current, current.copy()
        if most and most not in made:
            made[most] = candidate.copy()
            for _ in range(most):
                made[most].silent_boundary()
        return list(made.values())

    def _merge(self) -> None:
        seen: dict[Any, Candidate] = {}
        for candidate in self.frontier:
            seen.setdefault((candidate.at, candidate.machine.boundaries, key_of(candidate.machine)), candidate)
        self.frontier = list(seen.values())
        if len(self.frontier) > MAX_CANDIDATES:
            self.doubt = f"more than {MAX_CANDIDATES} readings of the log"
            self.frontier = self.frontier[:MAX_CANDIDATES]

    def _violated(self) -> Verdict:
        assert self.failure is not None
        mismatch, candidate = self.failure
        log, first = self.recorded.log, self.trace.first
        at, rest = mismatch.at, mismatch.expected
        if not rest and log[at][1] == LogKind.CLOCK and at + 1 < len(log):
            at += 1  # the clock alone says nothing: what it was read for is not to be
        if mismatch.raw is not None:
            clause, words = mismatch.raw
            around = excerpt(log, min(at, len(log) - 1), first)
            way = "raw memory at a held boundary is not what the log tells"
            return Verdict(
                VIOLATED, at, 0, clause, way, first + at, found=words, excerpt=around, script=candidate.script
            )
        found = log[at]
        alive = candidate.request((found[2], found[3], found[4])) is not None
        live = alive or any(entry[2:5] == found[2:5] for entry in rest)
        clause, way = clauses.violated(rest, log[at : at + 2], live, candidate.machine.logged_clock)
        expected = in_words(rest[0]) if rest else "no entry"
        verdict = Verdict(
            VIOLATED, mismatch.at, 0, clause, way, first + at, found[0], expected, in_words(found),
            excerpt(log, at, first), script=candidate.script,
        )  # fmt: skip
        if self.doubt:
            verdict.word = UNKNOWN
            verdict.reasons.append(
                f"entry {first + at} has no reading ({clause}: expected {expected}), but {self.doubt}"
            )
        return verdict


def _rank(mismatch: Mismatch) -> tuple[int, bool]:
    """The reading that went farthest explains most; among those, one that did not only count boundaries otherwise."""
    return mismatch.at, not mismatch.expected or mismatch.expected[0][1] != LogKind.CLOCK


def key_of(m: Machine) -> Any:
    """What decides all that follows, as far as two candidates at the same entry can differ."""
    limit = m.config.paused_limit
    rows = None if m.plan is None else [(row.request.arrival, row.context_len) for row in m.plan]
    requests = [
        (q.arrival, q.state, q.computed, len(q.tokens), min(q.paused, limit), q.mask_index, tuple(q.pages), q.published)
        for r in m.rings
        for q in r.requests
        if q is not None
    ]
    rings = [(r.cq_tail, r.cq_published, r.cq_head, r.planned, r.lease_at, r.lapsed, *r.deficit) for r in m.rings]
    held = None if m.reserved is None else (m.reserved.arrival, m.boundaries - m.reserved_since)
    return repr(
        (m.engine, m.step, m.number, m.clock, rows, requests, rings, m.free, m.quarantine, list(m.idle), m.turn, held)
    )


__all__ = ["UNKNOWN", "VALID", "VIOLATED", "Verdict", "check"]
