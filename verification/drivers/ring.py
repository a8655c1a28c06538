"""Runs a program through a ring client and records the history."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from blink_core.abi.dtypes import Array
from blink_core.abi.enums import EventKind
from blink_core.frontend.ring_client import Handle, ProtocolError, RingClient, RingFull
from blink_core.transport.interface import TransportError
from hil_rigs.engine_memory import EngineUnreachable
from verification.history import History, Submitted
from verification.masks import allowed_ids, mask_words
from verification.program import Program

TERMINAL = (EventKind.FINISH, EventKind.ERROR)
# Seconds for a program: so many, and so many for each of its tokens, but no more than leaves a test of profile smoke
# time to say which request was not served. A token of a real model costs some 0.05 s on an idle machine of two cores.
LEAST_S, TOKEN_S, MOST_S = 120.0, 0.5, 480.0


def deadline_of(program: Program) -> float:
    """Seconds within which a program must be through: a wedged engine is told from one on a busy machine."""
    tokens = sum(len(r.prompt) + r.params.max_tokens for r in program.requests)
    return min(LEAST_S + TOKEN_S * tokens, MOST_S)


def run_program(
    client: RingClient,
    program: Program,
    *,
    ring: int = 1,
    deadline_s: float | None = None,
    every: int = 0,
    observe: Callable[[], None] = lambda: None,
    died: Callable[[], str | None] = lambda: None,
    first: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> History:
    """Submits, cancels and polls until every request is terminal, `deadline_s` is over or the engine is gone.

    deadline_s: None: that of `deadline_of`.

    `observe` is called after each `every` events (0: never), for checks at step boundaries of the running engine.
    `died` says how the engine has died, None while it lives. `first` is entered for the submissions before the first
    poll; a hold of the engine there lets it see all of them at once, whatever its pace. A broken ring protocol and an
    engine out of reach are findings: they end the run and stand in the history.
    """
    history = History(program, ring)
    seconds = deadline_of(program) if deadline_s is None else deadline_s
    try:
        _Run(client, history, every, observe, died).run(first, time.monotonic() + seconds)
    except ProtocolError as e:
        history.broken = str(e)
    except (TransportError, EngineUnreachable) as e:
        history.died = str(e)
    return history


class _Run:
    def __init__(
        self,
        client: RingClient,
        history: History,
        every: int,
        observe: Callable[[], None],
        died: Callable[[], str | None],
    ) -> None:
        self.client, self.history, self.every, self.observe, self.died = client, history, every, observe, died
        self.waiting = deque(enumerate(history.program.requests))
        self.handles: dict[int, Handle] = {}
        self.requests: dict[tuple[int, int], int] = {}
        self.seen: dict[int, int] = {}
        self.counted = 0  # TOKEN and terminal events
        self.open: set[int] = set()

    def run(self, first: Callable[[], AbstractContextManager[None]], deadline: float) -> None:
        history = self.history
        with first():
            self.submit_due()
        next_observation = self.every
        while self.waiting or self.open:
            self.cancel_due()
            self.submit_due()
            if time.monotonic() > deadline:
                return
            events = self.deliver(0.2)
            if len(events) == 0 and (reason := self.died()) is not None:
                history.died = reason
                return
            for event in events:
                self.take(event)
            if self.every and len(history.events) >= next_observation:
                next_observation = len(history.events) + self.every
                self.cancel_due()  # before the hold, so that cancels fall into a step
                self.observe()
        # An event after the last terminal one would be a fault: look once more.
        self.deliver(0.0)
        history.complete = True

    def deliver(self, timeout: float) -> Array:
        events = self.client.poll(timeout)
        self.history.deliver(events)
        self.history.calls.append(("poll", len(events)))
        return events

    def take(self, event: Any) -> None:
        kind = int(event["kind"])
        self.counted += kind == EventKind.TOKEN or kind in TERMINAL
        request = self.requests.get((int(event["slot"]), int(event["generation"])))
        if request is None:
            return
        if kind == EventKind.TOKEN:
            self.seen[request] += 1
            self.post_mask(request, int(event["index"]) + 1)
        elif kind in TERMINAL:
            self.open.discard(request)

    def post_mask(self, request: int, index: int) -> None:
        spec = self.history.program.requests[request]
        if spec.mask_seed is not None and index < spec.params.max_tokens:
            allowed = allowed_ids(spec.mask_seed, index, self.client.config.vocab)
            self.client.post_mask(self.handles[request], index, mask_words(allowed))

    def submit_due(self) -> None:
        waiting, history = self.waiting, self.history
        while waiting and (self.counted >= waiting[0][1].after or not self.open):
            index, spec = waiting[0]
            try:
                handle = self.client.submit(spec.prompt, spec.params, tag=index, masked=spec.mask_seed is not None)
            except RingFull:
                return  # the ring is the bottleneck now: poll, then try again
            waiting.popleft()
            history.submitted.append(Submitted(index, handle.slot, handle.generation, handle.sq_index))
            history.calls.append(("submit", index))
            self.handles[index], self.requests[handle.slot, handle.generation] = handle, index
            self.seen[index] = 0
            self.open.add(index)
            self.post_mask(index, 0)
            self.cancel_due()

    def cancel_due(self) -> None:
        for request in sorted(self.open - self.history.cancels):
            after = self.history.program.requests[request].cancel_after
            if after is None or self.seen[request] < after:
                continue
            try:
                self.client.cancel(self.handles[request])
            except RingFull:
                return  # tried again after the next poll
            self.history.cancels.add(request)
            self.history.calls.append(("cancel", request))


def drain(client: RingClient, timeout: float = 30.0) -> None:
    """Polls until the client has no live request; for cleaning up after a broken run."""
    deadline = time.monotonic() + timeout
    while client.live and time.monotonic() < deadline:
        client.poll(0.1)
