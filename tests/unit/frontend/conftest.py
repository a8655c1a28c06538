"""Fixtures of the front end's tests: the real model file, a tiny tokeniser, and a scripted double of the engine."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from blink_core.abi.enums import FinishReason
from blink_core.abi.params import SamplingParams
from blink_core.frontend.app import ServerConfig, create_app
from blink_core.frontend.detokenizer import byte_alphabet
from blink_core.frontend.engine_api import EngineHealth, EngineLimits, Finished, TokenOutput
from blink_core.frontend.tokenizer import Tokenizer, load_tokenizer
from blink_core.frontend.tokenizer_gguf import tokenizer_from_metadata
from tests.real_model import real_model

MODEL = "SmolLM2-135M-Instruct"
DEADLINE_S = 60.0
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    """The pinned model's GGUF file."""
    return real_model()


@pytest.fixture(scope="session")
def smollm(smollm_path: Path) -> Tokenizer:
    return load_tokenizer(smollm_path)


@pytest.fixture(scope="session")
def unmodified(smollm_path: Path) -> PreTrainedTokenizerBase:
    """transformers' own reading of the real file."""
    return AutoTokenizer.from_pretrained(smollm_path.parent, gguf_file=smollm_path.name)


@pytest.fixture(scope="session")
def reference(unmodified: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The same with the model's published pre-tokeniser.

    transformers' GGUF reader knows no "smollm" and falls back to plain GPT-2 splitting. The model's tokenizer.json
    splits digits first, as llama.cpp does for that name, so exactly that is put back.
    """
    tokenizer = copy.deepcopy(unmodified)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def tiny_tokenizer(*, add_bos: bool = False, template: str = CHATML) -> Tokenizer:
    """One token a byte (ids 0 to 255 in byte order), a merge, four special tokens and a shown added one."""
    spelling = {byte: char for char, byte in byte_alphabet().items()}
    tokens = [spelling[byte] for byte in range(256)]
    tokens += ["he", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|stop|>", "<think>"]
    return tokenizer_from_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * 257 + [3] * 4 + [4],
            "tokenizer.ggml.merges": ["h e"],
            "tokenizer.ggml.bos_token_id": 258,
            "tokenizer.ggml.eos_token_id": 259,
            "tokenizer.ggml.add_bos_token": add_bos,
            "tokenizer.chat_template": template,
        }
    )


Step = int | Exception | FinishReason | Awaitable[object]
Script = Callable[[list[int], SamplingParams], Iterable[Step]]


@dataclass
class ScriptedEngine:
    """A double of the engine: each request plays a script of token ids, awaitables, errors and a finish reason.

    Like the engine it ends a request at `max_tokens`, and a request that is closed early counts as cancelled. Each
    token has logprob -0.5 and, where asked for, the ids after it as alternatives, with logprobs -1, -2, ...
    """

    script: Script
    limits: EngineLimits = field(
        default_factory=lambda: EngineLimits(max_model_len=128, vocab_size=262, max_prompt_len=127, slots=8)
    )
    state: EngineHealth = field(default_factory=lambda: EngineHealth(alive=True, state="ready"))
    prompts: list[list[int]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    cached: int = 0
    sent: int = 0
    live: int = 0
    cancelled: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    closed: bool = False

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, request_id: str
    ) -> AsyncIterator[TokenOutput | Finished]:
        self.prompts.append(list(prompt))
        self.params.append(params)
        self.request_ids.append(request_id)
        self.live += 1
        finished = False
        index = 0
        try:
            for step in self.script(list(prompt), params):
                if isinstance(step, FinishReason):
                    finished = True
                    yield Finished(step, index, self.cached)
                    return
                if isinstance(step, Exception):
                    finished = True
                    raise step
                if isinstance(step, int):
                    index += 1
                    self.sent += 1
                    top = tuple(((step + k) % self.limits.vocab_size, -float(k)) for k in range(1, params.logprobs + 1))
                    yield TokenOutput(index - 1, step, -0.5, top)
                    if index == params.max_tokens:
                        finished = True
                        yield Finished(FinishReason.LENGTH, index, self.cached)
                        return
                else:
                    await step
            raise AssertionError("the script ends without a terminal step")
        finally:
            self.live -= 1
            if not finished:
                self.cancelled.put_nowait(request_id)

    def health(self) -> EngineHealth:
        return self.state

    async def close(self) -> None:
        self.closed = True


def says(tokenizer: Tokenizer, text: str, end: Step | None = FinishReason.EOS) -> Script:
    """A script that answers every prompt with `text`, then EOS where that is the end."""
    ids: list[Step] = list(tokenizer.encode_rendered(text))
    if end is FinishReason.EOS:
        assert tokenizer.eos_token_id is not None
        ids.append(tokenizer.eos_token_id)
    return lambda _prompt, _params: ids if end is None else [*ids, end]


@dataclass
class FrontEndHarness:
    """An application over a scripted engine, spoken to in-process."""

    tokenizer: Tokenizer
    engine: ScriptedEngine
    app: ASGIApp

    async def post(
        self, path: str, body: object = None, *, raw: bytes | None = None, content_type: str | None = "application/json"
    ) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://blink") as client:
            async with asyncio.timeout(DEADLINE_S):
                if raw is not None:
                    kind = {} if content_type is None else {"content-type": content_type}
                    return await client.post(path, content=raw, headers=kind)
                return await client.post(path, json=body)

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://blink") as client:
            async with asyncio.timeout(DEADLINE_S):
                return await client.get(path)

    def call(self, path: str, body: object = None, **options: Any) -> httpx.Response:
        return asyncio.run(self.post(path, body, **options))


Harness = Callable[..., FrontEndHarness]


@pytest.fixture
def harness() -> Harness:
    """Make a harness: `harness(text="hello")`, or `harness(script=...)`; `config` fields as keywords."""

    def make(
        text: str = "hello",
        script: Script | None = None,
        limits: EngineLimits | None = None,
        template: str = CHATML,
        add_bos: bool = False,
        cached: int = 0,
        **config: object,
    ) -> FrontEndHarness:
        tokenizer = tiny_tokenizer(add_bos=add_bos, template=template)
        engine = ScriptedEngine(says(tokenizer, text) if script is None else script)
        engine.limits = limits or engine.limits
        engine.cached = cached
        assert tokenizer.eos_token_id is not None
        fields: dict[str, object] = {"served_name": "tiny", "eos_token_ids": (tokenizer.eos_token_id,), **config}
        return FrontEndHarness(tokenizer, engine, create_app(engine, tokenizer, ServerConfig(**fields)))  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def tiny() -> Tokenizer:
    return tiny_tokenizer()
