"""Request bodies of the OpenAI API, checked before anything else happens (design section 8; faults B).

Parameters that the API defines and Blink does not implement are accepted at the value that means "off" and refused
otherwise, naming the parameter; a name that the API does not define is refused too, because ignoring it would
answer another question than the one asked. Extensions beyond the API: `stop_token_ids`, `ignore_eos`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from blink_core.frontend.errors import ApiError, bad_request

MAX_STOP_STRINGS = 4
MAX_STOP_TOKEN_IDS = 8  # of the slot format (design section 3)
DEFAULT_COMPLETION_TOKENS = 16

_Sized = TypeVar("_Sized", str, list[Any])
_Model = TypeVar("_Model", bound=BaseModel)
Prompt = str | list[str] | list[int] | list[list[int]]


def _one_of(*allowed: object) -> Callable[[object], bool]:
    # `1 == True` in Python, so types are compared too
    return lambda value: any(type(value) is type(choice) and value == choice for choice in allowed)


def _number(*allowed: float) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value in allowed


def _any_of(*types: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, types)


# Parameter -> the values, besides null, that ask for nothing Blink lacks.
_INERT_COMMON: dict[str, Callable[[object], bool]] = {
    "n": _one_of(1),
    "logit_bias": _one_of({}),
    "presence_penalty": _number(0),
    "frequency_penalty": _number(0),
    "user": _any_of(str),
}
_INERT_COMPLETION: dict[str, Callable[[object], bool]] = {
    **_INERT_COMMON,
    "best_of": _one_of(1),
    "echo": _one_of(False),
    "logprobs": _one_of(),
    "suffix": _one_of(),
}
_INERT_CHAT: dict[str, Callable[[object], bool]] = {
    **_INERT_COMMON,
    "audio": _one_of(),
    "function_call": _one_of("none"),
    "functions": _one_of([]),
    "logprobs": _one_of(False),
    "metadata": _any_of(dict),
    "modalities": _one_of(["text"]),
    "parallel_tool_calls": _any_of(bool),
    "prediction": _one_of(),
    "prompt_cache_key": _any_of(str),
    "reasoning_effort": _one_of(),
    "response_format": _one_of({"type": "text"}),
    "safety_identifier": _any_of(str),
    "service_tier": _one_of("auto", "default"),
    "store": _one_of(False),
    "tool_choice": _one_of("none", "auto"),
    "tools": _one_of([]),
    "top_logprobs": _one_of(),
    "verbosity": _one_of("medium"),
    "web_search_options": _one_of(),
}
_INERT_MESSAGE: dict[str, Callable[[object], bool]] = {
    "annotations": _one_of([]),
    "audio": _one_of(),
    "function_call": _one_of(),
    "refusal": _one_of(),
    "tool_call_id": _one_of(),
    "tool_calls": _one_of([]),
}


def _drop_inert(data: Any, inert: Mapping[str, Callable[[object], bool]], where: str = "") -> Any:
    """Return `data` without the parameters in `inert`. Raises ApiError if one has a value that Blink lacks."""
    if not isinstance(data, dict):
        return data
    for name, harmless in inert.items():
        value = data.get(name)
        if value is not None and not harmless(value):
            param = where + name
            raise bad_request(
                f"Unsupported value for '{param}': {_shown(value)} is not supported by this server.",
                param=param,
                code="unsupported_value",
            )
    return {key: value for key, value in data.items() if key not in inert}


def _shown(value: object) -> str:
    text = pydantic_core.to_json(value, inf_nan_mode="constants").decode()
    return text if len(text) <= 100 else text[:97] + "..."


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _Request(BaseModel):
    """What both kinds of completion share. Types are strict: no string passes for a number."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None

    @field_validator("temperature")
    @classmethod
    def _temperature(cls, value: float | None) -> float | None:
        return _within("temperature", value, 0.0, 2.0)

    @field_validator("top_p")
    @classmethod
    def _top_p(cls, value: float | None) -> float | None:
        return _within("top_p", value, 0.0, 1.0)

    @field_validator("seed")
    @classmethod
    def _seed(cls, value: int | None) -> int | None:
        if value is not None and not -(2**63) <= value < 2**64:
            raise _invalid("seed", f"{value} does not fit in 64 bits")
        return value

    @field_validator("max_tokens")
    @classmethod
    def _max_tokens(cls, value: int | None) -> int | None:
        return _at_least_one("max_tokens", value)

    @field_validator("stop", mode="before")
    @classmethod
    def _stop(cls, value: object) -> object:
        if value is None or isinstance(value, str):
            strings = [] if value is None else [value]
        elif isinstance(value, list) and all(isinstance(item, str) for item in value):
            strings = value
        else:
            raise _invalid("stop", "expected a string or an array of strings")
        if len(strings) > MAX_STOP_STRINGS:
            raise _invalid("stop", f"{len(strings)} stop strings, the limit is {MAX_STOP_STRINGS}")
        if "" in strings:
            raise _invalid("stop", "a stop string must not be empty")
        return strings

    @field_validator("stop_token_ids")
    @classmethod
    def _stop_token_ids(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and len(value) > MAX_STOP_TOKEN_IDS:
            raise _invalid("stop_token_ids", f"{len(value)} ids, the limit is {MAX_STOP_TOKEN_IDS}")
        return value

    def model_post_init(self, _context: Any) -> None:
        if self.stream_options is not None and not self.stream:
            raise _invalid("stream_options", "only allowed when 'stream' is true")

    @property
    def stop_strings(self) -> list[str]:
        return self.stop if isinstance(self.stop, list) else []

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(_Request):
    """Body of POST /v1/completions."""

    prompt: Prompt

    @field_validator("prompt", mode="plain")
    @classmethod
    def _prompt(cls, value: object) -> Prompt:
        return check_prompt(value)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry for each choice."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class ChatMessage(BaseModel):
    """One message. `content` given as text parts becomes one string, the parts joined by newlines."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: str
    name: str | None = None


class ChatRequest(_Request):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None

    @field_validator("max_completion_tokens")
    @classmethod
    def _max_completion_tokens(cls, value: int | None) -> int | None:
        return _at_least_one("max_completion_tokens", value)

    @field_validator("messages", mode="before")
    @classmethod
    def _messages(cls, value: object) -> object:
        if not isinstance(value, list):
            raise _invalid("messages", "expected an array of messages")
        if not value:
            raise _invalid("messages", "the array is empty; at least one message is needed")
        return [_message(item, f"messages[{index}]") for index, item in enumerate(value)]

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise _invalid("max_tokens", "give either 'max_tokens' or 'max_completion_tokens', not both")


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises ApiError."""
    return _validate(CompletionRequest, _drop_inert(parse_json(body), _INERT_COMPLETION))


def parse_chat(body: bytes) -> ChatRequest:
    """Raises ApiError."""
    return _validate(ChatRequest, _drop_inert(parse_json(body), _INERT_CHAT))


def parse_json(body: bytes) -> Any:
    """Strict JSON: no NaN, no invalid UTF-8, no lone surrogate, bounded nesting. Raises ApiError 400."""
    try:
        data = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"We could not parse the JSON body of your request: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise bad_request("The body must be a JSON object.", code="invalid_json")
    return data


def check_prompt(value: object) -> Prompt:
    """Text, token ids, or a non-empty array of one of them; never empty. Raises ApiError 400."""
    if isinstance(value, str):
        return _not_empty(value)
    if isinstance(value, list):
        if all(isinstance(item, str) for item in value):
            return [_not_empty(item) for item in _not_empty(value)]
        if _are_ids(value):
            return value
        if all(isinstance(item, list) and _are_ids(item) for item in value):
            return [_not_empty(item) for item in value]
    raise _invalid("prompt", "expected a string, an array of strings, an array of token ids, or an array of these")


def _are_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)


def _not_empty(value: _Sized) -> _Sized:
    if not value:
        raise _invalid("prompt", "the prompt is empty")
    return value


def _message(item: object, where: str) -> object:
    if not isinstance(item, dict):
        return item
    if item.get("role") in ("tool", "function"):
        raise bad_request(
            f"Unsupported value for '{where}.role': tools are not supported by this server.",
            param=f"{where}.role",
            code="unsupported_value",
        )
    message: dict[str, Any] = _drop_inert(item, _INERT_MESSAGE, f"{where}.")
    return {**message, "content": _content(message.get("content"), f"{where}.content")}


def _content(value: object, where: str) -> object:
    if value is None:
        raise _invalid(where, "the content is missing")
    if not isinstance(value, list):
        return value
    if not value:
        raise _invalid(where, "the array of content parts is empty")
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise bad_request(
                f"Unsupported content part type {_shown(kind)} in '{where}[{index}]'; supported: \"text\".",
                param=f"{where}[{index}].type",
                code="unsupported_content_part",
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise _invalid(f"{where}[{index}].text", "expected a string")
        texts.append(text)
    return "\n".join(texts)


def _validate(model: type[_Model], data: Any) -> _Model:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _from_pydantic(error) from None


def _from_pydantic(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    param = ""
    for part in first["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else part
    if first["type"] == "missing":
        return bad_request(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return bad_request(f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return bad_request(f"Invalid value for '{param}': {first['msg']}.", param=param, code=code)


def _invalid(param: str, why: str) -> ApiError:
    return bad_request(f"Invalid value for '{param}': {why}.", param=param, code="invalid_value")


def _within(param: str, value: float | None, low: float, high: float) -> float | None:
    if value is not None and not low <= value <= high:  # also false for NaN
        raise _invalid(param, f"{value} is outside the range from {low:g} to {high:g}")
    return value


def _at_least_one(param: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise _invalid(param, f"{value} is less than the minimum of 1")
    return value
