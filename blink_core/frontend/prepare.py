"""From a request body to token ids and sampling parameters, every limit checked (design section 8; fault B01)."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from blink_core.abi.params import SamplingParams
from blink_core.frontend.chat import ChatTemplate, ChatTemplateError
from blink_core.frontend.engine_api import EngineLimits
from blink_core.frontend.errors import ApiError, bad_request, unavailable
from blink_core.frontend.schema import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_STOP_TOKEN_IDS,
    ChatRequest,
    CompletionRequest,
    parse_chat,
    parse_completion,
)
from blink_core.frontend.tokenizer import Tokenizer

_T = TypeVar("_T")
_SEED_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """One engine request: a prompt and how to continue it. `hidden` ids end the text and are never shown."""

    prompt: list[int]
    params: SamplingParams
    hidden: frozenset[int]


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A valid request; choice i of the response continues `plans[i]`."""

    plans: list[PromptPlan]
    stop: list[str]
    stream: bool
    include_usage: bool

    @property
    def prompt_tokens(self) -> int:
        return sum(len(plan.prompt) for plan in self.plans)


@dataclass(frozen=True, slots=True)
class _TokenLimit:
    """The parameter that limits the completion, the value asked for, the default (None: the rest of the context)."""

    param: str
    asked: int | None
    default: int | None


class Preparer:
    """Parses, renders and tokenises requests; long ones in a small pool of threads, away from the event loop.

    eos_token_ids: the ids the engine ends on (the union of the model's files, fault T09).
    offload_bytes: bodies larger than this go to the pool. timeout_s: deadline of that work.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        limits: EngineLimits,
        *,
        served_name: str,
        eos_token_ids: Sequence[int],
        max_prompts: int,
        offload_bytes: int = 16 * 1024,
        timeout_s: float = 60.0,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._limits = limits
        self._served_name = served_name
        self._eos = frozenset(eos_token_ids)
        self._max_prompts = max_prompts
        self._offload_bytes = offload_bytes
        self._timeout_s = timeout_s
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenise")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def chat(self, body: bytes) -> PreparedRequest:
        """Raises ApiError."""
        return await self._run(self._chat, body)

    async def completion(self, body: bytes) -> PreparedRequest:
        """Raises ApiError."""
        return await self._run(self._completion, body)

    async def _run(self, work: Callable[[bytes], _T], body: bytes) -> _T:
        if len(body) <= self._offload_bytes:
            return work(body)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.get_running_loop().run_in_executor(self._pool, work, body)
        except TimeoutError:
            raise unavailable(
                f"Tokenising the request took longer than {self._timeout_s:g} s.", code="tokenizer_timeout"
            ) from None

    def _chat(self, body: bytes) -> PreparedRequest:
        request = parse_chat(body)
        self._check_model(request.model)
        if self._template is None:
            raise bad_request(
                f"The model '{self._served_name}' has no chat template; use /v1/completions.", code="no_chat_template"
            )
        try:
            text = self._template.render([message.model_dump(exclude_none=True) for message in request.messages])
        except ChatTemplateError as error:
            raise bad_request(
                f"The model's chat template refused the messages: {error}", param="messages", code="chat_template_error"
            ) from None
        ids = self._tokenizer.encode_rendered(text)
        name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        limit = _TokenLimit(name, getattr(request, name), default=None)
        return self._prepared(request, [ids], limit, param="messages")

    def _completion(self, body: bytes) -> PreparedRequest:
        request = parse_completion(body)
        self._check_model(request.model)
        prompts = request.prompts
        if len(prompts) > self._max_prompts:
            raise bad_request(
                f"Invalid value for 'prompt': {len(prompts)} prompts, the limit is {self._max_prompts}.",
                param="prompt",
                code="invalid_value",
            )
        ids = [self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        limit = _TokenLimit("max_tokens", request.max_tokens, default=DEFAULT_COMPLETION_TOKENS)
        return self._prepared(request, ids, limit, param="prompt")

    def _check_model(self, name: str) -> None:
        if name != self._served_name:
            raise model_not_found(name, self._served_name)

    def _prepared(
        self,
        request: CompletionRequest | ChatRequest,
        prompts: list[list[int]],
        limit: _TokenLimit,
        *,
        param: str,
    ) -> PreparedRequest:
        ignore_eos = bool(request.ignore_eos)
        stop_ids = self._stop_ids(request)
        hidden = frozenset(stop_ids) if ignore_eos else self._eos | frozenset(stop_ids)
        temperature = 1.0 if request.temperature is None else request.temperature
        top_p = 1.0 if request.top_p is None else request.top_p
        # The smallest nucleus is the most likely token alone; the descriptor holds float32, where tiny values are 0.
        if np.float32(top_p) == 0.0:
            temperature, top_p = 0.0, 1.0
        plans = []
        for prompt in prompts:
            self._check_ids(prompt, param)
            params = SamplingParams(
                max_tokens=self._max_tokens(len(prompt), limit, param),
                temperature=temperature,
                top_p=top_p,
                seed=secrets.randbits(64) if request.seed is None else request.seed & _SEED_MASK,
                stop_token_ids=stop_ids,
                ignore_eos=ignore_eos,
            )
            plans.append(PromptPlan(prompt, params, hidden))
        return PreparedRequest(plans, request.stop_strings, bool(request.stream), request.include_usage)

    def _stop_ids(self, request: CompletionRequest | ChatRequest) -> tuple[int, ...]:
        """Stop ids asked for, and the ids of stop strings that are special tokens: those never show in the text, so
        only their id can stop them (fault T05)."""
        ids = list(request.stop_token_ids or [])
        self._check_ids(ids, "stop_token_ids")
        special = (self._tokenizer.special_token_id(text) for text in request.stop_strings)
        ids += [token for token in special if token is not None]
        unique = tuple(dict.fromkeys(ids))
        if len(unique) > MAX_STOP_TOKEN_IDS:
            raise bad_request(
                f"Invalid value for 'stop_token_ids': {len(unique)} ids with the special tokens in 'stop', "
                f"the limit is {MAX_STOP_TOKEN_IDS}.",
                param="stop_token_ids",
                code="invalid_value",
            )
        return unique

    def _check_ids(self, ids: list[int], param: str) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self._limits.vocab_size):
            bad = next(token for token in ids if not 0 <= token < self._limits.vocab_size)
            raise bad_request(
                f"Invalid value for '{param}': token id {bad} is outside the vocabulary of {self._limits.vocab_size}.",
                param=param,
                code="invalid_value",
            )

    def _max_tokens(self, prompt_len: int, limit: _TokenLimit, param: str) -> int:
        limits = self._limits
        if prompt_len == 0:
            raise bad_request(f"Invalid value for '{param}': it has no tokens.", param=param, code="invalid_value")
        if prompt_len > limits.max_prompt_len:
            raise _too_long(
                f"This model's maximum prompt length is {limits.max_prompt_len} tokens (its context holds "
                f"{limits.max_model_len}), but the prompt has {prompt_len} tokens.",
                param,
            )
        rest = limits.max_model_len - prompt_len
        if limit.asked is None:
            return rest if limit.default is None else min(limit.default, rest)
        if limit.asked > rest:
            raise _too_long(
                f"This model's maximum context length is {limits.max_model_len} tokens, but "
                f"{prompt_len + limit.asked} were requested ({prompt_len} in the prompt, {limit.asked} in the "
                "completion).",
                limit.param,
            )
        return limit.asked


def _too_long(message: str, param: str) -> ApiError:
    return bad_request(message, param=param, code="context_length_exceeded")


def model_not_found(name: str, served: str) -> ApiError:
    """404 for a model that is not served here."""
    return ApiError(
        404,
        f"The model '{name}' does not exist here; this server serves '{served}'.",
        param="model",
        code="model_not_found",
    )
