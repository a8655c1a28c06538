"""What the plugin does during a session: filters, outcomes, records, and the report at the end."""

from __future__ import annotations

import datetime as dt
import json
import os
import shutil
import signal
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

from verification.certificate.classify import Classification, classify
from verification.certificate.collector import DESELECTED, JOURNAL, Collector
from verification.certificate.identity import describe, own_id, property_of, replay_command
from verification.certificate.jsonable import bounded, jsonable
from verification.certificate.outcomes import Outcome, PropertyUnknown, RigBroken, gravest
from verification.certificate.recorder import Recorder
from verification.certificate.records import TestRecord
from verification.failures.explain import EXPLAINED, Explainer, Explanation, begin, known_issues_of
from verification.plugin_selection import engine_of, never_ran, rigs_of, select_recorded, unknown_names
from verification.result import CheckResult, Verdict
from verification.run_context import RunContext

RECORDER: pytest.StashKey[Recorder] = pytest.StashKey()
_HINT: pytest.StashKey[Classification] = pytest.StashKey()
_PHASES: pytest.StashKey[dict[str, Classification]] = pytest.StashKey()
_DURATION: pytest.StashKey[float] = pytest.StashKey()
_DETAILS: pytest.StashKey[str] = pytest.StashKey()
_MESSAGE: pytest.StashKey[dict[str, str]] = pytest.StashKey()  # by phase, without prompts unless asked
_EXPLANATION: pytest.StashKey[Explanation] = pytest.StashKey()
_MAX_DETAILS = 20_000
_MAX_MESSAGE = 2_000
# Set by `blink certify`, which builds and signs the report itself, from the journal, also when this process dies.
JOURNAL_ONLY = "BLINK_JOURNAL_ONLY"
# And the pid of `blink certify`: a run whose asker is gone ends, and so do the engines that it started.
CERTIFY_PID = "BLINK_CERTIFY_PID"


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")


def _shorten(text: str, limit: int) -> str:
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


class SessionPlugin:
    """Registered for one session, in the controlling process and, under pytest-xdist, in each worker."""

    def __init__(self, config: pytest.Config, context: RunContext) -> None:
        self.config = config
        self.context = context
        self.is_worker = hasattr(config, "workerinput")
        if (parent := os.environ.pop(CERTIFY_PID, None)) and not self.is_worker:
            from blink_core.runtime.parent import ParentWatch

            ParentWatch(int(parent)).on_gone(lambda: os.kill(os.getpid(), signal.SIGINT))
        self.started = _now()
        self.clock = time.monotonic()
        self.collector = Collector()
        self.report: dict[str, Any] | None = None
        self.issues = known_issues_of(config)
        self.explainer = Explainer(
            context, self.issues, prompts=bool(config.getoption("blink_bundle_prompts")), root=config.rootpath
        )
        self._setup_errors: dict[int, tuple[BaseException, str]] = {}
        self._why: dict[str, str] = {}  # own id -> why it was left out
        self._lock: Any = None

    # --- start ---------------------------------------------------------------------------------------------------

    @property
    def _writes(self) -> bool:
        return not self.is_worker and self.context.out is not None and not self.config.option.collectonly

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        if not self._writes:
            return
        from hil_rigs.locks import LockTimeout, OwnedLock
        from verification.certificate.output import ALLURE, CORPUS, RESUMED, OutputError, lock_name, prepare

        out = cast(Path, self.context.out)
        self._lock = OwnedLock(lock_name(out), owner=self.context.run_id)
        try:
            self._lock.acquire(timeout_s=0.0)
            # With it goes the folder that allure's logger has just made.
            kept = RESUMED if self.context.shard is not None else (CORPUS,) if os.environ.get(JOURNAL_ONLY) else ()
            prepare(out, keep=kept)
            if self._allure_folder() == out / ALLURE:
                (out / ALLURE).mkdir(exist_ok=True)
        except (LockTimeout, OutputError) as error:
            self._lock.release()
            self._lock = None
            raise pytest.UsageError(f"--out: {error}") from error
        self.collector = Collector(out / JOURNAL)
        self.collector.fact("known_issues", [issue.model_dump(mode="json") for issue in self.issues])
        self.collector.session(
            {
                "run_id": self.context.run_id,
                "rig": self.context.rig,
                "profile": self.context.profile_name,
                "seed": self.context.seed,
                "seed_source": self.context.seed_source,
                "model": self.context.model,
                "started": self.started,
            }
        )

    def pytest_report_header(self) -> list[str]:
        context = self.context
        seed = f"{context.seed} ({context.seed_source}; --seed {context.seed} draws the same)"
        lines = [
            f"blink: rig {context.rig}, profile {context.profile_name}, model {context.model or 'none given'}, "
            f"run {context.run_id}",
            f"blink: root seed {seed}",
        ]
        if context.out is not None:
            lines.append(f"blink: output {context.out}")
        return lines

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["blink"] = {
            "run_id": self.context.run_id,
            "seed": self.context.seed,
            "seed_source": self.context.seed_source,
        }

    # --- collection ----------------------------------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        owners: dict[str, str] = {}
        for item in items:
            test = own_id(item)
            if test in owners and property_of(item) is not None:
                raise pytest.UsageError(
                    f"{item.nodeid} and {owners[test]} have the same own id {test!r}; give one an id"
                )
            owners[test] = item.nodeid
            item.add_marker(pytest.mark.allure_label(test, label_type="as_id"))
            item.add_marker(pytest.mark.allure_label(f"Blink on {self.context.rig}", label_type="epic"))
            if (name := property_of(item)) is not None:
                item.add_marker(pytest.mark.allure_label(name, label_type="feature"))
        self.collector.collected(describe(item) for item in items)
        if self.context.shard is not None:
            self._keep_shard(items)
        if self.context.replay is not None and (others := select_recorded(items, self.context.replay)):
            self.config.hook.pytest_deselected(items=others)

    def _keep_shard(self, items: list[pytest.Item]) -> None:
        """Leaves the tests of the run's shard that are not done yet, and notes why the others are left out."""
        from verification.certificate import shards

        shard, done = cast(shards.Shard, self.context.shard), set[str]()
        if self.context.done is not None:
            done = shards.done_ids(self.context.done)
        by_id = {own_id(item): item for item in items}
        parts = shards.partition(by_id, shard.count, shards.registered_costs(), lambda test: engine_of(by_id[test]))
        mine = set(parts[shard.index - 1])
        left = [item for item in items if own_id(item) not in mine or own_id(item) in done]
        for item in left:
            test = own_id(item)
            self._why[test] = shards.DONE if test in mine else f"{shards.OTHER}: this is {shard}"
        items[:] = [item for item in items if own_id(item) in mine - done]
        if left:
            self.config.hook.pytest_deselected(items=left)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            self.collector.deselected(describe(item), self._why.get(own_id(item), DESELECTED))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        # Own id and property come with a test's first report; a test that no worker ever reports has its node id only.
        self.collector.collected({"nodeid": nodeid, "id": nodeid, "property": None} for nodeid in ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.is_worker:
            self.collector.finished(
                TestRecord(
                    f"collection/{report.nodeid}",
                    report.nodeid,
                    None,
                    Outcome.TEST_DEFECT,
                    message="the tests could not be collected",
                    details=_shorten(str(report.longrepr), _MAX_DETAILS),
                    phase="collection",
                )
            )

    # --- each test -----------------------------------------------------------------------------------------------

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
            item.stash.setdefault(_DETAILS, _shorten(report.longreprtext, _MAX_DETAILS))
            return
        message, places = self.explainer.withheld(item, found, call.excinfo.value)
        item.stash.setdefault(_MESSAGE, {})[cast(str, report.when)] = message
        text = "\n".join([*places, message])
        item.stash.setdefault(_DETAILS, _shorten(text, _MAX_DETAILS))
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
            message=_shorten(item.stash.get(_MESSAGE, {}).get(phase, deciding.message), _MAX_MESSAGE),
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

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if not self.is_worker:
            self.collector.started(nodeid)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None, None, None]:
        whole, text = report.longrepr, getattr(report, "blink_withheld", None)
        if text is not None and not self.is_worker:
            report.longrepr = text  # while junitxml looks; the terminal looks at the end of the session
        try:
            yield
        finally:
            report.longrepr = whole
        if not self.is_worker:
            self._collect(report)

    def _collect(self, report: pytest.TestReport) -> None:
        if (described := getattr(report, "blink_item", None)) is not None:
            self.collector.collected([json.loads(described)])
        if (text := getattr(report, "blink_record", None)) is not None:
            self.collector.finished(TestRecord.from_json(text))
            for name, value in json.loads(getattr(report, "blink_facts", "{}")).items():
                self.collector.fact(name, value)
        elif report.when not in ("setup", "call", "teardown"):  # pytest-xdist's report of a worker that died
            self.collector.crashed(report.nodeid, f"the worker that ran it died: {report.longrepr}")

    def _break_rigs(self, item: pytest.Item, reason: str) -> None:
        """The rigs that a test used are broken: a test uses one, or whose fault it was cannot be told."""
        for rig in rigs_of(item) or {"rig"}:
            self.context.break_rig(reason, fixture=rig)

    def pytest_exception_interact(self, node: pytest.Item | pytest.Collector, call: pytest.CallInfo[Any]) -> None:
        """Break the rig as soon as a `RigBroken` is seen, also when it is a member of a group."""
        error = call.excinfo.value if call.excinfo is not None else None
        if isinstance(error, BaseExceptionGroup) and (broken := error.subgroup(RigBroken)) is not None:
            self._break_rigs(cast(pytest.Item, node), str(broken.exceptions[0]))

    # --- end -----------------------------------------------------------------------------------------------------

    def pytest_internalerror(self, excrepr: object) -> None:
        if not self.is_worker:
            self.collector.error(_shorten(f"pytest internal error: {excrepr}", _MAX_DETAILS))

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if not self.is_worker:
            self.collector.error(f"interrupted: {excinfo.typename} {excinfo.value}".strip())

    @pytest.hookimpl(wrapper=True, trylast=True)  # after junitxml has written, before the terminal's summary
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        yield
        if self.is_worker:
            # What a worker deselected, the controller never sees otherwise.
            deselected = [json.loads(r.to_json()) for r in self.collector.records.values() if r.phase == "collection"]
            self.config.workeroutput["blink_deselected"] = deselected  # type: ignore[attr-defined]
            return
        if self._writes and self._lock is not None:
            try:
                self._end(cast(Path, self.context.out))
            finally:
                self._lock.release()

    def _end(self, out: Path) -> None:
        for name, value in jsonable(self.context.facts).items():
            self.collector.fact(name, value)
        if os.environ.get(JOURNAL_ONLY):
            self.collector.end()
        else:
            self._write_report(out)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for values in getattr(node, "workeroutput", {}).get("blink_deselected", []):
            if values["id"] not in self.collector.records:
                self.collector.finished(TestRecord.from_json(json.dumps(values)))

    def _allure_folder(self) -> Path | None:
        folder = getattr(self.config.option, "allure_report_dir", None)
        return Path(folder) if folder else None

    def _write_report(self, out: Path) -> None:
        from verification.certificate import output, report, required
        from verification.plugin import invocation

        self.collector.end()
        records = self.collector.close()
        description = describe_run(
            self.context,
            self.collector.facts,
            self.started,
            time.monotonic() - self.clock,
            invocation(self.config),
            required.required_text(self.context.rig),
            required.thresholds_text(),
            judges_required=self.context.judges_required,
        )
        self.report = report.build(description, records, self.collector.errors)
        xml = getattr(self.config.option, "xmlpath", None)
        if xml and Path(xml).is_file() and Path(xml).resolve() != out / output.JUNIT:
            shutil.copyfile(xml, out / output.JUNIT)
        allure = self._allure_folder()
        if allure is not None and allure.is_dir() and allure.resolve() != out / output.ALLURE:
            shutil.copytree(allure, out / output.ALLURE, dirs_exist_ok=True)
        output.finish(out, self.report, description.required_text, description.thresholds_text, self.context.key)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        from verification.certificate.report import known_issue_lines

        if self.report is None or self.context.out is None:
            return
        terminalreporter.section("Blink")
        for entry in self.report["properties"]:
            terminalreporter.write_line(
                f"{entry['name']:<24} {entry['outcome']:<16} {entry['passed']} of {entry['tests']} tests passed"
            )
        for reason in self.report["verdict"]["reasons"]:
            terminalreporter.write_line(f"- {reason}")
        for line in known_issue_lines(self.report):
            terminalreporter.write_line(line)
        terminalreporter.write_line(f"report: {self.context.out / 'report.html'}")
        terminalreporter.write_line(f"verdict: {self.report['verdict']['word']}")


def model_path(model: str) -> Path | None:
    """Where a model given by path or by pinned name lies; None where it is not to be found."""
    from blink_core.model_store import ModelStoreError, resolve

    try:
        return resolve(model)
    except ModelStoreError:
        return None


def _capabilities(context: RunContext) -> frozenset[str]:
    """Of the run's rig, by its description."""
    from hil_rigs.description import load_rig

    return context.capabilities or frozenset(load_rig(context.rig).capabilities)


def describe_run(
    context: RunContext,
    facts: dict[str, Any],
    started: str,
    duration_s: float,
    command: list[str],
    required_text: str,
    thresholds_text: str | None,
    *,
    judges_required: bool = True,
) -> Any:
    """The run as the report describes it, judged by its required set or by what was selected.

    A model given as a file or folder is hashed unless the rig already did.
    """
    from verification.certificate.provenance import model_digest
    from verification.certificate.report import RunDescription

    model = dict(facts.get("model") or {})
    if context.model is not None:
        path = model_path(context.model)
        model.setdefault("name", context.model if path is None else path.name)
        if path is not None:
            model.setdefault("path", str(path.resolve()))
            if not model.get("sha256"):
                model["sha256"] = model_digest(path)
    return RunDescription(
        run_id=context.run_id,
        rig=context.rig,
        profile=context.profile_name,
        seed=context.seed,
        seed_source=context.seed_source,
        started=started,
        ended=_now(),
        duration_s=duration_s,
        command=command,
        required_text=required_text,
        thresholds_text=thresholds_text,
        model=model,
        facts={name: value for name, value in facts.items() if name not in ("model", "known_issues")},
        known_issues=facts.get("known_issues", []),
        judges_required=judges_required and context.shard is None,
        shard=None if context.shard is None else str(context.shard),
        capabilities=_capabilities(context),
    )
