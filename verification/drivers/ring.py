"""Runs a program through a ring client and records the history."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from blink_core.abi.enums import EventKind
from blink_core.frontend.ring_client import Handle, ProtocolError, RingClient, RingFull
from verification.history import History, Submitted
from verification.program import Program

TERMINAL = (EventKind.FINISH, EventKind.ERROR)


def run_program(
    client: RingClient,
    program: Program,
    *,
    ring: int = 1,
    deadline_s: float = 120.0,
    every: int = 0,
    observe: Callable[[], None] = lambda: None,
) -> History:
    """Submits, cancels and polls until every request is terminal or `deadline_s` is over.

    `observe` is called after each `every` events (0: never), for checks at step boundaries of the running engine.
    """
    history = History(program, ring)
    waiting = deque(enumerate(program.requests))
    handles: dict[tuple[int, int], tuple[int, Handle]] = {}
    seen: dict[int, int] = {}
    open_requests: set[int] = set()
    deadline = time.monotonic() + deadline_s
    next_observation = every

    def cancel_due(request: int) -> None:
        after = program.requests[request].cancel_after
        if after is not None and request not in history.cancels and request in open_requests and seen[request] >= after:
            handle = next(h for r, h in handles.values() if r == request)
            client.cancel(handle)
            history.cancels.add(request)

    while waiting or open_requests:
        while waiting and (len(history.events) >= waiting[0][1].after or not open_requests):
            index, spec = waiting[0]
            try:
                handle = client.submit(spec.prompt, spec.params, tag=index)
            except RingFull:
                break  # the ring is the bottleneck now: poll, then try again
            waiting.popleft()
            history.submitted.append(Submitted(index, handle.slot, handle.generation, handle.sq_index))
            handles[handle.slot, handle.generation] = (index, handle)
            seen[index] = 0
            open_requests.add(index)
            cancel_due(index)
        if time.monotonic() > deadline:
            return history
        try:
            events = client.poll(0.2)
        except ProtocolError as e:
            history.broken = str(e)
            return history
        history.deliver(events)
        for event in events:
            found = handles.get((int(event["slot"]), int(event["generation"])))
            if found is None:
                continue
            if event["kind"] == EventKind.TOKEN:
                seen[found[0]] += 1
                cancel_due(found[0])
            elif event["kind"] in TERMINAL:
                open_requests.discard(found[0])
        if every and len(history.events) >= next_observation:
            next_observation = len(history.events) + every
            observe()
    # An event after the last terminal one would be a fault: look once more.
    history.deliver(client.poll(0.0))
    history.complete = True
    return history


def drain(client: RingClient, timeout: float = 30.0) -> None:
    """Polls until the client has no live request; for cleaning up after a broken run."""
    deadline = time.monotonic() + timeout
    while client.live and time.monotonic() < deadline:
        client.poll(0.1)


def lengths(history: History) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Tokens delivered for each accepted request: int64[requests]."""
    return np.array([len(history.tokens_of(s)) for s in history.submitted], np.int64)
