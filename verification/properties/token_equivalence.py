"""Token equivalence: every emitted token re-scored by teacher forcing in HuggingFace (design section 9).

The engine's logits come from its capture file, matched by slot, generation and position. Clauses:

  capture   exactly one captured row, with the delivered token, for every token delivered
  sampler   a token is the one that the request's sampling parameters and seed give on the engine's own logits
  others    those of `criterion.judge_tokens`
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blink_core.abi.capture import record_dtype
from blink_core.abi.dtypes import Array
from verification.criterion import TokenScores, judge_tokens, score_tokens
from verification.history import History
from verification.masks import allowed_ids
from verification.oracles.hf import HFOracle
from verification.oracles.sampler import Agreement, SampledRow, compare, raw_greedy
from verification.program import RequestSpec
from verification.properties.own_error import measured_tokens
from verification.result import JSON, CheckResult, Measurement, Verdict
from verification.thresholds import SamplingThresholds, TokenThresholds

PROPERTY = "token-equivalence"

_WITNESSED = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "choice", "min_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)

Key = tuple[int, int, int, int]  # ring, slot, generation, position


def read_window(path: Path, vocab: int, window: tuple[int, int]) -> Array:
    """Capture records that lie whole in the bytes `window` of the file; one run's own, so that keys are unique."""
    dtype = record_dtype(vocab)
    first, last = -(-window[0] // dtype.itemsize), window[1] // dtype.itemsize
    if last <= first:
        return np.zeros(0, dtype)
    return np.fromfile(path, dtype, last - first, offset=first * dtype.itemsize)


def index_capture(records: Array, vocab: int) -> tuple[dict[Key, Array], CheckResult]:
    """Records by key, and clause capture of the records themselves: the vocabulary, and no key twice."""
    rows: dict[Key, Array] = {}
    columns = (records[name].tolist() for name in ("ring", "slot", "generation", "position"))
    for i, key in enumerate(zip(*columns, strict=True)):
        if int(records[i]["vocab"]) != vocab:
            message = f"record {i} has logits of {int(records[i]['vocab'])} ids, the model has {vocab}"
            return rows, CheckResult(Verdict.INVALID, PROPERTY, "capture", message)
        if key in rows:
            message = "ring {}, slot {}, generation {}, position {} was sampled twice".format(*key)
            return rows, CheckResult(Verdict.INVALID, PROPERTY, "capture", message)
        rows[key] = records[i]
    return rows, CheckResult(Verdict.VALID, PROPERTY, "capture", f"{len(rows)} sampled rows, each once")


def check_capture(history: History, rows: dict[Key, Array]) -> CheckResult:
    """Clause capture: every delivered token has its row."""
    count = 0
    for s in history.submitted:
        prompt = len(history.program.requests[s.request].prompt)
        for index, token in enumerate(history.tokens_of(s)):
            row = rows.get((history.ring, s.slot, s.generation, prompt + index))
            if row is None or int(row["token"]) != token:
                seen = "no logits" if row is None else f"token {int(row['token'])}"
                return CheckResult(
                    Verdict.INVALID,
                    PROPERTY,
                    "capture",
                    f"request {s.request} was delivered token {token} at index {index}, the sampler recorded {seen}",
                )
            count += 1
    if count == 0:
        return CheckResult(Verdict.UNKNOWN, PROPERTY, "capture", "no token was delivered")
    return CheckResult(Verdict.VALID, PROPERTY, "capture", f"{count} delivered tokens match the sampler's record")


def sampled_rows(history: History, rows: dict[Key, Array], eos: Iterable[int] = ()) -> list[SampledRow]:
    """Rows of all delivered tokens that the raw logits' argmax alone does not decide: drawn ones, and greedy ones with
    bias, penalties, masks or min_tokens. eos: the engine's end-of-sequence ids. Presupposes `check_capture`."""
    found = []
    for s in history.submitted:
        spec, tokens = history.program.requests[s.request], history.tokens_of(s)
        for index, token in enumerate(tokens):
            logits = rows[history.ring, s.slot, s.generation, len(spec.prompt) + index]["logits"]
            row = row_of(spec, tokens[:index], logits, token, eos)
            if not raw_greedy(row):
                found.append(row)
    return found


def row_of(
    spec: RequestSpec, before: Sequence[int], logits: NDArray[np.float32], token: int, eos: Iterable[int] = ()
) -> SampledRow:
    """The row of a request behind its prompt and the tokens `before`, with the grammar mask of that place.

    logits: float32 [V]; token: id that was emitted there; eos: the engine's end-of-sequence ids."""
    mask = None
    if spec.mask_seed is not None:
        mask = frozenset(np.flatnonzero(allowed_ids(spec.mask_seed, len(before), len(logits))).tolist())
    return SampledRow.of(
        spec.params, logits, token, prompt=spec.prompt, output=tuple(before), eos=tuple(eos), mask=mask
    )


def check_sampler(rows: Iterable[SampledRow], limits: SamplingThresholds) -> CheckResult:
    """Clause sampler. A token that only rounding (`limits.near`) keeps from being the rule's is excused."""
    counts: Counter[Agreement] = Counter()
    wrong: list[JSON] = []
    for row in rows:
        expected, agreement = compare(row, limits)
        counts[agreement] += 1
        if agreement is Agreement.WRONG:
            parameters: dict[str, JSON] = {name: getattr(row, name) for name in _WITNESSED}
            wrong.append({"position": row.position, "token": row.token, "expected": expected, **parameters})
    n, excused = sum(counts.values()), counts[Agreement.NEAR] + counts[Agreement.EDGE]
    if n == 0:
        return CheckResult(Verdict.UNKNOWN, PROPERTY, "sampler", "no token was drawn, or chosen from changed logits")
    allowed = limits.excused.allowed(n)
    bad = len(wrong) > 0 or excused > allowed
    return CheckResult(
        Verdict.INVALID if bad else Verdict.VALID,
        PROPERTY,
        "sampler",
        f"{len(wrong)} of {n} sampled tokens are not what their parameters give; {excused} excused, within "
        f"{limits.near:g} of it, at most {allowed} allowed",
        {"rows": wrong[:8]} if wrong else {},
        {
            "sampled_rows": Measurement(n, "rows"),
            "sampled_wrong": Measurement(len(wrong), "rows", 0, n),
            "sampled_excused": Measurement(excused, "rows", allowed, n),
        },
    )


def judge(parts: Sequence[TokenScores], thresholds: TokenThresholds) -> CheckResult:
    """The criterion over the pooled parts; unknown without any rows, or without a greedy one."""
    greedy = sum(int(part.greedy.sum()) for part in parts)
    if greedy == 0:
        rows = sum(map(len, parts))
        return CheckResult(Verdict.UNKNOWN, PROPERTY, "rows", f"none of {rows} rows is greedy: no choice was compared")
    return judge_tokens(TokenScores.concatenate(parts), thresholds)


def score(history: History, rows: dict[Key, Array], hf64: HFOracle, hf32: HFOracle) -> list[TokenScores]:
    """Scores of every request of a history that was delivered at least one token. Presupposes `check_capture`."""
    requests = [s for s in history.submitted if history.tokens_of(s)]
    sequences, starts = [], []
    for s in requests:
        prompt = history.program.requests[s.request].prompt
        sequences.append([*prompt, *history.tokens_of(s)[:-1]])
        starts.append(len(prompt) - 1)
    parts = []
    for s, ids, start, r64, r32 in zip(
        requests,
        sequences,
        starts,
        hf64.forward_many(sequences, start=starts),
        hf32.forward_many(sequences, start=starts),
        strict=True,
    ):
        tokens = history.tokens_of(s)
        logits = np.stack(
            [rows[history.ring, s.slot, s.generation, start + 1 + i]["logits"] for i in range(len(tokens))]
        )
        spec = history.program.requests[s.request]
        scored = score_tokens(
            logits=logits,
            hf64=r64.logits,
            hf32=r32.logits,
            emitted=tokens,
            greedy=[raw_greedy(row_of(spec, tokens[:i], logits[i], tokens[i])) for i in range(len(tokens))],
            names=[{"request": s.request, "index": i} for i in range(len(tokens))],
        )
        parts.append(measured_tokens(scored, ids, start, r64.logits, hf32))
    return parts
