"""From exceptions to the nine outcomes, and from phases to one outcome."""

from __future__ import annotations

import pytest

from verification.certificate.classify import classify
from verification.certificate.outcomes import (
    MEANINGS,
    InfrastructureError,
    Outcome,
    PropertyUnknown,
    PropertyViolation,
    RigBroken,
    enforce,
    gravest,
)
from verification.result import CheckResult, Verdict

INVALID = CheckResult(Verdict.INVALID, "kv-content", "C1", "row 3 differs", {"row": 3})
UNKNOWN = CheckResult(Verdict.UNKNOWN, "kv-content", "C2", "gap in the log")
VALID = CheckResult(Verdict.VALID, "kv-content", "C1", "equal")


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "phase", "outcome"),
    [
        (PropertyViolation(INVALID), "call", Outcome.PRODUCT_FAILURE),
        (PropertyViolation(INVALID), "teardown", Outcome.PRODUCT_FAILURE),
        (AssertionError("x"), "call", Outcome.PRODUCT_FAILURE),
        (AssertionError("x"), "setup", Outcome.TEST_DEFECT),
        (PropertyUnknown(UNKNOWN), "call", Outcome.UNKNOWN),
        (InfrastructureError("disk full"), "call", Outcome.INFRASTRUCTURE),
        (RigBroken("engine died"), "setup", Outcome.INFRASTRUCTURE),
        (caused(RuntimeError("wrapped"), InfrastructureError("x")), "call", Outcome.INFRASTRUCTURE),
        (KeyError("x"), "call", Outcome.TEST_DEFECT),
        (OSError("x"), "setup", Outcome.TEST_DEFECT),
        (pytest.fail.Exception("no good"), "call", Outcome.PRODUCT_FAILURE),
        (pytest.fail.Exception("no good"), "setup", Outcome.TEST_DEFECT),
        (pytest.fail.Exception("Timeout (>1.0s) from pytest-timeout."), "call", Outcome.UNKNOWN),
        (ExceptionGroup("two", [KeyError("x"), PropertyViolation(INVALID)]), "call", Outcome.PRODUCT_FAILURE),
        (ExceptionGroup("two", [PropertyUnknown(UNKNOWN), KeyError("x")]), "call", Outcome.TEST_DEFECT),
    ],
)
def test_exception_becomes_its_outcome(error: Exception, phase: str, outcome: Outcome) -> None:
    """Catches: a broken rig or test blamed on the product, or a violation passed off as something milder."""
    assert classify(error, phase).outcome is outcome


def test_group_gives_the_violation_s_result() -> None:
    """Catches: the witness of a violation lost when hypothesis reports several failures as a group."""
    group = ExceptionGroup("g", [PropertyUnknown(UNKNOWN), ExceptionGroup("h", [PropertyViolation(INVALID)])])
    assert classify(group, "call").result is INVALID


@pytest.mark.parametrize(
    ("phases", "outcome"),
    [
        ([Outcome.PASSED, Outcome.PASSED, Outcome.PASSED], Outcome.PASSED),
        ([Outcome.PASSED, Outcome.PRODUCT_FAILURE, Outcome.INFRASTRUCTURE], Outcome.PRODUCT_FAILURE),
        ([Outcome.PASSED, Outcome.PASSED, Outcome.INFRASTRUCTURE], Outcome.INFRASTRUCTURE),
        ([Outcome.UNKNOWN, Outcome.TEST_DEFECT], Outcome.TEST_DEFECT),
        ([Outcome.SKIPPED, Outcome.PASSED], Outcome.SKIPPED),
        ([], Outcome.MISSING),
    ],
)
def test_gravest_phase_decides(phases: list[Outcome], outcome: Outcome) -> None:
    """Catches: a teardown error that hides a violation, or one that a passed call hides."""
    assert gravest(phases) is outcome


def test_enforce_follows_the_verdict() -> None:
    """Catches: an undecided check that counts as a pass."""
    assert enforce(VALID) is VALID
    with pytest.raises(PropertyViolation, match="C1.*row 3"):
        enforce(INVALID)
    with pytest.raises(PropertyUnknown, match="gap in the log"):
        enforce(UNKNOWN)


def test_there_are_nine_outcomes_and_each_is_explained() -> None:
    """Catches: an outcome added without its place in order, or without a text in the report."""
    assert len(Outcome) == len(MEANINGS) == 9
    assert all(gravest([outcome]) is outcome for outcome in Outcome)
