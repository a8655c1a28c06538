"""What of a history must be the same whenever the same program runs: no slots, no times, no order between requests.

A request that is cancelled gets, by luck, some tokens more than those that its cancel waited for, or even ends first;
of it only the tokens that came before the cancel count.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from blink_core.abi.enums import ErrorReason, EventKind, FinishReason
from verification.history import History, enum_name
from verification.program import Program

CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request of a program got. outcome: "FINISH LENGTH", "ERROR DEADLINE", "cancelled", "open"; tokens: ids;
    alternatives: of each LOGPROBS event the ids."""

    request: int
    outcome: str
    tokens: tuple[int, ...]
    alternatives: tuple[tuple[int, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "request": self.request,
            "outcome": self.outcome,
            "tokens": list(self.tokens),
            "alternatives": [list(ids) for ids in self.alternatives],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Answer:
        """The answer that `to_json` gave; raises KeyError, TypeError or ValueError for anything else."""
        alternatives = tuple(tuple(map(int, ids)) for ids in data["alternatives"])
        return cls(int(data["request"]), str(data["outcome"]), tuple(map(int, data["tokens"])), alternatives)


def answers(history: History) -> list[Answer]:
    """The answers of all requests of a history, in the order of the program; of one never submitted "open"."""
    found = {request: Answer(request, "open", ()) for request in range(len(history.program.requests))}
    for s in history.submitted:
        wait = history.program.requests[s.request].cancel_after
        tokens, alternatives, outcome = history.tokens_of(s), [], "open"
        for event in history.events_of(s):
            if event["kind"] == EventKind.LOGPROBS:
                alternatives.append(tuple(event["tokens"]))
            elif event["kind"] == EventKind.FINISH:
                outcome = f"FINISH {enum_name(FinishReason, event['reason'])}"
            elif event["kind"] == EventKind.ERROR:
                outcome = f"ERROR {enum_name(ErrorReason, event['reason'])}"
        if wait is not None and len(tokens) >= wait:  # also if it ended in the poll that showed it, and no cancel went
            found[s.request] = Answer(s.request, CANCELLED, tuple(tokens[:wait]))
        else:
            found[s.request] = Answer(s.request, outcome, tuple(tokens), tuple(alternatives))
    return list(found.values())


def digest(value: Any) -> str:
    """SHA-256 of a JSON value in one form, hex."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def program_digest(program: Program) -> str:
    """Digest of what was drawn."""
    return digest(program.to_json())


def history_digest(history: History) -> str:
    """Digest of a program and what it got."""
    return digest([history.program.to_json(), [answer.to_json() for answer in answers(history)]])
