"""The key-value section of a GGUF file, read without touching the tensors (GGUF versions 2 and 3, little endian).

The front end needs only the tokeniser and the chat template, and the general reader of the `gguf` package takes
seconds on a large vocabulary. Every length in the file is checked against the file's size before it is used.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

_MAGIC = b"GGUF"
_STRING, _ARRAY, _BOOL = 8, 9, 7
# value type -> struct code; 7 is a bool of one byte
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class GgufError(ValueError):
    """Not a GGUF file, an unsupported version, or a truncated or damaged one."""


class _Reader:
    def __init__(self, data: mmap.mmap | bytes, name: str) -> None:
        self._data = data
        self._size = len(data)
        self._at = 0
        self._name = name

    def take(self, count: int, what: str) -> int:
        """Advance by `count` bytes and return the old offset."""
        start = self._at
        if count > self._size - start:
            raise GgufError(
                f"{self._name} is truncated or damaged: {what} at byte {start} needs {count} bytes, "
                f"the file has {self._size}"
            )
        self._at = start + count
        return start

    def scalar(self, code: str, what: str) -> Any:
        width = struct.calcsize("<" + code)
        return struct.unpack_from("<" + code, self._data, self.take(width, what))[0]

    def string(self, what: str) -> str:
        length = self.scalar("Q", what)
        start = self.take(length, what)
        try:
            return self._data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise GgufError(f"{self._name}: {what} at byte {start} is not UTF-8: {error}") from None

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what)
        if kind not in _SCALARS:
            raise GgufError(f"{self._name}: {what} has unknown value type {kind}")
        return self.scalar(_SCALARS[kind], what)

    def array(self, what: str) -> list[Any]:
        kind = self.scalar("I", what)
        count = self.scalar("Q", what)
        if kind in _SCALARS:
            code = _SCALARS[kind]
            start = self.take(count * struct.calcsize("<" + code), what)
            return list(struct.unpack_from(f"<{count}{code}", self._data, start))
        if count > self._size - self._at:  # each element takes at least one byte
            self.take(count, what)
        return [self.value(kind, what) for _ in range(count)]


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Return every key with its value (str, int, float, bool or list). Raises GgufError, OSError."""
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            raise GgufError(f"{path.name} is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(data, path.name)
            start = reader.take(4, "magic")
            if data[start : start + 4] != _MAGIC:
                raise GgufError(f"{path.name} is not a GGUF file: it begins with {data[:4]!r}")
            version = reader.scalar("I", "version")
            if version not in (2, 3):
                raise GgufError(f"{path.name} has GGUF version {version}; supported: 2 and 3 (little endian)")
            reader.scalar("Q", "tensor count")
            metadata: dict[str, Any] = {}
            for _ in range(reader.scalar("Q", "key count")):
                key = reader.string("a key")
                metadata[key] = reader.value(reader.scalar("I", key), key)
            return metadata
