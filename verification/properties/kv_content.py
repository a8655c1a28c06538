"""KV content: rows gathered from the pages of the running engine against HuggingFace's past_key_values.

Taken at a step boundary from raw memory: block tables, token pool and KV pool as they lie. The decision is
`criterion.judge_kv` (clauses k-rows, v-rows); the clause `tokens` holds the token pool against what was submitted and
delivered, so that the right KV of the wrong tokens does not pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blink_core.abi.dtypes import Array
from hil_rigs.engine_memory import EngineMemory, StateSnapshot
from verification.criterion import KVScores, judge_kv, score_kv
from verification.history import History
from verification.oracles.hf import HFOracle
from verification.properties.own_error import measured_kv
from verification.result import JSON, CheckResult, Verdict
from verification.thresholds import KVThresholds

PROPERTY = "kv-content"


@dataclass(frozen=True, slots=True)
class Gathered:
    """KV of one running request: tokens int32[n], k and v float32 [layers, n, kv_heads, head_dim].

    found: leading tokens of its prompt that were in the prefix cache when it was first admitted.
    """

    slot: int
    generation: int
    preemptions: int
    tokens: Array
    k: Array
    v: Array
    found: int = 0


def gather(memory: EngineMemory, snapshot: StateSnapshot, ring: int) -> list[Gathered]:
    """KV of every running request of `ring`. Call it under `memory.hold()`, of a snapshot that passed."""
    found = []
    slots = snapshot.config.slots
    for request in snapshot.running.tolist():
        q = snapshot.requests[request]
        count = int(q["computed"])
        if request // slots != ring or count == 0:
            continue
        k, v = memory.kv_rows(snapshot.block_tables[int(q["row"])], count)
        key = request % slots, int(q["generation"])
        found.append(Gathered(*key, int(q["preemptions"]), memory.tokens(request, count), k, v, found=int(q["cached"])))
    return found


def check_tokens(history: History, rows: list[Gathered]) -> CheckResult:
    """Clause tokens: the token pool holds prompt and delivered tokens."""
    if not rows:
        return CheckResult(Verdict.UNKNOWN, PROPERTY, "tokens", "no running request was observed")
    by_key = {(s.slot, s.generation): s for s in history.submitted}
    for row in rows:
        s = by_key.get((row.slot, row.generation))
        if s is None:
            return CheckResult(
                Verdict.INVALID, PROPERTY, "tokens", f"slot {row.slot} generation {row.generation} runs unasked"
            )
        expected = [*history.program.requests[s.request].prompt, *history.tokens_of(s)][: len(row.tokens)]
        if row.tokens.tolist() != expected:
            pool: list[JSON] = row.tokens.tolist()
            at = next(
                (i for i, (a, b) in enumerate(zip(row.tokens.tolist(), expected, strict=False)) if a != b),
                len(expected),
            )
            wanted: list[JSON] = list(expected[at : at + 8])
            return CheckResult(
                Verdict.INVALID,
                PROPERTY,
                "tokens",
                f"request {s.request}: token {at} of the token pool differs from what was submitted and delivered",
                {"pool": pool[at : at + 8], "expected": wanted},
            )
    return CheckResult(Verdict.VALID, PROPERTY, "tokens", f"token pool of {len(rows)} requests is right")


def judge(parts: Sequence[KVScores], thresholds: KVThresholds) -> CheckResult:
    """Clauses k-rows and v-rows over the pooled parts; without any, nothing was compared and nothing is known."""
    if not parts:
        return CheckResult(Verdict.UNKNOWN, PROPERTY, "rows", "no KV row was compared")
    return judge_kv(KVScores.concatenate(parts), thresholds)


def score(rows: Sequence[Gathered], hf64: HFOracle, hf32: HFOracle) -> KVScores:
    """Row errors of all gathered requests (at least one), pooled."""
    parts = []
    for row in rows:
        ids = row.tokens.tolist()
        scored = score_kv(
            k=row.k,
            v=row.v,
            hf64=hf64.kv(ids),
            hf32=hf32.kv(ids),
            name={"slot": row.slot, "generation": row.generation},
        )
        parts.append(measured_kv(scored, ids, hf64, hf32))
    return KVScores.concatenate(parts)
