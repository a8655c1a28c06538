"""The verdict of a run: a pure function of the tests' outcomes and the required set (design sections 9 and 10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from verification.certificate.corpus import PREFIX
from verification.certificate.outcomes import Outcome
from verification.certificate.required import Profile


class ExitCode(IntEnum):
    """Exit codes of `blink certify`."""

    PASS = 0
    PROPERTY_FAILED = 1
    COULD_NOT_RUN = 2


WORDS: dict[ExitCode, str] = {
    ExitCode.PASS: "passed",
    ExitCode.PROPERTY_FAILED: "property failed",
    ExitCode.COULD_NOT_RUN: "could not run",
}


@dataclass(frozen=True, slots=True)
class TestOutcome:
    """What the verdict needs to know of a test."""

    __test__ = False  # not a test class, whatever pytest thinks of its name

    id: str
    property: str | None
    outcome: Outcome
    nodeid: str = ""

    def is_replay(self) -> bool:
        """Whether it is an earlier failure that was run again, which is evidence against the product only."""
        return self.id.startswith(PREFIX)


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """Exit code of a run and the sentences that explain it; no reasons for a pass."""

    exit_code: ExitCode
    reasons: tuple[str, ...]

    @property
    def word(self) -> str:
        return WORDS[self.exit_code]

    @property
    def line(self) -> str:
        """The last line that `blink certify` prints."""
        return f"verdict: {self.word} (exit {int(self.exit_code)})"


# Outcomes of which the run cannot be called passed, whether the test was required or not: something that was to be
# decided was not.
_UNDECIDED = (Outcome.INFRASTRUCTURE, Outcome.TEST_DEFECT, Outcome.UNKNOWN, Outcome.BLOCKED)


def decide(tests: Sequence[TestOutcome], profile: Profile | None, session_errors: Sequence[str] = ()) -> RunVerdict:
    """Decide a run by a profile's required set, or with None by the tests that were selected, of which one must pass.

    Precedence: a property failure (1) outranks everything, because it is evidence about the product that no trouble of
    the rig takes back. Then anything that kept the run from deciding (2): session errors, undecided tests, anything
    required that did not pass, a saved failure that was not replayed. Only what is left is a pass (0). Pure: equal
    input gives an equal verdict.

    A replay that passed counts for nothing: it is a case that was counted when it failed. One that did not run stops a
    pass, with one exception, which `not_applicable` finds and the report tells.
    """
    failed = [test for test in tests if test.outcome is Outcome.PRODUCT_FAILURE]
    undecided = _undecided_reasons(tests, profile, session_errors)
    if failed:
        broken = tuple(f"{test.property or 'no property'}: {test.id} is a product failure" for test in failed)
        return RunVerdict(ExitCode.PROPERTY_FAILED, broken + undecided)
    if undecided:
        return RunVerdict(ExitCode.COULD_NOT_RUN, undecided)
    return RunVerdict(ExitCode.PASS, ())


def not_applicable(tests: Sequence[TestOutcome], *, whole: bool) -> list[str]:
    """Ids of the saved failures whose replay was filtered because their test is not for this rig, model or run at all:
    the run's own test of that node id was filtered too.

    In a part of a run (not `whole`) the own test may be in another part: each filtered replay is one of these, until
    the parts are joined.
    """
    own = {test.nodeid for test in tests if test.outcome is Outcome.FILTERED and not test.is_replay()}
    return [
        test.id
        for test in tests
        if test.is_replay() and test.outcome is Outcome.FILTERED and (not whole or test.nodeid in own)
    ]


def _undecided_reasons(
    tests: Sequence[TestOutcome], profile: Profile | None, session_errors: Sequence[str]
) -> tuple[str, ...]:
    reasons = [f"session: {error}" for error in session_errors]
    reasons += [f"{test.id} is {test.outcome}" for test in tests if test.outcome in _UNDECIDED]
    replays, tests = [test for test in tests if test.is_replay()], [test for test in tests if not test.is_replay()]
    idle = [test for test in replays if test.outcome in (Outcome.MISSING, Outcome.SKIPPED, Outcome.FILTERED)]
    excused = not_applicable([*replays, *tests], whole=profile is not None)
    reasons += [f"saved failure {test.id} was not replayed: {test.outcome}" for test in idle if test.id not in excused]
    if profile is None:
        passed_any = any(test.outcome is Outcome.PASSED for test in tests)
        return tuple(reasons if passed_any or reasons else ["no test passed"])
    by_id = {test.id: test for test in tests}
    for name, requirement in profile.properties.items():
        own = [test for test in tests if test.property == name]
        passed = sum(test.outcome is Outcome.PASSED for test in own)
        if passed < requirement.min_passed:
            reasons.append(f"{name}: {passed} tests passed, at least {requirement.min_passed} required")
        for test_id in requirement.tests:
            outcome = by_id[test_id].outcome if test_id in by_id else Outcome.MISSING
            if outcome in (Outcome.MISSING, Outcome.SKIPPED, Outcome.FILTERED):
                reasons.append(f"{name}: required test {test_id} is {outcome}")
        # A skip is a hole: within a required property, only what is not for this rig may be left out.
        holes = [
            test
            for test in own
            if test.outcome in (Outcome.SKIPPED, Outcome.MISSING) and test.id not in requirement.tests
        ]
        reasons += [f"{name}: {test.id} is {test.outcome}" for test in holes]
    return tuple(reasons)
