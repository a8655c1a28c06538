"""Response bodies and SSE chunks in the exact shapes of the OpenAI API (design section 8)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pydantic_core

from blink_core.frontend.generation import ChoiceEnd, Piece
from blink_core.frontend.logprobs import TokenBytes, TokenLogprob, chat_logprobs, completion_logprobs

DONE = b"data: [DONE]\n\n"


def to_json(value: Any) -> bytes:
    return pydantic_core.to_json(value)


def sse(value: Any) -> bytes:
    """One server-sent event; JSON escapes newlines, so it is always one `data:` line."""
    return b"data: " + pydantic_core.to_json(value) + b"\n\n"


Usage = dict[str, Any]


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> Usage:
    """`prompt_tokens_details` is null where the engine did not say how much of the prompt it found in its cache."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": None if cached_tokens is None else {"cached_tokens": cached_tokens},
    }


@dataclass(slots=True)
class Answer:
    """One choice of a whole response, as it grows."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    completion_tokens: int = 0
    cached_tokens: int | None = None

    def add(self, item: Piece | ChoiceEnd) -> None:
        self.texts.append(item.text)
        self.logprobs += item.logprobs
        if isinstance(item, ChoiceEnd):
            self.finish_reason, self.completion_tokens = item.finish_reason, item.completion_tokens
            self.cached_tokens = item.cached_tokens

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Shape(Protocol):
    """How one kind of response looks."""

    def first_chunks(self, choices: int) -> list[dict[str, Any]]: ...
    def text_chunk(self, item: Piece | ChoiceEnd) -> dict[str, Any]: ...
    def last_chunk(self, choice: int, finish_reason: str) -> dict[str, Any]: ...
    def usage_chunk(self, counts: Usage) -> dict[str, Any]: ...
    def whole(self, answers: list[Answer], counts: Usage) -> dict[str, Any]: ...


class _Shape:
    """Fields that all chunks of one response share. With `include_usage` every chunk has a `usage` of null but one.

    token_bytes: spells tokens; None if no log probabilities are wanted.
    """

    def __init__(self, id: str, model: str, *, include_usage: bool, token_bytes: TokenBytes | None) -> None:
        self._id = id
        self._created = int(time.time())
        self._model = model
        self._include_usage = include_usage
        self._token_bytes = token_bytes

    def _head(self, object: str) -> dict[str, Any]:
        return {"id": self._id, "object": object, "created": self._created, "model": self._model}

    def _chunk(self, object: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head(object), "choices": choices}
        if self._include_usage:
            chunk["usage"] = None
        return chunk


class ChatShape(_Shape):
    def first_chunks(self, choices: int) -> list[dict[str, Any]]:
        return [self._delta(choice, {"role": "assistant", "content": ""}, None) for choice in range(choices)]

    def text_chunk(self, item: Piece | ChoiceEnd) -> dict[str, Any]:
        return self._delta(item.choice, {"content": item.text}, None, item.logprobs)

    def last_chunk(self, choice: int, finish_reason: str) -> dict[str, Any]:
        return self._delta(choice, {}, finish_reason)

    def usage_chunk(self, counts: Usage) -> dict[str, Any]:
        return {**self._chunk("chat.completion.chunk", []), "usage": counts}

    def whole(self, answers: list[Answer], counts: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": self._logprobs(answer.logprobs),
                "finish_reason": answer.finish_reason,
            }
            for index, answer in enumerate(answers)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": counts}

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return None if self._token_bytes is None else chat_logprobs(tokens, self._token_bytes)

    def _delta(
        self,
        choice: int,
        delta: dict[str, Any],
        finish_reason: str | None,
        tokens: Sequence[TokenLogprob] = (),
    ) -> dict[str, Any]:
        logprobs = self._logprobs(tokens) if tokens else None
        entry = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._chunk("chat.completion.chunk", [entry])


class CompletionShape(_Shape):
    def first_chunks(self, choices: int) -> list[dict[str, Any]]:
        return []

    def text_chunk(self, item: Piece | ChoiceEnd) -> dict[str, Any]:
        logprobs = self._logprobs(item.logprobs) if item.logprobs else None
        return self._chunk("text_completion", [self._entry(item.choice, item.text, logprobs, None)])

    def last_chunk(self, choice: int, finish_reason: str) -> dict[str, Any]:
        return self._chunk("text_completion", [self._entry(choice, "", None, finish_reason)])

    def usage_chunk(self, counts: Usage) -> dict[str, Any]:
        return {**self._chunk("text_completion", []), "usage": counts}

    def whole(self, answers: list[Answer], counts: Usage) -> dict[str, Any]:
        choices = [
            self._entry(index, answer.text, self._logprobs(answer.logprobs), answer.finish_reason)
            for index, answer in enumerate(answers)
        ]
        return {**self._head("text_completion"), "choices": choices, "usage": counts}

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return None if self._token_bytes is None else completion_logprobs(tokens, self._token_bytes)

    @staticmethod
    def _entry(choice: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
        return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
