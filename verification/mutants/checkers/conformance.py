"""Checker: the event log of drawn programs, as the trace monitor reads one (`blink trace check`).

The monitor gets the inputs from the log itself, so that what the scheduler logs is judged beside what it does.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping
from functools import lru_cache

from blink_core.abi.config import EngineConfig
from verification.lockstep.programs import execute
from verification.mutants.checkers.base import Finding, Product, found, left
from verification.mutants.checkers.lock_step import THEMES, draw
from verification.trace.drawn import trace_of_words
from verification.trace.monitor import VALID, VIOLATED, check

PROGRAMS = 84  # of one seed
# What a rule speaks of where the monitor names it: by the entry that the specification does not predict.
RULES: dict[str, str] = {
    "R2": "D", "R3": "DV", "R4": "DR", "R5": "DR", "R6": "BDSV", "R10": "BDRSV", "R11": "DSV",
    "A2": "QS", "A4": "QS", "A5": "Q", "P1": "GQS", "P2": "GS", "P4": "KS",
    "C1": "GRS", "C2": "RS", "C3": "RS", "C4": "BRS", "L1": "RS", "L2": "QS", "L3": "VX",
    "L4": "X", "L6": "X", "L7": "X",
    "K1": "KP", "K2": "KP", "K4": "K", "K5": "K", "K6": "P", "K7": "P", "T2": "VX", "E1": "G",
}  # fmt: skip
OTHER = "other"


@lru_cache(maxsize=64)
def _drawn(seed: int) -> tuple[tuple[EngineConfig, bytes], ...]:
    """Configuration and words of each program of a seed."""
    out = []
    for number in range(PROGRAMS):
        driver = execute(draw(random.Random(f"conformance/{seed}/{number}"), THEMES[number % len(THEMES)])).d
        out.append((driver.config, array("q", driver.words).tobytes()))
    return tuple(out)


class Conformance:
    """Traces of drawn programs until the monitor finds a clause violated."""

    name = "log-conformance"
    where = frozenset({"native"})
    clauses: Mapping[str, frozenset[str]] = {rule: frozenset(classes) for rule, classes in RULES.items()} | {
        OTHER: frozenset()
    }
    functions = frozenset(
        {
            "verification.trace.monitor.check",
            "verification.trace.clauses.violated",
            "verification.trace.follower.Follower",
            "verification.spec.machine.Machine",
        }
    )
    seconds = 30.0

    def prepare(self, seed: int) -> None:
        """Draws the programs of a seed; kept for later runs of this process."""
        _drawn(seed)

    def run(self, product: Product, seed: int, deadline: float) -> Finding | None:
        """Raises RuntimeError for a trace of which the monitor cannot tell."""
        for number, (config, words) in enumerate(_drawn(seed)):
            if left(deadline) == 0:
                raise TimeoutError(f"{number} of {PROGRAMS} programs were run")
            program = array("q")
            program.frombytes(words)
            verdict = check(trace_of_words(config, program.tolist(), product.native, seed=str(seed)))
            if verdict.word == VIOLATED:
                clause = verdict.clause if verdict.clause in self.clauses else OTHER
                told = f"entry {verdict.entry}: {verdict.way}; expected {verdict.expected}, found {verdict.found}"
                return found(self, clause, f"program {number}: {verdict.clause}: {told}")
            if verdict.word != VALID:
                raise RuntimeError(f"program {number}: {verdict.word}: {'; '.join(verdict.reasons)}")
        return None


CHECKERS = (Conformance(),)
