"""The OpenAI-compatible HTTP application (design section 8).

Routes: POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /v1/models/{id}, GET /health.
An error before the first engine event is an HTTP status with an OpenAI error object; after it, an SSE event with one
(fault B03). The headers of a stream therefore wait for the first engine event.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blink_core.frontend.asgi import (
    ClientGone,
    EventStream,
    check_content_type,
    read_body,
    send_error,
    send_json,
    until_disconnect,
)
from blink_core.frontend.chat import ChatTemplate
from blink_core.frontend.engine_api import EngineClient, EngineError, Overloaded
from blink_core.frontend.errors import ApiError, from_engine, internal_error, shorten, unavailable
from blink_core.frontend.generation import ChoiceEnd, Piece, generate_all, generate_choice
from blink_core.frontend.prepare import PreparedRequest, Preparer, PromptPlan, model_not_found
from blink_core.frontend.responses import DONE, Answer, ChatShape, CompletionShape, Shape, Usage, sse, usage
from blink_core.frontend.stop import StopMatcher
from blink_core.frontend.tokenizer import Tokenizer

log = logging.getLogger("blink.frontend")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Limits and deadlines of the HTTP side. Bytes and seconds; `max_choices` bounds one request's choices,
    that is its prompts times n.

    max_body_bytes 0 means: enough for any prompt the model takes, as text or ids, ten times over.
    """

    served_name: str
    eos_token_ids: tuple[int, ...] = ()
    max_body_bytes: int = 0
    max_choices: int = 64
    body_timeout_s: float = 60.0
    send_timeout_s: float = 60.0
    event_timeout_s: float = 600.0

    def body_limit(self, max_model_len: int) -> int:
        return self.max_body_bytes or max(4 * 2**20, 96 * max_model_len)


class FrontEnd:
    """Endpoints over one engine client and one tokeniser. Raises ChatTemplateError for a faulty chat template."""

    def __init__(self, engine: EngineClient, tokenizer: Tokenizer, config: ServerConfig) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._config = config
        self._created = int(time.time())
        source = tokenizer.chat_template
        self._preparer = Preparer(
            tokenizer,
            None if source is None else ChatTemplate(source, tokenizer.special_tokens),
            engine.limits,
            served_name=config.served_name,
            eos_token_ids=config.eos_token_ids,
            max_choices=config.max_choices,
        )

    def close(self) -> None:
        self._preparer.close()

    async def health(self, _request: Request) -> Response:
        health = self._engine.health()
        ready = health.alive and health.state == "ready"
        body = {"status": health.state, "reason": health.detail}
        return JSONResponse(body, status_code=200 if ready else 503)

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["id"]
        if name != self._config.served_name:
            error = model_not_found(name, self._config.served_name)
            return JSONResponse(error.body(), status_code=error.status)
        return JSONResponse(self._model())

    def _model(self) -> dict[str, object]:
        return {
            "id": self._config.served_name,
            "object": "model",
            "created": self._created,
            "owned_by": "blink",
            "max_model_len": self._engine.limits.max_model_len,
        }

    async def chat_completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(scope, receive, send, self._preparer.chat, ChatShape, "chatcmpl")

    async def completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(scope, receive, send, self._preparer.completion, CompletionShape, "cmpl")

    async def _serve(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        prepare: Callable[[bytes], Awaitable[PreparedRequest]],
        shape_type: type[ChatShape] | type[CompletionShape],
        prefix: str,
    ) -> None:
        config = self._config
        request_id: str = scope["blink.request_id"]
        limit = config.body_limit(self._engine.limits.max_model_len)
        check_content_type(scope)
        body = await read_body(scope, receive, limit=limit, timeout_s=config.body_timeout_s)

        async def work() -> None:
            request = await prepare(body)
            self._check_health()
            shape = shape_type(
                f"{prefix}-{request_id}",
                config.served_name,
                include_usage=request.include_usage,
                token_bytes=None if request.alternatives is None else self._tokenizer.token_bytes,
            )
            items = generate_all(request.plans, self._source(request, request_id))
            try:
                if request.stream:
                    await self._stream(send, request, shape, items, request_id)
                else:
                    await self._whole(send, request, shape, items)
            finally:
                await items.aclose()

        await until_disconnect(receive, work())

    def _check_health(self) -> None:
        health = self._engine.health()
        if not health.alive:
            raise unavailable(f"The engine is {health.state}: {health.detail}", code="engine_dead")
        if health.state == "draining":
            raise unavailable(f"The engine is draining: {health.detail}", code="draining", retry_after_s=5.0)

    def _source(
        self, request: PreparedRequest, request_id: str
    ) -> Callable[[int, PromptPlan], AsyncGenerator[Piece | ChoiceEnd, None]]:
        def source(choice: int, plan: PromptPlan) -> AsyncGenerator[Piece | ChoiceEnd, None]:
            return generate_choice(
                self._engine,
                plan,
                choice=choice,
                request_id=request_id if len(request.plans) == 1 else f"{request_id}-{choice}",
                detokenizer=self._tokenizer.detokenizer(),
                stop=StopMatcher(request.stop),
                event_timeout_s=self._config.event_timeout_s,
            )

        return source

    async def _whole(
        self, send: Send, request: PreparedRequest, shape: Shape, items: AsyncIterator[Piece | ChoiceEnd]
    ) -> None:
        answers = [Answer() for _ in request.plans]
        async for item in items:
            answers[item.choice].add(item)
        whole = shape.whole(answers, _usage(request, answers))
        await send_json(send, 200, whole, timeout_s=self._config.send_timeout_s)

    async def _stream(
        self,
        send: Send,
        request: PreparedRequest,
        shape: Shape,
        items: AsyncIterator[Piece | ChoiceEnd],
        request_id: str,
    ) -> None:
        stream = EventStream(send, self._config.send_timeout_s)
        ended = [Answer() for _ in request.plans]  # only the ends are kept
        try:
            async for item in items:
                if not stream.started:
                    for chunk in shape.first_chunks(len(request.plans)):
                        await stream.write(sse(chunk))
                if item.text or item.logprobs:
                    await stream.write(sse(shape.text_chunk(item)))
                if isinstance(item, ChoiceEnd):
                    await stream.write(sse(shape.last_chunk(item.choice, item.finish_reason)))
                    ended[item.choice].add(item)
            if request.include_usage:
                await stream.write(sse(shape.usage_chunk(_usage(request, ended))))
            await stream.write(DONE)
        except ClientGone:
            raise
        except Exception as error:
            if not stream.started:
                raise
            await stream.write(sse(_as_api_error(error, request_id).body()))
        await stream.end()


def _usage(request: PreparedRequest, answers: list[Answer]) -> Usage:
    cached = request.cached_tokens([answer.cached_tokens for answer in answers])
    return usage(request.prompt_tokens, sum(answer.completion_tokens for answer in answers), cached)


class _Endpoint:
    """A plain ASGI endpoint from which no exception leaves without an OpenAI error object."""

    def __init__(self, app: ASGIApp, send_timeout_s: float) -> None:
        self._app = app
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id: str = scope["blink.request_id"]
        started = False

        async def tracked_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            try:
                await self._app(scope, receive, tracked_send)
            except ClientGone:
                raise
            except Exception as error:
                if started:  # too late for a status; the server closes the connection
                    raise
                await send_error(tracked_send, _as_api_error(error, request_id), timeout_s=self._send_timeout_s)
        except ClientGone:
            log.info("request %s: the client disconnected", request_id)


class _RequestIds:
    """Gives each request an id, in the scope and in the `x-request-id` header of its response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        scope["blink.request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)


def _as_api_error(error: Exception, request_id: str) -> ApiError:
    """Known errors as they are; anything else is logged with its traceback and shown as a 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineError | Overloaded):
        log.warning("request %s: %s", request_id, error)
        return from_engine(error)
    log.error("request %s failed unexpectedly", request_id, exc_info=error)
    return internal_error(request_id)


async def _http_exception(request: Request, error: Exception) -> Response:
    """404 and 405 from routing."""
    assert isinstance(error, HTTPException)
    what = {404: "Unknown path", 405: "Method not allowed for"}.get(error.status_code, error.detail)
    api_error = ApiError(error.status_code, f"{what}: {shorten(request.method)} {shorten(request.url.path)}")
    return JSONResponse(api_error.body(), status_code=error.status_code, headers=error.headers)


async def _unexpected(request: Request, error: Exception) -> Response:
    api_error = _as_api_error(error, request.scope["blink.request_id"])
    return JSONResponse(api_error.body(), status_code=api_error.status, headers=api_error.headers)


def create_app(engine: EngineClient, tokenizer: Tokenizer, config: ServerConfig) -> ASGIApp:
    """The application. Its lifespan ends with `engine.close()`. Raises ChatTemplateError."""
    front_end = FrontEnd(engine, tokenizer, config)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            front_end.close()
            await engine.close()

    routes = [
        Route("/v1/chat/completions", _Endpoint(front_end.chat_completions, config.send_timeout_s), methods=["POST"]),
        Route("/v1/completions", _Endpoint(front_end.completions, config.send_timeout_s), methods=["POST"]),
        Route("/v1/models", front_end.models, methods=["GET"]),
        Route("/v1/models/{id:path}", front_end.model, methods=["GET"]),
        Route("/health", front_end.health, methods=["GET"]),
    ]
    handlers = {HTTPException: _http_exception, Exception: _unexpected}
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    # A path with a slash too many is unknown: a redirect would lose the body of a POST with many clients.
    app.router.redirect_slashes = False
    return _RequestIds(app)
