"""The checker of queue ordering on hand-made histories and logs: good ones pass, each clause has bad ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blink_core.abi.config import EngineConfig
from blink_core.abi.dtypes import EVENT, LOG_ENTRY, LOGPROBS_EVENT, Array
from blink_core.abi.enums import ErrorReason, EventKind, FinishReason, LogKind
from blink_core.abi.params import SamplingParams
from verification.history import History, Submitted
from verification.program import Program, RequestSpec
from verification.properties import queue_ordering as q
from verification.result import CheckResult, Measurement, Verdict

pytestmark = pytest.mark.usefixtures("well_formed")
EOS, STOP, MAX_LEN = 2, 9, 12
Event = dict[str, Any]


def event(slot: int, kind: int, *, index: int = 0, token: int = -1, reason: int = 0) -> Event:
    made = {"slot": slot, "generation": 1, "kind": kind, "index": index, "token": token, "reason": reason}
    return made | {"logprob": -0.5}


def stream(slot: int, tokens: list[int], reason: int, kind: int = EventKind.FINISH) -> list[Event]:
    events = [event(slot, EventKind.TOKEN, index=i, token=t) for i, t in enumerate(tokens)]
    return [*events, event(slot, kind, index=len(tokens), reason=reason, token=0 if kind == EventKind.FINISH else -1)]


def history(*streams: list[Event], specs: list[RequestSpec] | None = None, cancels: set[int] | None = None) -> History:
    """One request a stream, in slots 0, 1 ..., of 3 prompt tokens and at most 3 new ones."""
    asked = specs or [RequestSpec((1, 3, 4), SamplingParams(3, stop_token_ids=(STOP,)))] * len(streams)
    submitted = [Submitted(i, i, 1, i) for i in range(len(streams))]
    events = [e for s in streams for e in s]
    return History(Program(tuple(asked)), 1, submitted, cancels or set(), events, complete=True)


def verdict(h: History) -> tuple[str, str]:
    result = q.check_history(h, eos_ids=[EOS], max_len=MAX_LEN)
    return result.clause, result.verdict.value


def spec(*, prompt: tuple[int, ...] = (1, 3, 4), most: int = 3, **params: Any) -> list[RequestSpec]:
    return [RequestSpec(prompt, SamplingParams(most, stop_token_ids=(STOP,), **params))]


def one(tokens: list[int], reason: int, *, found: int = 0, kind: int = EventKind.FINISH, **asked: Any) -> History:
    """One request that asked for something more; `found` of its prompt tokens came from the prefix cache."""
    events = stream(0, tokens, reason, kind)
    if kind == EventKind.FINISH:
        events[-1]["token"] = found
    return history(events, specs=spec(**asked))


def alternatives(*pairs: tuple[int, float], slot: int = 0) -> Event:
    """A decoded LOGPROBS event."""
    tokens, logprobs = zip(*pairs, strict=True)
    made = {"slot": slot, "generation": 1, "kind": EventKind.LOGPROBS, "count": len(pairs)}
    return made | {"tokens": list(tokens), "logprobs": list(logprobs)}


def delivered(*pairs: tuple[int, float]) -> Event:
    """The same as a ring client delivers it: the bytes of an `Event`."""
    record = np.zeros(1, LOGPROBS_EVENT)
    record["kind"], record["generation"], record["count"] = EventKind.LOGPROBS, 1, len(pairs)
    for i, (token, logprob) in enumerate(pairs):
        record["tokens"][0, i], record["logprobs"][0, i] = token, logprob
    taken = history()
    taken.events.clear()
    taken.deliver(np.concatenate((np.zeros(1, EVENT), record.view(EVENT))))
    return taken.events[1]


def with_logprobs(*events: Event, asked: int = 3) -> History:
    """One token, 5 at -0.5, behind these events."""
    return history([*events, *stream(0, [5], FinishReason.LENGTH)], specs=spec(most=1, logprobs=asked))


PAIRS = [alternatives((9, -0.25), (5, -0.5)), alternatives((7, -3.0))]
GOOD = [
    one([5, 6, 7], FinishReason.LENGTH, found=2),
    one([], ErrorReason.DEADLINE, kind=EventKind.ERROR, deadline_us=5),
    one([5], ErrorReason.NO_TOKEN, kind=EventKind.ERROR, min_tokens=2),
    one([5], ErrorReason.NO_TOKEN, kind=EventKind.ERROR, mask_box=0),
    one([5, 6, EOS], FinishReason.EOS, min_tokens=2),
    with_logprobs(*PAIRS),
    with_logprobs(delivered((9, -0.25), (5, -0.5)), delivered((7, -3.0))),
    with_logprobs(asked=0),
    history(stream(0, [5, 6, 7], FinishReason.LENGTH), stream(1, [5, EOS], FinishReason.EOS)),
    history(stream(0, [5, STOP], FinishReason.STOP_TOKEN)),
    history(
        stream(0, [5] * 9, FinishReason.CONTEXT), specs=[RequestSpec((1, 3, 4), SamplingParams(20, ignore_eos=True))]
    ),
    history(stream(0, [], FinishReason.CANCELLED), stream(1, [5, 6, 7], FinishReason.LENGTH), cancels={0}),
    history(stream(0, [5, 6, 7], FinishReason.LENGTH), cancels={0}),  # the cancel came too late
]


def test_alternatives_are_decoded_on_delivery() -> None:
    """Catches: alternatives kept as the fields of an Event, where a token id passes for an index."""
    assert delivered((9, -0.25), (5, -0.5)) == {**alternatives((9, -0.25), (5, -0.5)), "seq": 0}
    assert delivered((7, -3.0))["tokens"] == [7]


@pytest.mark.parametrize("h", GOOD)
def test_good_histories_pass(h: History) -> None:
    """Catches: a checker that rejects an allowed end."""
    assert verdict(h)[1] in ("valid", "unknown"), q.check_history(h, eos_ids=[EOS], max_len=MAX_LEN)
    assert (verdict(h)[1] == "unknown") == all(e["kind"] != EventKind.FINISH for e in h.events)


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


def dangling() -> History:
    """Alternatives behind the last token."""
    h = with_logprobs(*PAIRS)
    h.events.insert(-1, PAIRS[0])
    return h


BAD = {
    "found-the-whole-prompt": ("terminal", one([5, 6, 7], FinishReason.LENGTH, found=3)),
    "found-less-than-nothing": ("terminal", one([5, 6, 7], FinishReason.LENGTH, found=-1)),
    "found-what-it-did-not-look-for": ("terminal", one([5, 6, 7], FinishReason.LENGTH, found=2, prefix_cache=False)),
    "stop-before-min-tokens": ("terminal", one([5, STOP], FinishReason.STOP_TOKEN, min_tokens=2)),
    "deadline-unasked": ("goodput", one([5], ErrorReason.DEADLINE, kind=EventKind.ERROR)),
    "no-token-unasked": ("goodput", one([5], ErrorReason.NO_TOKEN, kind=EventKind.ERROR)),
    "lease-unexplained": ("goodput", one([5], ErrorReason.LEASE_LOST, kind=EventKind.ERROR)),
    "deadline-miscounted": (
        "goodput",
        history([event(0, EventKind.ERROR, index=1, reason=ErrorReason.DEADLINE)], specs=spec(deadline_us=5)),
    ),
    "alternatives-unasked": ("logprobs", with_logprobs(*PAIRS, asked=0)),
    "alternatives-missing": ("logprobs", with_logprobs()),
    "alternatives-too-few": ("logprobs", with_logprobs(PAIRS[0])),
    "alternatives-spread": ("logprobs", with_logprobs(*[alternatives(p) for p in ((9, -0.25), (5, -0.5), (7, -3.0))])),
    "alternatives-uneven": ("logprobs", with_logprobs(alternatives((9, -0.25)), alternatives((5, -0.5), (7, -3.0)))),
    "alternatives-twice": ("logprobs", with_logprobs(PAIRS[0], alternatives((9, -3.0)))),
    "alternatives-no-id": ("logprobs", with_logprobs(PAIRS[0], alternatives((-1, -3.0)))),
    "alternatives-out-of-order": ("logprobs", with_logprobs(PAIRS[0], alternatives((7, -0.3)))),
    "alternatives-improbable": ("logprobs", with_logprobs(alternatives((9, 0.25), (5, -0.5)), PAIRS[1])),
    "alternatives-nan": ("logprobs", with_logprobs(PAIRS[0], alternatives((7, float("nan"))))),
    "alternatives-other-value": ("logprobs", with_logprobs(alternatives((9, -0.25), (5, -0.6)), PAIRS[1])),
    "alternatives-without-the-best": ("logprobs", with_logprobs(alternatives((9, -0.6), (4, -0.7)), PAIRS[1])),
    "alternatives-of-no-token": ("logprobs", dangling()),
    "alternatives-of-a-stranger": ("delivery", with_logprobs(alternatives((9, -0.25), (5, -0.5), slot=3))),
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
    "count": (
        "terminal",
        history([*DONE[:-1], event(0, EventKind.FINISH, index=2, token=0, reason=FinishReason.LENGTH)]),
    ),
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


AT = {"swapped": 0, "repeated": 1, "unknown-kind": 0, "uncancelled": 1}
AT |= {name: -2 for name, (clause, _) in BAD.items() if clause == "logprobs"}  # the token, before the end
AT |= {"alternatives-of-no-token": -1, "alternatives-of-a-stranger": 0}
NO_EVENT: dict[str, dict[str, Any]] = {"deadline": {"requests": []}, "no-end": {"requests": [0]}}


@pytest.mark.parametrize("name", BAD)
def test_the_event_at_fault_is_shown(name: str) -> None:
    """Catches: a witness without the event that is wrong, with another one, or without what it contradicts."""
    clause, h = BAD[name]
    shown: dict[str, Any] = NO_EVENT.get(name, {})
    if clause not in ("sequence", "bounded-wait"):
        shown = {"event": h.events[AT.get(name, -1)]}
    if name in ("after-end", "two-ends"):
        shown["terminal"] = DONE[-1]
    if clause in ("terminal", "goodput"):
        shown["max_tokens"] = h.program.requests[0].params.max_tokens
    assert q.check_history(h, eos_ids=[EOS], max_len=MAX_LEN).witness == shown


def test_nothing_to_judge_is_unknown() -> None:
    """Catches: a pass on an empty program, on requests never submitted, or where nothing finished."""
    assert verdict(history()) == ("delivery", "unknown")
    short = history(DONE)
    short.program = Program(short.program.requests * 2)
    assert verdict(short) == ("delivery", "unknown")
    assert verdict(history(stream(0, [], FinishReason.CANCELLED), cancels={0})) == ("goodput", "unknown")


def test_what_the_story_explains() -> None:
    """Catches: a front end's own silence taken for the engine's fault; everything excused because one thing is."""
    lost = stream(0, [5], ErrorReason.LEASE_LOST, EventKind.ERROR)
    both = history(lost, stream(1, [5, 6, 7], FinishReason.LENGTH))

    def told(h: History, reason: ErrorReason) -> CheckResult:
        return q.check_history(h, eos_ids=[EOS], max_len=MAX_LEN, explained=[reason])

    assert told(both, ErrorReason.LEASE_LOST).ok()
    other = told(both, ErrorReason.DRAINING)
    assert (other.clause, other.verdict) == ("goodput", Verdict.INVALID)
    alone = told(history(lost), ErrorReason.LEASE_LOST)
    assert (alone.clause, alone.verdict) == ("goodput", Verdict.UNKNOWN)


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
    shown = {"admitted": {"order": [1, 0]}, "taken": {"order": [1, 0]}, "twice": {"order": [0, 1, 0]}}
    for name, entries in bad.items():
        result = q.check_fifo(PAIR, entries, 0)
        assert (result.clause, result.verdict) == ("fifo", Verdict.INVALID), name
        assert result.witness == {**shown, "not-admitted": {"requests": [1]}}.get(name, {})
    overwritten = q.check_fifo(PAIR, log(*TAKEN, *ADMITTED), 3)
    assert (overwritten.verdict, overwritten.witness) == (Verdict.UNKNOWN, {"gap": 3})
    silent = history(stream(0, [], FinishReason.CANCELLED), cancels={0})
    assert q.check_fifo(silent, log(TAKEN[0]), 0).verdict is Verdict.UNKNOWN


def test_fifo_of_classes() -> None:
    """Catches: an urgent request held against the order of its ring, or a class of which the order is not judged."""
    params = [SamplingParams(3, priority=p) for p in (1, 0, 1)]
    h = history(*(stream(i, [5, 6, 7], FinishReason.LENGTH) for i in range(3)))
    h.program = Program(tuple(RequestSpec((1, 3, 4), p) for p in params))
    taken = [(LogKind.ACCEPT, i, i) for i in range(3)]
    urgent_first, swapped_class = (1, 0, 2), (1, 2, 0)
    assert q.check_fifo(h, log(*taken, *[(LogKind.ADMIT, i, 0) for i in urgent_first]), 0).ok()
    result = q.check_fifo(h, log(*taken, *[(LogKind.ADMIT, i, 0) for i in swapped_class]), 0)
    assert (result.clause, result.verdict) == ("fifo", Verdict.INVALID)


def test_check_gives_the_first_violated_clause() -> None:
    """Catches: fifo judged of a history that was not delivered; a clause lost in the merge."""
    good = log(*TAKEN, *ADMITTED)
    right = q.check(PAIR, good, 0, eos_ids=[EOS], max_len=MAX_LEN)
    assert (right.property, right.verdict) == (q.PROPERTY, Verdict.VALID)
    assert right.measurements == {"requests": Measurement(2, "requests"), "events": Measurement(8, "events")}
    assert q.check(PAIR, log(*TAKEN, *ADMITTED[::-1]), 0, eos_ids=[EOS], max_len=MAX_LEN).clause == "fifo"
    assert q.check(changed(died="killed"), good, 0, eos_ids=[EOS], max_len=MAX_LEN).clause == "bounded-wait"
