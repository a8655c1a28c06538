"""Values that tests hand over (NumPy arrays, enumerations, dataclasses) as strict JSON."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_WITNESS_BYTES = 64 * 1024


def jsonable(value: Any) -> Any:
    """`value` as something that strict JSON holds; non-finite floats become the strings "nan", "inf", "-inf".

    Bytes become hex, sets sorted lists, anything unknown its `repr`.
    """
    if isinstance(value, enum.StrEnum):
        return value.value
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return number(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(jsonable(key)): jsonable(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((jsonable(item) for item in value), key=repr)
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # NumPy arrays and scalars, torch tensors; without importing either
        return jsonable(value.tolist())
    return repr(value)


def number(value: float) -> float | str:
    """A float for JSON, which has no NaN and no infinity."""
    if math.isfinite(value):
        return float(value)
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def bounded(value: Any, limit: int = MAX_WITNESS_BYTES) -> Any:
    """`jsonable(value)`, or a note with the first bytes of it when its JSON is longer than `limit` bytes."""
    converted = jsonable(value)
    text = json.dumps(converted)
    if len(text) <= limit:
        return converted
    return {"truncated": True, "bytes": len(text), "limit": limit, "head": text[:limit]}


def dump(value: Any) -> str:
    """Canonical text of a JSON value: sorted keys, no NaN."""
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
