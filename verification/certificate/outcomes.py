"""The nine outcomes of a test and the exceptions by which a test or a fixture names one (design section 9).

pytest knows passed, failed, error and skipped. A certificate must tell a broken product from a broken rig and from a
broken test, so an exception says which it is:

* `PropertyViolation` (or a failed `assert` in the call phase): the product broke a property;
* `PropertyUnknown`: the check could not decide;
* `InfrastructureError`: the rig, the network, the disk failed; `RigBroken`: and no later test can use the rig;
* anything else: a defect of the test.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verification.result import CheckResult


class Outcome(StrEnum):
    """What one test ended with."""

    PASSED = "passed"
    PRODUCT_FAILURE = "product_failure"
    INFRASTRUCTURE = "infrastructure"
    TEST_DEFECT = "test_defect"
    UNKNOWN = "unknown"
    BLOCKED = "blocked"
    FILTERED = "filtered"
    SKIPPED = "skipped"
    MISSING = "missing"


MEANINGS: dict[Outcome, str] = {
    Outcome.PASSED: "the property held",
    Outcome.PRODUCT_FAILURE: "the product broke the property",
    Outcome.INFRASTRUCTURE: "the rig or the machine failed",
    Outcome.TEST_DEFECT: "the test itself is broken",
    Outcome.UNKNOWN: "the check ran and could not decide",
    Outcome.BLOCKED: "an earlier cause broke it first",
    Outcome.FILTERED: "not for this rig or profile",
    Outcome.SKIPPED: "skipped by the test",
    Outcome.MISSING: "required or collected, and never ran",
}

# A test has several phases; its outcome is the gravest of theirs: a violation once seen is not hidden by a later error.
_GRAVITY = (
    Outcome.PRODUCT_FAILURE,
    Outcome.INFRASTRUCTURE,
    Outcome.TEST_DEFECT,
    Outcome.UNKNOWN,
    Outcome.BLOCKED,
    Outcome.MISSING,
    Outcome.SKIPPED,
    Outcome.FILTERED,
    Outcome.PASSED,
)


def gravest(outcomes: Iterable[Outcome]) -> Outcome:
    """The outcome that decides for a test made of several phases; `MISSING` for none at all."""
    found = set(outcomes)
    return next((outcome for outcome in _GRAVITY if outcome in found), Outcome.MISSING)


class PropertyViolation(AssertionError):
    """The product broke a property. `result` is the invalid `CheckResult` with its witness."""

    def __init__(self, result: CheckResult) -> None:
        super().__init__(f"{result.property} violated, clause {result.clause}: {result.message}")
        self.result = result


class PropertyUnknown(Exception):
    """The check could not decide (a gap in the event log, a search that ran out, too little precision)."""

    def __init__(self, result: CheckResult) -> None:
        super().__init__(f"{result.property} undecided, clause {result.clause}: {result.message}")
        self.result = result


class InfrastructureError(Exception):
    """The rig or the machine failed, not the product: a port taken, no shared memory left, a device that went away."""


class RigBroken(InfrastructureError):
    """As `InfrastructureError`, and the rig is not to be used again: later tests on it are `blocked`, never retried."""


def enforce(result: CheckResult) -> CheckResult:
    """Return a valid result; raise `PropertyViolation` for an invalid and `PropertyUnknown` for an unknown one."""
    verdict = str(result.verdict).lower()
    if verdict == "valid":
        return result
    if verdict == "invalid":
        raise PropertyViolation(result)
    if verdict == "unknown":
        raise PropertyUnknown(result)
    raise ValueError(f"verdict of {result.property} is {verdict!r}; it must be one of valid, unknown, invalid")
