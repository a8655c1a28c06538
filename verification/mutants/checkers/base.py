"""What the kill matrix asks of a checker.

A checker draws a test of its own from a seed, runs it on the product that it is given, and returns what it found wrong.
It must find nothing on the clean product. It never counts a crash or a missed deadline as a finding: it may raise
TimeoutError, which is recorded as a timeout; whatever else it raises is a crash, and the matrix ends it at its
deadline. It runs in a process of its own, where the mutant is in force before the product is imported.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Protocol, runtime_checkable

from verification.mutants.model import CLASSES, Mutant

WITNESS_LIMIT = 600


@dataclass(frozen=True, slots=True)
class Finding:
    """What a checker found wrong.

    clause: the rule that was broken, as its checker names it. classes: fault classes that this clause speaks of, from
    the checker's `clauses`; a mutant of any other class is not killed by it. witness: what shows it, in one line.
    """

    clause: str
    classes: frozenset[str]
    witness: str

    def __post_init__(self) -> None:
        if not self.classes <= CLASSES.keys():
            raise ValueError(f"clause {self.clause!r} names classes {sorted(self.classes - CLASSES.keys())}: unknown")
        object.__setattr__(self, "witness", " ".join(self.witness.split())[:WITNESS_LIMIT])


@dataclass(slots=True)
class Product:
    """The product as a checker gets it.

    mutant: what is wrong with it; None: nothing (the control). environ: environment for processes that the checker
    starts (engine, front end): the mutant is in force in them too. scratch: an empty folder of this run.
    """

    mutant: Mutant | None
    environ: Mapping[str, str]
    scratch: Path
    _native: ModuleType | None = field(default=None, repr=False)

    @property
    def native(self) -> ModuleType:
        """`blink_core._native`: shipped, or for a native mutant the mutant build with its fault switched on."""
        if self._native is None:
            from blink_core import _native

            self._native = _native
        return self._native


@runtime_checkable
class Checker(Protocol):
    """One way to notice faults.

    name: unique, kebab-case. where: kinds of mutants that it can notice (`native`, `python`, `cuda`). clauses: each
    clause that a finding may name, with the fault classes that it speaks of. functions: dotted names of the functions
    that decide (not those that drive the product); two checkers count as independent if they share none. seconds: how
    long one seed may take; past it the run is a timeout. A checker may have `prepare(seed)` as well: it draws the test
    of a seed and keeps it, before processes are forked that run it on many mutants; and `applies(mutant)`, if it is
    for some mutants of its classes only; and `deterministic`, true if it takes nothing from its seed: one run then
    stands for all seeds.
    """

    @property
    def name(self) -> str: ...
    @property
    def where(self) -> frozenset[str]: ...
    @property
    def clauses(self) -> Mapping[str, frozenset[str]]: ...
    @property
    def functions(self) -> frozenset[str]: ...
    @property
    def seconds(self) -> float: ...

    def run(self, product: Product, seed: int, deadline: float) -> Finding | None:
        """One test drawn by `seed`; None if nothing is wrong. deadline: `time.monotonic()` at which it must be over."""
        ...


def classes_of(checker: Checker) -> frozenset[str]:
    """All classes that a checker can name."""
    return frozenset().union(*checker.clauses.values())


def independent(first: Checker, second: Checker) -> bool:
    """Whether two checkers share no function that decides."""
    return not first.functions & second.functions


def found(checker: Checker, clause: str, witness: str) -> Finding:
    """A finding with the classes of its clause. Raises KeyError for a clause that the checker does not declare."""
    return Finding(clause, checker.clauses[clause], witness)


def left(deadline: float) -> float:
    """Seconds until `deadline`, at least 0."""
    return max(0.0, deadline - time.monotonic())
