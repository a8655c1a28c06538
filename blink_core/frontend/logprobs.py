"""Log probabilities of shown tokens: aligned with text that is held back or cut, and in the OpenAI API's two shapes.

A token is listed with the chunk that shows the last character it takes part in, and not at all if a stop string took
its first one away: so a stream and a whole answer list the same tokens, and those of the text that was sent. Tokens
that end an answer (end of sequence, stop ids) have no text and are not listed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from blink_core.frontend.engine_api import TokenOutput

LEAST = -9999.0  # what the OpenAI API shows for log(0), which JSON cannot hold


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One listed token. top: (id, logprob), most probable first. offset: where in its choice's text it begins."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int


class LogprobQueue:
    """Holds the tokens of one choice back as long as their text."""

    def __init__(self) -> None:
        self._made = 0  # characters that the detokeniser has given
        self._open: list[TokenLogprob] = []  # tokens whose text is not complete
        self._closed: deque[tuple[int, TokenLogprob]] = deque()  # (end of its text, token)

    def add(self, output: TokenOutput, characters: int) -> None:
        """A token that was pushed into the detokeniser, which gave `characters` characters for it."""
        self._open.append(TokenLogprob(output.token, output.logprob, output.top_logprobs, self._made))
        self.text(characters)

    def text(self, characters: int) -> None:
        """The detokeniser gave `characters` more: the text of all tokens so far is complete, if it gave any."""
        if characters:
            self._made += characters
            self._closed += [(self._made, token) for token in self._open]
            self._open.clear()

    def release(self, shown: int) -> tuple[TokenLogprob, ...]:
        """Tokens not released yet whose whole text is within the first `shown` characters."""
        ready = []
        while self._closed and self._closed[0][0] <= shown:
            ready.append(self._closed.popleft()[1])
        return tuple(ready)

    def cut(self, shown: int) -> tuple[TokenLogprob, ...]:
        """The answer ends after `shown` characters, where a stop string began: the rest of the tokens before it."""
        return tuple(token for token in self._rest() if token.offset < shown)

    def finish(self) -> tuple[TokenLogprob, ...]:
        """The answer ends and all its text is shown: the rest of the tokens."""
        return tuple(self._rest())

    def _rest(self) -> list[TokenLogprob]:
        return [*(token for _, token in self._closed), *self._open]


TokenBytes = Callable[[int], bytes]


def chat_logprobs(tokens: Sequence[TokenLogprob], token_bytes: TokenBytes) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion or chunk."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(token)
        return {"token": _text(raw), "logprob": _finite(logprob), "bytes": list(raw)}

    content = [
        {**entry(t.token, t.logprob), "top_logprobs": [entry(token, logprob) for token, logprob in t.top]}
        for t in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[TokenLogprob], token_bytes: TokenBytes) -> dict[str, Any]:
    """`choices[].logprobs` of a text completion or chunk. The token itself is always among its alternatives, so there
    may be one more than asked for; `text_offset` counts characters of the choice's own text."""

    def text(token: int) -> str:
        raw = token_bytes(token)
        shown = _text(raw)
        return shown if _is_text(raw) else f"bytes:{shown}"

    tops = []
    for t in tokens:
        top: dict[str, float] = {}
        for token, logprob in (*t.top, (t.token, t.logprob)):
            top.setdefault(text(token), _finite(logprob))  # of two ids with one spelling the more probable
        tops.append(top)
    return {
        "text_offset": [t.offset for t in tokens],
        "token_logprobs": [_finite(t.logprob) for t in tokens],
        "tokens": [text(t.token) for t in tokens],
        "top_logprobs": tops,
    }


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _text(raw: bytes) -> str:
    """UTF-8, or each byte as \\xNN where a token is only part of a character."""
    return raw.decode("utf-8") if _is_text(raw) else "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST
