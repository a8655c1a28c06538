"""Request bodies of the OpenAI API, checked before anything else happens (design section 8; faults B).

Parameters that the API defines and Blink does not implement are accepted at the value that means "off" and refused
otherwise, naming the parameter; a name that the API does not define is refused too, because ignoring it would
answer another question than the one asked.

Extensions beyond the API, named and meant as in vLLM: `top_k`, `min_p`, `repetition_penalty`, `min_tokens`,
`stop_token_ids`, `ignore_eos`, `priority` (0 to 3, 0 is served first). Blink's own: `timeout`, seconds after which the
engine ends the request (HTTP 504), and `prefix_cache`, false to neither use nor fill it.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from blink_core.abi.definition import MAX_LOGPROBS, PRIORITIES
from blink_core.frontend.errors import ApiError, bad_request, shorten, shown
from blink_core.frontend.json_body import parse_json
from blink_core.frontend.unsupported import CHAT, COMPLETION, MESSAGE, drop_inert

MAX_STOP_STRINGS = 4
MAX_STOP_LENGTH = 1024  # characters; matching takes memory by the character
MAX_STOP_TOKEN_IDS = 8  # of the slot format (design section 3)
DEFAULT_COMPLETION_TOKENS = 16
MAX_TIMEOUT_S = 86_400.0
_ID = re.compile(r"0|[1-9][0-9]*")

_Sized = TypeVar("_Sized", str, list[Any])
_Model = TypeVar("_Model", bound=BaseModel)
Prompt = str | list[str] | list[int] | list[list[int]]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _Request(BaseModel):
    """What both kinds of completion share. Types are strict: no string passes for a number."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    timeout: float | None = None
    prefix_cache: bool | None = None

    @field_validator("n")
    @classmethod
    def _n(cls, value: int | None) -> int | None:
        return _at_least("n", value, 1)

    @field_validator("temperature")
    @classmethod
    def _temperature(cls, value: float | None) -> float | None:
        return _within("temperature", value, 0.0, 2.0)

    @field_validator("top_p")
    @classmethod
    def _top_p(cls, value: float | None) -> float | None:
        return _within("top_p", value, 0.0, 1.0)

    @field_validator("min_p")
    @classmethod
    def _min_p(cls, value: float | None) -> float | None:
        return _within("min_p", value, 0.0, 1.0)

    @field_validator("top_k")
    @classmethod
    def _top_k(cls, value: int | None) -> int | None:
        return _at_least("top_k", value, -1)  # 0 and -1 keep all

    @field_validator("repetition_penalty")
    @classmethod
    def _repetition_penalty(cls, value: float | None) -> float | None:
        return _within("repetition_penalty", value, 0.01, 100.0)

    @field_validator("presence_penalty")
    @classmethod
    def _presence_penalty(cls, value: float | None) -> float | None:
        return _within("presence_penalty", value, -2.0, 2.0)

    @field_validator("frequency_penalty")
    @classmethod
    def _frequency_penalty(cls, value: float | None) -> float | None:
        return _within("frequency_penalty", value, -2.0, 2.0)

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _logit_bias(cls, value: object) -> object:
        return None if value is None else check_logit_bias(value)

    @field_validator("seed")
    @classmethod
    def _seed(cls, value: int | None) -> int | None:
        if value is not None and not -(2**63) <= value < 2**64:
            raise _invalid("seed", f"{shown(value)} does not fit in 64 bits")
        return value

    @field_validator("max_tokens")
    @classmethod
    def _max_tokens(cls, value: int | None) -> int | None:
        return _at_least("max_tokens", value, 1)

    @field_validator("min_tokens")
    @classmethod
    def _min_tokens(cls, value: int | None) -> int | None:
        return _at_least("min_tokens", value, 0)

    @field_validator("priority")
    @classmethod
    def _priority(cls, value: int | None) -> int | None:
        if value is not None and not 0 <= value < PRIORITIES:
            raise _invalid("priority", f"{shown(value)} is outside the range from 0 to {PRIORITIES - 1}")
        return value

    @field_validator("timeout")
    @classmethod
    def _timeout(cls, value: float | None) -> float | None:
        return _within("timeout", value, 1e-6, MAX_TIMEOUT_S)

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
        longest = max(map(len, strings), default=0)
        if longest > MAX_STOP_LENGTH:
            raise _invalid("stop", f"a stop string has {longest} characters, the limit is {MAX_STOP_LENGTH}")
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
    logprobs: int | None = None
    best_of: int | None = None

    @field_validator("logprobs")
    @classmethod
    def _logprobs(cls, value: int | None) -> int | None:
        return _alternatives("logprobs", value)

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        n = 1 if self.n is None else self.n
        if self.best_of is not None and self.best_of != n:
            raise bad_request(
                f"Unsupported value for 'best_of': {shown(self.best_of)} is not supported by this server; only the "
                f"value of 'n', {shown(n)}, is.",
                param="best_of",
                code="unsupported_value",
            )

    @property
    def alternatives(self) -> int | None:
        """Most probable ids wanted with each token; None if no log probabilities are wanted."""
        return self.logprobs

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
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _top_logprobs(cls, value: int | None) -> int | None:
        return _alternatives("top_logprobs", value)

    @property
    def alternatives(self) -> int | None:
        """Most probable ids wanted with each token; None if no log probabilities are wanted."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @field_validator("max_completion_tokens")
    @classmethod
    def _max_completion_tokens(cls, value: int | None) -> int | None:
        return _at_least("max_completion_tokens", value, 1)

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
        if self.top_logprobs is not None and not self.logprobs:
            raise _invalid("top_logprobs", "only allowed when 'logprobs' is true")


def parse_completion(body: bytes) -> CompletionRequest:
    """Raises ApiError."""
    return _validate(CompletionRequest, drop_inert(parse_json(body), COMPLETION))


def parse_chat(body: bytes) -> ChatRequest:
    """Raises ApiError."""
    return _validate(ChatRequest, drop_inert(parse_json(body), CHAT))


def check_logit_bias(value: object) -> dict[int, float]:
    """{"token id": bias} with biases from -100 to 100; ids as plain decimal numbers, so that no two keys name one id.

    Raises ApiError 400.
    """
    if not isinstance(value, dict):
        raise _invalid("logit_bias", "expected an object that maps token ids to biases")
    result = {}
    for key, bias in value.items():
        if not isinstance(key, str) or not _ID.fullmatch(key) or len(key) > 10:
            raise _invalid("logit_bias", f"{shown(key)} is not a token id (a decimal number without sign or leading 0)")
        if not isinstance(bias, int | float) or isinstance(bias, bool):
            raise _invalid(f"logit_bias.{key}", f"{shown(bias)} is not a number")
        if not -100 <= bias <= 100:  # also for what is not finite
            raise _invalid(f"logit_bias.{key}", f"{shown(bias)} is outside the range from -100 to 100")
        result[int(key)] = float(bias)
    return result


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
    message: dict[str, Any] = drop_inert(item, MESSAGE, f"{where}.")
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
                f"Unsupported content part type {shown(kind)} in '{where}[{index}]'; supported: \"text\".",
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
    param = shorten(param)
    if first["type"] == "missing":
        return bad_request(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return bad_request(f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return bad_request(f"Invalid value for '{param}': {shorten(first['msg'], 300)}.", param=param, code=code)


def _invalid(param: str, why: str) -> ApiError:
    return bad_request(f"Invalid value for '{param}': {why}.", param=param, code="invalid_value")


def _within(param: str, value: float | None, low: float, high: float) -> float | None:
    if value is not None and not low <= value <= high:  # also false for NaN
        raise _invalid(param, f"{value} is outside the range from {low:g} to {high:g}")
    return value


def _at_least(param: str, value: int | None, low: int) -> int | None:
    if value is not None and value < low:
        raise _invalid(param, f"{shown(value)} is less than the minimum of {low}")
    return value


def _alternatives(param: str, value: int | None) -> int | None:
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise _invalid(param, f"{shown(value)} is outside the range from 0 to {MAX_LOGPROBS}")
    return value
