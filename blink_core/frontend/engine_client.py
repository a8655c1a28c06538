"""The engine client of the HTTP front end: one ring, one polling thread, one asyncio queue a request.

When the engine is lost, every request ends with ENGINE_DEAD and new ones are refused with it. That is final if its
process has ended, it has stopped, or it broke the ring protocol, or if another front end has attached to the ring: that
one keeps it. An engine that only stood still (no heartbeat for the limit) is taken back when its heartbeat returns: the
client attaches with a new epoch, for which the engine drops the requests that were given up here.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from blink_core.abi.config import ConfigError, EngineConfig
from blink_core.abi.dtypes import CONFIG, EVENT, Array
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
from blink_core.frontend.ring_client import ArenaFull, Handle, ProtocolError, RingClient, RingFull, decode_logprobs
from blink_core.runtime.descriptor import KV_COUNTERS, DescriptorError, EngineDescriptor
from blink_core.runtime.engine_health import Health, HealthReader
from blink_core.runtime.memory import MappedMemory
from blink_core.transport.interface import TransportError, TransportTimeout
from blink_core.transport.shm import Segment, ShmTransport

log = logging.getLogger("blink.frontend")

HEARTBEAT_LIMIT_S = 5.0  # above the longest hold of a healthy scheduler thread
POLL_S = 0.1
ARENA_WAIT_S = 2.0  # for room in the prompt arena; the engine empties it between two steps
ARENA_POLL_S = 0.002

Output = TokenOutput | Finished | EngineError
Key = tuple[int, int]  # slot and generation of a request


class RingEngineClient:
    """`EngineClient` over a ring. Create it with `connect`; use it from one event loop."""

    def __init__(
        self,
        ring: RingClient,
        limits: EngineLimits,
        pid: int,
        loop: asyncio.AbstractEventLoop,
        *,
        heartbeat_limit_s: float = HEARTBEAT_LIMIT_S,
    ) -> None:
        """ring: attached. pid: the engine's process. heartbeat_limit_s: seconds without a heartbeat that mean loss."""
        self._ring, self._limits, self._pid, self._loop = ring, limits, pid, loop
        self._heartbeat_limit_s = heartbeat_limit_s
        self._started = _start_time(pid)
        self._queues: dict[Key, asyncio.Queue[Output]] = {}
        self._tags = itertools.count(1)
        self._failure: str | None = None
        self.kv_reports: Callable[[], int] | None = None  # of an engine under the KV sanitizer
        self.engine_health: Callable[[], Health] = Health  # what the engine's own process knows
        self._ended: Counter[ErrorReason] = Counter()  # requests that the model's own errors ended
        self._state = EngineState.READY
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._pump, name="blink-ring-poll", daemon=True)
        self._thread.start()

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    # ---- polling thread

    def _pump(self) -> None:
        try:
            while not self._stop.is_set():
                self._fail(self._follow())
                if not self._reattach():
                    return
                log.warning("engine is back: its heartbeat returned, attached with a new epoch")
                self._loop.call_soon_threadsafe(self._recover)
        except (_Lost, ProtocolError, TransportError) as e:
            self._fail(str(e))
        except Exception as e:
            if self._loop.is_closed():  # nobody is left to tell, and handing on is what failed
                return
            # Whatever it is, the thread ends with it: silence would leave every request waiting.
            log.exception("the polling thread failed")
            self._fail(f"the front end's polling thread failed: {type(e).__name__}: {e}")

    def _follow(self) -> str:
        """Hands events on until the heartbeat stops; returns why. Raises _Lost if the engine is gone for good."""
        beat, beat_at = -1, time.monotonic()
        decoder = _Decoder()
        while not self._stop.is_set():
            events = self._ring.poll(POLL_S)
            self._hand_on(decoder, events)
            now = time.monotonic()
            if now - beat_at <= POLL_S:
                continue
            seen = self._look(None if len(events) else decoder)
            if seen != beat:
                beat, beat_at = seen, now
            if now - beat_at > self._heartbeat_limit_s:
                return f"no heartbeat for {self._heartbeat_limit_s:g} s"
        return "the client is closed"

    def _hand_on(self, decoder: _Decoder, events: Array) -> None:
        """Decodes here, not on the loop, so that an event that means nothing ends as the loss of the engine. Those
        before it are handed on all the same."""
        outputs: list[tuple[Key, Output]] = []
        try:
            outputs.extend(decoder.decode(events))
        finally:
            if outputs:
                self._loop.call_soon_threadsafe(self._dispatch, outputs)

    def _look(self, decoder: _Decoder | None = None) -> int:
        """The heartbeat. Raises _Lost when the process is gone or the engine has stopped and said all it had to say.

        decoder: of the events that may still be there if it has stopped; None: do not look for them.
        """
        self._ring.check_successor()  # also where an attach failed, after which `check_epoch` lets nobody pass
        seen, state = self._ring.engine_words()
        self._state = EngineState(state)
        if self._state in (EngineState.STOPPED, EngineState.FAILED) and decoder is not None:
            # Every event was published before that state: what was not there before it is there now.
            last = self._ring.poll(0.0) if self._ring.attached else np.zeros(0, EVENT)
            if not len(last):
                raise _Lost(self._because(f"engine is {self._state.name.lower()}"))
            self._hand_on(decoder, last)
        if self._started is None or not _still_runs(self._pid, self._started):
            raise _Lost(self._because(f"engine process {self._pid} is gone"))
        if self._state is not EngineState.FAILED and (failure := self.engine_health().failure) is not None:
            raise _Lost(failure.reason)  # of a GPU that can no longer say so itself
        return seen

    def _because(self, what: str) -> str:
        """What happened, with the reason that the engine's process gave."""
        failure = self.engine_health().failure
        return what if failure is None or failure.reason in what else f"{what}: {failure.reason}"

    def _reattach(self) -> bool:
        """Waits for the heartbeat to return and takes a new epoch. False when the client is closed meanwhile."""
        decoder = _Decoder()  # its requests were given up: what comes of it is dropped
        stale = self._look(decoder)
        while not self._stop.wait(POLL_S):
            if self._look(decoder) == stale:
                continue
            with contextlib.suppress(TransportTimeout):  # it stands still again
                self._ring.attach(self._heartbeat_limit_s)
                return True
            stale = self._look(decoder)
        return False

    def _fail(self, why: str) -> None:
        """The engine is lost: every request ends with ENGINE_DEAD."""
        if self._stop.is_set():
            return
        log.error("engine lost: %s", why)
        self._failure = why
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._fail_all, why)

    # ---- event loop

    def _fail_all(self, why: str) -> None:
        self._failure = why  # again: a late `_recover` of an earlier loss may have run in between
        # Forgotten at once: after a new attach the same slot and generation name another request.
        queues, self._queues = self._queues, {}
        for queue in queues.values():
            queue.put_nowait(EngineError(ErrorReason.ENGINE_DEAD, f"the engine was lost: {why}"))

    def _recover(self) -> None:
        self._failure = None

    def _dispatch(self, outputs: list[tuple[Key, Output]]) -> None:
        for key, output in outputs:
            if isinstance(output, EngineError) and output.reason in _MODEL_ERRORS:
                self._ended[output.reason] += 1
            queue = self._queues.get(key)
            if queue is not None:  # else cancelled: its consumer is gone
                queue.put_nowait(output)

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, request_id: str
    ) -> AsyncIterator[TokenOutput | Finished]:
        """See `EngineClient.generate`."""
        if self._failure is not None:
            raise EngineError(ErrorReason.ENGINE_DEAD, f"the engine was lost: {self._failure}")
        queue: asyncio.Queue[Output] = asyncio.Queue()
        handle = await self._submit_with_room(prompt, params, queue)
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
            if self._queues.get((handle.slot, handle.generation)) is queue:
                del self._queues[handle.slot, handle.generation]
                if not terminal:
                    self._cancel(handle)

    async def _submit_with_room(
        self, prompt: Sequence[int], params: SamplingParams, queue: asyncio.Queue[Output]
    ) -> Handle:
        """Submits, waiting for arena space: the choices of one request come at once, and together may be larger than
        the arena, which would be refused for ever. Raises Overloaded after ARENA_WAIT_S, EngineError."""
        deadline = self._loop.time() + ARENA_WAIT_S
        while True:
            try:
                return self._submit(prompt, params, queue)
            except ArenaFull as e:
                if self._failure is not None:
                    raise EngineError(ErrorReason.ENGINE_DEAD, f"the engine was lost: {self._failure}") from e
                if self._loop.time() >= deadline:
                    raise Overloaded(str(e)) from e
            await asyncio.sleep(ARENA_POLL_S)

    def _submit(self, prompt: Sequence[int], params: SamplingParams, queue: asyncio.Queue[Output]) -> Handle:
        try:
            handle = self._ring.submit(prompt, params, tag=next(self._tags))
        except ArenaFull:
            raise
        except RingFull as e:
            raise Overloaded(str(e)) from e
        except ValueError as e:  # e.g. more logit bias than the arena holds beside the prompt
            raise EngineError(ErrorReason.BAD_PARAM, str(e)) from e
        except (TransportError, ProtocolError) as e:
            raise EngineError(ErrorReason.ENGINE_DEAD, str(e)) from e
        # Events are dispatched on this loop, hence only after this registration.
        self._queues[handle.slot, handle.generation] = queue
        if self._failure is not None:
            queue.put_nowait(EngineError(ErrorReason.ENGINE_DEAD, f"the engine was lost: {self._failure}"))
        return handle

    def _cancel(self, handle: Handle) -> None:
        try:
            self._ring.cancel(handle)
        # Room for a cancel of every live request is kept at submission, so RingFull is an engine that lost count. Never
        # try again later: after a new attach the same slot and generation name another request.
        except (RingFull, TransportError, ProtocolError) as e:
            log.warning("cancel of slot %d failed: %s", handle.slot, e)

    def health(self) -> EngineHealth:
        if self._failure is not None:
            return EngineHealth(False, "dead", self._because(self._failure))
        if self._state in (EngineState.DRAINING, EngineState.DRAINED):
            return EngineHealth(True, "draining", f"engine is {self._state.name.lower()}")
        told: list[str] = []
        if self.kv_reports is not None and (reports := self.kv_reports()):
            told.append(f"the KV sanitizer made {reports} reports: see the engine's log")
        told += [f"{count} requests ended with {_explain(reason)}" for reason, count in sorted(self._ended.items())]
        told += [detail] if (detail := self.engine_health().detail) else []
        return EngineHealth(True, "ready", "; ".join(told))

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
    ErrorReason.DEADLINE: "the request's own deadline passed",
    ErrorReason.LEASE_LOST: "the front end did not renew its lease in time, so the engine dropped its requests",
    ErrorReason.NO_TOKEN: "logit_bias, min_tokens and the grammar leave no token that may be chosen",
}

_MODEL_ERRORS = frozenset({ErrorReason.NAN_LOGITS, ErrorReason.MODEL_ERROR})


def _explain(reason: ErrorReason) -> str:
    return f"{reason.name}: {_EXPLANATIONS.get(reason, 'the engine refused the request')}"


class _Decoder:
    """Turns one epoch's events into what requests are told; holds the alternatives of tokens that are still to come."""

    def __init__(self) -> None:
        self._alternatives: dict[Key, list[tuple[int, float]]] = {}

    def decode(self, events: Array) -> Iterator[tuple[Key, Output]]:
        """Raises ProtocolError at an event whose kind or reason does not exist."""
        pairs = decode_logprobs(events)
        for at, event in enumerate(events.tolist()):
            seq, slot, kind, reason, generation, index, token, logprob, _step = event
            key = slot, generation
            try:
                kind = EventKind(kind)
                if kind == EventKind.TOKEN:
                    yield key, TokenOutput(index, token, logprob, tuple(self._alternatives.pop(key, ())))
                elif kind == EventKind.LOGPROBS:
                    count = int(pairs[at]["count"])
                    ids, values = pairs[at]["tokens"][:count].tolist(), pairs[at]["logprobs"][:count].tolist()
                    known = self._alternatives.setdefault(key, [])
                    known += [pair for pair in zip(ids, values, strict=True) if pair[0] >= 0]  # -1: a tiny vocabulary
                else:
                    self._alternatives.pop(key, None)
                    if kind == EventKind.FINISH:
                        yield key, Finished(FinishReason(reason), index, max(0, token))
                    else:
                        yield key, EngineError(ErrorReason(reason), _explain(ErrorReason(reason)))
            except ValueError as e:
                raise ProtocolError(f"event {seq} of slot {slot} generation {generation}: {e}") from e


class _Lost(Exception):
    """The engine is gone for good; says why."""


def _start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot, which tells it from a later one with its pid; None if it is not
    there or has ended: a zombie, which no parent has waited for yet, is gone too."""
    try:
        return _read_start_time(pid)
    except OSError:
        return None


def _still_runs(pid: int, started: int) -> bool:
    """Whether the process that began at `started` runs. Where that cannot be read now, the heartbeat decides: a front
    end without a free file descriptor must not call a living engine dead."""
    try:
        return _read_start_time(pid) == started
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True


def _read_start_time(pid: int) -> int | None:
    # The name, in parentheses, may hold anything.
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


async def connect(
    descriptor_path: Path | str, ring: int, *, timeout: float = 30.0, heartbeat_limit_s: float = HEARTBEAT_LIMIT_S
) -> RingEngineClient:
    """Attaches to ring `ring` of the engine that wrote `descriptor_path`. Times are in seconds.

    Raises EngineError with the reason when there is no such engine or ring, or it does not answer within `timeout`,
    ValueError for a limit that no heartbeat could keep.
    """
    if not heartbeat_limit_s > POLL_S:
        raise ValueError(f"heartbeat limit is {heartbeat_limit_s} s, must be more than {POLL_S} s")
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
        max_bias=config.max_bias,
        max_logprobs=config.max_logprobs,
    )
    loop = asyncio.get_running_loop()
    made = RingEngineClient(client, limits, descriptor.pid, loop, heartbeat_limit_s=heartbeat_limit_s)
    made.kv_reports = kv_reports(descriptor)
    made.engine_health = HealthReader(Path(descriptor_path).parent).read
    return made


def kv_reports(descriptor: EngineDescriptor) -> Callable[[], int] | None:
    """What counts the reports of the engine's KV sanitizer; None where it runs without, or is out of reach."""
    info = descriptor.kv_sanitizer
    if info is None:
        return None
    try:
        memory = MappedMemory(descriptor.pid, info.counters.fd, info.counters.nbytes)
    except OSError as e:
        log.warning("the KV sanitizer's counters are out of reach: %s", e)
        return None
    counters = np.frombuffer(memory.buffer, np.uint64, len(KV_COUNTERS))
    return lambda: int(counters[KV_COUNTERS.index("reports")])


def open_ring(descriptor: EngineDescriptor, ring: int) -> RingClient:
    """A ring client over shared memory, not yet attached.

    Raises TransportError if the segment is not there, ProtocolError if it is of another engine than the descriptor.
    """
    layouts = descriptor.config.layouts()
    segment = Segment(descriptor.segment)
    try:
        found = EngineConfig.unpack(bytes(segment.buffer[: CONFIG.itemsize]))
    except ConfigError as e:
        raise ProtocolError(f"segment {descriptor.segment}: {e}") from e
    if found != descriptor.config:
        raise ProtocolError(f"segment {descriptor.segment} holds {found}, the descriptor says {descriptor.config}")
    base = layouts["Control"].nbytes + ring * layouts["Ring"].nbytes
    return RingClient(ShmTransport(segment, base, layouts["Ring"].nbytes), descriptor.config)
