"""A stand-in for an engine that serves every program as the rules say, and faults that can be planted in it.

It is no model of scheduling: requests get their tokens in a drawn interleaving. What it shows is the power of the
programs and of the checkers of histories, not of the engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from blink_core.abi.enums import EventKind, FinishReason
from verification.history import History, Submitted
from verification.program import Program, RequestSpec, Shape, draw_program
from verification.properties.queue_ordering import check_history
from verification.result import CheckResult, Verdict

PAGE = 16
SHAPE = Shape(512, PAGE, 96, requests=(3, 8), most_new=24, sampled=0.0)
EOS = 2
Event = dict[str, Any]


def plain(program: Program) -> Program:
    """Without stop ids, biases and alternatives: the stand-in has no sampler."""
    keep = ("max_tokens", "seed", "ignore_eos", "priority", "prefix_cache")
    requests = []
    for r in program.requests:
        params = type(r.params)(**{name: getattr(r.params, name) for name in keep})
        requests.append(replace(r, params=params))
    return Program(tuple(requests))


def draw(seed: int) -> Program:
    return plain(draw_program(random.Random(seed), SHAPE))


def serve(program: Program, fault: Fault | None = None) -> History:
    """The history of a program: slots in order of submission, tokens in an interleaving drawn from the program
    alone."""
    rng = random.Random(len(program.requests))
    streams = {i: _stream(i, spec) for i, spec in enumerate(program.requests)}
    events: list[Event] = []
    left = {i: list(stream) for i, stream in streams.items()}
    while live := [i for i, stream in left.items() if stream]:
        events.append(left[rng.choice(live[:3])].pop(0))  # three rows run at a time
    if fault is not None:
        events = fault(program, events)
    submitted = [Submitted(i, i, 1, i) for i in range(len(program.requests))]
    cancels = {i for i, spec in enumerate(program.requests) if _cancelled_at(spec) is not None}
    return History(program, 1, submitted, cancels, events, complete=True)


def _cancelled_at(spec: RequestSpec) -> int | None:
    after = spec.cancel_after
    return None if after is None or after >= spec.params.max_tokens else after


def _stream(slot: int, spec: RequestSpec) -> list[Event]:
    cut = _cancelled_at(spec)
    count = spec.params.max_tokens if cut is None else cut
    own = {"slot": slot, "generation": 1}
    tokens = [
        own | {"kind": EventKind.TOKEN, "index": i, "token": 3 + (7 * slot + i) % 500, "reason": 0, "logprob": -0.5}
        for i in range(count)
    ]
    reason = FinishReason.LENGTH if cut is None else FinishReason.CANCELLED
    end = {"kind": EventKind.FINISH, "index": count, "token": 0, "reason": reason, "logprob": 0.0}
    return [*tokens, own | end]


Fault = Callable[[Program, list[Event]], list[Event]]


def lost_on_page(program: Program, events: list[Event]) -> list[Event]:
    """A token that fills a page, of a request whose prompt fills pages, is not delivered."""

    def lost(e: Event) -> bool:
        prompt = len(program.requests[e["slot"]].prompt)
        return e["kind"] == EventKind.TOKEN and prompt % PAGE == 0 and e["index"] == PAGE - 1

    return [e for e in events if not lost(e)]


def twice_beside_another(program: Program, events: list[Event]) -> list[Event]:
    """The second token of a row comes twice when another row's event came between it and the first."""
    out = []
    for at, e in enumerate(events):
        out.append(e)
        if e["kind"] == EventKind.TOKEN and e["index"] == 1 and at and events[at - 1]["slot"] != e["slot"]:
            out.append(e)
    return out


def two_ends_of_cancelled(program: Program, events: list[Event]) -> list[Event]:
    """A request that was cancelled before its first token ends twice."""
    return [
        e for one in events for e in ([one, one] if _ends(one, FinishReason.CANCELLED) and not one["index"] else [one])
    ]


def no_end_of_long(program: Program, events: list[Event]) -> list[Event]:
    """A request of more than one page of output never ends."""
    return [e for e in events if not (_ends(e, FinishReason.LENGTH) and e["index"] > PAGE)]


def wrong_count_of_urgent(program: Program, events: list[Event]) -> list[Event]:
    """The terminal event of the most urgent class counts one token too many."""
    return [
        e | {"index": e["index"] + 1}
        if e["kind"] == EventKind.FINISH and program.requests[e["slot"]].params.priority == 1
        else e
        for e in events
    ]


def to_the_neighbour(program: Program, events: list[Event]) -> list[Event]:
    """The last token of a request goes to the next slot, if that has a request."""
    out = []
    for e in events:
        last = e["kind"] == EventKind.TOKEN and e["index"] == program.requests[e["slot"]].params.max_tokens - 1
        move = last and e["index"] >= 2 and e["slot"] + 1 < len(program.requests)
        out.append(e | {"slot": e["slot"] + 1} if move else e)
    return out


def _ends(e: Event, reason: FinishReason) -> bool:
    return bool(e["kind"] == EventKind.FINISH and e["reason"] == reason)


FAULTS: tuple[Fault, ...] = (
    lost_on_page,
    twice_beside_another,
    two_ends_of_cancelled,
    no_end_of_long,
    wrong_count_of_urgent,
    to_the_neighbour,
)


def verdict(history: History) -> CheckResult:
    return check_history(history, eos_ids=[EOS], max_len=SHAPE.longest)


def caught(program: Program, fault: Fault) -> bool:
    return verdict(serve(program, fault)).verdict is Verdict.INVALID


def shrink(program: Program, bad: Callable[[Program], bool]) -> Program:
    """A program that is still bad: no request can be left out, and no prompt or output made shorter by half."""
    again = True
    while again:
        again = False
        for smaller in _smaller(program):
            if bad(smaller):
                program, again = smaller, True
                break
    return program


def _smaller(program: Program) -> list[Program]:
    found = []
    requests = program.requests
    if len(requests) > 1:
        found += [Program(requests[:at] + requests[at + 1 :]) for at in range(len(requests))]
    for at, r in enumerate(requests):
        if len(r.prompt) > 1:
            found.append(_with(program, at, replace(r, prompt=r.prompt[: len(r.prompt) // 2])))
        if r.params.max_tokens > 1:
            found.append(_with(program, at, replace(r, params=replace(r.params, max_tokens=r.params.max_tokens // 2))))
        if r.after:
            found.append(_with(program, at, replace(r, after=0)))
    return found


def _with(program: Program, at: int, request: RequestSpec) -> Program:
    return Program((*program.requests[:at], request, *program.requests[at + 1 :]))
