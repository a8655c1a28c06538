"""Strict JSON of request bodies (design section 8)."""

from __future__ import annotations

import json
from typing import Any

import pydantic_core

from blink_core.frontend.errors import bad_request, shown


class _Twice(Exception):
    """A key that an object has twice."""


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON object: no NaN, no invalid UTF-8, no lone surrogate, no key twice in an object, bounded nesting.

    Raises ApiError 400. (Which of two values counts is left open by RFC 8259, so proxies and servers disagree on it.)
    """
    try:
        data = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"We could not parse the JSON body of your request: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise bad_request("The body must be a JSON object.", code="invalid_json")
    try:
        # Valid and shallow, as the parser above took it; numbers are not read a second time.
        json.loads(body, object_pairs_hook=_refuse_twice, parse_int=len, parse_float=len)
    except _Twice as error:
        raise bad_request(
            f"The JSON body names {shown(str(error))} twice in one object.", code="invalid_json"
        ) from None
    return data


def _refuse_twice(pairs: list[tuple[str, Any]]) -> None:
    """Builds nothing: only the names matter."""
    names = {name for name, _ in pairs}
    if len(names) < len(pairs):
        for name, _ in pairs:
            if name not in names:
                raise _Twice(name)
            names.discard(name)
