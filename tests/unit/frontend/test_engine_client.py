"""The engine client over a real scheduler and ring: alternatives, cached tokens, deadlines, engine refusals."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from blink_core.abi.config import EngineConfig
from blink_core.abi.enums import ErrorReason, FinishReason, StepStatus
from blink_core.abi.params import SamplingParams
from blink_core.frontend.engine_api import EngineError, EngineLimits, Finished, TokenOutput
from blink_core.frontend.engine_client import RingEngineClient
from blink_core.frontend.ring_client import RingClient
from blink_core.runtime.cpu import CpuRuntime, Plan, noop_step
from blink_core.transport.shm import Segment, ShmTransport

DEADLINE_S = 60.0


def step(plan: Plan) -> None:
    """Alternatives are 10, 11, ... + context length, with logprobs -1, -2, ...; nothing may be chosen at length 9."""
    noop_step(plan)
    width = plan.top_tokens.shape[1]
    plan.top_tokens[:] = plan.rows["context_len"][:, None] + np.arange(10, 10 + width)
    plan.top_logprobs[:] = -np.arange(1, width + 1)
    plan.results["status"][plan.rows["context_len"] == 9] = StepStatus.NO_TOKEN


@asynccontextmanager
async def engine() -> AsyncIterator[RingEngineClient]:
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
        client = RingEngineClient(ring, limits, os.getpid(), asyncio.get_running_loop())
        async with asyncio.timeout(DEADLINE_S):
            yield client
        await client.close()
    finally:
        runtime.request_stop()
        await asyncio.to_thread(serving.join, DEADLINE_S)
        runtime.close()


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
