"""One prompt's way from engine events to text, the same for streamed and whole answers (design section 8).

Every TOKEN event counts in `completion_tokens`, also EOS and tokens whose text is held back. When a stop string
matches, the request is cancelled on the engine at once, and the tokens seen so far are what is counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from blink_core.abi.enums import ErrorReason, FinishReason
from blink_core.frontend.detokenizer import Detokenizer
from blink_core.frontend.engine_api import EngineClient, EngineError, Finished, TokenOutput
from blink_core.frontend.errors import unavailable
from blink_core.frontend.logprobs import LogprobQueue, TokenLogprob
from blink_core.frontend.prepare import PromptPlan
from blink_core.frontend.stop import StopMatcher


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token added to a choice's visible text; often nothing, because text is held back.

    logprobs: tokens whose text is now complete; none unless the plan asks for log probabilities.
    """

    choice: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """End of one choice. finish_reason is "stop" or "length"; `text` and `logprobs` are what was still held back.

    cached_tokens: of the prompt, from the prefix cache; None if the answer ended before the engine said so.
    """

    choice: int
    text: str
    finish_reason: str
    completion_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    cached_tokens: int | None = None


_FINISH = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CONTEXT: "length",
}


async def generate_choice(
    engine: EngineClient,
    plan: PromptPlan,
    *,
    choice: int,
    request_id: str,
    detokenizer: Detokenizer,
    stop: StopMatcher,
    event_timeout_s: float,
) -> AsyncGenerator[Piece | ChoiceEnd, None]:
    """Yield a Piece for each token, then one ChoiceEnd.

    Raises EngineError or Overloaded from the engine, ApiError 503 if it stays silent for `event_timeout_s`.
    Closing the generator, or cancelling its task, cancels the request on the engine.
    """
    events = engine.generate(plan.prompt, plan.params, request_id=request_id)
    listed = LogprobQueue() if plan.logprobs else None
    tokens = shown = 0
    try:
        while True:
            event = await _next_event(events, event_timeout_s)
            if isinstance(event, TokenOutput):
                tokens += 1
                made = "" if event.token in plan.hidden else detokenizer.push(event.token)
                if listed is not None and event.token not in plan.hidden:
                    listed.add(event, len(made))
                text = stop.push(made) if made else ""
                shown += len(text)
                if stop.matched is None:
                    yield Piece(choice, text, () if listed is None else listed.release(shown))
                    continue
                await _close(events)  # before the consumer takes the end: the engine should not sample one token more
                yield ChoiceEnd(choice, text, "stop", tokens, () if listed is None else listed.cut(shown))
                return
            reason = _FINISH.get(event.reason)
            if reason is None:
                raise EngineError(ErrorReason.DRAINING, "the engine cancelled the request")
            made = detokenizer.finish()
            text = stop.push(made)
            if stop.matched is not None:
                reason = "stop"
            text += stop.finish()
            last: tuple[TokenLogprob, ...] = ()
            if listed is not None:
                listed.text(len(made))
                last = listed.finish() if stop.matched is None else listed.cut(shown + len(text))
            yield ChoiceEnd(choice, text, reason, tokens, last, event.cached_tokens)
            return
    finally:
        await _close(events)


async def _next_event(events: AsyncIterator[TokenOutput | Finished], timeout_s: float) -> TokenOutput | Finished:
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(events)
    except TimeoutError:
        raise unavailable(f"The engine produced no event within {timeout_s:g} s.", code="engine_timeout") from None
    except StopAsyncIteration:
        raise EngineError(ErrorReason.ENGINE_DEAD, "the event stream ended without a terminal event") from None


async def _close(events: AsyncIterator[TokenOutput | Finished]) -> None:
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()


Source = Callable[[int, PromptPlan], AsyncGenerator[Piece | ChoiceEnd, None]]


async def generate_all(plans: Sequence[PromptPlan], source: Source) -> AsyncGenerator[Piece | ChoiceEnd, None]:
    """Run every plan at once and yield their items as they come. If one fails or this is closed, all are cancelled."""
    if len(plans) == 1:
        only = source(0, plans[0])
        try:
            async for item in only:
                yield item
        finally:
            await only.aclose()
        return
    queue: asyncio.Queue[Piece | ChoiceEnd | Exception] = asyncio.Queue()

    async def pump(choice: int, plan: PromptPlan) -> None:
        items = source(choice, plan)
        try:
            async for item in items:
                queue.put_nowait(item)
        except Exception as error:  # handed to the consumer, which raises it
            queue.put_nowait(error)
        finally:
            await items.aclose()

    tasks = [asyncio.create_task(pump(choice, plan)) for choice, plan in enumerate(plans)]
    try:
        running = len(plans)
        while running:
            received = await queue.get()  # bounded: each pump has the deadline of its engine events
            if isinstance(received, Exception):
                raise received
            running -= isinstance(received, ChoiceEnd)
            yield received
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
