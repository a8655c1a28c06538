"""Prompts that were not recorded: what the log says of shared pages tells which of their tokens are equal (K6, K7)."""

from __future__ import annotations

from collections.abc import Sequence

from blink_core.abi.enums import LogKind
from verification.spec.machine import Machine
from verification.spec.state import Request
from verification.trace.format import Entry
from verification.trace.submission import Unknown


def bind(m: Machine, log: Sequence[Entry], start: int, end: int) -> bool:
    """Gives unknown tokens the values that the boundary's PAGE_SHARE entries say they have.

    Returns whether entries after the boundary were asked: for a reservation that is enforced in it.
    """
    live = {(q.ring.index, q.slot, q.generation): q for r in m.rings for q in r.requests if q is not None}
    published: dict[int, tuple[int, ...]] = {}
    enforced: tuple[int, ...] | None = None
    for j in range(start, end):
        entry = log[j]
        request = live.get((entry[2], entry[3], entry[4]))
        if entry[1] == LogKind.RESERVATION and entry[5] == 2:
            enforced = entry[2:5]
        if request is None:
            continue
        if entry[1] == LogKind.PAGE_PUBLISH:
            published[entry[5]] = _page(m, request, entry[6])
        elif entry[1] == LogKind.PAGE_SHARE:
            if entry[2:5] == enforced:
                enforced = None
            _bind_page(m, request, entry[5], entry[6], published)
    if enforced is None:
        return False
    for j in range(end, len(log)):  # enforced, and not admitted at this boundary: its hits show when it is
        entry = log[j]
        if entry[2:5] == enforced:
            if entry[1] == LogKind.PAGE_SHARE:
                _bind_page(m, live[enforced[0], enforced[1], enforced[2]], entry[5], entry[6], published)
            elif entry[1] in (LogKind.ADMIT, LogKind.FINISH, LogKind.ERROR):
                break
    return True


def _page(m: Machine, request: Request, index: int) -> tuple[int, ...]:
    size = m.config.page_size
    return tuple(request.tokens[index * size : (index + 1) * size])


def _bind_page(m: Machine, request: Request, page: int, index: int, published: dict[int, tuple[int, ...]]) -> None:
    held = m.key[page][1] if page in m.key else published.get(page)
    own = _page(m, request, index)
    if held is None or len(own) != len(held):
        return
    values: dict[int, int] = {}
    for x, y in zip(own, held, strict=True):
        x, y = values.get(x, x), values.get(y, y)
        if x == y:
            continue
        if isinstance(x, Unknown):
            values[x] = y
        elif isinstance(y, Unknown):
            values[y] = x
        else:
            return  # known to differ: the specification will say so
    _substitute(m, values, published)


def _substitute(m: Machine, values: dict[int, int], published: dict[int, tuple[int, ...]]) -> None:
    """Gives unknown tokens their values wherever they stand, unless two cached pages would then be the same."""

    def value(token: int) -> int:
        while token in values:
            token = values[token]
        return token

    def known(tokens: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(map(value, tokens))

    keys = {page: (parent, known(tokens)) for page, (parent, tokens) in m.key.items()}
    if len(set(keys.values())) < len(keys):
        return
    m.key = keys
    m.cache = {key: page for page, key in keys.items()}
    published.update({page: known(tokens) for page, tokens in published.items()})
    for r in m.rings:
        for request in r.requests:
            if request is not None:
                request.tokens[:] = known(tuple(request.tokens))
