"""The application behind a real uvicorn on a real socket: the `openai` client, vanishing clients, bursts, shutdown."""

from __future__ import annotations

import asyncio
import json
import re
import resource
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from itertools import repeat
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
import uvicorn

from blink_core.abi.enums import ErrorReason, FinishReason
from blink_core.frontend.engine_api import EngineError, EngineLimits, Overloaded
from blink_core.frontend.main import Server, listen, raise_file_limit

if TYPE_CHECKING:
    from tests.unit.frontend.conftest import FrontEndHarness, Harness

DEADLINE_S = 60.0
EOS = 259
JSON_TYPE = "content-type: application/json"
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def served(made: FrontEndHarness, *, grace: int = 5) -> AsyncIterator[tuple[str, Server]]:
    """Serve on a free port of 127.0.0.1 for the duration of the block, like `main` does."""
    listener = listen("127.0.0.1", 0)
    ready = asyncio.Event()
    config = uvicorn.Config(
        made.app, http="httptools", loop="none", log_config=None, access_log=False, timeout_graceful_shutdown=grace
    )
    server = Server(config, ready.set)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await asyncio.wait_for(ready.wait(), DEADLINE_S)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, DEADLINE_S)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario()

    asyncio.run(bounded())


def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S)


def test_openai_client_chat(harness: Harness) -> None:
    """Catches: any response or stream that the official client cannot read unchanged."""

    async def scenario() -> None:
        made = harness(text="Hello, wörld 😀")
        async with served(made) as (url, _), client(url) as api:
            whole = await api.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, seed=1)
            assert whole.choices[0].message.content == "Hello, wörld 😀"
            assert whole.choices[0].finish_reason == "stop"
            assert whole.usage is not None
            stream = await api.chat.completions.create(
                model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert text == "Hello, wörld 😀"
            assert chunks[0].choices[0].delta.role == "assistant"
            assert chunks[-2].choices[0].finish_reason == "stop"
            assert chunks[-1].usage == whole.usage
            assert [model.id async for model in await api.models.list()] == ["tiny"]
            assert (await api.models.retrieve("tiny")).owned_by == "blink"

    run(scenario)


def test_openai_client_completions(harness: Harness) -> None:
    """Catches: text completions, several prompts or their streams unreadable for the official client."""

    async def scenario() -> None:
        made = harness(script=lambda prompt, _params: [*prompt, EOS, FinishReason.EOS])
        async with served(made) as (url, _), client(url) as api:
            whole = await api.completions.create(model="tiny", prompt=["ab", "cd"], max_tokens=9)
            assert [choice.text for choice in whole.choices] == ["ab", "cd"]
            stream = await api.completions.create(model="tiny", prompt=[[97, 98]], max_tokens=9, stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == "ab"

    run(scenario)


def test_openai_client_errors(harness: Harness) -> None:
    """Catches: errors that the official client does not turn into its own exception classes."""

    async def scenario() -> None:
        faults: list[Any] = [
            Overloaded(),
            EngineError(ErrorReason.ENGINE_DEAD),
            EngineError(ErrorReason.MODEL_ERROR, "broke"),
        ]
        made = harness(script=lambda _prompt, _params: [faults.pop(0)])
        async with served(made) as (url, _), client(url) as api:

            async def ask(**fields: Any) -> None:
                await api.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **fields})

            with pytest.raises(openai.RateLimitError) as limited:
                await ask()
            assert limited.value.response.headers["retry-after"] == "1"
            with pytest.raises(openai.InternalServerError) as dead:
                await ask(stream=True)
            assert (dead.value.status_code, dead.value.code) == (503, "engine_dead")
            with pytest.raises(openai.InternalServerError, match="broke"):
                await ask()
            with pytest.raises(openai.NotFoundError):
                await ask(model="other")
            with pytest.raises(openai.BadRequestError) as bad:
                await ask(max_tokens=0)
            assert bad.value.param == "max_tokens"

    run(scenario)


def test_openai_client_sees_an_error_in_mid_stream(harness: Harness) -> None:
    """Catches: fault B03, a broken stream that the client takes for the end of the answer."""

    async def scenario() -> None:
        made = harness(script=lambda _prompt, _params: [97, EngineError(ErrorReason.MODEL_ERROR, "broke")])
        async with served(made) as (url, _), client(url) as api:
            seen = []
            with pytest.raises(openai.APIError, match="broke"):
                async for chunk in await api.completions.create(model="tiny", prompt="x", stream=True):
                    seen.append(chunk.choices[0].text)
            assert seen == ["a"]

    run(scenario)


def test_openai_client_reads_logprobs_and_choices(harness: Harness) -> None:
    """Catches: log probabilities, several choices or cached tokens that the official client's types do not take, whole
    or streamed; Blink's extensions that cannot be sent with it."""

    async def scenario() -> None:
        made = harness(text="hé", cached=2)
        async with served(made) as (url, _), client(url) as api:
            extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "priority": 1, "timeout": 9}
            whole = await api.chat.completions.create(
                model="tiny",
                messages=MESSAGES,
                n=2,
                logprobs=True,
                top_logprobs=2,
                logit_bias={"5": -100},
                presence_penalty=1,
                frequency_penalty=1,
                extra_body=extra,
            )
            assert [choice.index for choice in whole.choices] == [0, 1]
            assert whole.usage is not None
            assert whole.usage.prompt_tokens_details is not None
            assert whole.usage.prompt_tokens_details.cached_tokens == 2
            listed = whole.choices[1].logprobs
            assert listed is not None
            assert listed.content is not None
            assert [(t.token, t.bytes, len(t.top_logprobs)) for t in listed.content] == [
                ("h", [104], 2),
                ("\\xc3", [0xC3], 2),
                ("\\xa9", [0xA9], 2),
            ]
            stream = await api.chat.completions.create(
                model="tiny", messages=MESSAGES, n=2, logprobs=True, top_logprobs=2, stream=True
            )
            seen: dict[int, list[Any]] = {0: [], 1: []}
            async for chunk in stream:
                for choice in chunk.choices:
                    if choice.logprobs is not None:
                        seen[choice.index] += choice.logprobs.content or []
            assert seen == {0: listed.content, 1: listed.content}
            text = await api.completions.create(model="tiny", prompt="x", logprobs=1)
            old = text.choices[0].logprobs
            assert old is not None
            assert (old.tokens, old.text_offset) == (["h", "bytes:\\xc3", "bytes:\\xa9"], [0, 1, 1])
            assert old.token_logprobs == [-0.5] * 3
            assert old.top_logprobs is not None
            assert old.top_logprobs[0] == {"i": -1.0, "h": -0.5}
            chunks = [c async for c in await api.completions.create(model="tiny", prompt="x", logprobs=1, stream=True)]
            tokens = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.tokens or []]
            assert tokens == old.tokens

    run(scenario)


def test_deadline_is_not_repeated_by_the_openai_client(harness: Harness) -> None:
    """Catches: a request whose own deadline passed sent again and again by the client, which repeats 408 and 5xx."""

    async def scenario() -> None:
        made = harness(script=lambda _prompt, _params: [EngineError(ErrorReason.DEADLINE)])
        async with served(made) as (url, _):
            api = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=3, timeout=DEADLINE_S)
            with pytest.raises(openai.InternalServerError) as late:
                await api.completions.create(model="tiny", prompt="x", extra_body={"timeout": 0.001})
            await api.close()
            assert (late.value.status_code, late.value.code, late.value.param) == (504, "deadline", "timeout")
        assert len(made.engine.prompts) == 1

    run(scenario)


def request_bytes(path: str, body: dict[str, Any], *headers: str) -> bytes:
    payload = json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "host: blink", f"content-length: {len(payload)}", JSON_TYPE, *headers]
    return "\r\n".join([*head, "", ""]).encode() + payload


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_before", [0, 3])
@pytest.mark.parametrize("prompts", [1, 3])
def test_vanishing_client_cancels_the_request_at_once(
    harness: Harness, stream: bool, tokens_before: int, prompts: int
) -> None:
    """Catches: a request that keeps its KV pages after its client has gone: before the first token (where nothing is
    sent yet), in mid-stream, and when not streaming at all."""

    async def scenario() -> None:
        reached = asyncio.Event()

        async def wait_for_ever() -> None:
            reached.set()
            await asyncio.Event().wait()

        made = harness(script=lambda _prompt, _params: [*[97] * tokens_before, wait_for_ever(), FinishReason.EOS])
        async with served(made) as (url, _):
            reader, writer = await connect(url)
            body = {"model": "tiny", "prompt": ["hi"] * prompts, "max_tokens": 50, "stream": stream}
            writer.write(request_bytes("/v1/completions", body))
            await reached.wait()
            if stream and tokens_before:
                await reader.readuntil(b"data: ")
            writer.close()
            for _ in range(prompts):
                await made.engine.cancelled.get()  # bounded by the deadline of `run`
            assert made.engine.live == 0

    run(scenario)


def test_client_that_leaves_while_sending_its_body(harness: Harness) -> None:
    """Catches: half a body taken for a whole one, or a handler that waits for the rest."""

    async def scenario() -> None:
        made = harness()
        async with served(made) as (url, _):
            _, writer = await connect(url)
            writer.write(request_bytes("/v1/completions", {"model": "tiny", "prompt": "hi"})[:-5])
            await writer.drain()
            writer.close()
            async with httpx.AsyncClient() as other:
                assert (await other.get(f"{url}/health")).status_code == 200
            assert made.engine.prompts == []

    run(scenario)


def test_body_that_never_arrives_is_a_408(harness: Harness) -> None:
    """Catches: a connection held for ever by a client that announces a body and sends none."""

    async def scenario() -> None:
        made = harness(body_timeout_s=0.05)
        async with served(made) as (url, _):
            reader, writer = await connect(url)
            writer.write(request_bytes("/v1/completions", {"model": "tiny", "prompt": "hi"})[:-5])
            answer = await reader.read()  # until the server closes
            assert answer.startswith(b"HTTP/1.1 408")
            writer.close()

    run(scenario)


def test_client_that_stops_reading_is_cancelled(harness: Harness) -> None:
    """Catches: a stream whose client takes nothing any more held for ever."""

    async def scenario() -> None:
        many = EngineLimits(max_model_len=10**9, vocab_size=262, max_prompt_len=127, slots=8)
        made = harness(script=lambda _prompt, _params: repeat(97), limits=many, send_timeout_s=0.05)
        async with served(made) as (url, _):
            _, writer = await connect(url)
            body = {"model": "tiny", "prompt": "hi", "max_tokens": 10**8, "stream": True}
            writer.write(request_bytes("/v1/completions", body))
            await made.engine.cancelled.get()  # bounded by the deadline of `run`
            writer.transport.abort()

    run(scenario)


@pytest.mark.parametrize("failing", [False, True])
def test_whole_answer_whose_client_stops_reading_is_given_up(harness: Harness, failing: bool) -> None:
    """Catches: a whole answer, or an error, that waits for ever for a client which takes nothing any more."""

    async def scenario() -> None:
        made = harness(script=lambda _p, _q: [Overloaded()] if failing else [97, FinishReason.EOS], send_timeout_s=0.05)
        body = json.dumps({"model": "tiny", "prompt": "hi"}).encode()
        requests = iter([{"type": "http.request", "body": body, "more_body": False}])
        never = asyncio.Event()
        tried: list[str] = []

        async def receive() -> dict[str, object]:
            for request in requests:
                return request
            await never.wait()
            raise AssertionError

        async def send(message: MutableMapping[str, object]) -> None:
            tried.append(str(message["type"]))
            if message["type"] == "http.response.body":
                await never.wait()

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions"}
        scope |= {"headers": [(b"content-type", b"application/json")], "query_string": b"", "root_path": ""}
        await made.app(scope, receive, send)  # bounded by the deadline of `run`
        assert tried == ["http.response.start", "http.response.body"]
        assert made.engine.live == 0

    run(scenario)


def test_oversized_body_gets_its_413_on_a_real_connection(harness: Harness) -> None:
    """Catches: a connection reset instead of the answer, while the client is still writing."""

    async def scenario() -> None:
        made = harness(max_body_bytes=100_000)
        async with served(made) as (url, _), httpx.AsyncClient() as api:
            kind = {"content-type": "application/json"}
            response = await api.post(f"{url}/v1/completions", content=b"x" * 390_000, headers=kind)
            assert response.status_code == 413

    run(scenario)


def test_burst_of_a_thousand_requests(harness: Harness) -> None:
    """Catches: requests of a burst lost, answered twice or hanging; refused ones must be 429, and only those."""

    async def scenario() -> None:
        def script(prompt: list[int], _params: Any) -> list[Any]:
            return [Overloaded()] if prompt[0] % 4 == 0 else [*prompt, EOS, FinishReason.EOS]

        made = harness(script=script)
        raise_file_limit()
        # Two descriptors a connection, client and server in one process. (httpx's pool is quadratic in such a burst.)
        at_once = asyncio.Semaphore(min(1000, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200) // 2))
        async with served(made) as (url, _):

            async def ask(number: int) -> int:
                prompt = [number % 100, 65 + number % 26]
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 9, "stream": number % 2 == 0}
                async with at_once:
                    reader, writer = await connect(url)
                    writer.write(request_bytes("/v1/completions", body, "connection: close"))
                    answer = await reader.read()
                    writer.close()
                status = int(answer.split(b" ", 2)[1])
                if status == 200:
                    texts = re.findall(rb'"text":("(?:[^"\\]|\\.)*")', answer)
                    assert "".join(json.loads(text) for text in texts) == made.tokenizer.decode(prompt)
                return status

            statuses = await asyncio.gather(*(ask(number) for number in range(1000)))
        assert [status == 429 for status in statuses] == [number % 100 % 4 == 0 for number in range(1000)]
        assert set(statuses) == {200, 429}
        assert len(made.engine.prompts) == len(set(made.engine.request_ids)) == 1000
        assert made.engine.live == 0

    run(scenario)


def test_shutdown_lets_a_stream_end(harness: Harness) -> None:
    """Catches: a graceful shutdown that cuts running streams, or that leaves the engine client open."""

    async def scenario() -> None:
        gate, reached = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            reached.set()
            await gate.wait()

        made = harness(script=lambda _prompt, _params: [97, wait(), 98, EOS, FinishReason.EOS])
        async with served(made) as (url, server):
            reader, writer = await connect(url)
            body = {"model": "tiny", "prompt": "hi", "stream": True}
            writer.write(request_bytes("/v1/completions", body))
            await reached.wait()
            server.stop()
            gate.set()
            answer = await reader.read()
            assert answer.count(b"data: ") == 4
            assert b"[DONE]" in answer
            writer.close()
        assert made.engine.closed
        assert made.engine.cancelled.empty()

    run(scenario)


def test_shutdown_cancels_what_outlives_the_grace_period(harness: Harness) -> None:
    """Catches: a shutdown that waits for ever for a stuck request, or that leaves it running on the engine."""

    async def scenario() -> None:
        reached = asyncio.Event()

        async def stuck() -> None:
            reached.set()
            await asyncio.Event().wait()

        made = harness(script=lambda _prompt, _params: [97, stuck(), FinishReason.EOS])
        async with served(made, grace=1) as (url, server):
            _, writer = await connect(url)
            writer.write(request_bytes("/v1/completions", {"model": "tiny", "prompt": "hi", "stream": True}))
            await reached.wait()
            server.stop()
            await made.engine.cancelled.get()
            writer.close()
        assert made.engine.closed

    run(scenario)
