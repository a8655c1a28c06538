"""The verdict as a pure function of outcomes and the required set."""

from __future__ import annotations

from dataclasses import replace

import pytest

from verification.certificate import required
from verification.certificate.outcomes import Outcome
from verification.certificate.required import Profile, PropertyRequirement, RequiredSetError
from verification.certificate.verdict import ExitCode, TestOutcome, decide, not_applicable
from verification.run_context import PROFILES

PROFILE = Profile(
    deadline_s=1,
    test_timeout_s=1,
    max_examples=1,
    properties={"a": PropertyRequirement(min_passed=2), "b": PropertyRequirement(tests=("b/one",))},
)
GOOD = [
    TestOutcome("a/one", "a", Outcome.PASSED),
    TestOutcome("a/two", "a", Outcome.PASSED),
    TestOutcome("b/one", "b", Outcome.PASSED),
]


def with_test(*more: TestOutcome) -> list[TestOutcome]:
    replaced = {test.id for test in more}
    return [*(test for test in GOOD if test.id not in replaced), *more]


def test_everything_required_passed_is_a_pass() -> None:
    """Catches: a verdict that never passes."""
    verdict = decide(GOOD, PROFILE)
    assert (verdict.exit_code, verdict.reasons, verdict.line) == (ExitCode.PASS, (), "verdict: passed (exit 0)")


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.PASSED])
def test_required_test_that_did_not_pass_denies(outcome: Outcome) -> None:
    """Catches: any outcome beside passed (a skip above all) counted as good enough for a required test."""
    verdict = decide(with_test(TestOutcome("b/one", "b", outcome)), PROFILE)
    failed = outcome is Outcome.PRODUCT_FAILURE
    assert verdict.exit_code == (ExitCode.PROPERTY_FAILED if failed else ExitCode.COULD_NOT_RUN)
    assert any("b/one" in reason for reason in verdict.reasons)


def test_required_test_that_nobody_collected_denies() -> None:
    """Catches: a required test that was deleted or renamed."""
    verdict = decide([test for test in GOOD if test.id != "b/one"], PROFILE)
    assert verdict.exit_code is ExitCode.COULD_NOT_RUN
    assert "b: required test b/one is missing" in verdict.reasons


def test_too_few_passed_tests_deny() -> None:
    """Catches: a property whose tests were filtered away."""
    verdict = decide(with_test(TestOutcome("a/two", "a", Outcome.FILTERED)), PROFILE)
    assert verdict.reasons == ("a: 1 tests passed, at least 2 required",)


@pytest.mark.parametrize("outcome", [Outcome.SKIPPED, Outcome.MISSING, Outcome.UNKNOWN, Outcome.BLOCKED])
def test_a_hole_in_a_required_property_denies(outcome: Outcome) -> None:
    """Catches: one more test of a required property that silently did not decide."""
    assert decide(with_test(TestOutcome("a/three", "a", outcome)), PROFILE).exit_code is ExitCode.COULD_NOT_RUN


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Outcome.PASSED, 0),
        (Outcome.PRODUCT_FAILURE, 1),
        (Outcome.UNKNOWN, 2),
        (Outcome.SKIPPED, 2),
        (Outcome.MISSING, 2),
    ],
)
def test_a_selection_is_judged_by_its_own_tests(outcome: Outcome, code: int) -> None:
    """Catches: a user's tests denied for the rig's required set; a selection that passes though nothing passed."""
    assert decide([TestOutcome("x/y", None, outcome)], None).exit_code == code


def test_filtered_extra_test_is_no_hole() -> None:
    """Catches: a test for another rig that denies this one."""
    assert decide(with_test(TestOutcome("a/gpu", "a", Outcome.FILTERED)), PROFILE).exit_code is ExitCode.PASS


@pytest.mark.parametrize(
    "outcome", [Outcome.INFRASTRUCTURE, Outcome.TEST_DEFECT, Outcome.UNKNOWN, Outcome.BLOCKED, Outcome.MISSING]
)
def test_property_failure_outranks_everything(outcome: Outcome) -> None:
    """Catches: a violation hidden because the rig also broke; and that it names the property first."""
    tests = with_test(TestOutcome("b/one", "b", outcome), TestOutcome("a/two", "a", Outcome.PRODUCT_FAILURE))
    verdict = decide(tests, PROFILE, ["the deadline passed"])
    assert verdict.exit_code is ExitCode.PROPERTY_FAILED
    assert verdict.reasons[0] == "a: a/two is a product failure"


def test_failure_outside_the_required_set_still_fails() -> None:
    """Catches: a violation ignored because its test was not listed."""
    verdict = decide(with_test(TestOutcome("x/y", None, Outcome.PRODUCT_FAILURE)), PROFILE)
    assert verdict.exit_code is ExitCode.PROPERTY_FAILED


def test_session_error_denies() -> None:
    """Catches: a run cut short by its deadline that passes on what it had."""
    verdict = decide(GOOD, PROFILE, ["the deadline passed"])
    assert verdict.exit_code is ExitCode.COULD_NOT_RUN


def test_replays_count_towards_no_minimum() -> None:
    """Catches: a night, or a selection, that passes on the replays of earlier failures, its own tests filtered away."""
    replays = [TestOutcome(f"corpus/{i}", "a", Outcome.PASSED, f"x::{i}") for i in range(3)]
    own = [test for test in GOOD if test.id != "a/two"]
    assert decide([*own, *replays], PROFILE).reasons == ("a: 1 tests passed, at least 2 required",)
    assert decide([*GOOD, *replays], PROFILE).exit_code is ExitCode.PASS
    assert decide(replays, None).reasons == ("no test passed",)


@pytest.mark.parametrize("outcome", [Outcome.MISSING, Outcome.SKIPPED, Outcome.FILTERED, Outcome.UNKNOWN])
@pytest.mark.parametrize("name", ["a", "unrequired", None])
def test_saved_failure_that_was_not_replayed_denies(outcome: Outcome, name: str | None) -> None:
    """Catches: a failure that was saved and not run again, of whatever property, in a run that passes."""
    replay = TestOutcome("corpus/1", name, outcome, "x::one")
    own = [replace(test, nodeid=f"x::{test.id}") for test in GOOD]
    verdict = decide([*own, replay], PROFILE)
    assert verdict.exit_code is ExitCode.COULD_NOT_RUN
    assert any("corpus/1" in reason for reason in verdict.reasons)
    # That the run filters the test itself excuses a filtered replay, and no other.
    filtered = TestOutcome("c/one", None, Outcome.FILTERED, "x::one")
    excused = outcome is Outcome.FILTERED
    assert decide([*own, filtered, replay], PROFILE).exit_code == (0 if excused else 2)
    assert not_applicable([*own, filtered, replay], whole=True) == (["corpus/1"] if excused else [])
    assert decide([*own, replay], None).exit_code == (0 if excused else 2)  # a shard: the joined run decides


def test_nothing_run_denies() -> None:
    """Catches: an empty suite that passes."""
    assert decide([], PROFILE).exit_code is ExitCode.COULD_NOT_RUN


def test_shipped_required_set_loads() -> None:
    """Catches: a required file that does not parse, or a property of the issue that is not required."""
    loaded = required.load("local")
    wanted = {"queue-ordering", "kv-conservation", "kv-content", "token-equivalence", "streaming", "fault-tolerance"}
    wanted |= {"specification", "conformance"}
    for profile in PROFILES:
        assert wanted <= set(loaded.profile(profile).properties)
    assert "nothing about GPUs" in loaded.scope


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("max_examples: 15", "max_examples: 0"), "greater than 0"),
        (("      streaming:\n        tests", "      speed:\n        tests"), "without a text"),
        (("schema_version: 1", "schema_version: 2"), "schema_version"),
        (("rig: local", "rig: local\ncolour: red"), "colour"),
    ],
)
def test_bad_required_set_is_refused(change: tuple[str, str], message: str) -> None:
    """Catches: a typing error in a required set that requires less, without a word."""
    with pytest.raises(RequiredSetError, match=message):
        required.parse(required.required_text("local").replace(*change), "x.yaml")


def test_unknown_rig_and_profile_name_the_known_ones() -> None:
    """Catches: an error that does not say what would have been right."""
    with pytest.raises(RequiredSetError, match="unknown rig 'moon'; known rigs: .*local"):
        required.load("moon")
    with pytest.raises(RequiredSetError, match="no profile 'lunch'; it has: smoke, nightly, full"):
        required.load("local").profile("lunch")
