"""Model families in stepped engines against HuggingFace: logits, KV rows, tokens; classes A, O, M, K, P, S, G.

Each tiny family serves the same drawn requests twice: alone, one after the other and in one chunk, and together, on
small pages, in chunks of a small budget, with a shared beginning. Where an answer first goes wrong says what it may be:
a lone token attends to nothing and stands at position 0, so what is wrong there is the model; what is right alone and
wrong together is a matter of rows, pages and chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verification.criterion import KVScores, TokenScores, judge_kv, judge_tokens, score_kv, score_tokens
from verification.mutants.checkers.base import Checker, Finding, Product, found
from verification.mutants.engines import greedy, parts_of, run, stepped
from verification.mutants.references import ENDLESS, FAMILIES, Sequence64, model_path, reference
from verification.program import RequestSpec
from verification.thresholds import default_thresholds

SHORT = 16  # positions that every window and original maximum reaches
ALONE: dict[str, Any] = {"prefix_cache": 0}
TOGETHER: dict[str, Any] = {"page_size": 8, "pages": 90, "token_budget": 24}

LONE = "a lone token"
NEAR = "first positions, alone"
FAR = "later positions, alone"
TOGETHER_CLAUSE = "rows together"
FAILED = "a request failed"

CLAUSES: dict[str, frozenset[str]] = {
    LONE: frozenset("M"),
    NEAR: frozenset("AOM"),
    FAR: frozenset("AOM"),
    TOGETHER_CLAUSE: frozenset("AOKPSGM"),
    FAILED: frozenset("OKPS"),
}


@dataclass(frozen=True, slots=True)
class Served:
    """One request of a family as it was served. common: leading tokens that are HuggingFace's, and the first that is
    not: as far as its rows can be compared."""

    family: str
    index: int
    expected: Sequence64
    got: Mapping[str, Any]
    together: bool

    @property
    def common(self) -> int:
        pairs = zip(self.got["tokens"], self.expected.tokens, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        return len(self.expected.tokens) if same is None else same + 1

    def clause(self, position: int) -> str:
        """Which clause a fault at this position of the sequence is about."""
        if self.together:
            return TOGETHER_CLAUSE
        if len(self.expected.prompt) + len(self.expected.tokens) == 2:
            return LONE
        return NEAR if position < SHORT else FAR

    def __str__(self) -> str:
        how = "together" if self.together else "alone"
        return f"{self.family}, request {self.index} of {len(self.expected.prompt)} tokens, {how}"


def serve(product: Product, seed: int, deadline: float) -> Iterator[list[Served] | str]:
    """For each family and way of serving: its requests as served, or what went wrong with one."""
    parts = parts_of(product, deadline)
    for family in FAMILIES:
        expected = reference(family, seed)
        for together, sizes in ((False, ALONE), (True, TOGETHER)):
            with stepped(parts, product.scratch, model_path(family), **sizes) as engine:
                asked = [_asked(e, together) for e in expected]
                result, _ = run(engine, asked)
            served = []
            for index, (e, got) in enumerate(zip(expected, result["requests"], strict=True)):
                if got is None or len(got["tokens"]) != len(e.tokens) or got["logits"] is None or got["k"] is None:
                    count = 0 if got is None else len(got["tokens"])
                    yield f"{family}, request {index}: {count} of {len(e.tokens)} tokens, all wanted"
                    break
                served.append(Served(family, index, e, got, together))
            else:
                yield served


def _asked(expected: Sequence64, together: bool) -> RequestSpec:
    """Together, long prompts come a little later and are served first: their chunks stand before rows that sample."""
    prompt, new = expected.prompt, len(expected.tokens)
    if not together:
        return greedy(prompt, new, ENDLESS)
    long = len(prompt) > 30
    return greedy(prompt, new, expected.after or (6 if long else 0), priority=0 if long else 2)


@dataclass(frozen=True)
class FamilyChecker:
    """Judges each family's requests by `judge`, which names clause and witness of the first thing wrong."""

    name: str
    functions: frozenset[str]
    judge: Callable[[list[Served]], tuple[str, str] | None]
    where: frozenset[str] = frozenset({"python"})
    clauses: Mapping[str, frozenset[str]] = field(default_factory=lambda: CLAUSES)
    seconds: float = 120.0

    def run(self, product: Product, seed: int, deadline: float) -> Finding | None:
        """The first family whose requests are not HuggingFace's."""
        for served in serve(product, seed, deadline):
            if isinstance(served, str):
                return found(self, FAILED, served)
            wrong = self.judge(served)
            if wrong is not None:
                return found(self, *wrong)
        return None


def judge_logits(served: list[Served]) -> tuple[str, str] | None:
    """The token criterion, group by group in the order of the clauses."""
    limits = replace_rows(default_thresholds().tokens)
    groups: dict[str, list[TokenScores]] = {clause: [] for clause in CLAUSES}
    for one in served:
        start, e = len(one.expected.prompt), one.expected
        for clause in dict.fromkeys(one.clause(start + i) for i in range(one.common)):
            rows = [i for i in range(one.common) if one.clause(start + i) == clause]
            score = score_tokens(
                logits=one.got["logits"][rows],
                hf64=e.logits64[rows],
                hf32=e.logits32[rows],
                emitted=np.array(one.got["tokens"])[rows],
                names=[{"request": str(one), "position": start + i} for i in rows],
            )
            groups[clause].append(score)
    for clause, parts in groups.items():
        if parts:
            result = judge_tokens(TokenScores.concatenate(parts), limits)
            if not result.ok():
                return clause, str(result)
    return None


def judge_pages(served: list[Served]) -> tuple[str, str] | None:
    """The KV criterion over all rows of a family, then the clause of the first position that fails."""
    limits = replace_rows(default_thresholds().kv)
    parts = []
    for one in served:
        e, count = one.expected, len(one.expected.prompt) + one.common - 1
        if one.got["known"].tolist()[:count] != [*e.prompt, *e.tokens][:count]:
            return one.clause(count), f"{one}: the token pool is not prompt and tokens"
        scored = score_kv(
            k=one.got["k"][:, :count],
            v=one.got["v"][:, :count],
            hf64=(e.k64[:, :count], e.v64[:, :count]),
            hf32=(e.k32[:, :count], e.v32[:, :count]),
            name={"request": str(one), "index": one.index},
        )
        parts.append(scored)
    result = judge_kv(KVScores.concatenate(parts), limits)
    if result.ok():
        return None
    rows: Any = result.witness.get("rows", [])
    clauses = [served[row["index"]].clause(row["position"]) for row in rows]
    return min(clauses, key=list(CLAUSES).index, default=FAR), str(result)


def replace_rows(limits: Any) -> Any:
    """The registered limits for as few rows as one family gives: its yardstick is then that of a few rows."""
    return limits.model_copy(update={"min_rows": 1})


def judge_generated(served: list[Served]) -> tuple[str, str] | None:
    """Tokens are those of HuggingFace's greedy search in float64, or next to them."""
    for one in served:
        e = one.expected
        for i, (mine, theirs) in enumerate(zip(one.got["tokens"], e.tokens, strict=True)):
            if mine == theirs:
                continue
            margin = e.logits64[i, theirs] - e.logits64[i, mine] if 0 <= mine < e.logits64.shape[1] else np.inf
            if margin <= 2 * np.abs(e.logits32[i] - e.logits64[i]).max():
                break  # a tie: from here on it is another sequence
            where = one.clause(len(e.prompt) + i)
            return where, f"{one}: token {i} is {mine}, HuggingFace's {theirs} leads by {margin:.3g}"
    return None


_HERE = "verification.mutants.checkers.families."
CHECKERS: tuple[Checker, ...] = (
    FamilyChecker(
        "family-logits",
        frozenset({"verification.criterion.tokens.judge_tokens", "verification.criterion.tokens.score_tokens"}),
        judge_logits,
    ),
    FamilyChecker(
        "family-pages",
        frozenset({"verification.criterion.kv.judge_kv", "verification.criterion.kv.score_kv"}),
        judge_pages,
    ),
    FamilyChecker("family-tokens", frozenset({_HERE + "judge_generated"}), judge_generated),
)
