"""The model step of the host runtime: plan -> forward -> sample -> results, and the logits capture."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np

from blink_core.abi.capture import record_dtype
from blink_core.abi.dtypes import Array
from blink_core.abi.enums import StepStatus
from blink_core.models import KVPool, Model, StepBatch
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
        rows = plan.rows[batch.sample_rows]
        tokens, logprobs, ok = sample(
            logits,
            np.ascontiguousarray(rows["temperature"]),
            np.ascontiguousarray(rows["top_p"]),
            np.ascontiguousarray(rows["seed"]),
            np.ascontiguousarray(rows["choice"]),
            np.ascontiguousarray(rows["context_len"]),
        )
        results = plan.results
        results["token"][batch.sample_rows] = tokens
        results["logprob"][batch.sample_rows] = logprobs
        results["status"][batch.sample_rows] = np.where(ok, StepStatus.OK, StepStatus.NAN_LOGITS)
        if self._capture is not None:
            self._capture.append(plan.step, rows, tokens, logits)
