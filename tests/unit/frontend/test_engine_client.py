"""The engine client over a real scheduler and ring: alternatives, cached tokens, deadlines, engine refusals."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest

from blink_core.abi.config import EngineConfig
from blink_core.abi.dtypes import EVENT, Array
from blink_core.abi.enums import ErrorReason, EventKind, FinishReason, StepStatus
from blink_core.abi.params import SamplingParams
from blink_core.frontend import engine_client
from blink_core.frontend.engine_api import EngineError, EngineLimits, Finished, Overloaded, TokenOutput
from blink_core.frontend.engine_client import HEARTBEAT_LIMIT_S, RingEngineClient
from blink_core.frontend.ring_client import ArenaFull, Handle, RingClient, RingFull
from blink_core.runtime.cpu import CpuRuntime, Plan, noop_step
from blink_core.transport.interface import TransportTimeout
from blink_core.transport.shm import Segment, ShmTransport

DEADLINE_S = 60.0


def step(plan: Plan) -> None:
    """Alternatives are 10, 11, ... + context length, with logprobs -1, -2, ...; nothing may be chosen at length 9."""
    noop_step(plan)
    width = plan.top_tokens.shape[1]
    plan.top_tokens[:] = plan.rows["context_len"][:, None] + np.arange(10, 10 + width)
    plan.top_logprobs[:] = -np.arange(1, width + 1)
    plan.results["status"][plan.rows["context_len"] == 9] = StepStatus.NO_TOKEN


def same_ring(ring: RingClient, runtime: CpuRuntime) -> RingClient:
    """Another client of the ring, not attached."""
    layouts = ring.config.layouts()
    transport = ShmTransport(Segment(runtime.segment.name), layouts["Control"].nbytes, layouts["Ring"].nbytes)
    return RingClient(transport, ring.config)


@asynccontextmanager
async def engine(heartbeat_limit_s: float = HEARTBEAT_LIMIT_S) -> AsyncIterator[RingEngineClient]:
    async with engine_and_runtime(heartbeat_limit_s) as (client, _):
        yield client


@asynccontextmanager
async def engine_and_runtime(
    heartbeat_limit_s: float = HEARTBEAT_LIMIT_S,
) -> AsyncIterator[tuple[RingEngineClient, CpuRuntime]]:
    config = EngineConfig(
        vocab=251,
        slots=4,
        sq_entries=16,
        cq_entries=128,
        max_len=64,
        arena_tokens=80,
        pages=66,
        page_size=4,
        max_rows=4,
    )
    runtime = CpuRuntime(config, f"blink-test-{os.getpid()}-{secrets.token_hex(4)}")
    serving = threading.Thread(target=runtime.serve, args=(step,))
    serving.start()
    try:
        layouts = config.layouts()
        transport = ShmTransport(Segment(runtime.segment.name), layouts["Control"].nbytes, layouts["Ring"].nbytes)
        ring = RingClient(transport, config)
        await asyncio.to_thread(ring.attach, 30.0)
        limits = EngineLimits(64, 251, 63, slots=4)
        loop = asyncio.get_running_loop()
        client = RingEngineClient(ring, limits, os.getpid(), loop, heartbeat_limit_s=heartbeat_limit_s)
        async with asyncio.timeout(DEADLINE_S):
            yield client, runtime
        await client.close()
    finally:
        runtime.request_stop()
        await asyncio.to_thread(serving.join, DEADLINE_S)
        runtime.close()


class Beats:
    """What ring clients read for the engine's heart: one that beats at each look until it is told to stand still. The
    scheduler's own stands still wherever a machine does not let it run for the short limits of the tests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.still, self._count, words = False, itertools.count(1), RingClient.engine_words
        self._last = next(self._count)

        def beating(ring: RingClient) -> tuple[int, int]:
            if not self.still:
                self._last = next(self._count)
            return self._last, words(ring)[1]

        monkeypatch.setattr(RingClient, "engine_words", beating)


async def all_of(client: RingEngineClient, prompt: list[int], **fields: object) -> list[TokenOutput | Finished]:
    params = SamplingParams(**{"max_tokens": 3, **fields})  # type: ignore[arg-type]
    return [output async for output in client.generate(prompt, params, request_id="r")]


@pytest.mark.parametrize("wanted", [0, 1, 3, 20])
def test_alternatives_belong_to_their_token(wanted: int) -> None:
    """Catches: alternatives of another token, request or position, or in another number than asked for."""

    async def scenario() -> None:
        async with engine() as client:
            both = await asyncio.gather(
                all_of(client, [1, 2], logprobs=wanted), all_of(client, [1, 2, 3, 4], logprobs=20 - wanted)
            )
        for outputs, prompt, count in ((both[0], 2, wanted), (both[1], 4, 20 - wanted)):
            tokens = [output for output in outputs if isinstance(output, TokenOutput)]
            assert [t.top_logprobs for t in tokens] == [
                tuple((prompt + index + 10 + k, -1.0 - k) for k in range(count)) for index in range(3)
            ]

    asyncio.run(scenario())


def test_cached_tokens_are_reported() -> None:
    """Catches: prompt tokens from the prefix cache not told, or told for a request that does not use it."""

    async def scenario() -> None:
        async with engine() as client:
            prompt = list(range(17))
            ends = [(await all_of(client, prompt))[-1] for _ in range(2)]
            ends.append((await all_of(client, prompt, prefix_cache=False))[-1])
        assert ends == [Finished(FinishReason.LENGTH, 3, cached) for cached in (0, 16, 0)]

    asyncio.run(scenario())


def test_reasons_are_explained() -> None:
    """Catches: a deadline, a refusal, or nothing left to choose that ends without saying so."""

    async def scenario() -> None:
        async with engine() as client:
            cases: tuple[tuple[list[int], dict[str, object], ErrorReason, str], ...] = (
                ([1], {"deadline_us": 1, "max_tokens": 60}, ErrorReason.DEADLINE, "own deadline passed"),
                ([1] * 9, {}, ErrorReason.NO_TOKEN, "no token that may be chosen"),
                ([1], {"min_p": 2.0}, ErrorReason.BAD_PARAM, "out of range"),
                # What no arena holds is refused here already.
                ([1] * 63, {"logit_bias": tuple((k, 1.0) for k in range(9))}, ErrorReason.BAD_PARAM, "81 words"),
            )
            for prompt, fields, reason, words in cases:
                with pytest.raises(EngineError) as failure:
                    await all_of(client, prompt, **fields)
                assert (failure.value.reason, words in failure.value.message) == (reason, True), failure.value.message
            assert (await all_of(client, [1]))[-1] == Finished(FinishReason.LENGTH, 3)

    asyncio.run(scenario())


def test_choices_that_are_together_larger_than_the_arena() -> None:
    """Catches: a request refused as overload, however often it is tried, because its choices come at once and the
    engine has not copied the first prompt when the second one is written."""

    async def scenario() -> None:
        async with engine() as client:
            for _ in range(3):
                choices = await asyncio.gather(*(all_of(client, [1] * 60, prefix_cache=False) for _ in range(4)))
                assert [outputs[-1] for outputs in choices] == [Finished(FinishReason.LENGTH, 3)] * 4

    asyncio.run(scenario())


@pytest.mark.parametrize("failure", [None, "a bug"])
def test_wait_for_the_arena_ends(monkeypatch: pytest.MonkeyPatch, failure: str | None) -> None:
    """Catches: a request that waits for ever for an engine which takes nothing in, or is told of overload, and so to
    come again, when the engine is lost."""

    async def scenario() -> None:
        async with engine() as client:

            def full(*args: object, **kwargs: object) -> Handle:
                client._failure = failure
                raise ArenaFull("arena of 80 words has no room for 60")

            monkeypatch.setattr(engine_client, "ARENA_WAIT_S", 0.01)
            monkeypatch.setattr(client._ring, "submit", full)
            with pytest.raises(Overloaded if failure is None else EngineError, match=failure or "arena of 80 words"):
                await all_of(client, [1] * 60)

    asyncio.run(scenario())


# ---- the polling thread


async def lost(client: RingEngineClient, words: str) -> None:
    """A request that is under way ends, health says why, and a later request is refused, all with `words`."""
    with pytest.raises(EngineError) as failure:
        async for _ in client.generate([1], SamplingParams(60), request_id="r"):
            pass
    assert (failure.value.reason, words in failure.value.message) == (ErrorReason.ENGINE_DEAD, True), failure.value
    health = client.health()
    assert (health.alive, health.state, words in health.detail) == (False, "dead", True), health
    with pytest.raises(EngineError, match=words):
        await all_of(client, [1])


async def poll_by(monkeypatch: pytest.MonkeyPatch, client: RingEngineClient, poll: Callable[[float], Array]) -> None:
    """Replaces what the polling thread calls, and waits until it has called it: one of before may still be under way,
    and would bring whatever the engine says of a request."""
    called = threading.Event()

    def noted(timeout: float) -> Array:
        called.set()
        return poll(timeout)

    monkeypatch.setattr(client._ring, "poll", noted)
    assert await asyncio.to_thread(called.wait, DEADLINE_S)


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyError("a bug"), MemoryError("a bug"), OSError("a bug")])
def test_polling_thread_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Catches: an exception nobody expected that ends the polling thread in silence, or a RuntimeError taken for a
    closed loop: health says ready and every request hangs."""

    async def scenario() -> None:
        async with engine() as client:
            poll = client._ring.poll

            def failing(timeout: float) -> Array:
                events = poll(timeout)
                if len(events) or client._queues:
                    raise error
                return events

            await poll_by(monkeypatch, client, failing)
            await lost(client, "a bug")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("kind", "reason", "words"),
    [
        (EventKind.FINISH, 99, "99 is not a valid FinishReason"),
        (EventKind.ERROR, 98, "98 is not a valid ErrorReason"),
        (9, 1, "9 is not a valid EventKind"),
    ],
)
def test_event_that_means_nothing_is_the_loss_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, kind: int, reason: int, words: str
) -> None:
    """Catches: an unknown kind or reason that raises in a callback of the loop, where nobody is told: its request, and
    those whose events came with it, hang. Events before it still count."""

    async def scenario() -> None:
        async with engine() as client:
            poll, forged = client._ring.poll, iter([True])
            queue: asyncio.Queue[TokenOutput | Finished | EngineError] = asyncio.Queue()

            def forging(timeout: float) -> Array:
                poll(timeout)  # what the engine says of the request is kept back
                if len(client._queues) < 2 or next(forged, None) is None:
                    return np.zeros(0, EVENT)
                slot, generation = next(key for key, known in client._queues.items() if known is not queue)
                batch = np.zeros(3, EVENT)
                batch["slot"], batch["generation"] = (99, slot, slot), (1, generation, generation)
                batch["kind"], batch["reason"] = (EventKind.FINISH, kind, EventKind.TOKEN), (1, reason, 0)
                return batch

            client._queues[99, 1] = queue
            await poll_by(monkeypatch, client, forging)
            await lost(client, words)
            assert await queue.get() == Finished(FinishReason(1), 0)

    asyncio.run(scenario())


def test_superseded_front_end_says_so_and_leaves_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a front end that goes on after another one attached to its ring, hides why its requests ended, or takes
    the ring back, so that two front ends throw each other out for ever."""

    Beats(monkeypatch)

    async def scenario() -> None:
        async with engine_and_runtime(heartbeat_limit_s=0.2) as (client, runtime):
            other = same_ring(client._ring, runtime)
            poll = client._ring.poll

            def silent(timeout: float) -> Array:
                return poll(timeout)[:0]  # so that the request does not end before

            await poll_by(monkeypatch, client, silent)
            task = asyncio.create_task(lost(client, "superseded by epoch 2"))
            while not client._queues:
                await asyncio.sleep(0)
            assert await asyncio.to_thread(other.attach, 30.0) == 2
            await task
            await asyncio.to_thread(client._thread.join, DEADLINE_S)
            assert not client._thread.is_alive()
            other.check_epoch()
            other.close()

    asyncio.run(scenario())


def test_superseded_while_the_engine_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a front end that waits for the heartbeat to return and then attaches over one that came meanwhile."""
    heart = Beats(monkeypatch)

    async def scenario() -> None:
        async with engine_and_runtime(heartbeat_limit_s=0.2) as (client, runtime):
            heart.still = True
            while client._failure is None:  # bounded by the deadline of `engine`
                await asyncio.sleep(0.01)
            assert "no heartbeat" in client._failure
            other = same_ring(client._ring, runtime)
            assert await asyncio.to_thread(other.attach, 30.0) == 2
            heart.still = False
            await asyncio.to_thread(client._thread.join, DEADLINE_S)
            assert "superseded by epoch 2" in client.health().detail
            other.check_epoch()
            other.close()

    asyncio.run(scenario())


def test_attach_that_fails_half_way_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a front end that takes its own half attach for another's, or for the loss of the engine, and stays dead
    though the engine is back."""
    heart = Beats(monkeypatch)

    async def scenario() -> None:
        async with engine(heartbeat_limit_s=0.2) as client:
            ring = client._ring
            attach, wait = ring.attach, ring._transport.wait
            failures: list[bool] = []

            def half(timeout: float) -> int:
                if failures:
                    return attach(timeout)
                waits = itertools.count()

                def cut(work: int, deadline: float) -> bytes:
                    if next(waits):  # the word that it found comes through, its fence does not
                        raise TransportTimeout("posted, not completed")
                    return wait(work, deadline)

                try:
                    with monkeypatch.context() as patch:
                        patch.setattr(ring._transport, "wait", cut)
                        return attach(timeout)
                except TransportTimeout:
                    failures.append(ring.attached)
                    raise

            monkeypatch.setattr(ring, "attach", half)
            heart.still = True

            def lost_by() -> str | None:
                return client._failure

            while lost_by() is None:  # bounded by the deadline of `engine`
                await asyncio.sleep(0.01)
            heart.still = False
            while lost_by() is not None and client._thread.is_alive():
                await asyncio.sleep(0.01)
            assert (lost_by(), failures) == (None, [False])
            assert (await all_of(client, [1, 2]))[-1] == Finished(FinishReason.LENGTH, 3)

    asyncio.run(scenario())


def test_cancel_is_not_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a cancel kept for later, when after a new attach its slot and generation name another request."""

    async def scenario() -> None:
        async with engine() as client:
            loop, later = asyncio.get_running_loop(), []

            def full(handle: Handle) -> None:
                raise RingFull("submission queue of 16 entries is full")

            monkeypatch.setattr(client._ring, "cancel", full)
            outputs = client.generate([1], SamplingParams(60), request_id="r")
            await anext(outputs)
            monkeypatch.setattr(loop, "call_later", lambda *args: later.append(args))
            await outputs.aclose()  # type: ignore[attr-defined]
            monkeypatch.undo()
            assert later == []

    asyncio.run(scenario())
