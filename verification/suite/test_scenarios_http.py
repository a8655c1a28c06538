"""Rows of the fault corpus over HTTP, on the model under test: choices, and text that is cut inside a character."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest

from blink_core.abi.enums import LogKind
from verification.fixtures import Judge, Subject
from verification.suite.scenarios import NO_LOG, condition, hold

if TYPE_CHECKING:
    import openai

pytestmark = [
    pytest.mark.blink_property("scenarios"),
    pytest.mark.capability("cpu", "shared-memory", "oracle", "http"),
]

CHOICES, NEW = 4, 6


def test_l09_l19_choices_of_one_request(engine: Subject, client: openai.OpenAI, judge: Judge) -> None:
    """L09, L19. Catches: choices that overwrite each other, share an end, or are one sample for want of a seed; a seed
    that does not bring them back.

    Condition: without a seed, at temperature 1, the choices run as requests of their own.
    """

    def ask(**fields: Any) -> list[tuple[int, str, str | None]]:
        answer = client.completions.create(
            model=engine.rig.model_name, prompt="Once upon a time", n=CHOICES, temperature=1.0, max_tokens=NEW, **fields
        )
        return [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices]

    before = engine.snapshot(log_from=NO_LOG)
    first = ask()
    after = engine.snapshot(log_from=int(before.header["log_tail"]))
    accepted = after.log[after.log["kind"] == LogKind.ACCEPT]
    slots = {(int(e["slot"]), int(e["generation"])) for e in accepted}
    condition(judge, "L19", len(slots) == CHOICES, "each choice is a request of its own", requests=len(slots))
    hold(judge, "L19", [index for index, *_ in first] == list(range(CHOICES)), f"choices {[i for i, *_ in first]}")
    hold(judge, "L19", all(reason in ("length", "stop") for *_, reason in first), "each has its own finish reason")
    hold(judge, "L09", len({text for _, text, _ in first}) > 1, "all choices of an unseeded request are one sample")
    hold(judge, "L09", ask(seed=11) == ask(seed=11), "a seed does not bring the choices back")
    judge.record.cases()


def test_t02_t03_an_answer_that_ends_inside_a_character(engine: Subject, client: openai.OpenAI, judge: Judge) -> None:
    """T02, T03. Catches: max_tokens inside a character that gives an error, or nothing, instead of what the bytes say;
    incomplete bytes that are dropped when another token follows; a stream that shows them otherwise.

    Condition: every token of the answer is the first byte of a character that takes four; a bias forces that.
    """
    oracle = engine.oracles[1]
    lead = oracle.encode("🙂")[0]
    condition(judge, "T03", oracle.decode([lead]) == "\ufffd", "the token is a part of a character")

    def ask(tokens: int, *, stream: bool) -> tuple[str, int]:
        fields: dict[str, Any] = {
            "model": engine.rig.model_name,
            "prompt": "ok",
            "max_tokens": tokens,
            "temperature": 0.0,
        }
        fields |= {"logit_bias": {str(lead): 100}}
        if not stream:
            whole = client.completions.create(**fields)
            return whole.choices[0].text, whole.usage.completion_tokens
        text, counted = "", 0
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        for part in client.completions.create(**fields, **options):
            text += "".join(choice.text for choice in part.choices)
            counted = part.usage.completion_tokens if part.usage else counted
        return text, counted

    for tokens, stream in itertools.product((1, 3), (False, True)):
        expected = oracle.decode([lead] * tokens)
        found = ask(tokens, stream=stream)
        hold(judge, "T03", found == (expected, tokens), f"{found}, the bytes are {expected!r} of {tokens} tokens")
    judge.record.cases()
