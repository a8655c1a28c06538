"""The checker of queue ordering on hand-made histories and logs: good ones pass, each clause has bad ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blink_core.abi.config import EngineConfig
from blink_core.abi.dtypes import LOG_ENTRY, Array
from blink_core.abi.enums import ErrorReason, EventKind, FinishReason, LogKind
from blink_core.abi.params import SamplingParams
from verification.history import History, Submitted
from verification.program import Program, RequestSpec
from verification.properties import queue_ordering as q
from verification.result import Verdict

EOS, STOP, MAX_LEN = 2, 9, 12
Event = dict[str, Any]


def event(slot: int, kind: int, *, index: int = 0, token: int = -1, reason: int = 0) -> Event:
    return {"slot": slot, "generation": 1, "kind": kind, "index": index, "token": token, "reason": reason}


def stream(slot: int, tokens: list[int], reason: int, kind: int = EventKind.FINISH) -> list[Event]:
    events = [event(slot, EventKind.TOKEN, index=i, token=t) for i, t in enumerate(tokens)]
    return [*events, event(slot, kind, index=len(tokens), reason=reason)]


def history(*streams: list[Event], specs: list[RequestSpec] | None = None, cancels: set[int] | None = None) -> History:
    """One request a stream, in slots 0, 1 ..., of 3 prompt tokens and at most 3 new ones."""
    asked = specs or [RequestSpec((1, 3, 4), SamplingParams(3, stop_token_ids=(STOP,)))] * len(streams)
    submitted = [Submitted(i, i, 1, i) for i in range(len(streams))]
    events = [e for s in streams for e in s]
    return History(Program(tuple(asked)), 1, submitted, cancels or set(), events, complete=True)


def verdict(h: History) -> tuple[str, str]:
    result = q.check_history(h, eos_ids=[EOS], max_len=MAX_LEN)
    return result.clause, result.verdict.value


GOOD = [
    history(stream(0, [5, 6, 7], FinishReason.LENGTH), stream(1, [5, EOS], FinishReason.EOS)),
    history(stream(0, [5, STOP], FinishReason.STOP_TOKEN)),
    history(
        stream(0, [5] * 9, FinishReason.CONTEXT), specs=[RequestSpec((1, 3, 4), SamplingParams(20, ignore_eos=True))]
    ),
    history(stream(0, [], FinishReason.CANCELLED), stream(1, [5, 6, 7], FinishReason.LENGTH), cancels={0}),
    history(stream(0, [5, 6, 7], FinishReason.LENGTH), cancels={0}),  # the cancel came too late
]


@pytest.mark.parametrize("h", GOOD)
def test_good_histories_pass(h: History) -> None:
    """Catches: a checker that rejects an allowed end."""
    assert verdict(h)[1] == "valid"


def swapped() -> History:
    h = history(stream(0, [5, 6, 7], FinishReason.LENGTH))
    h.events[0], h.events[1] = h.events[1], h.events[0]
    return h


def changed(**fields: Any) -> History:
    h = history(stream(0, [5, 6, 7], FinishReason.LENGTH))
    for name, value in fields.items():
        setattr(h, name, value)
    return h


DONE = stream(0, [5, 6, 7], FinishReason.LENGTH)
BAD = {
    "protocol": ("sequence", changed(broken="event 4 carries sequence number 3")),
    "died": ("bounded-wait", changed(died="engine exited with status -9")),
    "deadline": ("bounded-wait", changed(complete=False)),
    "nothing-submitted-yet-dead": ("bounded-wait", changed(died="killed", submitted=[], events=[], complete=False)),
    "no-end": ("bounded-wait", history(DONE[:-1])),
    "stranger": ("delivery", history([*DONE, event(3, EventKind.TOKEN)])),
    "after-end": ("delivery", history([*DONE, event(0, EventKind.TOKEN, index=3, token=5)])),
    "two-ends": ("delivery", history([*DONE, DONE[-1]])),
    "swapped": ("delivery", swapped()),
    "repeated": ("delivery", history([DONE[0], *DONE])),
    "unknown-kind": ("delivery", history([event(0, 77), *DONE])),
    "count": ("terminal", history([*DONE[:-1], event(0, EventKind.FINISH, index=2, reason=FinishReason.LENGTH)])),
    "too-many": ("terminal", history(stream(0, [5, 6, 7, 8], FinishReason.LENGTH))),
    "too-short": ("terminal", history(stream(0, [5], FinishReason.LENGTH))),
    "past-eos": ("terminal", history(stream(0, [EOS, 6, 7], FinishReason.LENGTH))),
    "past-stop": ("terminal", history(stream(0, [STOP, 6, 7], FinishReason.LENGTH))),
    "false-eos": ("terminal", history(stream(0, [5, 6], FinishReason.EOS))),
    "false-stop": ("terminal", history(stream(0, [5, 6], FinishReason.STOP_TOKEN))),
    "false-context": ("terminal", history(stream(0, [5, 6], FinishReason.CONTEXT))),
    "uncancelled": (
        "terminal",
        history(stream(0, [5], FinishReason.CANCELLED), stream(1, [5, 6, 7], FinishReason.LENGTH)),
    ),
    "garbage-reason": ("terminal", history(stream(0, [5, 6, 7], 200))),
    "error": ("goodput", history(stream(0, [5], ErrorReason.NAN_LOGITS, EventKind.ERROR))),
    "garbage-error": ("goodput", history(stream(0, [5], 250, EventKind.ERROR))),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_histories_are_invalid(name: str) -> None:
    """Catches: a clause that cannot fail; a dead engine taken for trouble of the rig; an exception on garbage."""
    clause, h = BAD[name]
    assert verdict(h) == (clause, "invalid")


def test_nothing_to_judge_is_unknown() -> None:
    """Catches: a pass on an empty program, on requests never submitted, or where nothing finished."""
    assert verdict(history()) == ("delivery", "unknown")
    short = history(DONE)
    short.program = Program(short.program.requests * 2)
    assert verdict(short) == ("delivery", "unknown")
    assert verdict(history(stream(0, [], FinishReason.CANCELLED), cancels={0})) == ("goodput", "unknown")


def test_limits_are_compared_with_the_oracles() -> None:
    """Catches: an engine that ends at other ids, or at another length, than it should."""
    config = EngineConfig(vocab=64, eos_ids=(2, 0), max_len=MAX_LEN)
    assert q.check_limits(config, (0, 2), MAX_LEN).ok()
    for eos, length in (((2,), MAX_LEN), ((0, 2, 5), MAX_LEN), ((0, 2), 11)):
        result = q.check_limits(config, eos, length)
        assert (result.clause, result.verdict) == ("limits", Verdict.INVALID)


def log(*entries: tuple[int, int, int]) -> Array:
    """Entries (kind, slot, c) of ring 1."""
    made = np.zeros(len(entries), LOG_ENTRY)
    for record, (kind, slot, c) in zip(made, entries, strict=True):
        record["kind"], record["slot"], record["c"], record["ring"], record["generation"] = kind, slot, c, 1, 1
    return made


PAIR = history(DONE, stream(1, [5, 6, 7], FinishReason.LENGTH))
TAKEN = [(LogKind.ACCEPT, 0, 0), (LogKind.ACCEPT, 1, 1)]
ADMITTED = [(LogKind.ADMIT, 0, 0), (LogKind.ADMIT, 1, 0)]


def test_fifo() -> None:
    """Catches: order of acceptance or admission that is not judged; a resumed request counted as a first admission."""
    assert q.check_fifo(PAIR, log(*TAKEN, *ADMITTED, (LogKind.ADMIT, 0, 1)), 0).ok()
    bad = {
        "admitted": log(*TAKEN, *ADMITTED[::-1]),
        "taken": log(*TAKEN[::-1], *ADMITTED),
        "twice": log(*TAKEN, *ADMITTED, ADMITTED[0]),
        "lost": log(TAKEN[0], *ADMITTED),
        "not-admitted": log(*TAKEN, ADMITTED[0]),
        "empty": log(),
    }
    for name, entries in bad.items():
        result = q.check_fifo(PAIR, entries, 0)
        assert (result.clause, result.verdict) == ("fifo", Verdict.INVALID), name
    assert q.check_fifo(PAIR, log(*TAKEN, *ADMITTED), 3).verdict is Verdict.UNKNOWN
    silent = history(stream(0, [], FinishReason.CANCELLED), cancels={0})
    assert q.check_fifo(silent, log(TAKEN[0]), 0).verdict is Verdict.UNKNOWN


def test_check_gives_the_first_violated_clause() -> None:
    """Catches: fifo judged of a history that was not delivered; a clause lost in the merge."""
    good = log(*TAKEN, *ADMITTED)
    assert q.check(PAIR, good, 0, eos_ids=[EOS], max_len=MAX_LEN).ok()
    assert q.check(PAIR, log(*TAKEN, *ADMITTED[::-1]), 0, eos_ids=[EOS], max_len=MAX_LEN).clause == "fifo"
    assert q.check(changed(died="killed"), good, 0, eos_ids=[EOS], max_len=MAX_LEN).clause == "bounded-wait"
