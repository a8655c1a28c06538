"""`blink certificate compare OLD NEW`: what changed between two runs, and whether their answers agree.

Reports are compared test by test; where both runs recorded the answers to the agreement programs
(`verification.agreement_record`) these are compared too, and with them a run on one rig with a run on another.

Something got worse, and the exit code is 1, by any of these; each is told on a line of its own:

  worse       a test of both runs that has another outcome now, and not `passed`
  new fault   a test of the new run alone that is a product failure, infrastructure, test defect, unknown or blocked;
              one that is required, or a saved failure that can be replayed here, and did not pass
  gone        a test of the old run alone that is required: by its own id, of its profile, in the required set that
              either run was signed with. Other tests that are gone are told and change nothing.
  cases       fewer of a test that passed in both runs of one profile: a suite that asks less
  situation   one that was reached, that the new run's profile expects and its rig can reach, and that was not
  session     an error of the new session that the old one did not have
  verdict     `passed` before and not now, or `property failed` now and not before
  answers     they contradict each other; the record of either run is damaged or there are several; the old run has a
              record and the new one has none; runs of one root seed and model recorded other programs, or no token

Told, and no reason for exit code 1: other limits, other digests, seed, model, rig or machine, a situation won, answers
that cannot be compared because neither run, or only the new one, recorded any or because the seeds or models differ.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verification.agreement_record import FILE, AgreementError, AgreementRecord, holds_any, read
from verification.certificate.corpus import PREFIX
from verification.certificate.outcomes import Outcome
from verification.certificate.output import REQUIRED
from verification.certificate.provenance import file_digest
from verification.certificate.report import REQUIRED_SET, ReportError, outcomes_of, validate
from verification.certificate.required import parse
from verification.certificate.verdict import ExitCode, not_applicable
from verification.properties import agreement
from verification.result import Verdict

_REPORT = "report.json"


class CompareError(ValueError):
    """A run that cannot be read."""


GONE, DAMAGED, NOT_COMPARABLE = "gone", "damaged", "not comparable"
_UNDECIDED = (Outcome.PRODUCT_FAILURE, Outcome.INFRASTRUCTURE, Outcome.TEST_DEFECT, Outcome.UNKNOWN, Outcome.BLOCKED)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences of two runs; the module says which of them are for the worse.

    agreement: what became of the recorded answers: "valid", "invalid", "unknown" (of the same programs), "not
    comparable", "gone", "damaged", or None where neither run, or only the new one, has any.
    """

    same: dict[str, bool]
    worse: list[str] = field(default_factory=list)
    better: list[str] = field(default_factory=list)
    fewer_cases: list[str] = field(default_factory=list)
    new_faults: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    gone_required: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    situations_lost: list[str] = field(default_factory=list)
    situations_won: list[str] = field(default_factory=list)
    session: list[str] = field(default_factory=list)
    measurements: list[str] = field(default_factory=list)
    agreement: str | None = None
    agreement_message: str = ""

    @property
    def ok(self) -> bool:
        """Nothing got worse, and the answers do not contradict each other."""
        told = (self.worse, self.fewer_cases, self.new_faults, self.gone_required, self.situations_lost, self.session)
        return not any(told) and self.agreement not in (Verdict.INVALID, Verdict.UNKNOWN, GONE, DAMAGED)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}


def load(path: Path) -> tuple[Path, dict[str, Any]]:
    """Folder and report of a run, by its folder or any file in it. Raises CompareError."""
    if not path.exists():
        raise CompareError(f"{path} does not exist")
    folder = path if path.is_dir() else path.parent
    try:
        report = json.loads((folder / _REPORT).read_text(encoding="utf-8"))
        validate(report)
    except (OSError, ValueError, ReportError, RecursionError) as error:
        raise CompareError(f"{folder / _REPORT}: {error}") from error
    return folder, report


def compare(old: Path, new: Path) -> Comparison:
    """Compares two runs. Raises CompareError when one cannot be read."""
    (old_folder, before), (new_folder, after) = load(old), load(new)
    old_tests, new_tests = ({t["id"]: t for t in r["tests"]} for r in (before, after))
    worse: list[str] = []
    better: list[str] = []
    for test in sorted(old_tests.keys() & new_tests.keys()):
        was, now = old_tests[test]["outcome"], new_tests[test]["outcome"]
        if was != now:
            changed = f"{test}: {was} -> {now}"
            (worse if was == Outcome.PASSED else better if now == Outcome.PASSED else worse).append(changed)
    wanted = _required(old_folder, before) | _required(new_folder, after)
    added, gone = sorted(new_tests.keys() - old_tests.keys()), sorted(old_tests.keys() - new_tests.keys())
    excused = not_applicable(outcomes_of(after), whole=after["run"]["judged"] == REQUIRED_SET)
    faults = [
        f"{test}: {new_tests[test]['outcome']}"
        for test in added
        if test not in excused and _is_fault(new_tests[test], test in wanted)
    ]
    reached = [{s["name"] for s in r["situations"] if s["reached"]} for r in (before, after)]
    expected = {s["name"] for s in after["situations"] if s["expected"] and s["applies"]}
    verdict, message = _agreement(old_folder, before, new_folder, after)
    return Comparison(
        same=_same(before, after),
        worse=worse,
        better=better,
        fewer_cases=_fewer_cases(old_tests, new_tests) if before["run"]["profile"] == after["run"]["profile"] else [],
        new_faults=faults,
        added=added,
        gone_required=[test for test in gone if test in wanted],
        gone=[test for test in gone if test not in wanted],
        situations_lost=sorted((reached[0] - reached[1]) & expected),
        situations_won=sorted(reached[1] - reached[0]),
        session=_session(before, after),
        measurements=_measurements(old_tests, new_tests),
        agreement=verdict,
        agreement_message=message,
    )


def _fewer_cases(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Tests that passed in both runs, and drew fewer programs in the new one."""
    return [
        f"{test}: {old[test]['cases']} -> {new[test]['cases']}"
        for test in sorted(old.keys() & new.keys())
        if old[test]["outcome"] == new[test]["outcome"] == Outcome.PASSED and new[test]["cases"] < old[test]["cases"]
    ]


def _required(folder: Path, report: dict[str, Any]) -> set[str]:
    """Own ids that a run's profile requires, by the required set that lies beside its report and is the one that the
    report names."""
    path = folder / REQUIRED
    try:
        digest, said = file_digest(path), report["digests"]["required"]
        if digest != said:
            raise CompareError(f"{path}: sha256 {digest}, {_REPORT} says {said}")
        profile = parse(path.read_text(encoding="utf-8"), str(path)).profile(report["run"]["profile"])
    except CompareError:
        raise
    except (OSError, ValueError) as error:  # RequiredSetError among them
        raise CompareError(f"{path}: {error}") from error
    return {test for requirement in profile.properties.values() for test in requirement.tests}


def _is_fault(test: dict[str, Any], required: bool) -> bool:
    if required or test["id"].startswith(PREFIX):
        return bool(test["outcome"] != Outcome.PASSED)
    return test["outcome"] in _UNDECIDED


def _session(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """New errors of the session, and a verdict that got worse."""
    told = [f"session error: {one}" for one in after["session_errors"] if one not in before["session_errors"]]
    was, now = (report["verdict"] for report in (before, after))
    codes = was["exit_code"], now["exit_code"]
    if codes[0] != codes[1] and (codes[0] == ExitCode.PASS or codes[1] == ExitCode.PROPERTY_FAILED):
        told.append(f"verdict: {was['word']} -> {now['word']}")
    return told


def _same(a: dict[str, Any], b: dict[str, Any]) -> dict[str, bool]:
    pairs = {name: (a["run"][name], b["run"][name]) for name in ("rig", "profile", "seed")}
    pairs |= {name: (a["digests"][name], b["digests"][name]) for name in a["digests"]}
    pairs["model"] = a["claim"]["model"]["sha256"], b["claim"]["model"]["sha256"]
    pairs["commit"] = a["source"]["git_commit"], b["source"]["git_commit"]
    pairs["machine"] = a["machine"]["hostname"], b["machine"]["hostname"]
    pairs["verdict"] = a["verdict"]["word"], b["verdict"]["word"]
    return {name: one == other for name, (one, other) in pairs.items()}


def _measurements(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Limits that are not what they were."""
    found = []
    for test in sorted(old.keys() & new.keys()):
        before, after = old[test]["measurements"], new[test]["measurements"]
        for name in sorted(before.keys() & after.keys()):
            a, b = before[name], after[name]
            if a["limit"] != b["limit"]:
                found.append(f"{test}: limit of {name}: {a['limit']} -> {b['limit']}")
    return found


def _agreement(old: Path, before: dict[str, Any], new: Path, after: dict[str, Any]) -> tuple[str | None, str]:
    records: list[AgreementRecord | None] = []
    for folder, report in ((old, before), (new, after)):
        try:
            records.append(read(folder) if holds_any(folder) else None)
        except AgreementError as error:
            return DAMAGED, f"the answers of run {report['run']['id']} cannot be read: {error}"
    one, other = records
    if one is None or other is None:
        absent = [r["run"]["id"] for r, had in ((before, one), (after, other)) if had is None]
        message = f"run {' and run '.join(absent)} recorded no answers ({FILE})"
        return (GONE if one is not None else None), message
    if (one.root_seed, one.subject) != (other.root_seed, other.subject):
        said = [f"model {r.subject} of root seed {r.root_seed}" for r in (one, other)]
        return NOT_COMPARABLE, f"the answers are of {said[0]} and of {said[1]}: run both with one seed"
    result = agreement.check(one.ran, other.ran, names=(f"rig {one.rig}", f"rig {other.rig}"))
    note = "" if result.ok() else " (decided without ties: `--agree-with` decides them by HuggingFace's logits)"
    return str(result.verdict), result.message + note


def lines(result: Comparison) -> list[str]:
    """The comparison for a terminal."""
    said = [f"{name}: {'the same' if same else 'different'}" for name, same in result.same.items()]
    for title, entries in (
        ("worse", result.worse),
        ("better", result.better),
        ("fewer cases", result.fewer_cases),
        ("new fault", result.new_faults),
        ("only in the new run", result.added),
        ("required and gone", result.gone_required),
        ("only in the old run", result.gone),
        ("situation not reached any more", result.situations_lost),
        ("situation reached now", result.situations_won),
        ("the run itself", result.session),
        ("other limit", result.measurements),
    ):
        said += [f"{title}: {entry}" for entry in entries]
    said.append(f"agreement of answers: {result.agreement or 'not compared'}: {result.agreement_message}")
    said.append("verdict: " + ("nothing got worse" if result.ok else "something got worse, or the answers disagree"))
    return said
