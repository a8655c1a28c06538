"""From an exception in a phase of a pytest test to one of the nine outcomes (design section 9)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from verification.certificate.outcomes import (
    InfrastructureError,
    Outcome,
    PropertyUnknown,
    PropertyViolation,
    gravest,
)

if TYPE_CHECKING:
    from verification.result import CheckResult

_TIMEOUT_MARK = "from pytest-timeout"


@dataclass(frozen=True, slots=True)
class Classification:
    """Outcome of one phase, with the sentence that explains it and the check that decided it, if one did."""

    outcome: Outcome
    message: str
    result: CheckResult | None = None


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions in `error`: itself, or the members of an exception group at any depth.

    hypothesis reports several distinct failures, and a failure that did not repeat, as a group.
    """
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from leaves(member)
    else:
        yield error


def check_result(error: BaseException) -> CheckResult | None:
    """The `CheckResult` that an exception (or a member of its group) carries, a violation before an undecided one."""
    carriers = [leaf for leaf in leaves(error) if isinstance(leaf, (PropertyViolation, PropertyUnknown))]
    carriers.sort(key=lambda leaf: isinstance(leaf, PropertyUnknown))
    return carriers[0].result if carriers else None


def classify(error: BaseException, phase: str) -> Classification:
    """Classify the exception that ended a phase.

    Args:
        error: what the phase raised, never a skip (the plugin handles those).
        phase: "setup", "call" or "teardown".
    """
    outcome = gravest(_outcome(leaf, phase) for leaf in leaves(error))
    return Classification(outcome, f"{type(error).__name__}: {error}", check_result(error))


def _outcome(error: BaseException, phase: str) -> Outcome:
    if isinstance(error, PropertyViolation):
        return Outcome.PRODUCT_FAILURE
    if isinstance(error, PropertyUnknown):
        return Outcome.UNKNOWN
    if isinstance(error, InfrastructureError):
        return Outcome.INFRASTRUCTURE
    if isinstance(error, pytest.fail.Exception):
        # A test past its time limit shows neither that the product is wrong nor that it is right.
        if _TIMEOUT_MARK in str(error):
            return Outcome.UNKNOWN
        return Outcome.PRODUCT_FAILURE if phase == "call" else Outcome.TEST_DEFECT
    if isinstance(error, AssertionError) and phase == "call":
        return Outcome.PRODUCT_FAILURE
    if error.__cause__ is not None and isinstance(error.__cause__, InfrastructureError):
        return Outcome.INFRASTRUCTURE
    return Outcome.TEST_DEFECT
