"""Parameters that the OpenAI API defines and Blink does not implement: refused unless they ask for nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from blink_core.frontend.errors import bad_request, shown


def _one_of(*allowed: object) -> Callable[[object], bool]:
    # `1 == True` in Python, so types are compared too
    return lambda value: any(type(value) is type(choice) and value == choice for choice in allowed)


def _any_of(*types: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, types)


# Parameter -> the values, besides null, that ask for nothing Blink lacks.
_COMMON: dict[str, Callable[[object], bool]] = {
    "user": _any_of(str),
}
COMPLETION: dict[str, Callable[[object], bool]] = {
    **_COMMON,
    "echo": _one_of(False),
    "suffix": _one_of(),
}
CHAT: dict[str, Callable[[object], bool]] = {
    **_COMMON,
    "audio": _one_of(),
    "function_call": _one_of("none"),
    "functions": _one_of([]),
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
    "verbosity": _one_of("medium"),
    "web_search_options": _one_of(),
}
MESSAGE: dict[str, Callable[[object], bool]] = {
    "annotations": _one_of([]),
    "audio": _one_of(),
    "function_call": _one_of(),
    "refusal": _one_of(),
    "tool_call_id": _one_of(),
    "tool_calls": _one_of([]),
}


def drop_inert(data: Any, inert: Mapping[str, Callable[[object], bool]], where: str = "") -> Any:
    """Return `data` without the parameters in `inert`. Raises ApiError if one has a value that Blink lacks."""
    if not isinstance(data, dict):
        return data
    for name, harmless in inert.items():
        value = data.get(name)
        if value is not None and not harmless(value):
            param = where + name
            raise bad_request(
                f"Unsupported value for '{param}': {shown(value)} is not supported by this server.",
                param=param,
                code="unsupported_value",
            )
    return {key: value for key, value in data.items() if key not in inert}
