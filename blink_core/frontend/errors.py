"""Errors as the OpenAI API words them: `{"error": {"message", "type", "param", "code"}}` (design section 8)."""

from __future__ import annotations

import math
from typing import Any

import pydantic_core

from blink_core.abi.enums import ErrorReason
from blink_core.frontend.engine_api import EngineError, Overloaded

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
RATE_LIMIT = "rate_limit_error"


class ApiError(Exception):
    """An error with its HTTP status and the four fields of an OpenAI error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 `invalid_request_error`."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, *, code: str = "engine_unavailable", retry_after_s: float | None = None) -> ApiError:
    """A 503: the engine cannot serve this request now."""
    headers = {} if retry_after_s is None else {"retry-after": _seconds(retry_after_s)}
    return ApiError(503, message, type=SERVER_ERROR, code=code, headers=headers)


def internal_error(request_id: str) -> ApiError:
    """A 500 that tells nothing but the id under which the cause was logged."""
    return ApiError(
        500, f"The server had an error while processing your request (request id {request_id}).", type=SERVER_ERROR
    )


# The engine re-validates every slot (design section 3); these reasons mean that the request itself cannot be served.
_CLIENT_FAULTS = {
    *(ErrorReason.BAD_LENGTH, ErrorReason.BAD_TOKEN, ErrorReason.BAD_PARAM, ErrorReason.NEVER_FITS),
    ErrorReason.NO_TOKEN,
}
SHOWN = 100  # characters of a client's own value that an error repeats


def shown(value: object) -> str:
    """A client's value as JSON, cut to `SHOWN` characters: no error sends megabytes back."""
    return shorten(pydantic_core.to_json(value, inf_nan_mode="constants").decode())


def shorten(text: str, limit: int = SHOWN) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def from_engine(error: EngineError | Overloaded) -> ApiError:
    """Map what the engine client raises to an HTTP error: 400, 429 with Retry-After, 500, 503 or 504.

    A deadline is a 504 that says "do not retry": the OpenAI clients repeat a 408 or 504 on their own otherwise, and
    this limit was the client's own.
    """
    if isinstance(error, Overloaded):
        return ApiError(
            429,
            f"The engine is overloaded: {error.message}",
            type=RATE_LIMIT,
            code="engine_overloaded",
            headers={"retry-after": _seconds(error.retry_after_s)},
        )
    code = error.reason.name.lower()
    if error.reason is ErrorReason.ENGINE_DEAD:
        return unavailable(f"The engine is dead: {error.message}", code=code)
    if error.reason is ErrorReason.DRAINING:
        return unavailable(f"The engine is draining: {error.message}", code=code, retry_after_s=5.0)
    if error.reason is ErrorReason.LEASE_LOST:
        return unavailable(f"The engine dropped the request: {error.message}", code=code, retry_after_s=1.0)
    if error.reason is ErrorReason.DEADLINE:
        return ApiError(
            504,
            f"The request was not finished within its 'timeout': {error.message}",
            type=SERVER_ERROR,
            param="timeout",
            code=code,
            headers={"x-should-retry": "false"},
        )
    if error.reason in _CLIENT_FAULTS:
        return bad_request(f"The engine refused the request ({error.reason.name}): {error.message}", code=code)
    return ApiError(
        500, f"The engine failed the request ({error.reason.name}): {error.message}", type=SERVER_ERROR, code=code
    )


def _seconds(value: float) -> str:
    return str(max(1, math.ceil(value)))
