"""A history as a picture: a lane for each request, calls and events over the clients' time, and what cannot be in red.

Blue: submission. Orange: cancel. Grey ticks: tokens. Green and purple: FINISH and ERROR. Dashed and open to the right:
outcome unknown. Grey outline: it failed. Below, with an event log, each KV page over the log's own order (the engine's
time; the two axes are not the same clock): coloured while a request owns it, grey while it is cached, with a coloured
strip for a request that holds it, hatched pale red in quarantine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from verification.linearisability.check import Decision
from verification.linearisability.operations import EVENTS, Kind, Operation, OperationHistory
from verification.linearisability.pages import Key, Span, Use
from verification.linearisability.scene import FONT, Box, Line, Scene, Text
from verification.result import Verdict

MOST_LANES, MOST_PAGES, MOST_SPANS = 40, 48, 1500
_LEFT, _RIGHT, _TOP, _LANE, _PAGE = 190.0, 150.0, 58.0, 26.0, 9.0
_NARROWEST, _WIDEST, _PLOT, _LEAST = 1.5, 16.0, 900.0, 900.0
_COLOURS = {
    Kind.SUBMIT: "#3b7dd8",
    Kind.CANCEL: "#e08214",
    Kind.TOKEN: "#707070",
    Kind.FINISH: "#2e8b57",
    Kind.ERROR: "#8e44ad",
}
_WRONG, _SHADE, _PALE, _INK = "#d0021b", "#fff3cd", "#e4e4e4", "#222222"
_OWNERS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#997700", "#44aa99", "#882255", "#999933")


@dataclass(frozen=True, slots=True)
class PageUse:
    """Pages over the event log. entries: length of the log. ring: of the history, whose requests have colours."""

    spans: Sequence[Span]
    entries: int
    ring: int


def draw(
    history: OperationHistory,
    decision: Decision | None = None,
    *,
    title: str = "",
    names: Sequence[int | None] = (),
    pages: PageUse | None = None,
) -> Scene:
    """The picture of a history. names: what to call its requests, by default their numbers.

    A long history is narrowed, a wide one cut to MOST_LANES requests, those of the witness first.
    """
    return _Drawing(history, decision, title, names, pages).scene


class _Drawing:
    def __init__(
        self,
        history: OperationHistory,
        decision: Decision | None,
        title: str,
        names: Sequence[int | None],
        pages: PageUse | None,
    ) -> None:
        self.history, self.names = history, names
        self.shown = decision.shown if decision is not None else frozenset()
        self.blocked = None if decision is None else decision.blocked
        self.blamed = {history.operations[i].request for i in self.shown} - {None}
        self.stamps = sorted({s for o in history.operations for s in (o.invoked, o.returned) if s is not None})
        self.unit = min(_WIDEST, max(_NARROWEST, _PLOT / max(1, len(self.stamps))))
        self.end = _LEFT + self.unit * max(1, len(self.stamps))
        order = sorted(range(len(history.requests)), key=lambda r: (r not in self.blamed, r))[:MOST_LANES]
        self.lanes = {request: place for place, request in enumerate(sorted(order))}
        self.bottom = _TOP + _LANE * len(self.lanes)
        self.scene = Scene(max(self.end + _RIGHT, _LEAST), self.bottom + 44, title or "history")
        self._heading(decision, title)
        self._lanes()
        for position, operation in enumerate(history.operations):
            if operation.kind not in EVENTS:
                self._call(position, operation)
        self._events()
        left_out = len(history.requests) - len(self.lanes)
        if left_out:
            self._text(10, self.bottom + 36, f"{left_out} further requests are not shown")
        if pages is not None and pages.spans:
            self._pages(pages)

    def _text(self, x: float, y: float, text: str, **style: object) -> None:
        self.scene.items.append(Text(x, y, text, **style))  # type: ignore[arg-type]

    def _x(self, stamp: int) -> float:
        return _LEFT + self.unit * bisect_left(self.stamps, stamp)

    def _y(self, request: int) -> float:
        return _TOP + _LANE * self.lanes[request]

    def _name(self, request: int) -> str:
        name = self.names[request] if request < len(self.names) else request
        return "stranger" if name is None else f"request {name}"

    def _heading(self, decision: Decision | None, title: str) -> None:
        verdict = "" if decision is None else f"{decision.verdict.value}: "
        bad = decision is not None and decision.verdict is Verdict.INVALID
        self._text(10, 20, title or "One ring as its clients saw it", size=FONT + 3, bold=True)
        if decision is not None:
            law = f"{decision.law}: " if decision.law else ""
            self._text(10, 40, f"{verdict}{law}{decision.message}"[:180], fill=_WRONG if bad else _INK)
        x = _LEFT
        for kind, colour in _COLOURS.items():
            self.scene.items.append(Box(x, self.bottom + 12, 8, 8, colour))
            self._text(x + 12, self.bottom + 20, kind.value, size=FONT - 1)
            x += 62
        self._text(x, self.bottom + 20, "dashed: outcome unknown; red: cannot be together", size=FONT - 1)

    def _lanes(self) -> None:
        for request in self.lanes:
            y, info = self._y(request), self.history.requests[request]
            blamed = request in self.blamed
            if blamed:
                self.scene.items.append(Box(0, y, self.scene.width, _LANE, _SHADE))
            label = f"{self._name(request)}  slot {info.slot} gen {info.generation}"
            self._text(10, y + 17, label, bold=blamed, faint=self._faint(request))
            self.scene.items.append(Line(_LEFT, y + _LANE, self.end, y + _LANE, _PALE))

    def _faint(self, request: int | None) -> bool:
        return bool(self.shown) and request not in self.blamed

    def _call(self, position: int, operation: Operation) -> None:
        x = self._x(operation.invoked)
        until = self.end if operation.returned is None else self._x(operation.returned)
        wrong = position in self.shown
        if operation.request is None:
            self._ring_wide(operation, x, until, wrong)
            return
        if operation.request not in self.lanes:
            return
        colour = _COLOURS[operation.kind]
        fill = "none" if operation.failed else colour
        unknown = operation.returned is None
        line = _WRONG if wrong else ("#888888" if operation.failed else colour)
        faint, hint = self._faint(operation.request), self._hint(operation)
        y, thick = self._y(operation.request) + 6, 2.5 if wrong else 1.0
        fill = "#ffffff" if unknown else fill
        self.scene.items.append(Box(x, y, max(2.0, until - x), _LANE - 12, fill, line, thick, unknown, faint, hint))
        if unknown:
            self._text(x + 3, y + 11, f"{operation.kind.value} ?", fill=colour, size=FONT - 2, faint=faint)

    def _ring_wide(self, operation: Operation, x: float, until: float, wrong: bool) -> None:
        colour = _WRONG if wrong else "#555555"
        width = max(2.0, until - x)
        self.scene.items.append(
            Box(x, _TOP, width, self.bottom - _TOP, "#cccccc", colour, 1, operation.returned is None, True)
        )
        self._text(x, _TOP - 3, operation.kind.value, fill=colour, size=FONT - 2)

    def _events(self) -> None:
        """Events of one poll stand side by side in its interval."""
        polls: dict[tuple[int, int, int], list[int]] = {}
        for position, o in enumerate(self.history.operations):
            if o.kind in EVENTS and o.returned is not None:
                polls.setdefault((o.process, o.invoked, o.returned), []).append(position)
        for (_, invoked, returned), positions in polls.items():
            left, right = self._x(invoked), self._x(returned) + self.unit
            for k, position in enumerate(positions):
                operation = self.history.operations[position]
                if operation.request in self.lanes:
                    self._event(position, operation, left + (right - left) * (k + 0.5) / len(positions))

    def _event(self, position: int, operation: Operation, x: float) -> None:
        assert operation.request is not None
        y, wrong = self._y(operation.request), position in self.shown
        terminal = operation.kind is not Kind.TOKEN
        colour, faint = _COLOURS[operation.kind], self._faint(operation.request)
        width = 5.0 if terminal or position == self.blocked else max(1.2, min(3.0, self.unit / 2))
        line = _WRONG if wrong else "none"
        colour = _WRONG if position == self.blocked else colour
        self.scene.items.append(
            Box(x - width / 2, y + 4, width, _LANE - 8, colour, line, 1.5, faint=faint, hint=self._hint(operation))
        )
        if terminal:
            ink = _WRONG if wrong else colour
            self._text(x + 5, y + 17, f"{operation.reason} {operation.index}", fill=ink, size=FONT - 1, faint=faint)

    def _hint(self, operation: Operation) -> str:
        return f"{operation}, process {operation.process}" + (", failed" if operation.failed else "")

    # ---- pages

    def _pages(self, pages: PageUse) -> None:
        colours = {
            (pages.ring, r.slot, r.generation): _OWNERS[number % len(_OWNERS)]
            for number, r in enumerate(self.history.requests)
        }
        blamed = {
            (pages.ring, self.history.requests[r].slot, self.history.requests[r].generation)
            for r in self.blamed
            if r is not None
        }
        rank = {span.page: (1, span.page) for span in pages.spans} | {
            span.page: (0, span.page) for span in pages.spans if span.key in blamed
        }
        rows = {page: i for i, page in enumerate(sorted(sorted(rank, key=rank.__getitem__)[:MOST_PAGES]))}
        top = self.bottom + 62
        width = max(self.end - _LEFT, 300.0)
        self._text(10, top - 8, "KV pages over the event log", bold=True)
        if len(rank) > len(rows):
            self._text(_LEFT, top - 8, f"{len(rows)} of {len(rank)} pages")
        for page, row in rows.items():
            self._text(_LEFT - 8, top + _PAGE * row + _PAGE - 1, f"page {page}", size=_PAGE - 1, at_end=True)
        order = {Use.CACHED: 0, Use.QUARANTINED: 1, Use.OWNED: 2, Use.HELD: 3}
        chosen = sorted((s for s in pages.spans if s.page in rows), key=lambda s: (s.key not in blamed, -s.start))
        for span in sorted(chosen[:MOST_SPANS], key=lambda s: (order[s.use], s.start)):
            x = _LEFT + width * span.start / max(1, pages.entries)
            until = _LEFT + width * span.end / max(1, pages.entries)
            self._span(span, x, max(1.0, until - x), top + _PAGE * rows[span.page], colours, span.key in blamed)
        height = top + _PAGE * len(rows)
        self._text(_LEFT, height + 14, f"{pages.entries} log entries", size=FONT - 1)
        for request in self.lanes:  # the colours' legend stands in the lanes above
            info = self.history.requests[request]
            key = (pages.ring, info.slot, info.generation)
            self.scene.items.append(Box(2, self._y(request) + 9, 5, _LANE - 18, colours[key]))
        self.scene.height = height + 28
        self.scene.width = max(self.scene.width, _LEFT + width + 20)

    def _span(self, span: Span, x: float, width: float, y: float, colours: dict[Key, str], blamed: bool) -> None:
        colour = {Use.CACHED: "#dddddd", Use.QUARANTINED: "#f4c2c2"}.get(span.use)
        if colour is None:
            colour = "#bbbbbb" if span.key is None else colours.get(span.key, "#9a9a9a")
        thin = span.use is Use.HELD
        who = "" if span.key is None else " by ring {}, slot {}, generation {}".format(*span.key)
        hint = f"page {span.page} {span.use.value}{who}, log entries {span.start} to {span.end}"
        height = _PAGE / 2 - 1 if thin else _PAGE - 1
        line = _WRONG if blamed else "none"
        self.scene.items.append(Box(x, y + (_PAGE / 4 if thin else 0), width, height, colour, line, 0.8, hint=hint))
