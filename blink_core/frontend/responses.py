"""Response bodies and SSE chunks in the exact shapes of the OpenAI API (design section 8)."""

from __future__ import annotations

import time
from typing import Any, Protocol

import pydantic_core

DONE = b"data: [DONE]\n\n"


def to_json(value: Any) -> bytes:
    return pydantic_core.to_json(value)


def sse(value: Any) -> bytes:
    """One server-sent event; JSON escapes newlines, so it is always one `data:` line."""
    return b"data: " + pydantic_core.to_json(value) + b"\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class Shape(Protocol):
    """How one kind of response looks."""

    def first_chunks(self, choices: int) -> list[dict[str, Any]]: ...
    def text_chunk(self, choice: int, text: str) -> dict[str, Any]: ...
    def last_chunk(self, choice: int, finish_reason: str) -> dict[str, Any]: ...
    def usage_chunk(self, counts: dict[str, int]) -> dict[str, Any]: ...
    def whole(self, texts: list[str], reasons: list[str], counts: dict[str, int]) -> dict[str, Any]: ...


class _Shape:
    """Fields that all chunks of one response share. With `include_usage` every chunk has a `usage` of null but one."""

    def __init__(self, id: str, model: str, *, include_usage: bool) -> None:
        self._id = id
        self._created = int(time.time())
        self._model = model
        self._include_usage = include_usage

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

    def text_chunk(self, choice: int, text: str) -> dict[str, Any]:
        return self._delta(choice, {"content": text}, None)

    def last_chunk(self, choice: int, finish_reason: str) -> dict[str, Any]:
        return self._delta(choice, {}, finish_reason)

    def usage_chunk(self, counts: dict[str, int]) -> dict[str, Any]:
        return {**self._chunk("chat.completion.chunk", []), "usage": counts}

    def whole(self, texts: list[str], reasons: list[str], counts: dict[str, int]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": reason,
            }
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": counts}

    def _delta(self, choice: int, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        entry = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._chunk("chat.completion.chunk", [entry])


class CompletionShape(_Shape):
    def first_chunks(self, choices: int) -> list[dict[str, Any]]:
        return []

    def text_chunk(self, choice: int, text: str) -> dict[str, Any]:
        return self._chunk("text_completion", [self._entry(choice, text, None)])

    def last_chunk(self, choice: int, finish_reason: str) -> dict[str, Any]:
        return self._chunk("text_completion", [self._entry(choice, "", finish_reason)])

    def usage_chunk(self, counts: dict[str, int]) -> dict[str, Any]:
        return {**self._chunk("text_completion", []), "usage": counts}

    def whole(self, texts: list[str], reasons: list[str], counts: dict[str, int]) -> dict[str, Any]:
        pairs = enumerate(zip(texts, reasons, strict=True))
        choices = [self._entry(index, text, reason) for index, (text, reason) in pairs]
        return {**self._head("text_completion"), "choices": choices, "usage": counts}

    @staticmethod
    def _entry(choice: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {"index": choice, "text": text, "logprobs": None, "finish_reason": finish_reason}
