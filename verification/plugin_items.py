"""What the plugin does with one test: whether it runs, what its phases ended with, its signature and its record."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from typing import Any, NoReturn, cast

import pytest

from verification.certificate.classify import Classification, classify
from verification.certificate.identity import describe, own_id, property_of, replay_command
from verification.certificate.jsonable import bounded, jsonable
from verification.certificate.outcomes import Outcome, PropertyUnknown, RigBroken, gravest
from verification.certificate.recorder import Recorder
from verification.certificate.records import TestRecord
from verification.failures.explain import EXPLAINED, Explainer, Explanation, begin
from verification.plugin_selection import never_ran, rigs_of, unknown_names
from verification.result import CheckResult, Verdict
from verification.run_context import RunContext

RECORDER: pytest.StashKey[Recorder] = pytest.StashKey()
_HINT: pytest.StashKey[Classification] = pytest.StashKey()
_PHASES: pytest.StashKey[dict[str, Classification]] = pytest.StashKey()
_DURATION: pytest.StashKey[float] = pytest.StashKey()
_DETAILS: pytest.StashKey[str] = pytest.StashKey()
_MESSAGE: pytest.StashKey[dict[str, str]] = pytest.StashKey()  # by phase, without prompts unless asked
_EXPLANATION: pytest.StashKey[Explanation] = pytest.StashKey()
MAX_DETAILS = 20_000
_MAX_MESSAGE = 2_000
# Set by `blink certify`, which builds and signs the report itself, from the journal, also when this process dies.
JOURNAL_ONLY = "BLINK_JOURNAL_ONLY"


def shorten(text: str, limit: int) -> str:
    """A text of at most about `limit` characters: its beginning and its end."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - limit} characters left out ...\n{text[-half:]}"


def failed_in_call(item: pytest.Item) -> bool:
    """Whether the test's own body has failed; for fixtures, whose teardown comes after it."""
    found = item.stash.get(_PHASES, {}).get("call")
    return found is not None and found.outcome not in (Outcome.PASSED, Outcome.SKIPPED)


def leave_out(item: pytest.Item, reason: str) -> NoReturn:
    """End a test as `filtered`: it is not for this subject. For fixtures; a required test may not end so."""
    item.stash[_HINT] = Classification(Outcome.FILTERED, f"filtered: {reason}")
    pytest.skip(reason)


class ItemPlugin:
    """Registered beside the session's plugin, where tests run: in the one process, or in each worker of pytest-xdist.

    It puts a test's record on the report of its last phase, for whoever collects them.
    """

    def __init__(self, context: RunContext, explainer: Explainer) -> None:
        self.context = context
        self.explainer = explainer
        self._setup_errors: dict[int, tuple[BaseException, str]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.context.http.clear()
        self.context.seen_last.clear()
        self.context.test, self.context.replayed = own_id(item), False
        if (wrong := unknown_names(item)) is not None:
            pytest.fail(f"{item.nodeid}: {wrong}", pytrace=False)
        hint = self._left_out(item)
        if hint is not None:
            item.stash[_HINT] = hint
            pytest.skip(hint.message)

    def _left_out(self, item: pytest.Item) -> Classification | None:
        context = self.context
        profiles = {name for marker in item.iter_markers("blink_profile") for name in marker.args}
        if profiles and context.profile_name not in profiles:
            wanted = ", ".join(sorted(profiles))
            return Classification(
                Outcome.FILTERED, f"filtered: for profile {wanted}, this run is {context.profile_name}"
            )
        needs = {name for marker in item.iter_markers("capability") for name in marker.args} | self._needs(item)
        absent = sorted(needs - context.capabilities)
        if absent:
            return Classification(Outcome.FILTERED, f"filtered: rig {context.rig} has no {', '.join(absent)}")
        for rig in sorted(rigs_of(item) & context.broken.keys()):
            return Classification(Outcome.BLOCKED, f"blocked: the rig broke earlier: {context.broken[rig]}")
        return None

    @staticmethod
    def _needs(item: pytest.Item) -> set[str]:
        from hil_rigs.capabilities import PROPERTY_NEEDS

        return set(PROPERTY_NEEDS.get(property_of(item) or "", ()))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        begin(item)
        yield
        if (replay := self.context.replay) is not None and not self.context.replayed:
            raise PropertyUnknown(CheckResult(Verdict.UNKNOWN, property_of(item) or "", "replay", never_ran(replay)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        phase = cast(str, report.when)
        phases = item.stash.setdefault(_PHASES, {})
        phases[phase] = self._classify(item, call, report, phase)
        item.stash[_DURATION] = item.stash.get(_DURATION, 0.0) + report.duration
        if phases[phase].outcome in EXPLAINED and call.excinfo is not None:
            self._explain(item, phase, phases[phase], call.excinfo.value, report)
        if report.failed:
            self._withhold(item, phases[phase], call, report)
        report.blink_item = json.dumps(describe(item))  # type: ignore[attr-defined]
        if phase == "teardown":
            record = self._record(item, phases)
            report.blink_record = record.to_json()  # type: ignore[attr-defined]
            report.blink_facts = json.dumps(jsonable(self.context.facts))  # type: ignore[attr-defined]
            report.user_properties += [("blink_id", record.id), ("blink_outcome", str(record.outcome))]
            report.user_properties += [("blink_property", record.property)] if record.property else []
            report.user_properties += [("blink_signature", record.signature)] if record.signature else []
        return report

    def _classify(
        self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport, phase: str
    ) -> Classification:
        if hasattr(report, "wasxfail"):
            if report.skipped:
                return Classification(Outcome.SKIPPED, f"expected failure: {report.wasxfail}")
            return Classification(Outcome.TEST_DEFECT, "passed although marked as an expected failure")
        if call.excinfo is None:
            if report.failed:  # a strict xfail that passed
                return Classification(Outcome.TEST_DEFECT, str(report.longrepr))
            return Classification(Outcome.PASSED, "")
        if report.skipped:
            return item.stash.get(_HINT, None) or Classification(Outcome.SKIPPED, str(call.excinfo.value))
        error = call.excinfo.value
        if isinstance(error, RigBroken):
            self._break_rigs(item, f"{error} (first in {own_id(item)})")
        if phase == "setup":
            # pytest hands the error of a wide-scoped fixture to each test that asks for it: one cause, counted once.
            known = self._setup_errors.setdefault(id(error), (error, own_id(item)))
            if known[1] != own_id(item):
                return Classification(Outcome.BLOCKED, f"blocked: {type(error).__name__} in setup, first in {known[1]}")
        return classify(error, phase)

    def _explain(
        self,
        item: pytest.Item,
        phase: str,
        classification: Classification,
        error: BaseException,
        report: pytest.TestReport,
    ) -> None:
        """Signature and bundle of a failed phase; a later phase has them only when it is graver."""
        before = item.stash.get(_EXPLANATION, None)
        if before is not None and gravest((before.outcome, classification.outcome)) is before.outcome:
            return
        recorder, replay = item.stash.get(RECORDER, None), replay_command(item, self.context)
        found = self.explainer.explain(item, phase, classification, error, recorder, replay)
        item.stash[_EXPLANATION] = found
        report.sections.append(("Blink", "\n".join(found.lines(self.context.out))))

    def _withhold(
        self, item: pytest.Item, found: Classification, call: pytest.CallInfo[None], report: pytest.TestReport
    ) -> None:
        """What a failed phase leaves in files has no prompts, unless they were asked for; the terminal shows them all.

        The output of `blink certify`'s own pytest is a file.
        """
        if self.explainer.redactor.show or call.excinfo is None:
            item.stash.setdefault(_DETAILS, shorten(report.longreprtext, MAX_DETAILS))
            return
        message, places = self.explainer.withheld(item, found, call.excinfo.value)
        item.stash.setdefault(_MESSAGE, {})[cast(str, report.when)] = message
        text = "\n".join([*places, message])
        item.stash.setdefault(_DETAILS, shorten(text, MAX_DETAILS))
        report.blink_withheld = text  # type: ignore[attr-defined]
        if os.environ.get(JOURNAL_ONLY):
            report.longrepr = text
            report.sections[:] = [section for section in report.sections if section[0] == "Blink"]

    def _record(self, item: pytest.Item, phases: dict[str, Classification]) -> TestRecord:
        outcome = gravest(classification.outcome for classification in phases.values())
        phase, deciding = next((name, one) for name, one in phases.items() if one.outcome is outcome)
        recorder = item.stash.get(RECORDER, None) or Recorder()
        for name, count in self.context.observed().items():
            recorder.situation(name, count)
        if self.context.unread:
            self.context.fact("situations_unread", dict(self.context.unread))
        result = deciding.result
        if result is not None:
            recorder.take(result)
        values = recorder.as_dict()
        context = self.context
        explanation = item.stash.get(_EXPLANATION, None)
        record = TestRecord(
            id=own_id(item),
            nodeid=item.nodeid,
            property=property_of(item),
            outcome=outcome,
            duration_s=item.stash[_DURATION],
            phase=phase if outcome is not Outcome.PASSED else "call",
            message=shorten(item.stash.get(_MESSAGE, {}).get(phase, deciding.message), _MAX_MESSAGE),
            details=item.stash.get(_DETAILS, ""),
            seed=context.derive_seed(own_id(item)),
            replay=replay_command(item, context),
            **(explanation.record_fields() if explanation is not None else {}),
            **values,
        )
        if record.witness is None and outcome is Outcome.PRODUCT_FAILURE and result is None:
            record.witness = bounded(dict(item.user_properties)) if item.user_properties else None
        if record.witness is not None:
            record.witness = self.explainer.redactor.value(record.witness)
        return record

    def _break_rigs(self, item: pytest.Item, reason: str) -> None:
        """The rigs that a test used are broken: a test uses one, or whose fault it was cannot be told."""
        for rig in rigs_of(item) or {"rig"}:
            self.context.break_rig(reason, fixture=rig)

    def pytest_exception_interact(self, node: pytest.Item | pytest.Collector, call: pytest.CallInfo[Any]) -> None:
        """Break the rig as soon as a `RigBroken` is seen, also when it is a member of a group."""
        error = call.excinfo.value if call.excinfo is not None else None
        if isinstance(error, BaseExceptionGroup) and (broken := error.subgroup(RigBroken)) is not None:
            self._break_rigs(cast(pytest.Item, node), str(broken.exceptions[0]))
