"""`blink certificate compare OLD NEW`: what changed between two runs, and whether their answers agree.

Reports are compared test by test; where both runs recorded the answers to the agreement programs
(`verification.agreement_record`) these are compared too, and with them a run on one rig with a run on another.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verification.agreement_record import FILE, AgreementError, read
from verification.certificate.outcomes import Outcome
from verification.certificate.report import ReportError, validate
from verification.properties import agreement
from verification.result import Verdict

_REPORT = "report.json"


class CompareError(ValueError):
    """A run that cannot be read."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Differences of two runs. worse: tests that passed before and do not now, and situations that are not reached any
    more. agreement: what became of the recorded answers: "valid", "invalid", "unknown" or None where one side has none.
    """

    same: dict[str, bool]
    worse: list[str] = field(default_factory=list)
    better: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    situations_lost: list[str] = field(default_factory=list)
    situations_won: list[str] = field(default_factory=list)
    measurements: list[str] = field(default_factory=list)
    agreement: str | None = None
    agreement_message: str = ""

    @property
    def ok(self) -> bool:
        """Nothing got worse, and the answers do not contradict each other."""
        return not (self.worse or self.situations_lost or self.agreement == Verdict.INVALID)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}


def load(path: Path) -> tuple[Path, dict[str, Any]]:
    """Folder and report of a run, by its folder or any file in it. Raises CompareError."""
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
    reached = [{s["name"] for s in r["situations"] if s["reached"]} for r in (before, after)]
    expected = {s["name"] for s in after["situations"] if s["expected"] and s["applies"]}
    verdict, message = _agreement(old_folder, before, new_folder, after)
    return Comparison(
        same=_same(before, after),
        worse=worse,
        better=better,
        added=sorted(new_tests.keys() - old_tests.keys()),
        gone=sorted(old_tests.keys() - new_tests.keys()),
        situations_lost=sorted((reached[0] - reached[1]) & expected),
        situations_won=sorted(reached[1] - reached[0]),
        measurements=_measurements(old_tests, new_tests),
        agreement=verdict,
        agreement_message=message,
    )


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
    records = []
    for folder, report in ((old, before), (new, after)):
        try:
            records.append(read(folder))
        except AgreementError as error:
            return None, f"run {report['run']['id']} recorded no answers ({FILE}): {error}"
    one, other = records
    if (one.root_seed, one.subject) != (other.root_seed, other.subject):
        said = [f"model {r.subject} of root seed {r.root_seed}" for r in records]
        return str(Verdict.UNKNOWN), f"the answers are of {said[0]} and of {said[1]}: run both with one seed"
    result = agreement.check(one.ran, other.ran, names=(f"rig {one.rig}", f"rig {other.rig}"))
    note = "" if result.ok() else " (decided without ties: `--agree-with` decides them by HuggingFace's logits)"
    return str(result.verdict), result.message + note


def lines(result: Comparison) -> list[str]:
    """The comparison for a terminal."""
    said = [f"{name}: {'the same' if same else 'different'}" for name, same in result.same.items()]
    for title, entries in (
        ("worse", result.worse),
        ("better", result.better),
        ("only in the new run", result.added),
        ("only in the old run", result.gone),
        ("situation not reached any more", result.situations_lost),
        ("situation reached now", result.situations_won),
        ("other limit", result.measurements),
    ):
        said += [f"{title}: {entry}" for entry in entries]
    said.append(f"agreement of answers: {result.agreement or 'not compared'}: {result.agreement_message}")
    said.append("verdict: " + ("nothing got worse" if result.ok else "something got worse, or the answers disagree"))
    return said
