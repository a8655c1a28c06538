"""What the front end needs from an engine client: the Protocol and its value types (design sections 3 and 8).

`blink_core.frontend.engine_client` implements it over a ring; the HTTP layer knows only this module.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from blink_core.abi.definition import MAX_LOGPROBS
from blink_core.abi.enums import ErrorReason, FinishReason
from blink_core.abi.params import SamplingParams


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Sizes that bound a request, all counts of tokens except `slots` (requests in flight on this ring), `max_bias`
    (logit-bias pairs of one request) and `max_logprobs` (alternatives of one token)."""

    max_model_len: int
    vocab_size: int
    max_prompt_len: int
    slots: int
    max_bias: int = 300
    max_logprobs: int = MAX_LOGPROBS


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One sampled token. `index` counts from 0; `logprob` is the natural-log softmax of the raw logits at `token`.

    top_logprobs: as many (id, logprob) as `SamplingParams.logprobs` asked for, most probable first; `token` need not be
    among them.
    """

    index: int
    token: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The terminal event of a request that did not fail; `tokens` is the number of TOKEN events before it,
    `cached_tokens` the number of prompt tokens whose KV came from the prefix cache."""

    reason: FinishReason
    tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """`state` is "ready", "draining" or "dead"; `detail` says why, in words, and may be empty when ready."""

    alive: bool
    state: str
    detail: str = ""


class EngineError(Exception):
    """A request ended with an ERROR event, or the engine is gone (ENGINE_DEAD)."""

    def __init__(self, reason: ErrorReason, message: str = "") -> None:
        super().__init__(message or reason.name)
        self.reason = reason
        self.message = message or reason.name


class Overloaded(Exception):
    """No slot or ring space became free before the client's deadline; nothing was submitted."""

    def __init__(self, message: str = "no request slot became free in time", *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class EngineClient(Protocol):
    """One ring's client, used from one event loop."""

    @property
    def limits(self) -> EngineLimits: ...

    def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, request_id: str
    ) -> AsyncIterator[TokenOutput | Finished]:
        """Yield TokenOutput with index 0, 1, 2 ... and then exactly one Finished.

        Raises EngineError, or Overloaded before the first item. `aclose()` on the iterator, or cancelling the task
        that awaits it, cancels the request on the engine.
        """
        ...

    def health(self) -> EngineHealth: ...

    async def close(self) -> None: ...
