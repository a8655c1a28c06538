"""Stop strings over a stream of text pieces (design section 8; faults T05, T06).

A stop string may begin in one token and end in another, so text that could still become one is held back, and no
more than that: exactly the longest suffix that is a proper prefix of some stop string. An Aho-Corasick automaton
gives that length, and every match, in constant amortised time a character.

The match that *completes* first wins; of several that complete at the same character the longest wins, because it
starts first. That depends on the text alone, never on how it was cut into tokens, so a stream and a whole answer agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Feed text with `push`, end with `finish`; the text returned never holds any part of a matched stop string.

    `matched` is the stop string found, else None; after a match every further call returns "".
    Raises ValueError for an empty stop string.
    """

    __slots__ = ("_depth", "_fail", "_goto", "_held", "_match", "_node", "_stops", "matched")

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._goto: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fail = [0]
        self._match: list[str | None] = [None]  # longest stop string that ends at this node
        self._node = 0
        self._held = ""
        self.matched: str | None = None
        self._build()

    def _build(self) -> None:
        for stop in self._stops:
            node = 0
            for char in stop:
                following = self._goto[node].get(char)
                if following is None:
                    following = len(self._goto)
                    self._goto[node][char] = following
                    self._goto.append({})
                    self._depth.append(self._depth[node] + 1)
                    self._fail.append(0)
                    self._match.append(None)
                node = following
            self._match[node] = stop
        queue = deque(self._goto[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._goto[node].items():
                self._fail[child] = self._step(self._fail[node], char)
                if self._match[child] is None:
                    self._match[child] = self._match[self._fail[child]]
                queue.append(child)

    def _step(self, node: int, char: str) -> int:
        while node and char not in self._goto[node]:
            node = self._fail[node]
        return self._goto[node].get(char, 0)

    def push(self, text: str) -> str:
        """Take the next piece of text; return what can be shown now."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        seen = len(self._held)
        buffer = self._held + text
        node = self._node
        for end, char in enumerate(text, start=seen + 1):
            node = self._step(node, char)
            stop = self._match[node]
            if stop is not None:
                self.matched = stop
                self._held = ""
                return buffer[: end - len(stop)]
        self._node = node
        keep = len(buffer) - self._depth[node]
        self._held = buffer[keep:]
        return buffer[:keep]

    def finish(self) -> str:
        """The generation ended without a match: return the text that was held back."""
        held, self._held, self._node = self._held, "", 0
        return held
