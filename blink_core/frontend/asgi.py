"""HTTP pieces below the API: bodies with limits, responses, watching for a client that leaves (design section 8).

Plain ASGI: Starlette's own responses notice a vanished client only when they next send, and a request that waits for
its first token would keep its KV pages until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from blink_core.frontend.errors import ApiError, shorten
from blink_core.frontend.responses import to_json


class ClientGone(Exception):
    """The client closed its connection, or stopped reading for longer than the send deadline."""


def check_content_type(scope: Scope) -> None:
    """Raises ApiError 415 unless the body is declared as JSON in UTF-8.

    A browser sends other types to foreign servers without asking them first, so taking those as JSON would let any web
    page use a server on its reader's machine.
    """
    declared = Headers(scope=scope).get("content-type", "")
    kind, _, rest = declared.partition(";")
    parameters = dict(part.strip().lower().partition("=")[::2] for part in rest.split(";") if part.strip())
    charset = parameters.get("charset", "utf-8").strip('"')
    if kind.strip().lower() != "application/json" or charset not in ("utf-8", "utf8"):
        found = f"'{shorten(declared)}'" if declared else "missing"
        raise ApiError(
            415,
            f"The Content-Type header is {found}; it must be 'application/json' (in UTF-8).",
            code="unsupported_media_type",
        )


async def read_body(scope: Scope, receive: Receive, *, limit: int, timeout_s: float) -> bytes:
    """The request body. Raises ApiError 413 over `limit` bytes, 408 past the deadline, ClientGone."""
    declared = Headers(scope=scope).get("content-length", "0")
    length = int(declared) if declared.isascii() and declared.isdigit() else 0
    # A client that is still writing would see a reset instead of the answer, so a moderate excess is read and dropped.
    drain_limit = 4 * limit
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while length <= drain_limit:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk: bytes = message.get("body", b"")
                size += len(chunk)
                if size <= limit:
                    chunks.append(chunk)
                if size > drain_limit:
                    break
                if not message.get("more_body", False):
                    if size <= limit:
                        return b"".join(chunks)
                    break
    except TimeoutError:
        raise ApiError(
            408, f"The request body did not arrive within {timeout_s:g} s.", headers={"connection": "close"}
        ) from None
    raise ApiError(
        413,
        f"The request body has {max(size, length)} bytes or more; the limit is {limit}.",
        code="request_too_large",
        headers={"connection": "close"},
    )


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Await `work`, but cancel it, and raise ClientGone, as soon as the client disconnects."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        task.result()
    finally:
        watch.cancel()
        task.cancel()
        # Cancellation is complete, and the engine told, before the request counts as over.
        await asyncio.gather(watch, task, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_with_deadline(send: Send, message: Message, timeout_s: float) -> None:
    """Send one ASGI message. Raises ClientGone if the client does not take it in time."""
    try:
        async with asyncio.timeout(timeout_s):
            await send(message)
    except (TimeoutError, OSError):
        raise ClientGone from None


async def send_json(
    send: Send, status: int, body: Any, headers: dict[str, str] | None = None, *, timeout_s: float
) -> None:
    """Send a whole JSON response. Raises ClientGone."""
    payload = to_json(body)
    raw = [(b"content-type", b"application/json"), (b"content-length", str(len(payload)).encode())]
    raw += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()]
    await send_with_deadline(send, {"type": "http.response.start", "status": status, "headers": raw}, timeout_s)
    await send_with_deadline(send, {"type": "http.response.body", "body": payload}, timeout_s)


async def send_error(send: Send, error: ApiError, *, timeout_s: float) -> None:
    """Raises ClientGone."""
    await send_json(send, error.status, error.body(), error.headers, timeout_s=timeout_s)


class EventStream:
    """A text/event-stream response; the headers go out with the first event."""

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self.started = False

    async def write(self, data: bytes) -> None:
        """Raises ClientGone."""
        if not self.started:
            self.started = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ]
            await send_with_deadline(
                self._send, {"type": "http.response.start", "status": 200, "headers": headers}, self._timeout_s
            )
        body: Message = {"type": "http.response.body", "body": data, "more_body": True}
        await send_with_deadline(self._send, body, self._timeout_s)

    async def end(self) -> None:
        """Raises ClientGone."""
        await send_with_deadline(
            self._send, {"type": "http.response.body", "body": b"", "more_body": False}, self._timeout_s
        )
