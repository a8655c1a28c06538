"""What the plugin does during a session: its folder, what is collected, the records of its tests, the report."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from verification.certificate.collector import DESELECTED, JOURNAL, Collector
from verification.certificate.identity import describe, own_id, property_of
from verification.certificate.jsonable import jsonable
from verification.certificate.outcomes import Outcome
from verification.certificate.records import TestRecord
from verification.failures.explain import Explainer, known_issues_of
from verification.plugin_items import JOURNAL_ONLY, MAX_DETAILS, ItemPlugin, shorten
from verification.plugin_items import RECORDER as RECORDER
from verification.plugin_items import failed_in_call as failed_in_call
from verification.plugin_items import leave_out as leave_out
from verification.plugin_report import describe_run, now
from verification.plugin_selection import engine_of, select_recorded
from verification.run_context import RunContext

# The pid of `blink certify`: a run whose asker is gone ends, and so do the engines that it started.
CERTIFY_PID = "BLINK_CERTIFY_PID"


class SessionPlugin:
    """Registered for one session, in the controlling process and, under pytest-xdist, in each worker."""

    def __init__(self, config: pytest.Config, context: RunContext) -> None:
        self.config = config
        self.context = context
        self.is_worker = hasattr(config, "workerinput")
        if (parent := os.environ.pop(CERTIFY_PID, None)) and not self.is_worker:
            from blink_core.runtime.parent import ParentWatch

            ParentWatch(int(parent)).on_gone(lambda: os.kill(os.getpid(), signal.SIGINT))
        self.started = now()
        self.clock = time.monotonic()
        self.collector = Collector()
        self.report: dict[str, Any] | None = None
        self.issues = known_issues_of(config)
        self.explainer = Explainer(
            context, self.issues, prompts=bool(config.getoption("blink_bundle_prompts")), root=config.rootpath
        )
        self.items = ItemPlugin(context, self.explainer)
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
                    details=shorten(str(report.longrepr), MAX_DETAILS),
                    phase="collection",
                )
            )

    # --- records of tests ----------------------------------------------------------------------------------------

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

    # --- end -----------------------------------------------------------------------------------------------------

    def pytest_internalerror(self, excrepr: object) -> None:
        if not self.is_worker:
            self.collector.error(shorten(f"pytest internal error: {excrepr}", MAX_DETAILS))

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
