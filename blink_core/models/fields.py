"""Typed access to the keys of a configuration, each error naming the file, the key and the value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from blink_core.models.errors import ModelError

NAMES: dict[type[Any], str] = {dict: "an object", list: "a list"}


class Fields:
    """Keys of ``config.json``, or of GGUF metadata under the architecture's prefix.

    ``defaults`` answer where the key is absent, and where it is null unless null is asked for.
    """

    def __init__(
        self,
        file: Path,
        values: Mapping[str, Any],
        *,
        prefix: str = "",
        defaults: Mapping[str, Any] | None = None,
        tensors: frozenset[str] = frozenset(),
        read_table: Callable[[str], tuple[float, ...]] = lambda name: (),
    ) -> None:
        """``tensors``: names of the file's tensors; ``read_table``: values of a short one (GGUF only)."""
        self.file = file
        self.values = values
        self.tensors = tensors
        self.read_table = read_table
        self._prefix = prefix
        self._defaults = defaults or {}

    def fail(self, message: str) -> ModelError:
        """An error about this file, to be raised."""
        return ModelError(f"{self.file}: {message}")

    def raw(self, key: str) -> Any:
        """The value as it stands, None where there is none."""
        return self.values.get(self._prefix + key)

    def has(self, key: str) -> bool:
        """Whether the key is there, be it null."""
        return self._prefix + key in self.values

    def get(self, key: str, kind: type[Any], default: Any = None) -> Any:
        """The value of ``key`` as ``kind``: bool, int, float, str, dict, list. ModelError if missing or of another."""
        value = self.raw(key)
        if value is None:
            value = self._defaults.get(key, default)
        if value is None:
            raise self.fail(f"{self._prefix + key!r} is missing")
        return self.check(self._prefix + key, value, kind)

    def optional(self, key: str, kind: type[Any]) -> Any:
        """As :meth:`get`, but null is an answer: None where the key is null, or absent without a default."""
        value = self.raw(key) if self.has(key) else self._defaults.get(key)
        return None if value is None else self.check(self._prefix + key, value, kind)

    def check(self, key: str, value: Any, kind: type[Any]) -> Any:
        """``value`` as ``kind``. A bool is an int to Python only; a whole number may stand for a float."""
        accepted = (int, float) if kind is float else (kind,)
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise self.fail(f"{key!r} is {value!r}, expected {NAMES.get(kind, kind.__name__)}")
        return kind(value)

    def only(self, **supported: Any) -> None:
        """Refuse a key that is set to anything but the given value."""
        for key, value in supported.items():
            given = self.raw(key)
            if given is not None and given != value:
                raise self.fail(f"{self._prefix + key} is {given!r}, which is not supported; only {value!r} is")
