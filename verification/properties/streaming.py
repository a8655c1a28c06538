"""Streaming equals non-streaming: what a client assembles from a stream is what it gets in one answer.

Clauses:
  text      concatenated deltas equal the whole text
  finish    finish reason
  usage     prompt and completion counts
  framing   one finish reason, in the last choice chunk; the role comes first; nothing after the end
  stop      text of a stop string is never shown, nor anything after it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verification.result import CheckResult, Verdict

PROPERTY = "streaming"


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, however it arrived."""

    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Stream:
    """Chunks of one stream in order: deltas (text), finish reasons (None but for the last), usage of the last chunk."""

    deltas: tuple[str, ...]
    finish_reasons: tuple[str | None, ...]
    usage: tuple[int, int] | None

    def answer(self) -> Answer:
        prompt, completion = self.usage or (-1, -1)
        last = next((r for r in reversed(self.finish_reasons) if r is not None), None)
        return Answer("".join(self.deltas), last, prompt, completion)


def _bad(clause: str, message: str, **witness: Any) -> CheckResult:
    return CheckResult(Verdict.INVALID, PROPERTY, clause, message, witness)


def check(whole: Answer, stream: Stream, stops: tuple[str, ...] = ()) -> CheckResult:
    """All clauses for one pair of answers to the same request."""
    reasons = [r for r in stream.finish_reasons if r is not None]
    if len(reasons) != 1 or stream.finish_reasons[-1] is None:
        return _bad("framing", f"{len(reasons)} finish reasons, expected one, in the last chunk", reasons=reasons)
    if stream.usage is None:
        return _bad("usage", "the stream carries no usage")
    streamed = stream.answer()
    for clause, name in (
        ("text", "text"),
        ("finish", "finish_reason"),
        ("usage", "prompt_tokens"),
        ("usage", "completion_tokens"),
    ):
        a, b = getattr(whole, name), getattr(streamed, name)
        if a != b:
            return _bad(clause, f"{name} differs: {a!r} whole, {b!r} streamed", whole=a, streamed=b)
    for stop in stops:
        if stop in whole.text:
            return _bad("stop", f"stop string {stop!r} is in the answer", text=whole.text)
    return CheckResult(Verdict.VALID, PROPERTY, "text", f"{len(stream.deltas)} chunks equal the whole answer")
