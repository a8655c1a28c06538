"""The product's parts in a process of their own: the other end of `hil_rigs.parts`.

Checkers name modules of the product by their dotted names only, and get plain data back, so that the suite imports
nothing of the engine's model or front-end code; a mutant is in force there through the environment.
"""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

CALL_LIMIT_S = 60.0


class PartError(RuntimeError):
    """The product raised; `kind` is the exception's type name, the message ends with its traceback."""

    def __init__(self, kind: str, message: str, traceback: str) -> None:
        super().__init__(f"{kind}: {message}\n{traceback}")
        self.kind, self.text = kind, message


class PartsGone(RuntimeError):
    """The process of the parts ended."""


class Part:
    """An object that is kept in the other process; attributes are called with `call`."""

    def __init__(self, parts: Parts, number: int) -> None:
        self._parts, self.number = parts, number

    def call(self, path: str, *arguments: Any, **keywords: Any) -> Any:
        """The value of `object.path(*arguments, **keywords)`, or of the attribute if it cannot be called."""
        return self._parts.send((self.number, path), arguments, keywords, keep=False)

    def keep(self, path: str, *arguments: Any, **keywords: Any) -> Part:
        """The same, but the value stays there."""
        kept = self._parts.send((self.number, path), arguments, keywords, keep=True)
        assert isinstance(kept, Part)
        return kept


class Parts:
    """A running process; a context manager. environ: its environment, with the mutant in it."""

    def __init__(self, environ: Mapping[str, str], deadline: float | None = None) -> None:
        """deadline: `time.monotonic()` beyond which no call waits."""
        self.deadline = deadline
        threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hil_rigs.parts"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # tracebacks come with the answers
            env={**environ, **threads},
        )

    @property
    def alive(self) -> bool:
        """Whether the process runs and can be spoken to."""
        stream = self._process.stdin
        return self._process.poll() is None and stream is not None and not stream.closed

    def drop(self, part: Part) -> None:
        """Lets an object go that was kept."""
        self.send("", (part.number,), {}, keep=False)

    def call(self, target: str, *arguments: Any, **keywords: Any) -> Any:
        """`module:attribute.path` called there; its value, which must have a pickle. Raises PartError, PartsGone,
        or TimeoutError for no answer until the deadline."""
        return self.send(target, arguments, keywords, keep=False)

    def keep(self, target: str, *arguments: Any, **keywords: Any) -> Part:
        """The same, but the value stays there and a handle comes back."""
        kept = self.send(target, arguments, keywords, keep=True)
        assert isinstance(kept, Part)
        return kept

    def send(
        self, target: str | tuple[int, str], arguments: tuple[Any, ...], keywords: dict[str, Any], *, keep: bool
    ) -> Any:
        """One call; handles among the arguments stand for the objects."""
        plain = tuple(_reference(value) for value in arguments)
        named = {name: _reference(value) for name, value in keywords.items()}
        raw = pickle.dumps((target, plain, named, keep), protocol=pickle.HIGHEST_PROTOCOL)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(len(raw).to_bytes(8, "little") + raw)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PartsGone(f"the parts exited with status {self._process.wait(5.0)}") from None
        limit = time.monotonic() + CALL_LIMIT_S
        limit = limit if self.deadline is None else min(limit, self.deadline)
        answer = pickle.loads(self._read(int.from_bytes(self._read(8, limit, target), "little"), limit, target))
        if answer[0] == "error":
            raise PartError(*answer[1:])
        return Part(self, answer[1]) if answer[0] == "handle" else answer[1]

    def _read(self, count: int, limit: float, target: object) -> bytes:
        assert self._process.stdout is not None
        number, parts = self._process.stdout.fileno(), []
        while count > 0:
            ready, _, _ = select.select([number], [], [], max(0.0, limit - time.monotonic()))
            if not ready:
                self.close()
                raise TimeoutError(f"no answer to {target} in time")
            raw = os.read(number, min(count, 1 << 20))
            if not raw:
                raise PartsGone(f"the parts exited with status {self._process.wait(5.0)} in {target}")
            parts.append(raw)
            count -= len(raw)
        return b"".join(parts)

    def close(self) -> None:
        """Ends the process. Idempotent."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _reference(value: Any) -> Any:
    if isinstance(value, list):
        return [_reference(item) for item in value]
    return ("handle", value.number) if isinstance(value, Part) else value
