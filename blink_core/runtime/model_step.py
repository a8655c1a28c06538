"""The model step of the host runtime: plan -> forward -> sample -> results, and the logits capture."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np

from blink_core.abi.capture import record_dtype
from blink_core.abi.definition import MAX_STOP_IDS
from blink_core.abi.dtypes import Array
from blink_core.models import KVPool, Model, StepBatch
from blink_core.ops.logits import NO_IDS, NO_VALUES, SamplingRow
from blink_core.ops.sampling import sample
from blink_core.runtime.cpu import Plan


def step_batch(plan: Plan) -> StepBatch:
    """The plan as the model's input."""
    rows = plan.rows
    starts = np.empty(len(rows) + 1, np.int32)
    starts[:-1], starts[-1] = rows["q_start"], len(plan.token_ids)
    return StepBatch(
        token_ids=plan.token_ids,
        positions=plan.positions,
        kv_slots=plan.kv_slots,
        row_starts=starts,
        context_lens=rows["context_len"].astype(np.int32),
        block_tables=plan.block_tables.astype(np.int32),
        sample_rows=np.flatnonzero(rows["sample"]).astype(np.int32),
    )


def sampling_row(plan: Plan, index: int) -> SamplingRow:
    """How the token of plan row `index` is chosen.

    Before min_tokens end-of-sequence ids are barred also for a request that ignores them, and so are its stop ids: as
    vLLM does. A record may change while the step runs if its request was cancelled, so lengths are bounded here.
    """
    record, row = plan.sampling[index], plan.rows[index]
    context, prompt_len = int(row["context_len"]), int(record["prompt_len"])
    repetition, presence = float(record["repetition_penalty"]), float(record["presence_penalty"])
    frequency, n_bias = float(record["frequency_penalty"]), int(record["n_bias"])
    prompt = output = barred = bias_ids = NO_IDS
    bias = NO_VALUES
    if repetition != 1.0 or presence != 0.0 or frequency != 0.0:
        known = plan.tokens[index][:context]
        prompt, output = known[:prompt_len], known[prompt_len:]
    if n_bias:
        pairs = plan.bias[index][:n_bias]
        bias_ids, bias = pairs["token"].copy(), pairs["bias"].copy()
    if int(row["emitted"]) < int(record["min_tokens"]):
        stops = record["stop_ids"][: min(int(record["n_stop"]), MAX_STOP_IDS)]
        barred = np.concatenate((plan.eos_ids, stops))
    return SamplingRow(
        temperature=float(record["temperature"]),
        top_k=int(record["top_k"]),
        top_p=float(record["top_p"]),
        min_p=float(record["min_p"]),
        seed=int(record["seed"]),
        choice=int(record["choice"]),
        position=context,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        prompt=prompt,
        output=output,
        bias_ids=bias_ids,
        bias=bias,
        barred=barred,
        mask=plan.masks[index] if row["masked"] else None,
        logprobs=int(record["logprobs"]),
    )


class Capture:
    """Appends the logits of every sampled row to a file (`abi.capture`)."""

    def __init__(self, path: Path, vocab: int) -> None:
        self._file: BinaryIO = path.open("wb", buffering=0)
        self._dtype = record_dtype(vocab)
        self._vocab = vocab

    def append(self, step: int, rows: Array, tokens: Array, logits: Array) -> None:
        records = np.zeros(len(rows), self._dtype)
        records["step"], records["vocab"] = step, self._vocab
        for name in ("ring", "slot", "generation"):
            records[name] = rows[name]
        records["position"], records["token"], records["logits"] = rows["context_len"], tokens, logits
        self._file.write(records.tobytes())


class ModelStep:
    """Runs a model over its KV pool; one instance is used by one thread."""

    def __init__(self, model: Model, kv: KVPool, capture: Capture | None = None) -> None:
        self._model, self._kv, self._capture = model, kv, capture

    def __call__(self, plan: Plan) -> None:
        batch = step_batch(plan)
        logits = self._model.forward(batch, self._kv)
        if batch.sample_rows.size == 0:
            return
        chosen = batch.sample_rows
        width = plan.top_tokens.shape[1]
        sampled = sample(logits, [sampling_row(plan, index) for index in chosen.tolist()], width)
        results = plan.results
        results["token"][chosen] = sampled.tokens
        results["logprob"][chosen] = sampled.logprobs
        results["status"][chosen] = sampled.status
        if width:
            plan.top_tokens[chosen], plan.top_logprobs[chosen] = sampled.top_tokens, sampled.top_logprobs
        if self._capture is not None:
            self._capture.append(plan.step, plan.rows[chosen], sampled.tokens, logits)
