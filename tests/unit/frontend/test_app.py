"""Response shapes, streaming, errors and sampling parameters of the application, in-process."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from blink_core.abi.enums import ErrorReason, FinishReason
from blink_core.abi.params import SamplingParams
from blink_core.frontend.engine_api import EngineError, EngineHealth, Overloaded
from blink_core.frontend.generation import ChoiceEnd, generate_choice
from blink_core.frontend.prepare import PromptPlan
from blink_core.frontend.stop import StopMatcher

if TYPE_CHECKING:
    import httpx

    from tests.unit.frontend.conftest import FrontEndHarness, Harness

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
EOS = 259


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": MESSAGES, **fields}


def complete(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hi", "max_tokens": 50, **fields}


def events(response: httpx.Response) -> list[Any]:
    """Parsed `data:` events of a stream; "[DONE]" stays text."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.text.endswith("\n\n")
    lines = response.text[:-2].split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    payloads = [line.removeprefix("data: ") for line in lines]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def test_chat_completion_shape(harness: Harness) -> None:
    """Catches: a field of the chat completion object missing, wrong or with EOS shown or not counted."""
    made = harness(text="hello")
    response = made.call(CHAT, chat())
    body = response.json()
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert body.pop("id") == f"chatcmpl-{response.headers['x-request-id']}"
    assert isinstance(body.pop("created"), int)
    assert made.engine.prompts == [made.tokenizer.encode_rendered(prompt)]
    tokens = len(made.engine.prompts[0])
    assert body == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {  # "he" is one token, EOS is one
            "prompt_tokens": tokens,
            "completion_tokens": 5,
            "total_tokens": tokens + 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert made.engine.params[0].max_tokens == 128 - tokens  # default: the rest of the context


def test_text_completion_shape(harness: Harness) -> None:
    """Catches: a field of the text completion object missing or wrong, or another default than 16 tokens."""
    made = harness(text="x" * 40)
    response = made.call(COMPLETIONS, {"model": "tiny", "prompt": "hi"})
    body = response.json()
    assert body.pop("id") == f"cmpl-{response.headers['x-request-id']}"
    body.pop("created")
    assert body == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [{"index": 0, "text": "x" * 16, "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 16,
            "total_tokens": 18,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_chat_stream_chunks(harness: Harness) -> None:
    """Catches: wrong order or shape of chunks: role first, then text, finish reason, usage with no choices, [DONE]."""
    made = harness(text="hi!")
    stream = events(made.call(CHAT, chat(stream=True, stream_options={"include_usage": True})))
    assert stream.pop() == "[DONE]"
    assert {(e["object"], e["model"], e["id"], e["created"]) for e in stream} == {
        ("chat.completion.chunk", "tiny", stream[0]["id"], stream[0]["created"])
    }
    last = stream.pop()
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert all(event["usage"] is None for event in stream)
    choices = [event["choices"] for event in stream]
    assert all(len(choice) == 1 and choice[0]["index"] == 0 for choice in choices)
    assert [choice[0]["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "h"},
        {"content": "i"},
        {"content": "!"},
        {},
    ]
    assert [choice[0]["finish_reason"] for choice in choices] == [None, None, None, None, "stop"]


def test_completion_stream_chunks_without_usage(harness: Harness) -> None:
    """Catches: usage sent though it was not asked for, or chunks of another shape than text_completion."""
    stream = events(harness(text="ab").call(COMPLETIONS, complete(stream=True)))
    assert stream.pop() == "[DONE]"
    assert not any("usage" in event for event in stream)
    assert [event["choices"][0]["text"] for event in stream] == ["a", "b", ""]
    assert stream[-1]["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}


@pytest.mark.parametrize("stop", [None, "lo", ["zz", "o w"], "é", "never", "<|stop|>"])
@pytest.mark.parametrize("max_tokens", [1, 4, 9, 16, 17, 18, 50])
def test_streamed_text_equals_whole_text(harness: Harness, stop: Any, max_tokens: int) -> None:
    """Catches: text, finish reason or counts that depend on streaming, also when cut inside a character."""
    fields = {"max_tokens": max_tokens, "stop": stop}
    text = "hello world é 😀."
    whole = harness(text=text).call(COMPLETIONS, complete(**fields)).json()
    made = harness(text=text)
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    stream = events(made.call(COMPLETIONS, complete(**fields, **usage)))
    assert "".join(e["choices"][0]["text"] for e in stream[:-2]) == whole["choices"][0]["text"]
    assert stream[-3]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert stream[-2]["usage"] == whole["usage"]


def test_stop_string_ends_the_request_on_the_engine(harness: Harness) -> None:
    """Catches: a request that runs on after its stop string, tokens after it counted, or stop text shown (T05)."""
    made = harness(text="abcSTOPdefghi")
    body = made.call(COMPLETIONS, complete(stop=["STOP"])).json()
    assert body["choices"][0] == {"index": 0, "text": "abc", "logprobs": None, "finish_reason": "stop"}
    assert body["usage"]["completion_tokens"] == made.engine.sent == 7
    assert made.engine.cancelled.qsize() == 1
    assert made.engine.live == 0


def test_request_is_cancelled_before_the_end_is_handed_on(harness: Harness) -> None:
    """Catches: an engine that goes on sampling while the front end still writes the end of a stopped answer."""

    async def scenario() -> None:
        made = harness(text="aSTOPbc")
        items = generate_choice(
            made.engine,
            PromptPlan([1], SamplingParams(max_tokens=50), frozenset()),
            choice=0,
            request_id="r",
            detokenizer=made.tokenizer.detokenizer(),
            stop=StopMatcher(["STOP"]),
            event_timeout_s=60.0,
        )
        async for item in items:
            assert made.engine.cancelled.qsize() == isinstance(item, ChoiceEnd)
        assert made.engine.cancelled.qsize() == 1

    asyncio.run(scenario())


def test_bos_comes_once(harness: Harness) -> None:
    """Catches: fault T11, a second BOS before a rendered chat; none before a plain prompt of a model that wants one."""
    made = harness(add_bos=True, template="{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    bos = made.tokenizer.bos_token_id
    made.call(CHAT, chat())
    made.call(COMPLETIONS, complete())
    made.call(COMPLETIONS, complete(prompt=[104, 105]))
    assert made.engine.prompts == [[bos, 104, 105], [bos, 104, 105], [104, 105]]


def test_held_back_text_is_flushed_at_the_end(harness: Harness) -> None:
    """Catches: the beginning of a stop string lost when the answer ends before the stop string is complete."""
    body = harness(text="abcSTO").call(COMPLETIONS, complete(stop="STOP")).json()
    assert body["choices"][0]["text"] == "abcSTO"


def test_stop_string_that_is_a_special_token_stops_by_id(harness: Harness) -> None:
    """Catches: a special token as stop string that can never match, because decoded text does not show it."""
    made = harness()
    made.call(COMPLETIONS, complete(stop=["<|stop|>", "x"], stop_token_ids=[5, 5]))
    assert made.engine.params[0].stop_token_ids == (5, 260)


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        (FinishReason.EOS, "stop"),
        (FinishReason.STOP_TOKEN, "stop"),
        (FinishReason.LENGTH, "length"),
        (FinishReason.CONTEXT, "length"),
    ],
)
def test_finish_reasons(harness: Harness, reason: FinishReason, shown: str) -> None:
    """Catches: an engine's finish reason shown as another one."""
    body = harness(script=lambda _p, _s: [97, reason]).call(COMPLETIONS, complete()).json()
    assert body["choices"][0]["finish_reason"] == shown


def test_terminal_tokens_are_never_shown_but_counted(harness: Harness) -> None:
    """Catches: the text of EOS or of a stop token shown where it is an ordinary token, or left out of the count."""
    made = harness(script=lambda _p, _s: [97, 98, FinishReason.STOP_TOKEN])
    body = made.call(COMPLETIONS, complete(stop_token_ids=[98])).json()
    assert (body["choices"][0]["text"], body["usage"]["completion_tokens"]) == ("a", 2)
    plain_eos = harness(script=lambda _p, _s: [97, 98, FinishReason.EOS], eos_token_ids=(98,))
    assert plain_eos.call(COMPLETIONS, complete()).json()["choices"][0]["text"] == "a"
    ignored = harness(script=lambda _p, _s: [97, 98, 97, FinishReason.LENGTH], eos_token_ids=(98,))
    assert ignored.call(COMPLETIONS, complete(ignore_eos=True)).json()["choices"][0]["text"] == "aba"
    assert ignored.engine.params[0].ignore_eos is True


def test_sampling_parameters_reach_the_engine(harness: Harness) -> None:
    """Catches: a parameter dropped, renamed, or given another default than the API's."""
    made = harness()
    everything = {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": -1,
        "max_tokens": 7,
        "top_k": 9,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": -2,
        "frequency_penalty": 2.0,
        "min_tokens": 7,
        "logit_bias": {"5": -100, "261": 1.5},
        "priority": 3,
        "timeout": 2.5,
        "prefix_cache": False,
        "logprobs": 4,
    }
    made.call(COMPLETIONS, complete(**everything))
    made.call(CHAT, chat(max_completion_tokens=3, temperature=0, logprobs=True, top_logprobs=20))
    made.call(COMPLETIONS, complete(top_p=0, top_k=-1))
    made.call(COMPLETIONS, complete(top_p=1e-300, top_k=262))  # 0 in the descriptor's float32; all ids
    made.call(COMPLETIONS, complete(top_k=10**30, seed=1))
    first, second, third, fourth, fifth = made.engine.params
    assert first == SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        seed=2**64 - 1,
        top_k=9,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias=((5, -100.0), (261, 1.5)),
        min_tokens=7,
        logprobs=4,
        priority=3,
        deadline_us=2_500_000,
        prefix_cache=False,
    )
    assert (second.temperature, second.top_p, second.max_tokens, second.logprobs) == (0.0, 1.0, 3, 20)
    assert (third.temperature, third.top_p) == (fourth.temperature, fourth.top_p) == (0.0, 1.0)
    assert fifth == SamplingParams(max_tokens=50, temperature=1.0, seed=1)
    assert {params.top_k for params in made.engine.params[1:]} == {0}


def test_absent_seed_is_fresh_each_time(harness: Harness) -> None:
    """Catches: fault L09, one default seed shared by all requests, also by the prompts of one request."""
    made = harness()
    for _ in range(8):
        made.call(COMPLETIONS, complete(prompt=["a", "b"]))
    seeds = [params.seed for params in made.engine.params]
    assert len(set(seeds)) == 16
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert max(seeds) > 2**32
    assert {params.temperature for params in made.engine.params} == {1.0}


def test_text_parts_are_joined(harness: Harness) -> None:
    """Catches: content given as text parts refused, or rendered as a Python list."""
    made = harness()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    made.call(CHAT, chat(messages=[{"role": "user", "content": parts}]))
    made.call(CHAT, chat(messages=[{"role": "user", "content": "one\ntwo"}]))
    assert made.engine.prompts[0] == made.engine.prompts[1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [["a", "bc", "a"], [[1], [2, 3], [1]]])
def test_several_prompts_give_choices_in_order(harness: Harness, stream: bool, prompts: list[Any]) -> None:
    """Catches: fault L19, outputs of one request's prompts mixed up or overwritten, or wrong sums in usage."""

    def echo(prompt: list[int], _params: Any) -> list[Any]:
        return [*prompt, *prompt, EOS, FinishReason.EOS]

    made = harness(script=echo)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = made.call(COMPLETIONS, complete(prompt=prompts, **options))
    texts = ["", "", ""]
    if stream:
        *chunks, last, _ = events(response)
        for chunk in chunks:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        usage = last["usage"]
    else:
        body = response.json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        texts = [choice["text"] for choice in body["choices"]]
        usage = body["usage"]
    assert texts == [made.tokenizer.decode(prompt * 2) for prompt in made.engine.prompts]
    assert usage.pop("prompt_tokens_details") == {"cached_tokens": 0}
    assert usage == {"prompt_tokens": 4, "completion_tokens": 11, "total_tokens": 15}
    assert len(set(made.engine.request_ids)) == 3


def test_failure_of_one_prompt_cancels_the_others(harness: Harness) -> None:
    """Catches: engine requests left running when a sibling of the same HTTP request failed."""

    async def scenario() -> None:
        gate = asyncio.Event()

        def script(prompt: list[int], _params: Any) -> list[Any]:
            return [97, EngineError(ErrorReason.NAN_LOGITS)] if prompt == [1] else [97, gate.wait(), FinishReason.EOS]

        made = harness(script=script)
        response = await made.post(COMPLETIONS, complete(prompt=[[2], [1], [3]]))
        assert (response.status_code, response.json()["error"]["code"]) == (500, "nan_logits")
        assert made.engine.live == 0
        assert made.engine.cancelled.qsize() == 2

    asyncio.run(scenario())


ENGINE_ERRORS = [
    (Overloaded(retry_after_s=2.5), 429, "engine_overloaded", "3"),
    (EngineError(ErrorReason.ENGINE_DEAD, "heartbeat is stale"), 503, "engine_dead", None),
    (EngineError(ErrorReason.DRAINING), 503, "draining", "5"),
    (EngineError(ErrorReason.LEASE_LOST), 503, "lease_lost", "1"),
    (EngineError(ErrorReason.DEADLINE), 504, "deadline", None),
    (EngineError(ErrorReason.NO_TOKEN), 400, "no_token", None),
    (EngineError(ErrorReason.NEVER_FITS), 400, "never_fits", None),
    (EngineError(ErrorReason.BAD_LENGTH), 400, "bad_length", None),
    (EngineError(ErrorReason.BAD_TOKEN), 400, "bad_token", None),
    (EngineError(ErrorReason.BAD_PARAM), 400, "bad_param", None),
    (EngineError(ErrorReason.NAN_LOGITS), 500, "nan_logits", None),
    (EngineError(ErrorReason.MODEL_ERROR), 500, "model_error", None),
    (EngineError(ErrorReason.CHECKSUM), 500, "checksum", None),
    (RuntimeError("secret detail"), 500, None, None),
    (FinishReason.CANCELLED, 503, "draining", "5"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fault", "status", "code", "retry"), ENGINE_ERRORS)
def test_engine_errors_before_the_first_token_are_statuses(
    harness: Harness, stream: bool, fault: Any, status: int, code: str | None, retry: str | None
) -> None:
    """Catches: an engine error answered with 200, with the wrong status, without Retry-After, or leaking internals."""
    response = harness(script=lambda _p, _s: [fault]).call(CHAT, chat(stream=stream))
    error = response.json()["error"]
    assert (response.status_code, error["code"], response.headers.get("retry-after")) == (status, code, retry)
    assert "secret detail" not in response.text
    if code is None:
        assert response.headers["x-request-id"] in error["message"]


@pytest.mark.parametrize("fault", [EngineError(ErrorReason.MODEL_ERROR, "step failed"), RuntimeError("secret detail")])
def test_error_after_the_headers_is_an_event(harness: Harness, fault: Exception) -> None:
    """Catches: fault B03, an error in mid-stream that breaks the HTTP stream instead of being an error event."""
    stream = events(harness(script=lambda _p, _s: [97, 98, fault]).call(CHAT, chat(stream=True)))
    assert [e["choices"][0]["delta"].get("content") for e in stream[:-1]] == ["", "a", "b"]
    assert set(stream[-1]) == {"error"}
    assert stream[-1]["error"]["type"] == "server_error"
    assert "secret detail" not in json.dumps(stream)


def test_unexpected_errors_are_logged_with_the_request_id(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """Catches: a 500 whose cause cannot be found in the log."""
    response = harness(script=lambda _p, _s: [RuntimeError("secret detail")]).call(CHAT, chat())
    record = next(record for record in caplog.records if response.headers["x-request-id"] in record.getMessage())
    assert record.exc_info is not None
    assert "secret detail" in str(record.exc_info[1])


def test_silent_engine_is_an_error_not_a_hang(harness: Harness) -> None:
    """Catches: a request that waits for ever for an engine that never answers."""

    async def scenario() -> None:
        made = harness(script=lambda _p, _s: [asyncio.Event().wait()], event_timeout_s=0.05)
        response = await made.post(CHAT, chat())
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_timeout")
        assert made.engine.cancelled.qsize() == 1

    asyncio.run(scenario())


def get(made: FrontEndHarness, path: str) -> httpx.Response:
    return asyncio.run(made.get(path))


def test_health_and_unhealthy_engine(harness: Harness) -> None:
    """Catches: health that says ready for a dead or draining engine, or requests submitted to one."""
    made = harness()
    assert (get(made, "/health").status_code, get(made, "/health").json()["status"]) == (200, "ready")
    for state in ("draining", "dead"):
        made.engine.state = EngineHealth(alive=state != "dead", state=state, detail="because")
        assert get(made, "/health").status_code == 503
        assert get(made, "/health").json() == {"status": state, "reason": "because"}
        response = made.call(CHAT, chat())
        assert response.status_code == 503
        assert "because" in response.json()["error"]["message"]
    assert made.engine.prompts == []


def test_models(harness: Harness) -> None:
    """Catches: model objects without the fields that clients read, or a served name with a slash not found."""
    made = harness(served_name="org/tiny")
    listed = get(made, "/v1/models").json()
    assert listed["object"] == "list"
    assert [set(model) >= {"id", "object", "created", "owned_by"} for model in listed["data"]] == [True]
    assert get(made, "/v1/models/org/tiny").json() == listed["data"][0]


def test_long_bodies_are_handled_off_the_event_loop(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a long prompt tokenised on the event loop, which stalls every stream meanwhile; short ones take no
    thread."""
    import threading

    from blink_core.frontend import prepare, schema

    seen: list[bool] = []
    parse = schema.parse_chat

    def spy(body: bytes) -> Any:
        seen.append(threading.current_thread() is threading.main_thread())
        return parse(body)

    monkeypatch.setattr(prepare, "parse_chat", spy)
    made = harness()
    assert made.call(CHAT, chat()).status_code == 200
    assert made.call(CHAT, chat(messages=[{"role": "user", "content": "a" * 50_000}])).status_code == 400
    assert seen == [True, False]
