"""Serves the product's parts to another process: `python -m hil_rigs.parts`, spoken to over its standard streams.

The suite may not import the engine's models, tokeniser or front end, and a mutant must be in force before they are
imported: so they live in this process, which knows nothing of what it is asked for. A request is a pickled tuple
`(target, arguments, keywords, keep)` behind its length in 8 bytes. target: `module:attribute.path`; or `(handle,
attribute.path)` of an object that was kept; or empty, to let the object of the first argument go. The answer is
`("value", v)`, `("handle", n)` with `keep`, or `("error", type name, message, traceback)`. Only a parent that may run
any code here has these streams.
"""

from __future__ import annotations

import importlib
import operator
import os
import pickle
import sys
import traceback
from typing import Any, BinaryIO

Target = str | tuple[int, str]


def read_message(stream: BinaryIO) -> Any:
    """The next message; None at the end of the stream."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    return pickle.loads(stream.read(int.from_bytes(head, "little")))


def write_message(stream: BinaryIO, message: Any) -> None:
    raw = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(len(raw).to_bytes(8, "little") + raw)
    stream.flush()


class Server:
    """Resolves targets, calls them, and keeps what the other side asks to be kept."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] = {}
        self._last = 0

    def answer(self, target: Target, arguments: tuple[Any, ...], keywords: dict[str, Any], keep: bool) -> Any:
        if not target:  # the other side lets an object go
            self._kept.pop(arguments[0], None)
            return "value", None
        try:
            found = self._resolve(target)
            plain = {name: self._argument(value) for name, value in keywords.items()}
            value = found(*(self._argument(a) for a in arguments), **plain) if callable(found) else found
        except Exception as error:
            return "error", type(error).__name__, str(error), traceback.format_exc()
        if not keep:
            return "value", value
        self._last += 1
        self._kept[self._last] = value
        return "handle", self._last

    def _resolve(self, target: Target) -> Any:
        if isinstance(target, tuple):
            owner, path = self._kept[target[0]], target[1]
        else:
            module, _, path = target.partition(":")
            owner = importlib.import_module(module)
        return operator.attrgetter(path)(owner) if path else owner

    def _argument(self, value: Any) -> Any:
        """A kept object where ("handle", n) stands, also in a list, else the value itself."""
        if isinstance(value, list):
            return [self._argument(item) for item in value]
        if isinstance(value, tuple) and len(value) == 2 and value[0] == "handle":
            return self._kept[value[1]]
        return value


def main() -> int:
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed goes to the log, not among the answers
    server = Server()
    while (request := read_message(source)) is not None:
        answer = server.answer(*request)
        try:
            write_message(sink, answer)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            write_message(sink, ("error", type(error).__name__, f"the answer has no pickle: {error}", ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
