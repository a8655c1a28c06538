"""Planted faults: does the criterion, with this model and this many rows, kill what it is built to kill?

A stand-in for a faulty engine: HuggingFace float32 whose KV cache is perturbed before the last prompt token, or which
itself has a fault (heads, window, rotary factors, experts). It goes on with its own greedy tokens, as an engine would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from blink_core.abi.dtypes import Array
from verification.certificate.recorder import Recorder
from verification.criterion import KVScores, TokenScores, judge_kv, judge_tokens, score_kv, score_tokens
from verification.models.sensitivity import (
    CACHED,
    MODEL_FAULTS,
    PAGE,
    PROBES,
    STEPS,
    Perturb,
    cache_faults,
    draw_rows,
    faults_of,
)
from verification.oracles.hf import HFOracle
from verification.result import CheckResult, Verdict
from verification.thresholds import Thresholds

# Two full pages exchanged: the tokens cannot show it (`verification.models.sensitivity`), so the KV rows must.
REORDERED = "reordered-pages"


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
    faults = cache_faults(hf32.model, draw_rows(draw, hf32.config)) | {REORDERED: _reordered}
    clean_tokens, clean_kv = _scores(hf32.model, prompts, None, hf64, hf32)
    by_tokens: dict[str, int] = {}
    by_kv: dict[str, int] = {}
    for fault in (*faults_of(hf32.config), REORDERED):
        model = MODEL_FAULTS[fault](hf32.model) if fault in MODEL_FAULTS else hf32.model
        tokens, kv = _scores(model, prompts, faults.get(fault), hf64, hf32)
        by_kv[fault] = 0
        for probe in range(PROBES):
            mixed = [tokens[i] if i == probe else clean_tokens[i] for i in range(PROBES)]
            if fault != REORDERED:
                killed = _invalid(judge_tokens(TokenScores.concatenate(mixed), thresholds.tokens))
                by_tokens[fault] = by_tokens.get(fault, 0) + killed
            rows = [kv[i] if i == probe else clean_kv[i] for i in range(PROBES)]
            by_kv[fault] += _invalid(judge_kv(KVScores.concatenate(rows), thresholds.kv))
    clean = (
        judge_tokens(TokenScores.concatenate(clean_tokens), thresholds.tokens),
        judge_kv(KVScores.concatenate(clean_kv), thresholds.kv),
    )
    return Power(clean, by_tokens, by_kv)


def check_power(name: str, power: Power, record: Recorder, least: float, property_name: str) -> CheckResult:
    """Records the kills of model ``name`` and judges them: at least the share ``least`` of the probes of each fault."""
    missed = []
    for means, counts in (("tokens", power.by_tokens), ("KV rows", power.by_kv)):
        for fault, killed in counts.items():
            record.planted_fault(f"{name}: {fault}, killed by its {means}", caught=killed, planted=PROBES)
            if killed < least * PROBES:
                missed.append(f"{fault} by {means}: {killed} of {PROBES}")
    verdict = Verdict.UNKNOWN if missed else Verdict.VALID
    message = f"{name}: planted faults that the criterion let pass: {'; '.join(missed) or 'none'}"
    return CheckResult(verdict, property_name, "power", message)


def _reordered(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.cat((torch.arange(PAGE, 2 * PAGE), torch.arange(PAGE), torch.arange(2 * PAGE, CACHED)))
    return k[:, :, order], v[:, :, order]


def _invalid(result: CheckResult) -> bool:
    return str(result.verdict) == "invalid"


def _scores(
    model: Any, prompts: torch.Tensor, perturb: Perturb | None, hf64: HFOracle, hf32: HFOracle
) -> tuple[list[TokenScores], list[KVScores]]:
    k, v, tokens, logits = _continue(model, prompts, perturb)
    ids = [[*prompt, *more] for prompt, more in zip(prompts.tolist(), tokens.tolist(), strict=True)]
    starts = [CACHED] * PROBES
    runs64, runs32 = (oracle.forward_many([one[:-1] for one in ids], start=starts) for oracle in (hf64, hf32))
    token_scores, kv_scores = [], []
    for probe, pair in enumerate(zip(runs64, runs32, strict=True)):
        name: dict[str, Any] = {"probe": probe}
        token_scores.append(
            score_tokens(
                logits=logits[probe],
                hf64=pair[0].logits,
                hf32=pair[1].logits,
                emitted=tokens[probe],
                names=[{**name, "index": i} for i in range(STEPS)],
            )
        )
        references = [(run.k[:, :CACHED], run.v[:, :CACHED]) for run in pair]
        kv_scores.append(score_kv(k=k[:, probe], v=v[:, probe], hf64=references[0], hf32=references[1], name=name))
    return token_scores, kv_scores


def _continue(model: Any, prompts: torch.Tensor, perturb: Perturb | None) -> tuple[Array, Array, Array, Array]:
    """k, v [layers, probes, CACHED, kv_heads, head_dim] as perturbed, and the greedy tokens [probes, STEPS] with their
    logits [probes, STEPS, vocab] after it."""
    with torch.inference_mode():
        clean = DynamicCache()  # without the configuration, with which it would drop rows outside a window
        model(prompts[:, :CACHED], cache=clean, use_cache=True)
        cache = DynamicCache()
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
