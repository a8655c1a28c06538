"""Stop strings over arbitrary cuts of the text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blink_core.frontend.stop import StopMatcher

SMALL = st.text(alphabet="abé", max_size=12)
STOPS = st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=4)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By definition: the first end at which any stop string stands, and the longest that ends there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def longest_possible_start(text: str, stops: list[str]) -> str:
    """Longest suffix of `text` that may still grow into a stop string."""
    return next(text[at:] for at in range(len(text) + 1) if any(s.startswith(text[at:]) for s in [*stops, ""]))


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in pairwise(edges)]


@given(text=SMALL, stops=STOPS, places=st.lists(st.integers(0, 50), max_size=6))
def test_any_cut_gives_the_text_before_the_first_match(text: str, stops: list[str], places: list[int]) -> None:
    """Catches: a match lost or moved by token boundaries, text of a stop string shown, held text lost at the end."""
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(piece) for piece in cut(text, places))
    assert (shown + matcher.finish(), matcher.matched) == expected(text, stops)


@given(text=SMALL, stops=STOPS)
def test_held_back_text_is_minimal(text: str, stops: list[str]) -> None:
    """Catches: more text held back than could become a stop string, or less, at any point of the stream."""
    matcher = StopMatcher(stops)
    shown = ""
    for end, char in enumerate(text, start=1):
        shown += matcher.push(char)
        if matcher.matched is not None:
            return
        assert text[:end] == shown + longest_possible_start(text[:end], stops)


def test_stop_string_across_many_tokens_shows_nothing_of_itself() -> None:
    """Catches: fault T05, the beginning of a stop string leaking into the stream before it is complete."""
    matcher = StopMatcher(["DEFGHIJ"])
    shown = [matcher.push(piece) for piece in ["AB", "CD", "EF", "GHI", "JKL", "MN"]]
    assert shown == ["AB", "C", "", "", "", ""]
    assert matcher.matched == "DEFGHIJ"
    assert matcher.finish() == ""


def test_empty_stop_string_is_refused() -> None:
    """Catches: an empty stop string that would end every answer at once."""
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["a", ""])
