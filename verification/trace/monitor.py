"""`check`: the specification as monitor of a recorded log.

The inputs in the log are fed to the specification, call by call, which predicts every other entry; the first one that
differs names the violated clause. A log of level ALL shows each call that wrote anything and counts the boundaries that
wrote nothing (E2), so that there is one reading of it and no search.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from blink_core.abi.enums import LogKind
from verification.trace import clauses, snapshot
from verification.trace.feed import NotRecorded
from verification.trace.follower import Follower, Mismatch, Recorded
from verification.trace.format import Trace, why_not_conformance
from verification.trace.script import Call
from verification.trace.words import excerpt, in_words

VALID, VIOLATED, UNKNOWN = "valid", "violated", "unknown"


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
    calls: list[Call] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "calls"}

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
    verdict = _follow(trace)
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


def _follow(trace: Trace) -> Verdict:
    log, header = trace.entries, trace.header
    recorded = Recorded(header.config, log, trace.submissions, not _all_payloads(trace))
    snapshots = {index - trace.first: state for index, state in trace.snapshots}
    follower = Follower.start(header.config)
    try:
        follower.match(log, 1)  # STATE READY, before any call
        while follower.at < len(log):
            _compare_memory(follower, snapshots)
            follower.call(recorded)
        _compare_memory(follower, snapshots)
    except Mismatch as mismatch:
        return _violated(trace, follower, mismatch)
    except NotRecorded as missing:
        return Verdict(UNKNOWN, follower.at, 0, reasons=[str(missing)], calls=follower.calls)
    return Verdict(VALID, len(log), 0, calls=follower.calls)


def _compare_memory(follower: Follower, snapshots: dict[int, dict[str, Any]]) -> None:
    """Raises Mismatch if the snapshot at the next entry, where there is one, shows another state."""
    kept = snapshots.get(follower.at)
    raw = None if kept is None else snapshot.difference(follower.machine, kept)
    if raw is not None:
        raise Mismatch(follower.at, (), raw)


def _violated(trace: Trace, follower: Follower, mismatch: Mismatch) -> Verdict:
    log, first = trace.entries, trace.first
    at, rest = mismatch.at, mismatch.expected
    if mismatch.raw is not None:
        clause, words = mismatch.raw
        around = excerpt(log, min(at, len(log) - 1), first)
        way = "raw memory at a held boundary is not what the log tells"
        return Verdict(
            VIOLATED, at, 0, clause, way, first + at, found=words, excerpt=around, calls=follower.calls
        )  # fmt: skip
    if not rest and log[at][1] == LogKind.CLOCK and at + 1 < len(log):
        at += 1  # the clock alone says nothing: what it was read for is not to be
    found = log[at]
    alive = follower.request((found[2], found[3], found[4])) is not None
    live = alive or any(entry[2:5] == found[2:5] for entry in rest)
    clause, way = clauses.violated(rest, log[at : at + 2], live, follower.machine.clock)
    expected = in_words(rest[0]) if rest else "no entry"
    verdict = Verdict(
        VIOLATED, mismatch.at, 0, clause, way, first + at, found[0], expected, in_words(found), excerpt(log, at, first),
        calls=follower.calls,
    )  # fmt: skip
    if follower.guessed:
        verdict.word = UNKNOWN
        why = "prefix hits of a request that was not admitted at once were guessed"
        verdict.reasons.append(f"entry {first + at} has no reading ({clause}: expected {expected}), but {why}")
    return verdict


__all__ = ["UNKNOWN", "VALID", "VIOLATED", "Verdict", "check"]
