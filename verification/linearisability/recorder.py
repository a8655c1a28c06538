"""Records what several threads do with one ring client, as operations.

Stamps are the numbers of one counter, drawn before each call and after it: an order that may be weaker than the real
one, and is never wrong.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from blink_core.abi.enums import EventKind
from blink_core.abi.params import SamplingParams
from blink_core.frontend.ring_client import Handle, RingClient, RingFull
from verification.linearisability.operations import Kind, Operation, OperationHistory, Request
from verification.linearisability.recorded import named

_POLLER = 0


class Recorder:
    """A ring client for threads that submit and cancel, and one that polls. Requests are named by their numbers.

    A call that raises TransportError is of unknown outcome; one that raises RingFull did not happen.
    """

    def __init__(self, client: RingClient) -> None:
        self.client = client
        self.requests: list[Request] = []
        self.handles: list[Handle] = []
        self._operations: list[Operation] = []
        self._numbers: dict[tuple[int, int], int] = {}
        self._clock, self._processes = itertools.count(), itertools.count(_POLLER + 1)
        self._process = threading.local()
        self._lock = threading.Lock()

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, *, may_end: frozenset[str] = frozenset()
    ) -> int | None:
        """Submits a request; its number, or None if the ring is full.

        may_end: as in `Request`. Raises TransportError: then nobody knows whether the engine has a request without a
        number. Its events, if there are any, are those of a stranger, so that the history is no longer to be judged.
        """
        began = next(self._clock)
        try:
            handle = self.client.submit(prompt, params)
        except RingFull:
            return None
        over = next(self._clock)
        with self._lock:
            number = self._number(handle.slot, handle.generation, params.max_tokens, may_end | {"CONTEXT"})
            self.handles[number] = handle
            self._operations.append(Operation(Kind.SUBMIT, self._own(), began, over, number))
        return number

    def cancel(self, number: int) -> None:
        """Cancels a request. Raises RingFull or TransportError like the client; recorded either way."""
        with self._recorded(Kind.CANCEL, number):
            self.client.cancel(self.handles[number])

    @contextmanager
    def _recorded(self, kind: Kind, number: int) -> Iterator[None]:
        began = next(self._clock)
        failed, over = False, None
        try:
            yield
            over = next(self._clock)
        except RingFull:
            failed, over = True, next(self._clock)
            raise
        finally:
            with self._lock:
                self._operations.append(Operation(kind, self._own(), began, over, number, failed=failed))

    def _own(self) -> int:
        """Number of the calling thread; a new one after a call of unknown outcome is not needed, for it raises."""
        if not hasattr(self._process, "number"):
            self._process.number = next(self._processes)
        return int(self._process.number)

    def _number(self, slot: int, generation: int, most: int | None, may_end: frozenset[str]) -> int:
        """Number of a request. An event may be polled before its submission has returned: then it is known already."""
        known = self._numbers.get((slot, generation))
        request = Request(slot, generation, most, may_end)
        if known is None:
            known = self._numbers[slot, generation] = len(self.requests)
            self.requests.append(request)
            self.handles.append(Handle(slot, generation, -1))
        elif most is not None:
            self.requests[known] = request
        return known

    def poll(self, timeout: float) -> int:
        """Takes events, from one thread only; how many there were."""
        began = next(self._clock)
        events = self.client.poll(timeout)
        over = next(self._clock)
        with self._lock:
            for event in events:
                kind = int(event["kind"])
                if kind == EventKind.LOGPROBS:
                    continue
                number = self._number(int(event["slot"]), int(event["generation"]), None, frozenset())
                what, reason = named(kind, int(event["reason"]))
                index = int(event["index"])
                self._operations.append(Operation(what, _POLLER, began, over, number, index, reason=reason))
        return len(events)

    def quiet(self) -> None:
        """Every end that was owed should have been polled by now."""
        began, over = next(self._clock), next(self._clock)
        self._operations.append(Operation(Kind.QUIET, _POLLER, began, over))

    def history(self) -> OperationHistory:
        """What was recorded so far."""
        with self._lock:
            return OperationHistory(tuple(self.requests), tuple(sorted(self._operations, key=lambda o: o.invoked)))
