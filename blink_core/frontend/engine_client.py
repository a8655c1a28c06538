"""The engine client of the HTTP front end: one ring, one polling thread, one asyncio queue a request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from blink_core.abi.dtypes import Array
from blink_core.abi.enums import EngineState, ErrorReason, EventKind, FinishReason
from blink_core.abi.params import SamplingParams
from blink_core.frontend.engine_api import (
    EngineError,
    EngineHealth,
    EngineLimits,
    Finished,
    Overloaded,
    TokenOutput,
)
from blink_core.frontend.ring_client import Handle, ProtocolError, RingClient, RingFull
from blink_core.runtime.descriptor import DescriptorError, EngineDescriptor
from blink_core.transport.interface import TransportError
from blink_core.transport.shm import Segment, ShmTransport

log = logging.getLogger("blink.frontend")

HEARTBEAT_LIMIT_S = 5.0  # above the longest hold of a healthy scheduler thread
POLL_S = 0.1

Output = TokenOutput | Finished | EngineError


class RingEngineClient:
    """`EngineClient` over a ring. Create it with `connect`; use it from one event loop."""

    def __init__(self, ring: RingClient, limits: EngineLimits, pid: int, loop: asyncio.AbstractEventLoop) -> None:
        self._ring, self._limits, self._pid, self._loop = ring, limits, pid, loop
        self._queues: dict[tuple[int, int], asyncio.Queue[Output]] = {}
        self._tags = itertools.count(1)
        self._failure: str | None = None
        self._state = EngineState.READY
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._pump, name="blink-ring-poll", daemon=True)
        self._thread.start()

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    # ---- polling thread

    def _pump(self) -> None:
        beat, beat_at = -1, time.monotonic()
        while not self._stop.is_set():
            try:
                events = self._ring.poll(POLL_S)
                if len(events):
                    self._loop.call_soon_threadsafe(self._dispatch, events)
                now = time.monotonic()
                if now - beat_at > POLL_S:
                    self._ring.renew_lease()
                    seen, state = self._ring.engine_words()
                    if seen != beat:
                        beat, beat_at = seen, now
                    self._state = EngineState(state)
                    if self._state in (EngineState.STOPPED, EngineState.FAILED) and not len(events):
                        # Every event was published before that state: what the look above missed is there now.
                        last = self._ring.poll(0.0)
                        if not len(last):
                            return self._fail(f"engine is {self._state.name.lower()}")
                        self._loop.call_soon_threadsafe(self._dispatch, last)
                    if now - beat_at > HEARTBEAT_LIMIT_S:
                        return self._fail(f"no heartbeat for {HEARTBEAT_LIMIT_S:g} s")
                    if not _alive(self._pid):
                        return self._fail(f"engine process {self._pid} is gone")
            except (ProtocolError, TransportError, ValueError) as e:
                return self._fail(str(e))
            except RuntimeError:  # the event loop has closed
                return None
        return None

    def _fail(self, why: str) -> None:
        """The engine is dead: every request ends with ENGINE_DEAD."""
        log.error("engine lost: %s", why)
        self._failure = why
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._fail_all, why)

    # ---- event loop

    def _fail_all(self, why: str) -> None:
        for queue in self._queues.values():
            queue.put_nowait(EngineError(ErrorReason.ENGINE_DEAD, f"the engine died: {why}"))

    def _dispatch(self, events: Array) -> None:
        for event in events.tolist():
            _seq, slot, kind, reason, generation, index, token, logprob, _step = event
            queue = self._queues.get((slot, generation))
            if queue is None:
                continue  # cancelled: its consumer is gone
            if kind == EventKind.TOKEN:
                queue.put_nowait(TokenOutput(index, token, logprob))
            elif kind == EventKind.FINISH:
                queue.put_nowait(Finished(FinishReason(reason), index))
            elif kind == EventKind.ERROR:
                queue.put_nowait(EngineError(ErrorReason(reason), _explain(ErrorReason(reason))))

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, request_id: str
    ) -> AsyncIterator[TokenOutput | Finished]:
        """See `EngineClient.generate`."""
        if self._failure is not None:
            raise EngineError(ErrorReason.ENGINE_DEAD, f"the engine died: {self._failure}")
        queue: asyncio.Queue[Output] = asyncio.Queue()
        handle = self._submit(prompt, params, queue)
        log.debug("request %s is slot %d generation %d", request_id, handle.slot, handle.generation)
        terminal = False
        try:
            while not terminal:
                output = await queue.get()
                terminal = not isinstance(output, TokenOutput)
                if isinstance(output, EngineError):
                    raise output
                yield output
        finally:
            del self._queues[handle.slot, handle.generation]
            if not terminal:
                self._cancel(handle)

    def _submit(self, prompt: Sequence[int], params: SamplingParams, queue: asyncio.Queue[Output]) -> Handle:
        try:
            handle = self._ring.submit(prompt, params, tag=next(self._tags))
        except RingFull as e:
            raise Overloaded(str(e)) from e
        except (TransportError, ProtocolError) as e:
            raise EngineError(ErrorReason.ENGINE_DEAD, str(e)) from e
        # Events are dispatched on this loop, hence only after this registration.
        self._queues[handle.slot, handle.generation] = queue
        if self._failure is not None:
            queue.put_nowait(EngineError(ErrorReason.ENGINE_DEAD, f"the engine died: {self._failure}"))
        return handle

    def _cancel(self, handle: Handle) -> None:
        try:
            self._ring.cancel(handle)
        except RingFull:
            # Room for a cancel of every live request is kept at submission; only a stalled engine gets here.
            self._loop.call_later(POLL_S, self._cancel, handle)
        except (TransportError, ProtocolError) as e:
            log.warning("cancel of slot %d failed: %s", handle.slot, e)

    def health(self) -> EngineHealth:
        if self._failure is not None:
            return EngineHealth(False, "dead", self._failure)
        if self._state in (EngineState.DRAINING, EngineState.DRAINED):
            return EngineHealth(True, "draining", f"engine is {self._state.name.lower()}")
        return EngineHealth(True, "ready")

    async def close(self) -> None:
        self._stop.set()
        await asyncio.to_thread(self._thread.join, 2.0)
        self._ring.close()


_EXPLANATIONS = {
    ErrorReason.BAD_LENGTH: "prompt or max_tokens has a length the engine does not take",
    ErrorReason.BAD_TOKEN: "a token id lies outside the vocabulary",
    ErrorReason.BAD_PARAM: "a sampling parameter is out of range",
    ErrorReason.NEVER_FITS: "prompt and max_tokens need more KV cache than the engine has",
    ErrorReason.NAN_LOGITS: "the model produced NaN for this request",
    ErrorReason.DRAINING: "the engine is shutting down",
    ErrorReason.MODEL_ERROR: "the model step failed",
}


def _explain(reason: ErrorReason) -> str:
    return f"{reason.name}: {_EXPLANATIONS.get(reason, 'the engine refused the request')}"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


async def connect(descriptor_path: Path | str, ring: int, *, timeout: float = 30.0) -> RingEngineClient:
    """Attaches to ring `ring` of the engine that wrote `descriptor_path`.

    Raises EngineError with the reason when there is no such engine or ring, or it does not answer within `timeout`.
    """
    try:
        descriptor = EngineDescriptor.read(Path(descriptor_path))
        config = descriptor.config
        if not 0 <= ring < config.rings:
            raise EngineError(ErrorReason.ENGINE_DEAD, f"ring {ring} does not exist: the engine has {config.rings}")
        client = open_ring(descriptor, ring)
        await asyncio.to_thread(client.attach, timeout)
    except (DescriptorError, TransportError, ProtocolError) as e:
        raise EngineError(ErrorReason.ENGINE_DEAD, str(e)) from e
    limits = EngineLimits(
        max_model_len=config.max_len,
        vocab_size=config.vocab,
        max_prompt_len=config.max_len - 1,
        slots=config.slots,
    )
    return RingEngineClient(client, limits, descriptor.pid, asyncio.get_running_loop())


def open_ring(descriptor: EngineDescriptor, ring: int) -> RingClient:
    """A ring client over shared memory, not yet attached."""
    layouts = descriptor.config.layouts()
    segment = Segment(descriptor.segment)
    base = layouts["Control"].nbytes + ring * layouts["Ring"].nbytes
    return RingClient(ShmTransport(segment, base, layouts["Ring"].nbytes), descriptor.config)
