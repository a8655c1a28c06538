"""Keeps the beginning of an HTTP response's body while it passes by."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any


def tee(response: Any, kept: bytearray, most: int) -> None:
    """From now on a response's body is appended to `kept` as it comes, until that has `most` bytes or more.

    response: of httpx or a library with its interface (the OpenAI client brings its own); whose is seen from its class.
    """
    library = importlib.import_module(type(response).__module__.partition(".")[0])
    source = response.stream

    class Tee(library.SyncByteStream):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Iterator[bytes]:
            for chunk in source:
                if len(kept) < most:
                    kept.extend(chunk)
                yield chunk

        def close(self) -> None:
            source.close()

    response.stream = Tee()
