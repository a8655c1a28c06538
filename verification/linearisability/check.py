"""Decides whether a history is linearisable, and shows the least of it that is not.

The method is WGL (`search`) on the parts of the history (`partition`). Effort is bounded: where the bound is reached
the answer is unknown, never valid.
"""

from __future__ import annotations

from dataclasses import dataclass

from verification.linearisability import partition, witness
from verification.linearisability.operations import OperationHistory
from verification.linearisability.search import linearise
from verification.result import Verdict

BUDGET = 200_000
"""Steps of the specification that one check may take; a run of ten requests takes a few hundred."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the check came to.

    law: of an invalid history, the first law that is broken ("V3"). witness: of an invalid one, the least sub-history
    that is not linearisable either. shown: positions in the history that the witness is made of. blocked: position of
    the operation that no order allows. steps: of the specification, the effort of the search.
    """

    verdict: Verdict
    message: str
    law: str = ""
    witness: OperationHistory | None = None
    shown: frozenset[int] = frozenset()
    blocked: int | None = None
    parts: int = 0
    steps: int = 0


def check(history: OperationHistory, budget: int = BUDGET) -> Decision:
    """Judges a history. valid: some legal order of its operations extends their order in time and of each process.

    invalid comes with a witness. unknown: nothing happened, or `budget` steps did not decide; raises ValueError for a
    budget below 1.
    """
    if budget < 1:
        raise ValueError(f"budget is {budget} steps, must be at least 1")
    parts = partition.split(history)
    if not parts:
        return Decision(Verdict.UNKNOWN, "no operation: there is nothing to judge")
    steps, undecided = 0, 0
    for part in parts:
        found = linearise([history.operations[i] for i in part], history.requests, budget - steps)
        steps += found.steps
        if found.verdict is Verdict.INVALID:
            return _invalid(history, part, budget, len(parts), steps)
        undecided += found.verdict is Verdict.UNKNOWN
    broken = partition.broken_fence(history) if len(parts) > 1 else None
    if broken is not None:
        return _invalid(history, broken, budget, len(parts), steps)
    if undecided:
        message = f"{undecided} of {len(parts)} parts are not decided after {steps} steps"
        return Decision(Verdict.UNKNOWN, message, parts=len(parts), steps=steps)
    message = f"{len(history.operations)} operations in {len(parts)} parts have a legal order"
    return Decision(Verdict.VALID, message, parts=len(parts), steps=steps)


def _invalid(history: OperationHistory, part: partition.Part, budget: int, parts: int, steps: int) -> Decision:
    least = witness.minimise(history, part, budget)
    law, _, what = least.law.partition(": ")
    return Decision(
        Verdict.INVALID,
        f"no legal order: {least.operations[least.blocked]}: {what}",
        law,
        history.with_operations(least.operations),
        frozenset(i for places in least.places for i in places),
        least.places[least.blocked][-1],
        parts,
        steps,
    )
