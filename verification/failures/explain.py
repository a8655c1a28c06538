"""From a failed phase of a pytest test to its signature, its known issue and its bundle."""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from verification.certificate import output, provenance, required
from verification.certificate.classify import Classification, leaves
from verification.certificate.identity import own_id, property_of
from verification.certificate.outcomes import Outcome
from verification.failures import known_issues
from verification.failures.redact import Redactor
from verification.failures.signature import Signature, signature
from verification.run_context import RunContext

if TYPE_CHECKING:
    from verification.certificate.recorder import Recorder
    from verification.failures.bundle import Material
    from verification.failures.evidence import EngineEvidence, FailedRun
    from verification.judge import Judge
    from verification.program import Program
    from verification.subject import Subject

_PACKAGES = Path(__file__).resolve().parents[2]
_OWN_PACKAGES = frozenset({"blink_core", "hil_rigs", "verification"})
_RUNNERS = frozenset({"_pytest", "pluggy", "hypothesis"})  # their frames are the same in every traceback
EXPLAINED = frozenset({Outcome.PRODUCT_FAILURE, Outcome.INFRASTRUCTURE, Outcome.TEST_DEFECT, Outcome.UNKNOWN})


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is known of one failure. bundle: its folder relative to the output folder, "" where there is none."""

    outcome: Outcome
    signature: Signature
    replay: str
    bundle: str = ""
    known_issue: str = ""
    trouble: str = ""

    def record_fields(self) -> dict[str, Any]:
        """What the record of the test has of it."""
        return {
            "signature": self.signature.id,
            "signature_pattern": self.signature.pattern,
            "known_issue": self.known_issue,
            "bundle": self.bundle,
        }

    def lines(self, out: Path | None) -> list[str]:
        """For the terminal."""
        known = [f"known issue: {self.known_issue} (a note: the failure counts)"] if self.known_issue else []
        where = [f"bundle: {out / self.bundle}"] if out is not None and self.bundle else []
        where += [f"no bundle: {self.trouble}"] if self.trouble else []
        return [f"signature: {self.signature.id}  {self.signature.pattern}", *known, *where, f"replay: {self.replay}"]


@cache
def versions() -> dict[str, Any]:
    """What ran: commit, tool, Python, packages, digests of the engine's modules, sources, and limits."""
    machine = provenance.machine()
    text = required.thresholds_text()
    return {
        "tool": provenance.tool_version(),
        **provenance.source_state(),
        "python": machine["python"],
        "os": machine["os"],
        "kernel": machine["kernel"],
        "cpu": machine["cpu"],
        "packages": machine["packages"],
        "engine_modules": provenance.engine_modules(),
        "sources_sha256": provenance.sources_digest(),
        "thresholds_sha256": None if text is None else required.text_digest(text),
    }


class Explainer:
    """Explains the failures of one pytest process."""

    def __init__(
        self, context: RunContext, issues: Sequence[known_issues.KnownIssue], *, prompts: bool, root: Path
    ) -> None:
        """prompts: bundles hold prompts and generated tokens. root: tracebacks name files relative to it."""
        self.context, self.issues, self.root = context, issues, root
        self.redactor = Redactor(show=prompts)

    def explain(
        self,
        item: pytest.Item,
        phase: str,
        classification: Classification,
        error: BaseException,
        recorder: Recorder | None,
        replay: str,
    ) -> Explanation:
        """Explains a failed phase, and writes its bundle where an output folder was asked for.

        Call it before the fixtures of the test end: the engine is read as it stands.
        """
        one = next(iter(_leaves_of(error, classification)))
        texts = self._texts(getattr(item, "funcargs", {}))
        masker = Redactor()  # of its own: a signature is the same with prompts and without, and whatever ran before
        masker.learn(texts)
        texts += self.context.http.earlier
        self.redactor.learn(texts)
        found = sign(item, classification, one, masker)
        known = known_issues.match(
            {
                "property": self._property(item, classification),
                "clause": classification.result.clause if classification.result else "",
                "rig": self._rig_name(),
                "signature_id": found.id,
                "signature_pattern": found.pattern,
            },
            self.issues,
        )
        known_id = known.id if known is not None else ""
        explanation = Explanation(classification.outcome, found, replay, known_issue=known_id)
        if self.context.out is None:
            return explanation
        from verification.failures import bundle

        folder = f"{output.BUNDLES}/{self.context.file_name(own_id(item))}"
        material = self._material(item, phase, classification, one, recorder, explanation, texts)
        try:
            bundle.write(self.context.out / folder, material, self.redactor)
        except OSError as trouble:  # a full disk must not hide the failure itself
            return Explanation(classification.outcome, found, replay, known_issue=known_id, trouble=str(trouble))
        return Explanation(classification.outcome, found, replay, folder, known_id)

    def withheld(
        self, item: pytest.Item, classification: Classification, error: BaseException
    ) -> tuple[str, list[str]]:
        """Message and places of a failed phase, as far as they may be shown to those who asked for no prompts."""
        self.redactor.learn([*self._texts(getattr(item, "funcargs", {})), *self.context.http.earlier])
        one = next(iter(_leaves_of(error, classification)))
        return self._shown(classification, one), self._traceback(one)

    # ---- parts

    def _shown(self, classification: Classification, error: BaseException) -> str:
        result = classification.result
        return self.redactor.text(result.message) if result else _message(classification, error, self.redactor)

    def _rig_name(self) -> str:
        return required.required_name(self.context.rig)

    @staticmethod
    def _property(item: pytest.Item, classification: Classification) -> str | None:
        return classification.result.property if classification.result else property_of(item)

    def _material(
        self,
        item: pytest.Item,
        phase: str,
        classification: Classification,
        error: BaseException,
        recorder: Recorder | None,
        explanation: Explanation,
        texts: list[str],
    ) -> Material:
        from verification.failures.bundle import Material

        arguments: dict[str, Any] = getattr(item, "funcargs", {})
        subjects = list(_subjects(arguments))
        runs = _runs(arguments, subjects)
        engine = self._engine(arguments, subjects, runs)
        scenario = next((v.scenario for v in _judges(arguments) if v.scenario), None)
        result, redactor = classification.result, self.redactor
        context = self.context
        facts: dict[str, Any] = {
            "test": own_id(item),
            "nodeid": item.nodeid,
            "phase": phase,
            "property": self._property(item, classification),
            "clause": result.clause if result else "",
            "outcome": str(classification.outcome),
            "verdict": str(result.verdict) if result else None,
            "message": self._shown(classification, error),
            "error": type(error).__name__,
            "witness": redactor.value(result.witness) if result else None,
            "measurements": recorder.as_dict()["measurements"] if recorder is not None else {},
            "traceback": self._traceback(error),
            "signature": {"id": explanation.signature.id, "pattern": explanation.signature.pattern},
            "known_issue": explanation.known_issue or None,
            "replay": explanation.replay,
            "seeds": {
                "root": context.seed,
                "source": context.seed_source,
                "test": context.derive_seed(own_id(item)),
                "derived_from": own_id(item),
            },
            "run": {
                "id": context.run_id,
                "rig": context.rig,
                "profile": context.profile_name,
                "worker": context.worker,
                "time": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            },
            "model": context.facts.get("model") or {"name": context.model},
            "options": context.facts.get("options", {}),
            "versions": versions(),
        }
        if redactor.show:
            facts["details"] = classification.message
        return Material(facts, runs, engine, list(self.context.http.exchanges), scenario, texts)

    def _texts(self, arguments: dict[str, Any]) -> list[str]:
        """Texts that users and models wrote, as far as they are known."""
        return [*self.context.http.secrets(), *_prompts(list(_subjects(arguments)))]

    def _engine(
        self, arguments: dict[str, Any], subjects: list[Subject], runs: list[FailedRun]
    ) -> EngineEvidence | None:
        """The engine that the failing program ran on; without one, the only or first one that the test has."""
        from hil_rigs.local import LocalRig
        from verification.failures.evidence import EngineEvidence, look_at, read_logs

        rigs = {subject.name: subject.rig for subject in subjects}
        wanted = runs[-1].history.subject if runs else None
        if wanted in self.context.seen_last or (self.context.seen_last and not wanted):
            return self.context.seen_last.get(wanted or "") or next(iter(self.context.seen_last.values()))
        if wanted and wanted not in rigs and self.context.out is not None:
            # An engine of its own that the test has stopped by now: its logs are all there is.
            logs = read_logs(self.context.out / "logs" / f"{self.context.worker}-{wanted}")
            note = "the engine was stopped before the failure was seen: its memory is gone"
            return EngineEvidence(wanted, died=runs[-1].history.died, notes=[note], logs=logs)
        if wanted in rigs:
            return self._with_log(look_at(str(wanted), rigs[str(wanted)]))
        struck = [("fault scenario", v.rig) for v in _judges(arguments) if v.scenario and v.rig]
        given = [(name, value) for name, value in arguments.items() if isinstance(value, LocalRig)]
        every = (*struck, *rigs.items(), *given)
        return next((self._with_log(look_at(name, rig)) for name, rig in every), None)

    def _with_log(self, engine: EngineEvidence) -> EngineEvidence:
        """With the verdict on the engine's whole log, where the run follows it."""
        engine.log_verdict = self.context.log_verdict(engine.name)
        return engine

    def _traceback(self, error: BaseException) -> list[str]:
        """Places only: what stands in source lines and values may be content."""
        found = []
        entry = error.__traceback__
        while entry is not None:
            code = entry.tb_frame.f_code
            path = Path(code.co_filename)
            number = entry.tb_lineno
            entry = entry.tb_next
            if not _RUNNERS.isdisjoint(path.parts):
                continue
            root = next((root for root in (self.root, _PACKAGES) if path.is_relative_to(root)), None)
            shown = path.relative_to(root) if root is not None else Path(*path.parts[-3:])
            found.append(f"{shown.as_posix()}:{number} in {code.co_name}")
        return found[-40:]


def sign(item: pytest.Item, classification: Classification, error: BaseException, masker: Redactor) -> Signature:
    """The signature of a failed phase: by its check, or by exception and the function that raised it.

    Of an exception the message counts only where Blink's own code made it: any other may hold what a model answered.
    """
    result = classification.result
    outcome = str(classification.outcome)
    if result is not None:
        return signature(outcome, result.property, result.clause, masker.text(result.message))
    message = f": {masker.text(str(error))}" if _own(error) else ""
    return signature(outcome, property_of(item), "", f"{type(error).__name__}{message}", where=_where(error))


def _message(classification: Classification, error: BaseException, redactor: Redactor) -> str:
    """The message of a bare exception, as far as it may be shown."""
    if redactor.show or _own(error):
        return redactor.text(classification.message)
    return f"{type(error).__name__}: message of {len(str(error))} characters withheld, it may hold texts of users"


def _own(error: BaseException) -> bool:
    """Whether Blink's own code, or the time limit, raised an exception."""
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    path = Path(entry.tb_frame.f_code.co_filename) if entry is not None else Path()
    if path.stem == "pytest_timeout":
        return True
    return path.is_relative_to(_PACKAGES) and path.relative_to(_PACKAGES).parts[0] in _OWN_PACKAGES


def _where(error: BaseException) -> str:
    """Innermost function of the test's own files, or of any: names, for line numbers move."""
    entry, name = error.__traceback__, ""
    while entry is not None:
        code = entry.tb_frame.f_code
        if not name or Path(code.co_filename).name.startswith(("test_", "conftest")):
            name = code.co_name
        entry = entry.tb_next
    return name


def _leaves_of(error: BaseException, classification: Classification) -> Iterator[BaseException]:
    """The member of a group that decided, else the first."""
    members = list(leaves(error))
    yield from (one for one in members if getattr(one, "result", None) is classification.result is not None)
    yield from members


def known_issues_of(config: pytest.Config) -> tuple[known_issues.KnownIssue, ...]:
    """The run's known issues; `pytest.UsageError` for a file that does not hold."""
    given = config.getoption("blink_known_issues")
    try:
        return known_issues.load(config.invocation_params.dir / given if given else known_issues.DEFAULT_PATH)
    except known_issues.KnownIssuesError as error:
        raise pytest.UsageError(f"--known-issues: {error}") from error


def begin(item: pytest.Item) -> None:
    """A test's body begins: what its engines ran before is not its own."""
    for subject in _subjects(getattr(item, "funcargs", {})):
        subject.recent.clear()


def _judges(arguments: dict[str, Any]) -> list[Judge]:
    if "verification.judge" not in sys.modules:  # then no fixture can have given one
        return []
    from verification.judge import Judge

    return [value for value in arguments.values() if isinstance(value, Judge)]


def _subjects(arguments: dict[str, Any]) -> Iterator[Subject]:
    if "verification.subject" not in sys.modules:  # then no fixture can have given one
        return
    from verification.subject import Subject

    yield from (value for value in arguments.values() if isinstance(value, Subject))


def _runs(arguments: dict[str, Any], subjects: list[Subject]) -> list[FailedRun]:
    """Programs that the judge refused; where it judged none, the last that ran."""
    from verification.failures.evidence import FailedRun

    failing = [pair for judge in _judges(arguments) for pair in judge.failing]
    ran = [history for subject in subjects for history in subject.recent]
    ordinals = {id(history): number for number, history in enumerate(ran)}
    if failing:
        last = failing[-1][0]
        newest: dict[Program, FailedRun] = {}
        for result, history in failing:
            # hypothesis runs a failing program once more: on an engine that it has killed, nothing comes of that.
            if result == last and (history.submitted or history.program not in newest):
                newest[history.program] = FailedRun(history, result, ordinals.get(id(history), 0))
        return list(newest.values())
    return [FailedRun(history, None, ordinals[id(history)]) for history in ran[-1:]]


def _prompts(subjects: list[Subject]) -> list[str]:
    if not subjects:
        return []
    from verification.subject import PROMPTS

    return list(PROMPTS)
