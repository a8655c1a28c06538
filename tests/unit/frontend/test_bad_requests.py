"""Bad input at the HTTP layer: always an OpenAI-style error that names the parameter, never a 500, never a hang."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blink_core.frontend.errors import ApiError
from blink_core.frontend.schema import ChatRequest, CompletionRequest, parse_chat, parse_completion

if TYPE_CHECKING:
    from tests.unit.frontend.conftest import Harness

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_PROMPT = 127  # of the scripted engine: model length 128
HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": "tiny", "messages": HI, **fields}


def complete(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"model": "tiny", "prompt": "hi", **fields}


def without(request: tuple[str, dict[str, Any]], name: str) -> tuple[str, dict[str, Any]]:
    return request[0], {key: value for key, value in request[1].items() if key != name}


BAD = [
    (chat(max_tokens=0), "max_tokens", "0 is less than the minimum of 1"),
    (chat(max_tokens=-1), "max_tokens", "-1 is less than"),
    (chat(max_completion_tokens=0), "max_completion_tokens", "0 is less than"),
    (chat(max_tokens=5, max_completion_tokens=5), "max_tokens", "not both"),
    (chat(max_tokens=10**30), "max_tokens", "maximum context length is 128"),
    (chat(max_completion_tokens=128), "max_completion_tokens", "maximum context length is 128"),
    (chat(max_tokens=1.5), "max_tokens", "integer"),
    (chat(max_tokens="5"), "max_tokens", "integer"),
    (chat(max_tokens=True), "max_tokens", "integer"),
    (chat(temperature=-0.1), "temperature", "-0.1 is outside the range from 0 to 2"),
    (chat(temperature=2.1), "temperature", "2.1 is outside"),
    (chat(temperature=1e300), "temperature", "outside the range"),
    (chat(temperature="1"), "temperature", "valid number"),
    (chat(top_p=-0.1), "top_p", "outside the range from 0 to 1"),
    (chat(top_p=1.1), "top_p", "1.1 is outside"),
    (chat(seed=2**64), "seed", "64 bits"),
    (chat(seed=-(2**63) - 1), "seed", "64 bits"),
    (chat(seed=1.5), "seed", "integer"),
    (chat(stop=["a"] * 5), "stop", "5 stop strings, the limit is 4"),
    (chat(stop=""), "stop", "must not be empty"),
    (chat(stop=["a", 1]), "stop", "array of strings"),
    (chat(stop=["a", "b" * 1025]), "stop", "1025 characters, the limit is 1024"),
    (chat(stop_token_ids=[262]), "stop_token_ids", "262 is outside the vocabulary of 262"),
    (chat(stop_token_ids=[1] * 9), "stop_token_ids", "9 ids, the limit is 8"),
    (chat(stop_token_ids=list(range(8)), stop="<|stop|>"), "stop_token_ids", "9 ids with the special tokens"),
    (chat(stream=1), "stream", "boolean"),
    (chat(stream_options={"include_usage": True}), "stream_options", "only allowed when 'stream'"),
    (chat(stream=True, stream_options={"x": 1}), "stream_options.x", "Unknown parameter"),
    (chat(tools=[{"type": "function"}]), "tools", "not supported"),
    (chat(tool_choice="required"), "tool_choice", "not supported"),
    (chat(response_format={"type": "json_object"}), "response_format", "not supported"),
    (chat(modalities=["audio"]), "modalities", "not supported"),
    (chat(user=1), "user", "not supported"),
    (chat(prompt="x"), "prompt", "Unknown parameter"),
    (without(chat(), "model"), "model", "Missing required parameter"),
    (without(chat(), "messages"), "messages", "Missing required parameter"),
    (chat(model=5), "model", "string"),
    (chat(messages=[]), "messages", "is empty"),
    (chat(messages="hi"), "messages", "array of messages"),
    (chat(messages=["hi"]), "messages[0]", "dictionary"),
    (chat(messages=[{"role": "king", "content": "x"}]), "messages[0].role", "'assistant'"),
    (chat(messages=[{"role": "tool", "content": "x", "tool_call_id": "1"}]), "messages[0].role", "tools are not"),
    (chat(messages=[{"content": "x"}]), "messages[0].role", "Missing required parameter"),
    (chat(messages=[{"role": "user"}]), "messages[0].content", "missing"),
    (chat(messages=[{"role": "user", "content": None}]), "messages[0].content", "missing"),
    (chat(messages=[{"role": "user", "content": 5}]), "messages[0].content", "string"),
    (chat(messages=[*HI, {"role": "user", "content": []}]), "messages[1].content", "empty"),
    (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        "messages[0].content[0].type",
        'part type "image_url"',
    ),
    (chat(messages=[{"role": "user", "content": ["x"]}]), "messages[0].content[0].type", "part type null"),
    (
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": 5}]}]),
        "messages[0].content[0].text",
        "expected a string",
    ),
    (
        chat(messages=[{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]),
        "messages[0].tool_calls",
        "not supported",
    ),
    (complete(prompt=""), "prompt", "the prompt is empty"),
    (complete(prompt=[]), "prompt", "the prompt is empty"),
    (complete(prompt=["a", ""]), "prompt", "the prompt is empty"),
    (complete(prompt=[[1], []]), "prompt", "the prompt is empty"),
    (complete(prompt=None), "prompt", "expected a string"),
    (complete(prompt=5), "prompt", "expected a string"),
    (complete(prompt=["a", 5]), "prompt", "expected a string"),
    (complete(prompt=[1, True]), "prompt", "expected a string"),
    (complete(prompt=[1, 2.0]), "prompt", "expected a string"),
    (complete(prompt={"text": "x"}), "prompt", "expected a string"),
    (complete(prompt=[262]), "prompt", "token id 262 is outside the vocabulary of 262"),
    (complete(prompt=[-1]), "prompt", "token id -1 is outside the vocabulary"),
    (complete(prompt=[2**70]), "prompt", "outside the vocabulary"),
    (complete(prompt=["a"] * 65), "prompt", "65 prompts, the limit is 8"),
    (complete(max_tokens=0), "max_tokens", "less than the minimum of 1"),
    (complete(max_tokens=-3), "max_tokens", "-3 is less"),
    (complete(max_tokens=127), "max_tokens", "129 were requested (2 in the prompt, 127 in the completion)"),
    (complete(echo=True), "echo", "true is not supported"),
    (complete(best_of=2), "best_of", "2 is not supported"),
    (complete(best_of=1, n=2), "best_of", "1 is not supported by this server; only the value of 'n', 2, is"),
    (complete(best_of=True), "best_of", "integer"),
    (complete(suffix="x"), "suffix", "not supported"),
    (without(complete(), "prompt"), "prompt", "Missing required parameter"),
]


@pytest.mark.parametrize(("request_", "param", "message"), BAD, ids=[f"{b[1]}: {b[2]}"[:60] for b in BAD])
def test_bad_parameters_are_named(
    harness: Harness, request_: tuple[str, dict[str, Any]], param: str, message: str
) -> None:
    """Catches: an invalid or unsupported value ignored, passed on to the engine, or refused without saying which."""
    made = harness()
    response = made.call(*request_)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert message in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"]
    assert made.engine.prompts == []


ACCEPTED = [
    chat(n=1, logprobs=False, tools=[], tool_choice="none", presence_penalty=0, frequency_penalty=0.0, logit_bias={}),
    chat(response_format={"type": "text"}, store=False, metadata={"a": "b"}, user="me", service_tier="auto"),
    chat(n=None, temperature=None, top_p=None, seed=None, stop=None, max_tokens=None, stream=None, tools=None),
    chat(temperature=0, top_p=0, seed=-(2**63)),
    chat(temperature=2.0, top_p=1, seed=2**64 - 1),
    chat(messages=[{"role": "assistant", "content": "x", "tool_calls": None, "refusal": None, "annotations": []}]),
    chat(messages=[{"role": "developer", "content": "x", "name": "n"}]),
    complete(best_of=1, echo=False, suffix=None, logprobs=None, n=1, user="me"),
    complete(best_of=2, n=2, stop="b" * 1024),
    complete(prompt=[0, 261], stop=["a", "b", "c", "d"]),
]


@pytest.mark.parametrize("request_", ACCEPTED)
def test_parameters_at_their_default_are_accepted(harness: Harness, request_: tuple[str, dict[str, Any]]) -> None:
    """Catches: a client refused because it sends a default, or a value at the edge of its range."""
    response = harness().call(*request_)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": "tiny", "prompt": "hi"} trailing',
        b'{"model": "tiny", "prompt": "hi", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "hi", "temperature": Infinity}',
        b'{"model": "tiny", "prompt": "\xff\xfe"}',
        b'{"model": "tiny", "prompt": "\xed\xa0\x80"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "\\ud800\\u0041"}',
        b'{"model": "tiny", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"\xff\xfe{\x00}\x00",
        b"\x00",
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_malformed_json_is_a_400(harness: Harness, path: str, raw: bytes) -> None:
    """Catches: malformed JSON, NaN, invalid UTF-8, lone surrogates or deep nesting ending in a 500."""
    response = harness().call(path, raw=raw)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")


def test_infinite_temperature_by_overflow_is_refused(harness: Harness) -> None:
    """Catches: 1e999, which JSON readers turn into infinity, reaching the engine."""
    response = harness().call(COMPLETIONS, raw=b'{"model": "tiny", "prompt": "hi", "temperature": 1e999}')
    assert (response.status_code, response.json()["error"]["param"]) == (400, "temperature")


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize(
    ("length", "status"), [(MAX_PROMPT, 200), (MAX_PROMPT + 1, 400), (MAX_PROMPT + 2, 400), (MAX_PROMPT * 10, 400)]
)
def test_prompt_length_limits(harness: Harness, as_text: bool, length: int, status: int) -> None:
    """Catches: fault B01, a prompt at or above the limit passed to the engine, or one just below it refused."""
    made = harness()
    prompt = "a" * length if as_text else [97] * length
    response = made.call(COMPLETIONS, {"model": "tiny", "prompt": prompt})
    assert response.status_code == status
    if status == 200:
        assert made.engine.params[0].max_tokens == 1  # the default of 16 gives way to what fits
    else:
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert f"{MAX_PROMPT} tokens" in error["message"]
        assert f"has {length} tokens" in error["message"]
        assert made.engine.prompts == []


def test_chat_prompt_too_long_counts_the_template(harness: Harness) -> None:
    """Catches: the limit applied to the messages' text instead of the rendered prompt."""
    made = harness()
    response = made.call(CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "a" * MAX_PROMPT}]})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_wrong_model_is_a_404(harness: Harness) -> None:
    """Catches: an unknown model answered by the one that is loaded."""
    response = harness().call(COMPLETIONS, {"model": "other", "prompt": "hi"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "'other'" in error["message"]
    assert "'tiny'" in error["message"]


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("size", [1_001, 3_000, 100_000])
def test_body_over_the_limit_is_a_413(harness: Harness, declared: bool, size: int) -> None:
    """Catches: a body kept in memory beyond the limit, with and without a content-length."""

    async def post() -> tuple[int, Any]:
        async def chunks() -> Any:
            for _ in range(size // 100 + 1):
                yield b"x" * 100

        made = harness(max_body_bytes=1_000)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(made.app), base_url="http://blink") as client:
            content = b"x" * size if declared else chunks()
            response = await client.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
        return response.status_code, response.json()

    status, body = asyncio.run(post())
    assert (status, body["error"]["code"]) == (413, "request_too_large")
    assert "the limit is 1000" in body["error"]["message"]


def test_template_error_is_a_400_with_the_templates_words(harness: Harness) -> None:
    """Catches: a chat template that refuses its input turning into a 500."""
    made = harness(template="{{ raise_exception('Conversation roles must alternate') }}")
    response = made.call(*chat())
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "chat_template_error", "messages")
    assert "Conversation roles must alternate" in error["message"]


def test_unknown_paths_and_methods_are_openai_errors(harness: Harness) -> None:
    """Catches: plain-text 404 and 405 answers that clients cannot parse."""
    made = harness()
    missing = asyncio.run(made.get("/v2/nothing"))
    wrong = asyncio.run(made.get(CHAT))
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert wrong.headers["allow"] == "POST"
    for response in (missing, wrong):
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert asyncio.run(made.get("/v1/models/other")).status_code == 404


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=6,
)
# What the models know, so that a new parameter is drawn as well, and some that clients send and they do not.
FIELDS = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields})
NAMES = st.sampled_from([*FIELDS, "tools", "user", "echo", "metadata", "response_format", "suffix"])
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url"]) | JSON, "text": st.text(max_size=5) | JSON}
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "tool"]) | JSON,
        "content": st.text(max_size=5) | st.lists(PARTS, max_size=2) | JSON,
    }
)
BODIES = st.builds(
    lambda base, extra: {**base, **extra},
    st.fixed_dictionaries(
        {},
        optional={"model": st.just("tiny"), "prompt": st.text(max_size=3) | JSON, "messages": st.lists(MESSAGE | JSON)},
    ),
    st.dictionaries(NAMES | st.text(max_size=4), JSON, max_size=4),
)


@settings(max_examples=150)
@given(body=BODIES | JSON)
def test_any_json_is_parsed_or_refused(body: object) -> None:
    """Catches: any JSON document at all that raises something else than an ApiError."""
    raw = json.dumps(body).encode()
    for parse in (parse_chat, parse_completion):
        with contextlib.suppress(ApiError):
            parse(raw)
