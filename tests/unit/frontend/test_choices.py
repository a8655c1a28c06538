"""Several choices of one prompt: their requests, their order, their counts, their end."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from blink_core.abi.enums import FinishReason
from blink_core.frontend.engine_api import Overloaded

if TYPE_CHECKING:
    import httpx

    from tests.unit.frontend.conftest import Harness

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
EOS = 259


def complete(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hi", "max_tokens": 50, **fields}


def chunks_of(response: httpx.Response) -> list[Any]:
    payloads = [line.removeprefix("data: ") for line in response.text[:-2].split("\n\n")]
    assert payloads.pop() == "[DONE]"
    return [json.loads(payload) for payload in payloads]


def by_choice(_prompt: list[int], params: Any) -> list[Any]:
    """Choice c says c + 1 letters, then EOS."""
    return [*[97 + params.choice] * (params.choice + 1), EOS, FinishReason.EOS]


def test_choices_share_the_seed_and_differ_in_choice(harness: Harness) -> None:
    """Catches: L09, n equal samples; a seed that gives other samples with another n; choices of prompts mixed up."""
    made = harness()
    made.call(COMPLETIONS, complete(prompt=[[1], [2]], n=3, seed=11))
    assert [(p, s.seed, s.choice) for p, s in zip(made.engine.prompts, made.engine.params, strict=True)] == [
        ([prompt], 11, choice) for prompt in (1, 2) for choice in range(3)
    ]
    made = harness()
    made.call(COMPLETIONS, complete(prompt=[[1], [2]], n=2))
    seeds = [params.seed for params in made.engine.params]
    assert (seeds[0], seeds[2]) == (seeds[1], seeds[3])
    assert seeds[0] != seeds[2]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_choices_keep_their_index(harness: Harness, path: str, stream: bool) -> None:
    """Catches: L19, texts or finish reasons of choices mixed up, in a stream or not; a role for the first one only."""
    made = harness(script=by_choice)
    body = complete(n=3, stream=stream)
    if path == CHAT:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "n": 3, "stream": stream}
    response = made.call(path, body)
    texts, reasons, roles = [""] * 3, [[] for _ in range(3)], [0] * 3  # type: ignore[var-annotated]
    if stream:
        for chunk in chunks_of(response):
            (choice,) = chunk["choices"]
            delta = choice["delta"] if path == CHAT else {"content": choice["text"]}
            texts[choice["index"]] += delta.get("content", "")
            roles[choice["index"]] += "role" in delta
            reasons[choice["index"]].append(choice["finish_reason"])
        assert roles == [path == CHAT] * 3
        assert [[r for r in given if r] for given in reasons] == [["stop"]] * 3
        assert [given[-1] for given in reasons] == ["stop"] * 3
    else:
        for choice in response.json()["choices"]:
            texts[choice["index"]] = choice["message"]["content"] if path == CHAT else choice["text"]
            assert choice["finish_reason"] == "stop"
    assert texts == ["a", "bb", "ccc"]


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_a_prompt_once_and_all_its_choices(harness: Harness, stream: bool) -> None:
    """Catches: prompt tokens counted for each choice, completion tokens of one choice alone, or cached tokens that
    exceed the prompt's."""
    made = harness(script=by_choice, cached=1)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = made.call(COMPLETIONS, complete(prompt=["hi", "abc"], n=2, **options))
    usage = chunks_of(response)[-1]["usage"] if stream else response.json()["usage"]
    assert usage == {
        "prompt_tokens": 5,
        "completion_tokens": 2 * (2 + 3),
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_cached_tokens_are_unknown_where_a_stop_string_ended_the_answer(harness: Harness) -> None:
    """Catches: 0 reported for a request that was cancelled before the engine told."""
    made = harness(text="abc", cached=2)
    assert made.call(COMPLETIONS, complete(stop="b")).json()["usage"]["prompt_tokens_details"] is None


def test_choices_are_interleaved(harness: Harness) -> None:
    """Catches: a second choice that is sent only after the first has ended."""

    async def scenario() -> None:
        second_sent = asyncio.Event()

        def script(_prompt: list[int], params: Any) -> list[Any]:
            if params.choice == 0:
                return [97, second_sent.wait(), 97, EOS, FinishReason.EOS]

            async def sent() -> None:
                second_sent.set()

            return [98, sent(), EOS, FinishReason.EOS]

        made = harness(script=script)
        response = await made.post(COMPLETIONS, complete(n=2, stream=True))
        texts = [(c["choices"][0]["index"], c["choices"][0]["text"]) for c in chunks_of(response)]
        assert texts.index((1, "b")) < len(texts) - 1 - texts[::-1].index((0, "a"))

    asyncio.run(scenario())


def test_stop_string_ends_its_own_choice_only(harness: Harness) -> None:
    """Catches: a stop string found in one choice that ends, or is shared with, the others."""
    made = harness(script=by_choice)
    choices = made.call(COMPLETIONS, complete(n=3, stop="bb")).json()["choices"]
    assert [choice["text"] for choice in choices] == ["a", "", "ccc"]
    assert made.engine.cancelled.qsize() == 1


@pytest.mark.parametrize("stream", [False, True])
def test_overload_of_one_choice_is_an_overload(harness: Harness, stream: bool) -> None:
    """Catches: an answer with fewer choices than asked for, or the others left running."""

    async def scenario() -> None:
        never = asyncio.Event()

        def script(_prompt: list[int], params: Any) -> list[Any]:
            return [Overloaded()] if params.choice == 2 else [never.wait(), FinishReason.EOS]

        made = harness(script=script)
        response = await made.post(COMPLETIONS, complete(n=3, stream=stream))
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert made.engine.live == 0
        assert made.engine.cancelled.qsize() == 2

    asyncio.run(scenario())
