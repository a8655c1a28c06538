"""Checker: every reachable state of small scopes on the compiled scheduler (docs/explore.md)."""

from __future__ import annotations

from collections.abc import Mapping

from verification.explore.run import explore
from verification.explore.scopes import of_profile
from verification.mutants.checkers.base import Finding, Product, found, left

MAX_STATES, MAX_BYTES = 4_000_000, 1 << 29  # a fault may have no end of states
PROFILE = "smoke"  # some five seconds for one mutant
# By the rule of docs/rules.md that the explorer names; how it recounts it is in explore_clauses.hpp and _recount.hpp.
RULES: dict[str, str] = {
    "R1": "DR", "R2": "D", "R4": "DR", "R6": "BDRSX", "R8": "DV", "R9": "DR", "R10": "RS",
    "L1": "KRS", "L2": "QS", "L3": "VX", "L4": "X", "L6": "X", "L7": "X",
    "K1": "KPS", "K3": "KP", "K4": "KPS", "K5": "K", "K6": "P",
    "C2": "KPS", "C3": "RS", "C4": "BRS",
    "P1": "GQS", "P2": "GS", "P3": "R", "P4": "GKS",
    "A2": "Q", "A3": "KQS", "A5": "Q", "A7": "Q", "liveness": "DQSX",
}  # fmt: skip
OTHER = "other"  # the search itself objects: states that were taken for equal go on differently


class Scopes:
    """The same for every seed, so it is run once."""

    name = "small-scopes"
    where = frozenset({"native"})
    clauses: Mapping[str, frozenset[str]] = {rule: frozenset(classes) for rule, classes in RULES.items()} | {
        OTHER: frozenset()
    }
    functions = frozenset(
        {
            "blink_core.runtime.native.explore_clauses.Clauses",
            "blink_core.runtime.native.explore_recount.Recount",
            "blink_core.runtime.native.explore_graph.Graph",
        }
    )
    seconds = 60.0
    deterministic = True

    def run(self, product: Product, seed: int, deadline: float) -> Finding | None:
        """Scopes until a clause of one is broken. What a scope no longer meets is no finding: it may be the search."""
        for scope in of_profile(PROFILE):
            search = explore(
                scope, native=product.native, deadline_s=left(deadline), max_states=MAX_STATES, max_bytes=MAX_BYTES
            )
            if search.clause:
                clause = search.clause if search.clause in self.clauses else OTHER
                return found(self, clause, f"{scope.name}, {len(search.witness)} moves: {search.message}")
            if not search.finished:
                raise TimeoutError(f"{scope.name}: stopped by {search.stopped_by}")
        return None


CHECKERS = (Scopes(),)
