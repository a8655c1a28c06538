"""What the suite's own HTTP client asked for: ids that join the front end's log, and texts that are to be withheld."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from verification.failures.http_tee import tee

_MOST = 64  # exchanges
_MOST_BODY = 1 << 20


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request of the suite: the front end's id of it (header `x-request-id`), method, path, status."""

    request_id: str
    method: str
    path: str
    status: int
    stream: bool


@dataclass(slots=True)
class HttpLog:
    """The newest exchanges of one test, and every text that they carried to the server."""

    exchanges: deque[Exchange] = field(default_factory=lambda: deque(maxlen=_MOST))
    own: list[str] = field(default_factory=list)  # texts of this test
    earlier: deque[str] = field(default_factory=lambda: deque(maxlen=16 * _MOST))

    bodies: deque[bytearray] = field(default_factory=lambda: deque(maxlen=_MOST))

    def clear(self) -> None:
        """A new test begins. Texts are kept: a log may still hold them."""
        self.earlier.extend(self.secrets())
        self.exchanges.clear()
        self.own.clear()

    def response(self, response: Any) -> None:
        """An httpx event hook, called for each response before its body is read."""
        request = response.request
        sent: Any = None
        with contextlib.suppress(Exception):  # a body that streams or is no JSON has no texts for us
            sent = json.loads(request.content)
            self.own.extend(_strings(sent))
        self.exchanges.append(
            Exchange(
                str(response.headers.get("x-request-id", "")),
                str(request.method),
                str(request.url.path),
                int(response.status_code),
                bool(isinstance(sent, dict) and sent.get("stream")),
            )
        )
        self.bodies.append(bytearray())
        tee(response, self.bodies[-1], _MOST_BODY)

    def secrets(self) -> list[str]:
        """All texts that this test sent and that were answered."""
        while self.bodies:
            self.own.extend(_answers(bytes(self.bodies.popleft())))
        return list(self.own)


def _answers(body: bytes) -> Iterator[str]:
    """Texts of the choices in a whole answer, or in the events of a streamed one, each choice in one piece."""
    events = [line[5:] for line in body.splitlines() if line.startswith(b"data:")] or [body]
    texts: dict[int, str] = {}
    for event in events:
        with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
            for choice in json.loads(event)["choices"]:
                part = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
                texts[choice["index"]] = texts.get(choice["index"], "") + part
    yield from texts.values()


def _strings(value: Any) -> Iterator[str]:
    """The texts of a request body that a user wrote; names of models and roles are not among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            if name not in ("model", "role", "type"):
                yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
