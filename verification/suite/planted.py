"""Planted faults: does the criterion, with this model and this many rows, kill what it is built to kill?

A stand-in for a faulty engine: HuggingFace float32 whose KV cache is perturbed before the last prompt token, or whose
query heads read wrong KV heads. It goes on with its own greedy tokens, as an engine would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from blink_core.abi.dtypes import Array
from verification.criterion import KVScores, TokenScores, judge_kv, judge_tokens, score_kv, score_tokens
from verification.models.sensitivity import (
    CACHED,
    FAULTS,
    PROBES,
    STEPS,
    Perturb,
    cache_faults,
    with_wrong_heads,
)
from verification.oracles.hf import HFOracle
from verification.result import CheckResult
from verification.thresholds import Thresholds


@dataclass(frozen=True, slots=True)
class Power:
    """Verdicts of the clean stand-in, and by fault the probes that were killed by tokens and by KV rows, of PROBES."""

    clean: tuple[CheckResult, CheckResult]
    by_tokens: dict[str, int]
    by_kv: dict[str, int]


def measure_power(hf64: HFOracle, hf32: HFOracle, seed: int, thresholds: Thresholds) -> Power:
    """Plants each fault in each probe, one at a time, and judges it pooled with the clean rows of the other probes."""
    draw = np.random.default_rng([seed, 2])
    prompts = torch.from_numpy(draw.integers(3, hf32.vocab_size, (PROBES, CACHED + 1)))
    faults: dict[str, Perturb | None] = dict(
        cache_faults(hf32.model, torch.from_numpy(draw.integers(0, CACHED, PROBES)))
    )
    clean_tokens, clean_kv = _scores(hf32.model, prompts, None, hf64, hf32)
    by_tokens, by_kv = {}, {}
    for fault in FAULTS:
        model = with_wrong_heads(hf32.model) if fault == "wrong-head" else hf32.model
        tokens, kv = _scores(model, prompts, faults.get(fault), hf64, hf32)
        by_tokens[fault] = by_kv[fault] = 0
        for probe in range(PROBES):
            mixed = [tokens[i] if i == probe else clean_tokens[i] for i in range(PROBES)]
            by_tokens[fault] += _invalid(judge_tokens(TokenScores.concatenate(mixed), thresholds.tokens))
            rows = [kv[i] if i == probe else clean_kv[i] for i in range(PROBES)]
            by_kv[fault] += _invalid(judge_kv(KVScores.concatenate(rows), thresholds.kv))
    clean = (
        judge_tokens(TokenScores.concatenate(clean_tokens), thresholds.tokens),
        judge_kv(KVScores.concatenate(clean_kv), thresholds.kv),
    )
    return Power(clean, by_tokens, by_kv)


def _invalid(result: CheckResult) -> bool:
    return str(result.verdict) == "invalid"


def _scores(
    model: Any, prompts: torch.Tensor, perturb: Perturb | None, hf64: HFOracle, hf32: HFOracle
) -> tuple[list[TokenScores], list[KVScores]]:
    k, v, tokens, logits = _continue(model, prompts, perturb)
    token_scores, kv_scores = [], []
    for probe in range(PROBES):
        ids = [*prompts[probe].tolist(), *tokens[probe].tolist()]
        r64, r32 = (oracle.forward(ids[:-1], start=CACHED) for oracle in (hf64, hf32))
        name: dict[str, Any] = {"probe": probe}
        token_scores.append(
            score_tokens(
                logits=logits[probe],
                hf64=r64.logits,
                hf32=r32.logits,
                emitted=tokens[probe],
                names=[{**name, "index": i} for i in range(STEPS)],
            )
        )
        references = [(run.k[:, :CACHED], run.v[:, :CACHED]) for run in (r64, r32)]
        kv_scores.append(score_kv(k=k[:, probe], v=v[:, probe], hf64=references[0], hf32=references[1], name=name))
    return token_scores, kv_scores


def _continue(model: Any, prompts: torch.Tensor, perturb: Perturb | None) -> tuple[Array, Array, Array, Array]:
    """k, v [layers, probes, CACHED, kv_heads, head_dim] as perturbed, and the greedy tokens [probes, STEPS] with their
    logits [probes, STEPS, vocab] after it."""
    with torch.inference_mode():
        clean = DynamicCache(config=model.config)
        model(prompts[:, :CACHED], cache=clean, use_cache=True)
        cache = DynamicCache(config=model.config)
        parts = []
        for index, layer in enumerate(clean.layers):
            k, v = layer.keys.clone(), layer.values.clone()
            parts.append(perturb(k, v) if perturb else (k, v))
            cache.update(*parts[-1], index)
        kv = [np.stack([part[i].numpy().swapaxes(1, 2).copy() for part in parts]) for i in range(2)]
        token = prompts[:, CACHED:]
        tokens, logits = [], []
        for _ in range(STEPS):
            row = model(token, cache=cache, use_cache=True).logits[:, -1]
            token = row.argmax(dim=-1, keepdim=True)
            tokens.append(token.numpy())
            logits.append(row.numpy())
    return kv[0], kv[1], np.concatenate(tokens, axis=1), np.stack(logits, axis=1)
