"""A checker that is one drawn check of the product's parts, called in a process of their own."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from verification.mutants.checkers.base import Finding, Product, found
from verification.mutants.engines import parts_of
from verification.mutants.parts import Parts

Wrong = tuple[str, str] | None  # a clause of the checker and the witness


@dataclass(frozen=True)
class DrawnChecker:
    """Runs `check` with a generator drawn from the checker's name and the seed."""

    name: str
    functions: frozenset[str]
    clauses: Mapping[str, frozenset[str]]
    check: Callable[[Parts, random.Random, Path], Wrong]
    where: frozenset[str] = frozenset({"python"})
    seconds: float = 30.0

    def run(self, product: Product, seed: int, deadline: float) -> Finding | None:
        """What `check` found wrong."""
        wrong = self.check(parts_of(product, deadline), random.Random(f"{self.name}-{seed}"), product.scratch)
        return None if wrong is None else found(self, *wrong)
