"""HuggingFace's continuous batching over a paged KV cache as a second oracle (design section 9).

transformers' own scheduler, block tables, prefix sharing and paged attention, none of which `HFOracle` uses: what both
say alike is not an accident of one of them. Runs on the CPU with ``paged|eager`` attention (transformers 5.24; the name
``sdpa_paged`` is refused there, and ``sdpa`` would do as well). Several requests share a batch, and prompts are cut
into chunks, as in an engine.

It computes all rows of a batch with the rotary frequencies of the longest one, so that a model whose frequencies depend
on the length (LongRoPE) gives other answers than alone: such models are refused here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from verification.oracles.hf import HFOracle, OracleError

ATTENTION = "paged|eager"
PAGE = 16
_LOGGER = "ContinuousBatchingLogger"
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class PagedSizes:
    """Of one run: blocks of the pool (each PAGE tokens), tokens and requests of a batch."""

    blocks: int = 40
    batch_tokens: int = 32
    batch_requests: int = 6


class PagedOracle:
    """A model in float32 under transformers' continuous batching. Build it with ``PagedOracle.load``."""

    def __init__(self, oracle: HFOracle) -> None:
        self._oracle = oracle

    @classmethod
    def load(cls, path: str | Path, *, threads: int = 1) -> PagedOracle:
        """Load a GGUF file or a folder as ``HFOracle.load`` does. Raises ``OracleError``, also for a model whose rotary
        frequencies depend on the length."""
        oracle = HFOracle.load(path, dtype="float32", threads=threads, attention=ATTENTION)
        if oracle.rope_switch is not None:
            raise OracleError(f"{path}: frequencies change beyond {oracle.rope_switch} tokens; a batch would mix them")
        return cls(oracle)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        most_new: Sequence[int],
        *,
        sizes: PagedSizes | None = None,
        deadline_s: float = 120.0,
    ) -> list[list[int]]:
        """Greedy tokens after each prompt, at most so many, all requests together; end-of-sequence ids do not end them.

        Raises ``OracleError`` when a request fails, or when they are not done in ``deadline_s``.
        """
        if len(prompts) != len(most_new) or not prompts:
            raise OracleError(f"{len(prompts)} prompts with {len(most_new)} limits")
        sizes = sizes or PagedSizes()
        longest = max(len(p) + n for p, n in zip(prompts, most_new, strict=True))
        if longest > (sizes.blocks - 1) * PAGE:
            raise OracleError(f"a request of {longest} tokens does not fit {sizes.blocks} blocks of {PAGE}")
        generation = transformers.GenerationConfig(
            max_new_tokens=max(most_new), do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        batching = transformers.ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=sizes.blocks,
            max_batch_tokens=sizes.batch_tokens,
            max_requests_per_batch=sizes.batch_requests,
            max_blocks_per_request=0,  # the fast path of flash attention, which is not there
            use_cuda_graph=False,
            use_async_batching=False,
            auto_switch_to_flash=False,
        )
        noise = logging.getLogger(_LOGGER)
        level = noise.level
        noise.setLevel(logging.ERROR)
        try:
            with torch.inference_mode():
                return self._run(prompts, most_new, generation, batching, time.monotonic() + deadline_s)
        finally:
            noise.setLevel(level)

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        most_new: Sequence[int],
        generation: Any,
        batching: Any,
        deadline: float,
    ) -> list[list[int]]:
        done: dict[str, list[int]] = {}
        opened = self._oracle.model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching, block=True, timeout=_LOOK_S, warmup=False
        )
        with opened as manager:
            names = [
                manager.add_request([int(t) for t in prompt], request_id=f"r{i}", max_new_tokens=int(n))
                for i, (prompt, n) in enumerate(zip(prompts, most_new, strict=True))
            ]
            while len(done) < len(names):
                result = manager.get_result(timeout=_LOOK_S)
                if result is None:
                    if not manager.is_running():
                        raise OracleError("transformers' generation thread ended before its requests")
                    if time.monotonic() > deadline:
                        raise OracleError(f"{len(done)} of {len(names)} requests were done at the deadline")
                elif result.error is not None:
                    raise OracleError(f"transformers' continuous batching: {result.error}")
                elif result.is_finished():
                    done[result.request_id] = list(result.generated_tokens)
        return [done[name] for name in names]
