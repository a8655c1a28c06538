"""Streaming equals non-streaming, over HTTP with the OpenAI client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from verification.certificate.recorder import Recorder
from verification.fixtures import PROMPTS, Subject
from verification.properties.streaming import PROPERTY, Answer, Stream, check, check_stop
from verification.result import CheckResult, Verdict

if TYPE_CHECKING:
    import openai

pytestmark = [pytest.mark.blink_property("streaming"), pytest.mark.capability("cpu", "shared-memory", "http")]

CASES: tuple[dict[str, Any], ...] = (
    {"max_tokens": 24, "temperature": 0.0},
    {"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": 7},
    {"max_tokens": 40, "temperature": 0.0, "stop": ["\n", " the"]},
    {"max_tokens": 1, "temperature": 0.0},
)

SHORTEST = 12  # characters of an answer that is long enough to be cut in its middle


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("kind", ["chat", "text"])
def test_same_answer(engine: Subject, client: openai.OpenAI, record: Recorder, kind: str, case: int) -> None:
    """One request answered whole and as a stream, one after the other, so that both run alone in their batch.

    Catches: a lost or repeated chunk, a split character, a shown stop string, usage that differs.
    """
    for prompt in PROMPTS[: 2 if case else len(PROMPTS)]:
        options = {"model": engine.rig.model_name, **CASES[case]}
        if kind == "chat":
            options["messages"] = [{"role": "user", "content": prompt}]
            whole, stream = _chat(client, options)
        else:
            options["prompt"] = prompt
            whole, stream = _text(client, options)
        record.cases()
        record.check(check(whole, stream, tuple(CASES[case].get("stop", ()))))


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_stop_string(engine: Subject, client: openai.OpenAI, record: Recorder, kind: str) -> None:
    """A greedy answer, then the same with stop strings that it is known to hold: a piece of its middle, and two more.

    Catches: a stop string that is shown in part or missed, text after it, a wrong finish reason.
    """
    cut = 0
    for prompt in PROMPTS:
        options = {"model": engine.rig.model_name, "max_tokens": 32, "temperature": 0.0}
        options |= {"messages": [{"role": "user", "content": prompt}]} if kind == "chat" else {"prompt": prompt}
        ask = _chat if kind == "chat" else _text
        free, unstopped = ask(client, options)
        if len(free.text) < SHORTEST:  # the model ended at once
            continue
        middle = len(free.text) // 2
        stops = (free.text[middle : middle + 5], "\N{SNOWMAN}", free.text[-2:])
        stopped, stream = ask(client, options | {"stop": list(stops)})
        record.cases()
        record.situation("stop-string-across-tokens", _across_tokens(unstopped.deltas, middle, len(stops[0])))
        record.check(check_stop(free, stopped, stops))
        record.check(check(stopped, stream, stops))
        cut += 1
        if cut == 2:
            return
    verdict = Verdict.VALID if cut else Verdict.UNKNOWN
    record.check(CheckResult(verdict, PROPERTY, "stop", f"{cut} answers of {SHORTEST} or more characters were cut"))


def _across_tokens(deltas: Sequence[str], at: int, length: int) -> bool:
    """Whether the piece of text at `at` lies in several tokens. Without stop strings nothing is held back: each delta
    of a stream ends where a token ends, so that a piece that lies in two of them lies in two tokens."""
    ends = [sum(map(len, deltas[: i + 1])) for i in range(len(deltas))]
    return any(at < end < at + length for end in ends)


def _chat(client: openai.OpenAI, options: dict[str, Any]) -> tuple[Answer, Stream]:
    reply = client.chat.completions.create(**options)
    choice = reply.choices[0]
    whole = Answer(choice.message.content or "", choice.finish_reason, *_usage(reply.usage))
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    with_choice = [c.choices[0] for c in chunks if c.choices]
    return whole, Stream(
        tuple(c.delta.content or "" for c in with_choice),
        tuple(c.finish_reason for c in with_choice),
        _usage(chunks[-1].usage) if chunks[-1].usage else None,
        tuple(c.delta.role for c in with_choice),
    )


def _text(client: openai.OpenAI, options: dict[str, Any]) -> tuple[Answer, Stream]:
    reply = client.completions.create(**options)
    choice = reply.choices[0]
    whole = Answer(choice.text, choice.finish_reason, *_usage(reply.usage))
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    with_choice = [c.choices[0] for c in chunks if c.choices]
    return whole, Stream(
        tuple(c.text for c in with_choice),
        tuple(c.finish_reason for c in with_choice),
        _usage(chunks[-1].usage) if chunks[-1].usage else None,
    )


def _usage(usage: Any) -> tuple[int, int]:
    return usage.prompt_tokens, usage.completion_tokens
