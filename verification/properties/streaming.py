"""Streaming equals non-streaming: what a client assembles from a stream is what it gets in one answer.

Clauses:
  text       concatenated deltas equal the whole text
  finish     finish reason
  usage      prompt and completion counts, each at least 1
  framing    one finish reason, in the last choice chunk; a chat's first chunk carries the role
  character  no delta shows a replacement character that the whole text does not have
  stop       text ends before the first stop string, with finish reason "stop"; nothing of it or after it is shown
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verification.result import CheckResult, Verdict

PROPERTY = "streaming"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, however it arrived."""

    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Stream:
    """Chunks of one stream in order: deltas (text), finish reasons (None but for the last), usage of the last chunk.

    roles: of each chunk of a chat, None where there is none; None for a stream of plain text.
    """

    deltas: tuple[str, ...]
    finish_reasons: tuple[str | None, ...]
    usage: tuple[int, int] | None
    roles: tuple[str | None, ...] | None = None

    def answer(self) -> Answer:
        prompt, completion = self.usage or (-1, -1)
        last = next((r for r in reversed(self.finish_reasons) if r is not None), None)
        return Answer("".join(self.deltas), last, prompt, completion)


def _bad(clause: str, message: str, **witness: Any) -> CheckResult:
    return CheckResult(Verdict.INVALID, PROPERTY, clause, message, witness)


def check(whole: Answer, stream: Stream, stops: Sequence[str] = ()) -> CheckResult:
    """All clauses for one pair of answers to the same request (of stop: that none of `stops` is shown)."""
    reasons = [r for r in stream.finish_reasons if r is not None]
    if len(reasons) != 1 or stream.finish_reasons[-1] is None:
        return _bad("framing", f"{len(reasons)} finish reasons, expected one, in the last chunk", reasons=reasons)
    if stream.roles is not None and (not stream.roles or stream.roles[0] != "assistant"):
        return _bad("framing", f"the first chunk's role is {(stream.roles or (None,))[0]!r}, expected 'assistant'")
    if stream.usage is None:
        return _bad("usage", "the stream carries no usage")
    if whole.prompt_tokens < 1 or whole.completion_tokens < 1:
        return _bad("usage", f"{whole.prompt_tokens} prompt and {whole.completion_tokens} completion tokens")
    streamed = stream.answer()
    if streamed.text.count(REPLACEMENT) > whole.text.count(REPLACEMENT):
        split = [i for i, delta in enumerate(stream.deltas) if REPLACEMENT in delta]
        return _bad(
            "character", f"chunks {split} show a replacement character that the whole text has not", chunks=split
        )
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


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string begins that is complete first (of several that end together the longest); None for none."""
    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    return min(ends)[1] if ends else None


def check_stop(free: Answer, stopped: Answer, stops: Sequence[str]) -> CheckResult:
    """Clause stop, by the greedy answer `free` to the same request without stop strings.

    Unknown when `free` has no stop string: then nothing had to be cut.
    """
    at = first_stop(free.text, stops)
    if at is None:
        return CheckResult(Verdict.UNKNOWN, PROPERTY, "stop", f"no stop string of {list(stops)} came up in the answer")
    if stopped.text != free.text[:at]:
        return _bad(
            "stop", f"{stopped.text!r} is shown, expected {free.text[:at]!r}", shown=stopped.text, free=free.text
        )
    if stopped.finish_reason != "stop":
        return _bad("stop", f"finish reason is {stopped.finish_reason!r} at a stop string, expected 'stop'")
    if not 1 <= stopped.completion_tokens <= free.completion_tokens:
        return _bad(
            "stop", f"{stopped.completion_tokens} tokens counted, {free.completion_tokens} without stop strings"
        )
    return CheckResult(Verdict.VALID, PROPERTY, "stop", f"text ends before the stop string, after {at} characters")
