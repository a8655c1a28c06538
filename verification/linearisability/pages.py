"""Who held which KV page when, by the event log (level ALL)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from blink_core.abi.dtypes import Array
from blink_core.abi.enums import LogKind

Key = tuple[int, int, int]  # ring, slot, generation


class Use(StrEnum):
    """OWNED by one request, HELD by one of those that share it, CACHED whoever holds it, QUARANTINED."""

    OWNED = "owned"
    HELD = "held"
    CACHED = "cached"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class Span:
    """One use of one page, from log entry `start` to before `end`; `key` is the request, None where there is none."""

    page: int
    use: Use
    key: Key | None
    start: int
    end: int


def spans(log: Array) -> list[Span]:
    """Spans in the order of their ends. log: `LogEntry` records; what began before the first one is not shown."""
    return list(_Pages(log).walk())


class _Pages:
    def __init__(self, log: Array) -> None:
        self.log = log
        self.open: dict[tuple[int, Use, Key | None], int] = {}

    def walk(self) -> Iterator[Span]:
        for at, entry in enumerate(self.log):
            kind, page = int(entry["kind"]), int(entry["a"])
            key = (int(entry["ring"]), int(entry["slot"]), int(entry["generation"]))
            if kind == LogKind.PAGE_ALLOC:
                self.open[page, Use.OWNED, key] = at
            elif kind == LogKind.PAGE_SHARE:
                self.open[page, Use.HELD, key] = at
            elif kind == LogKind.PAGE_PUBLISH:
                yield from self._close(at, page, Use.OWNED)
                self.open[page, Use.CACHED, None] = at
                self.open[page, Use.HELD, key] = at
            elif kind == LogKind.PAGE_UNSHARE:
                yield from self._close(at, page, Use.HELD, key)
            elif kind == LogKind.PAGE_EVICT:
                yield from self._close(at, page, Use.CACHED)
            elif kind == LogKind.PAGE_FREE:
                yield from self._close(at, page, Use.OWNED)
                if entry["b"] == 1:
                    self.open[page, Use.QUARANTINED, None] = at
            elif kind == LogKind.PAGE_UNQUARANTINE:
                yield from self._close(at, page, Use.QUARANTINED)
        for (page, use, holder), start in self.open.items():
            yield Span(page, use, holder, start, len(self.log))

    def _close(self, at: int, page: int, use: Use, key: Key | None = None) -> Iterator[Span]:
        """key: None closes whoever's it is."""
        for found in [o for o in self.open if o[0] == page and o[1] is use and key in (None, o[2])]:
            yield Span(page, use, found[2], self.open.pop(found), at)
