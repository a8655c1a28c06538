"""The checkers of the prefix cache as its users see it: good cases and bad."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from blink_core.abi.dtypes import LOG_ENTRY, Array
from blink_core.abi.enums import EventKind, FinishReason, LogKind
from blink_core.abi.params import SamplingParams
from verification.history import History, Submitted
from verification.program import Program, RequestSpec
from verification.properties import prefix_cache as cache
from verification.result import Measurement

PAGE, RING = 4, 1
pytestmark = pytest.mark.usefixtures("well_formed")


def history(*found: int, tokens: Sequence[int] = (7, 8), first_slot: int = 0) -> History:
    """Requests of 9 prompt tokens, of which `found` came from the cache."""
    events: list[dict[str, Any]] = []
    for at, n in enumerate(found):
        name = {"slot": first_slot + at, "generation": 1}
        events += [name | {"kind": EventKind.TOKEN, "index": i, "token": t} for i, t in enumerate(tokens)]
        events.append(name | {"kind": EventKind.FINISH, "reason": FinishReason.LENGTH, "index": 2, "token": n})
    program = Program(tuple(RequestSpec(tuple(range(9)), SamplingParams(2)) for _ in found))
    submitted = [Submitted(i, first_slot + i, 1, i) for i in range(len(found))]
    return History(program, RING, submitted, events=events, complete=True)


@pytest.mark.parametrize(
    ("found", "expected", "verdict"),
    [
        ((0, 8), True, "valid"),
        ((0, 0), False, "valid"),
        ((0, 0), True, "unknown"),
        ((0, 4), False, "invalid"),
        ((0, 3), True, "invalid"),
        ((0, 12), True, "invalid"),
        ((0, -4), True, "invalid"),
    ],
)
def test_what_was_found(found: tuple[int, ...], expected: bool, verdict: str) -> None:
    """Catches: parts of pages, or a whole prompt, taken for a hit; a pass of a run with no hits, or unwanted ones."""
    result = cache.check_hits(history(*found), PAGE, expected=expected)
    assert (result.property, result.clause, result.verdict) == ("kv-content", "found", verdict)
    if result.ok():
        hits, tokens = Measurement(sum(n > 0 for n in found), "requests", n=2), Measurement(sum(found), "tokens")
        assert result.measurements == {"prefix_hits": hits, "tokens_found": tokens}


def test_what_must_have_been_found() -> None:
    """Catches: a cached prefix that a request did not find, laid to another request or to another property."""
    found = history(0, 8, 4)
    right = cache.check_found(found, {0: 0, 1: 8, 2: 4})
    assert (right.property, right.clause, right.verdict) == ("kv-content", "found", "valid")
    assert right.message.startswith("3 requests ")
    wrong = cache.check_found(found, {0: 0, 1: 4, 2: 8})
    assert (wrong.property, wrong.clause, wrong.verdict) == ("kv-content", "found", "invalid")
    assert (wrong.message, wrong.witness) == (
        "request 1 of 9 prompt tokens found 8, 4 are cached",
        {"request": 1},
    )


def rows(h: History, logits: float = 0.5) -> cache.Rows:
    dtype = np.dtype([("token", "<i4"), ("logits", "<f4", (3,))])
    made = {}
    for s in h.submitted:
        for i, token in enumerate(h.tokens_of(s)):
            made[RING, s.slot, s.generation, 9 + i] = np.array((token, [logits, 1.0, 2.0 + i]), dtype)
    return made


def test_on_and_off_are_the_same() -> None:
    """Catches: other tokens, or a single bit of the logits, that the prefix cache changes."""
    on, off = history(8, 0), history(0, 0, first_slot=5)
    assert cache.check_same(on, rows(on), off, rows(off)).ok()
    nearly = float(np.nextafter(np.float32(0.5), np.float32(1)))
    others = history(0, 0, tokens=(7, 9))
    for a, b in (((on, rows(on)), (off, rows(off, nearly))), ((on, rows(on)), (others, rows(others)))):
        result = cache.check_same(*a, *b)
        assert (result.property, result.clause, result.verdict) == ("token-equivalence", "same", "invalid")
    assert cache.check_same(on, rows(on), others, rows(others)).witness == {"on": [7, 8], "off": [7, 9]}
    assert "differ by 0.25 " in cache.check_same(on, rows(on), off, rows(off, 0.75)).message
    silent = history(0, tokens=())
    assert cache.check_same(silent, {}, silent, {}).verdict == "unknown"


def test_histories_of_other_requests_are_not_compared() -> None:
    """Catches: requests of which one run knows nothing, left out of the comparison without a word."""
    two, one = history(8, 0), history(0)
    for a, b in ((two, one), (one, two)):
        with pytest.raises(ValueError, match="argument 2 is"):
            cache.check_same(a, rows(a), b, rows(b))


def log(*entries: tuple[int, int, int]) -> Array:
    """Entries (kind, slot, a) of generation 1."""
    made = np.zeros(len(entries), LOG_ENTRY)
    for record, (kind, slot, a) in zip(made, entries, strict=True):
        record["kind"], record["slot"], record["a"], record["ring"], record["generation"] = kind, slot, a, RING, 1
    return made


@pytest.mark.parametrize("kind", [LogKind.PAGE_SHARE, LogKind.PAGE_PUBLISH, LogKind.PREFIX_HIT])
def test_opt_out(kind: LogKind) -> None:
    """Catches: a request whose content was to stay out of the cache, and did not; a pass where nobody shared."""
    private = {(0, 1)}
    assert cache.check_opt_out(log((kind, 1, 5), (LogKind.PAGE_ALLOC, 0, 6)), private).ok()
    assert cache.check_opt_out(log((kind, 1, 5), (kind, 0, 5)), private).verdict == "invalid"
    assert cache.check_opt_out(log((LogKind.PAGE_ALLOC, 0, 6)), private).verdict == "unknown"
    assert cache.check_opt_out(log((kind, 1, 5)), set()).verdict == "unknown"
