"""The GPU sampler against ops.sampling: the same token, status, log probability and alternatives, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cupy as cp
import numpy as np
import numpy.typing as npt

from blink_core.ops.cuda_ops import CudaOps, CudaSampler
from blink_core.ops.cuda_sampling import BIAS_PAIR, SAMPLE_ROW, STEP_RESULT
from blink_core.ops.logits import SamplingRow
from blink_core.ops.sampling import Sampled, sample
from hil_rigs.gpu.ops_cases import Outcome

LOGPROB_LIMIT = 2e-5  # natural-log units: float32 sums of float32 exponentials
WIDTH = 20


@dataclass(slots=True)
class DeviceRows:
    """SAMPLE_ROW records on the device and the arrays that they point to, which must be kept."""

    records: cp.ndarray
    keep: list[cp.ndarray]


def device_rows(rows: list[SamplingRow], owners: list[int] | None = None) -> DeviceRows:
    """Records of ``rows``; row i uses penalty counts i and writes result i."""
    host = np.zeros(len(rows), SAMPLE_ROW)
    keep: list[cp.ndarray] = []

    def put(array: npt.NDArray[Any]) -> int:
        if array.size == 0:
            return 0
        keep.append(cp.asarray(np.ascontiguousarray(array).view(np.uint8)))
        return int(keep[-1].data.ptr)

    for i, row in enumerate(rows):
        bias = np.zeros(row.bias_ids.size, BIAS_PAIR)
        bias["token"], bias["bias"] = row.bias_ids, row.bias
        tokens = np.concatenate((row.prompt, row.output)).astype(np.int32)
        barred = np.zeros(16, np.int32)
        barred[: row.barred.size] = row.barred
        host[i] = (
            row.seed, i + 1 if owners is None else owners[i], put(tokens), put(bias),
            0 if row.mask is None else put(row.mask), row.temperature, row.top_p, row.min_p,
            row.repetition_penalty, row.presence_penalty, row.frequency_penalty,
            row.top_k, row.choice, row.position, row.logprobs, row.prompt.size, tokens.size, bias.size, row.barred.size,
            i, i, barred,
        )  # fmt: skip
    return DeviceRows(cp.asarray(host.view(np.uint8)), keep)


def run_sampler(sampler: CudaSampler, logits: npt.NDArray[np.float32], rows: DeviceRows, there: int) -> Sampled:
    """Sample the first ``there`` rows; beyond the vocabulary the logits hold a value that would win."""
    count, vocab = logits.shape
    padded = np.full((count, sampler.stride), 1e9, np.float32)
    padded[:, :vocab] = logits
    sizes = cp.asarray(np.array([count, count, there, 0], np.int32))
    results = cp.full(count * STEP_RESULT.itemsize, 0xEE, cp.uint8)
    top_tokens = cp.full((count, WIDTH), 7777777, cp.int32)
    top_logprobs = cp.full((count, WIDTH), cp.nan, cp.float32)
    sampler(cp.asarray(padded), rows.records, sizes, results, top_tokens, top_logprobs)
    host = cp.asnumpy(results).view(STEP_RESULT)
    return Sampled(
        host["token"][:there], host["logprob"][:there], host["status"][:there], cp.asnumpy(top_tokens)[:there],
        cp.asnumpy(top_logprobs)[:there],
    )  # fmt: skip


def drawn_row(rng: np.random.Generator, vocab: int) -> SamplingRow:
    """Parameters drawn independently, each often at its neutral value or an edge."""

    def one_of(*values: float) -> float:
        return float(np.float32(rng.choice(np.array(values))))  # as the device holds it

    n_prompt, n_output = int(rng.integers(1, 40)), int(rng.integers(0, 40))
    n_bias = int(one_of(0, 0, 3, 30))
    mask = None
    if rng.random() < 0.25:
        bits = rng.random(-(-vocab // 32) * 32) < one_of(0.5, 0.01, 0.001)
        mask = np.packbits(bits, bitorder="little").view(np.uint32)
    return SamplingRow(
        temperature=one_of(0.0, 0.7, 1.0, 1.0, 2.5, 1e-6),
        top_k=int(one_of(0, 0, 1, 5, 50, 2000, vocab + 1)),
        top_p=one_of(1.0, 1.0, 0.9037, 0.4983, 1e-6, 0.99931),  # no edge falls between equals
        min_p=one_of(0.0, 0.0, 0.05, 1.0),
        seed=int(rng.integers(0, 2**63)),
        choice=int(rng.integers(0, 4)),
        position=int(rng.integers(0, 5000)),
        repetition_penalty=one_of(1.0, 1.0, 1.3, 0.8),
        presence_penalty=one_of(0.0, 0.0, 1.5, -0.5),
        frequency_penalty=one_of(0.0, 0.0, 0.7),
        prompt=rng.integers(0, vocab, n_prompt).astype(np.int32),
        output=rng.integers(0, min(vocab, 50), n_output).astype(np.int32),
        bias_ids=rng.permutation(vocab)[:n_bias].astype(np.int32),
        bias=(rng.standard_normal(min(n_bias, vocab)) * 5).astype(np.float32),
        barred=rng.permutation(vocab)[: int(one_of(0, 0, 2))].astype(np.int32),
        mask=mask,
        logprobs=int(one_of(0, 0, 1, 5, 20)),
    )


def drawn_logits(rng: np.random.Generator, rows: int, vocab: int) -> npt.NDArray[np.float32]:
    """Flat, peaked, tied and spoiled rows in turn."""
    logits = rng.standard_normal((rows, vocab)).astype(np.float32)
    for i in range(rows):
        kind = i % 8
        if kind == 1:
            logits[i] *= 8
        elif kind == 2:
            logits[i] = np.round(logits[i])  # thousands of equals
        elif kind == 3:
            logits[i] *= 0.01
        elif kind == 4:
            logits[i, rng.integers(0, vocab, vocab // 2)] = -np.inf
        elif kind == 5:
            logits[i] = 3.0
        elif kind == 6 and i % 16 == 6:
            logits[i, rng.integers(0, vocab)] = rng.choice(np.array([np.nan, np.inf], np.float32))
    if rows > 30:
        logits[30] = -np.inf
    return logits


def compare(got: Sampled, expected: Sampled, case: str) -> Iterator[Outcome]:
    """Tokens, statuses and alternatives exactly; log probabilities within LOGPROB_LIMIT."""
    width = expected.top_tokens.shape[1]
    usable = expected.status == 0

    def outcome(op: str, error: float, limit: float = 0.0) -> Outcome:
        return Outcome(op, case, "float32", error, limit)

    yield outcome("sampler: status", float(np.mean(got.status != expected.status)))
    yield outcome("sampler: token", float(np.mean(got.tokens != expected.tokens)))
    off = np.abs(got.logprobs[usable] - expected.logprobs[usable])
    yield outcome("sampler: logprob", float(off.max(initial=0.0)), LOGPROB_LIMIT)
    yield outcome(
        "sampler: NaN where unusable", float(np.mean(~np.isnan(got.logprobs[~usable]))) if (~usable).any() else 0.0
    )
    yield outcome("sampler: alternatives", float(np.mean(got.top_tokens[:, :width] != expected.top_tokens)))
    a, b = got.top_logprobs[:, :width], expected.top_logprobs
    same = (a == b) | (np.abs(a - b) <= LOGPROB_LIMIT)
    yield outcome("sampler: alternatives' logprobs", float(np.mean(~same)))


def sampler(ops: CudaOps, rng: np.random.Generator) -> Iterator[Outcome]:
    """Drawn rows over small, odd and large vocabularies; padding rows; counts carried over steps and owners."""
    for vocab, rows in ((5, 33), (1000, 64), (32003, 20), (128256, 80), (170003, 4)):  # the last: two turns
        cuda = CudaSampler(ops.kernels, vocab, rows, rows, WIDTH)
        drawn = [drawn_row(rng, vocab) for _ in range(rows)]
        logits = drawn_logits(rng, rows, vocab)
        there = rows - 1  # the last is padding
        device = device_rows(drawn)
        got = run_sampler(cuda, logits, device, there)
        with np.errstate(all="ignore"):
            expected = sample(logits[:there], drawn[:there], WIDTH)
        yield from compare(got, expected, f"{there} rows of {vocab}")
        again = run_sampler(cuda, logits, device, there)
        yield Outcome(
            "sampler: same again", f"{rows} rows of {vocab}", "float32", float(np.mean(again.tokens != got.tokens)), 0.0
        )
    # Penalty counts: a row goes on, grows, and is taken over by another request.
    vocab = 200
    cuda = CudaSampler(ops.kernels, vocab, 2, 2, WIDTH)
    outputs = rng.integers(0, vocab, (2, 30)).astype(np.int32)
    logits = np.zeros((2, vocab), np.float32)
    # The new owner has fewer tokens than the last, or as many, or more.
    for owner, length in ((5, 3), (5, 4), (5, 20), (9, 6), (9, 30), (5, 12), (5, 2), (9, 2), (5, 25), (9, 26)):
        row = SamplingRow(
            temperature=1.0, frequency_penalty=0.9, repetition_penalty=1.2, presence_penalty=0.3, seed=owner,
            position=length, prompt=outputs[owner % 2, :2], output=outputs[owner % 2, 2:length],
        )  # fmt: skip
        pair = [row, row]
        got = run_sampler(cuda, logits, device_rows(pair, [owner, 77]), 1)
        case = f"owner {owner} with {length} tokens"
        yield from compare(got, sample(logits[:1], pair[:1], WIDTH), case)
        counts = np.bincount(row.output, minlength=vocab).astype(np.uint32)
        counts[row.prompt] |= 1 << 31
        wrong = float(np.mean(cp.asnumpy(cuda._counts[0]) != counts))
        yield Outcome("sampler: penalty counts", case, "float32", wrong, 0.0)
