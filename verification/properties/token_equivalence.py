"""Token equivalence: every emitted token re-scored by teacher forcing in HuggingFace (design section 9).

The engine's logits come from its capture file, matched by slot, generation and position. The decision is
`criterion.judge_tokens`; the clause `capture` demands exactly one captured row, with the delivered token, for every
token delivered.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from blink_core.abi.capture import read_capture
from blink_core.abi.dtypes import Array
from verification.criterion import TokenScores, score_tokens
from verification.history import History
from verification.oracles.hf import HFOracle
from verification.result import CheckResult, Verdict

PROPERTY = "token-equivalence"


def captured(path: Path, vocab: int) -> dict[tuple[int, int, int, int], Array]:
    """Capture records by (ring, slot, generation, position)."""
    records = read_capture(path, vocab)
    keys = (records[n].tolist() for n in ("ring", "slot", "generation", "position"))
    return {key: records[i] for i, key in enumerate(zip(*keys, strict=True))}


def check_capture(history: History, rows: dict[tuple[int, int, int, int], Array]) -> CheckResult:
    """Clause capture."""
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
    return CheckResult(Verdict.VALID, PROPERTY, "capture", f"{count} delivered tokens match the sampler's record")


def score(
    history: History, rows: dict[tuple[int, int, int, int], Array], hf64: HFOracle, hf32: HFOracle
) -> list[TokenScores]:
    """Scores of every request of a history that was delivered at least one token."""
    requests = [s for s in history.submitted if history.tokens_of(s)]
    sequences, starts = [], []
    for s in requests:
        prompt = history.program.requests[s.request].prompt
        sequences.append([*prompt, *history.tokens_of(s)[:-1]])
        starts.append(len(prompt) - 1)
    parts = []
    for s, start, r64, r32 in zip(
        requests,
        starts,
        hf64.forward_many(sequences, start=starts),
        hf32.forward_many(sequences, start=starts),
        strict=True,
    ):
        tokens = history.tokens_of(s)
        logits = np.stack(
            [rows[history.ring, s.slot, s.generation, start + 1 + i]["logits"] for i in range(len(tokens))]
        )
        params = history.program.requests[s.request].params
        parts.append(
            score_tokens(
                logits=logits,
                hf64=r64.logits,
                hf32=r32.logits,
                emitted=tokens,
                greedy=params.temperature == 0.0,
                names=[{"request": s.request, "index": i} for i in range(len(tokens))],
            )
        )
    return parts
