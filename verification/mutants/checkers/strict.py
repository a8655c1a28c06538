"""Batch-invariant mode: a request has the same bits alone, with others and in other chunks; classes N, A, S, K, G.

The reference is the product itself, so that nothing is said about what it computes, only on what that depends: a
difference of a rounding is a matter of numbers, a larger one of rows, pages or masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verification.mutants.checkers.base import Checker, Finding, Product, found
from verification.mutants.engines import greedy, parts_of, run, stepped
from verification.mutants.references import ENDLESS, model_path

FAMILIES = ("mistral-window", "llama-gqa3", "qwen3-moe-mixed", "qwen2-window", "phi4-longrope")
WAYS: Mapping[str, dict[str, Any]] = {
    "alone": {"prefix_cache": 0, "token_budget": 512},
    "together, chunks of 24 on pages of 8": {"page_size": 8, "pages": 200, "token_budget": 24},
    "together, chunks of 40": {"token_budget": 40, "prefix_cache": 0},
}
ROUNDING = 1e-3  # of logits that spread by about four: far above rounding, far below another row's
BITS, VALUES, FAILED = "bits depend on the batch", "values depend on the batch", "a request failed"


@dataclass(frozen=True)
class StrictChecker:
    """Compares the logits of every row, bit by bit, between the ways of serving."""

    name: str = "strict-metamorphic"
    functions: frozenset[str] = frozenset({"verification.mutants.checkers.strict.difference"})
    where: frozenset[str] = frozenset({"python"})
    clauses: Mapping[str, frozenset[str]] = field(
        default_factory=lambda: {BITS: frozenset("N"), VALUES: frozenset("ASKGO"), FAILED: frozenset("SK")}
    )
    seconds: float = 60.0

    def run(self, product: Product, seed: int, deadline: float) -> Finding | None:
        """The first request whose rows differ between two ways."""
        parts = parts_of(product, deadline)
        for family in FAMILIES:
            prompts = draw(family, seed)
            first: list[Any] = []
            for way, sizes in WAYS.items():
                options = {"max_len": 400, "pages": 120} | sizes
                with stepped(parts, product.scratch, model_path(family), batch_invariant=True, **options) as engine:
                    after = ENDLESS if way == "alone" else 0
                    result, _ = run(engine, [greedy(p, 6, after) for p in prompts])
                rows = [one and one["logits"] for one in result["requests"]]
                if any(row is None for row in rows):
                    return found(self, FAILED, f"{family}, {way}: a request has not all its rows")
                first = first or rows
                wrong = difference(first, rows)
                if wrong is not None:
                    most, request = wrong
                    clause = BITS if most < ROUNDING else VALUES
                    return found(self, clause, f"{family}, request {request}: logits {way} differ by {most:.3g}")
        return None


def draw(family: str, seed: int) -> list[tuple[int, ...]]:
    """Prompts on both sides of pages, blocks of 128 positions, windows and chunks; two begin alike."""
    rng = np.random.default_rng([seed, 11])
    lengths = [1, int(rng.integers(2, 9)), 23, int(rng.integers(60, 80)), 127, int(rng.integers(129, 150))]
    lengths += [300] if family == "mistral-window" else []
    drawn = [tuple(int(i) for i in rng.integers(3, 500, n)) for n in lengths]
    return [*drawn, drawn[4][:64] + drawn[2]]


def difference(first: Sequence[Any], second: Sequence[Any]) -> tuple[float, int] | None:
    """(greatest difference, request) of the request that differs most; None where all bits are equal."""
    worst: tuple[float, int] | None = None
    for index, (a, b) in enumerate(zip(first, second, strict=True)):
        if a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32)):
            continue
        rows = min(len(a), len(b))
        # From the first row that differs in its token on it is another sequence: the first different row counts.
        at = next((i for i in range(rows) if not np.array_equal(a[i].view(np.uint32), b[i].view(np.uint32))), None)
        most = np.inf if at is None else float(np.nan_to_num(np.abs(a[at] - b[at]), nan=np.inf).max())
        worst = max(worst or (0.0, index), (most, index))
    return worst


CHECKERS: tuple[Checker, ...] = (StrictChecker(),)
