"""The checker of streaming on hand-made answers: a good pair passes, each clause has bad ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from verification.properties.streaming import PROPERTY, Answer, Stream, check, check_stop, first_stop
from verification.result import Verdict

WHOLE = Answer("a lamp 漢", "length", 4, 3)
GOOD = Stream(("", "a la", "mp 漢", ""), (None, None, None, "length"), (4, 3), ("assistant", None, None, None))


def test_good_pairs_pass() -> None:
    """Catches: a checker that rejects a whole, honest stream."""
    good = check(WHOLE, GOOD)
    assert (good.verdict, good.property, good.clause) == (Verdict.VALID, PROPERTY, "text")
    assert check(WHOLE, replace(GOOD, roles=None)).ok()
    assert check(replace(WHOLE, text="\ufffd"), replace(GOOD, deltas=("", "\ufffd", "", ""))).ok()


BAD: dict[str, tuple[str, Answer, Stream]] = {
    "lost-chunk": ("text", WHOLE, replace(GOOD, deltas=("", "a la", "", ""))),
    "repeated-chunk": ("text", WHOLE, replace(GOOD, deltas=("", "a la", "a la", "mp 漢"))),
    "finish": ("finish", replace(WHOLE, finish_reason="stop"), GOOD),
    "prompt-count": ("usage", replace(WHOLE, prompt_tokens=5), GOOD),
    "completion-count": ("usage", replace(WHOLE, completion_tokens=2), GOOD),
    "no-usage": ("usage", WHOLE, replace(GOOD, usage=None)),
    "zero-completion": ("usage", Answer("", "length", 4, 0), Stream(("",), ("length",), (4, 0))),
    "no-finish": ("framing", WHOLE, replace(GOOD, finish_reasons=(None, None, None, None))),
    "two-finishes": ("framing", WHOLE, replace(GOOD, finish_reasons=(None, None, "length", "length"))),
    "early-finish": ("framing", WHOLE, replace(GOOD, finish_reasons=(None, None, "length", None))),
    "empty-stream": ("framing", WHOLE, Stream((), (), (4, 3))),
    "no-role": ("framing", WHOLE, replace(GOOD, roles=(None, "assistant", None, None))),
    "split-character": ("character", WHOLE, replace(GOOD, deltas=("", "a la", "mp \ufffd\ufffd", ""))),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_pairs_are_invalid(name: str) -> None:
    """Catches: a clause that cannot fail."""
    clause, whole, stream = BAD[name]
    if not stream.finish_reasons:
        stream = replace(stream, finish_reasons=(None,), deltas=("",))
    result = check(whole, stream)
    assert (result.clause, result.verdict) == (clause, Verdict.INVALID), result
    assert clause != "character" or result.witness["chunks"] == [2]


def test_shown_stop_string_is_invalid() -> None:
    """Catches: a stop string that both ways show alike."""
    assert check(WHOLE, GOOD, ("amp",)).clause == "stop"
    assert check(WHOLE, GOOD, ("lamb",)).ok()


FREE = Answer("a lamp and a lamp", "length", 4, 8)


def test_stop_cuts_before_the_first_stop_string() -> None:
    """Catches: text of or after a stop string that is shown, text that is lost, another reason, an impossible count."""
    cut = Answer("a ", "stop", 4, 3)
    assert check_stop(FREE, cut, ("lamp", "zebra")).ok()
    for bad in (
        replace(cut, text="a lamp"),
        replace(cut, text="a la"),
        replace(cut, text="a lamp and a "),
        replace(cut, text="a"),
        replace(cut, finish_reason="length"),
        replace(cut, completion_tokens=9),
        replace(cut, completion_tokens=0),
    ):
        result = check_stop(FREE, bad, ("lamp",))
        assert (result.clause, result.verdict) == ("stop", Verdict.INVALID), bad


def test_answer_without_a_stop_string_decides_nothing() -> None:
    """Catches: a stop case in which nothing had to be cut counted as a pass."""
    assert check_stop(FREE, FREE, ("zebra",)).verdict is Verdict.UNKNOWN
    assert check_stop(FREE, FREE, ()).verdict is Verdict.UNKNOWN


def test_first_stop_is_the_one_that_is_complete_first() -> None:
    """Catches: the order of the list, or of the beginnings, taken for the order in which stop strings complete."""
    assert first_stop("xabcd", ("abcd", "bc")) == 2
    assert first_stop("xabcd", ("bc", "abc")) == 1  # both end together: the longer one
    assert first_stop("x", ("y",)) is None
