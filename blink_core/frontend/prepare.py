"""From a request body to token ids and sampling parameters, every limit checked (design section 8; fault B01)."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from blink_core.abi.params import SamplingParams
from blink_core.frontend.chat import ChatTemplate, ChatTemplateError
from blink_core.frontend.engine_api import EngineLimits
from blink_core.frontend.errors import ApiError, bad_request, shorten, shown, unavailable
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
    """One engine request: a prompt and how to continue it. `hidden` ids end the text and are never shown.

    logprobs: whether the client wants its tokens' log probabilities, of which `params.logprobs` alternatives each.
    """

    prompt: list[int]
    params: SamplingParams
    hidden: frozenset[int]
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A valid request; choice i of the response continues `plans[i]`, `n` choices in a row the same prompt.

    alternatives: most probable ids shown with each token, None for no log probabilities.
    """

    plans: list[PromptPlan]
    stop: list[str]
    stream: bool
    include_usage: bool
    n: int = 1
    alternatives: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once for its n choices, as the OpenAI API does."""
        return sum(len(plan.prompt) for plan in self.plans[:: self.n])

    def cached_tokens(self, by_choice: Sequence[int | None]) -> int | None:
        """Prompt tokens that came from the prefix cache: of each prompt the most that one of its choices found. None if
        that is not known of some prompt, because its choices ended before the engine could say."""
        total = 0
        for first in range(0, len(self.plans), self.n):
            known = [count for count in by_choice[first : first + self.n] if count is not None]
            if not known:
                return None
            total += max(known)
        return total


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
        max_choices: int,
        offload_bytes: int = 16 * 1024,
        timeout_s: float = 60.0,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._limits = limits
        self._served_name = served_name
        self._eos = frozenset(eos_token_ids)
        self._max_choices = max_choices
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
                f"The model's chat template refused the messages: {shorten(str(error), 300)}",
                param="messages",
                code="chat_template_error",
            ) from None
        self._check_choices(1, request.n or 1)
        ids = self._tokenizer.encode_rendered(text)
        name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        limit = _TokenLimit(name, getattr(request, name), default=None)
        return self._prepared(request, [ids], limit, param="messages")

    def _completion(self, body: bytes) -> PreparedRequest:
        request = parse_completion(body)
        self._check_model(request.model)
        prompts = request.prompts
        self._check_choices(len(prompts), request.n or 1)
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
        n = request.n or 1
        alternatives = self._alternatives(request)
        plans = []
        for prompt in prompts:
            self._check_ids(prompt, param)
            max_tokens = self._max_tokens(len(prompt), limit, param)
            params = self._params(request, max_tokens, limit.param, alternatives or 0)
            hidden = frozenset(params.stop_token_ids)
            if not params.ignore_eos:
                hidden |= self._eos
            for choice in range(n):
                plans.append(PromptPlan(prompt, replace(params, choice=choice), hidden, alternatives is not None))
        stream = bool(request.stream)
        return PreparedRequest(plans, request.stop_strings, stream, request.include_usage, n, alternatives)

    def _params(
        self, request: CompletionRequest | ChatRequest, max_tokens: int, limit_name: str, alternatives: int
    ) -> SamplingParams:
        temperature = _given(request.temperature, 1.0)
        top_p = _given(request.top_p, 1.0)
        # The smallest nucleus is the most likely token alone; the descriptor holds float32, where tiny values are 0.
        if np.float32(top_p) == 0.0:
            temperature, top_p = 0.0, 1.0
        top_k = _given(request.top_k, 0)
        min_tokens = _given(request.min_tokens, 0)
        if min_tokens > max_tokens:
            raise bad_request(
                f"Invalid value for 'min_tokens': {shown(min_tokens)} is more than '{limit_name}', which is "
                f"{max_tokens}.",
                param="min_tokens",
                code="invalid_value",
            )
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=secrets.randbits(64) if request.seed is None else request.seed & _SEED_MASK,
            stop_token_ids=self._stop_ids(request),
            ignore_eos=bool(request.ignore_eos),
            top_k=top_k if 0 < top_k < self._limits.vocab_size else 0,
            min_p=_given(request.min_p, 0.0),
            repetition_penalty=_given(request.repetition_penalty, 1.0),
            presence_penalty=_given(request.presence_penalty, 0.0),
            frequency_penalty=_given(request.frequency_penalty, 0.0),
            logit_bias=self._logit_bias(request),
            min_tokens=min_tokens,
            logprobs=alternatives,
            priority=_given(request.priority, 0),
            deadline_us=0 if request.timeout is None else math.ceil(request.timeout * 1e6),
            prefix_cache=_given(request.prefix_cache, True),
        )

    def _check_choices(self, prompts: int, n: int) -> None:
        """One engine request a choice: more than the slots could never run at once, and would be refused for ever."""
        limit = min(self._max_choices, self._limits.slots)
        if prompts > limit:
            raise bad_request(
                f"Invalid value for 'prompt': {prompts} prompts, the limit is {limit}.",
                param="prompt",
                code="invalid_value",
            )
        if prompts * n > limit:
            made = "" if prompts == 1 else f" for each of {prompts} prompts"
            raise bad_request(
                f"Invalid value for 'n': {shown(n)} choices{made}, the limit is {limit} in all.",
                param="n",
                code="invalid_value",
            )

    def _alternatives(self, request: CompletionRequest | ChatRequest) -> int | None:
        wanted, limit = request.alternatives, self._limits.max_logprobs
        if wanted is not None and wanted > limit:
            param = "logprobs" if isinstance(request, CompletionRequest) else "top_logprobs"
            raise bad_request(
                f"Invalid value for '{param}': {wanted} is more than this engine's limit of {limit}.",
                param=param,
                code="invalid_value",
            )
        return wanted

    def _logit_bias(self, request: CompletionRequest | ChatRequest) -> tuple[tuple[int, float], ...]:
        bias = request.logit_bias or {}
        if len(bias) > self._limits.max_bias:
            raise bad_request(
                f"Invalid value for 'logit_bias': {len(bias)} ids, the limit is {self._limits.max_bias}.",
                param="logit_bias",
                code="invalid_value",
            )
        self._check_ids(list(bias), "logit_bias")
        return tuple(bias.items())

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
                f"Invalid value for '{param}': token id {shown(bad)} is outside the vocabulary of "
                f"{self._limits.vocab_size}.",
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
            total, asked = shown(prompt_len + limit.asked), shown(limit.asked)
            raise _too_long(
                f"This model's maximum context length is {limits.max_model_len} tokens, but {total} were requested "
                f"({prompt_len} in the prompt, {asked} in the completion).",
                limit.param,
            )
        return limit.asked


def _given(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _too_long(message: str, param: str) -> ApiError:
    return bad_request(message, param=param, code="context_length_exceeded")


def model_not_found(name: str, served: str) -> ApiError:
    """404 for a model that is not served here."""
    return ApiError(
        404,
        f"The model '{shorten(name)}' does not exist here; this server serves '{served}'.",
        param="model",
        code="model_not_found",
    )
