"""The suite's own worth: seeded faults of the product, each to be noticed, by its class (design section 9)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from verification.certificate.identity import own_id
from verification.certificate.recorder import Recorder
from verification.mutants import automatic, matrix, weave
from verification.mutants.model import CLASSES, Mutant, by_name, load
from verification.mutants.weave import BuildFailed
from verification.plugin_session import leave_out
from verification.result import CheckResult, Measurement, Verdict
from verification.run_context import RunContext
from verification.thresholds import Thresholds

PROPERTY = "mutants"
pytestmark = [pytest.mark.blink_property(PROPERTY), pytest.mark.capability("cpu")]

# One of each class of the scheduler, with few seeds, so that every night shows that the checkers see; the whole matrix
# takes the full profile.
NIGHTLY = (
    "admit-youngest-first",
    "token-twice",
    "leak-page-on-cancel",
    "published-before-full",
    "running-list-swaps-the-last",
    "nan-temperature",
    "payload-checksum-ignored",
    "row-starts-at-its-number",
    "drain-accepts",
    "deadline-overflows",
)
NIGHTLY_SEEDS = 3


@pytest.fixture
def built(request: pytest.FixtureRequest) -> weave.Woven:
    """The mutant build; a machine that cannot build leaves these tests out."""
    try:
        return weave.build()
    except BuildFailed as failed:
        leave_out(request.node, str(failed).splitlines()[0])


def _run(
    mutants: Sequence[Mutant], seeds: int, seed: int, record: Recorder, evidence: Path | None, whole: Sequence[str] = ()
) -> None:
    """The rows of these mutants; each cell is a line of the report's planted faults, all of it stands in `evidence`."""
    with tempfile.TemporaryDirectory(prefix="blink-matrix-") as folder:
        made = matrix.Matrix(Path(folder), matrix.seeds_of(seed, seeds), say=lambda line: print(line, flush=True))
        rows = made.rows(mutants)
    for row in rows:
        for name, cell in row.cells.items():
            if row.cls and cell.run:
                record.planted_fault(f"{row.cls} {row.mutant}: {name}", caught=cell.hits, planted=cell.run)
    excused = matrix.equivalents()
    for one in matrix.by_class(rows, excused):
        print(one)
    verdict = matrix.judge(rows, whole=whole, excused=excused)
    record.cases(sum(cell.run for row in rows for cell in row.cells.values()))
    _keep(evidence, "kill-matrix.json", [row.to_json() for row in rows])
    figures = {
        "mutants_killed": Measurement(verdict.killed, limit=verdict.total, n=verdict.total),
        "mutants_argued_equivalent": Measurement(verdict.equivalent),
    }
    word = Verdict.INVALID if verdict.problems else Verdict.VALID
    record.check(
        CheckResult(word, PROPERTY, "kill-matrix", str(verdict), {"problems": list(verdict.problems[:20])}, figures)
    )


def _keep(evidence: Path | None, name: str, told: object) -> None:
    if evidence is not None:
        (evidence / name).write_text(json.dumps(told, indent=1), encoding="utf-8")


@pytest.fixture
def evidence(request: pytest.FixtureRequest, blink_run: RunContext) -> Path | None:
    """The test's folder for files that are signed with the report."""
    return blink_run.evidence(own_id(request.node))


@pytest.mark.blink_profile("nightly", "full")
def test_sample(built: weave.Woven, evidence: Path | None, record: Recorder, seed: int) -> None:
    """One mutant of each class of the scheduler, with few seeds, each noticed by its class; none without a mutant.

    Catches: checkers that have gone blind, or that object to the product as it is.
    """
    _run([by_name(name) for name in NIGHTLY], NIGHTLY_SEEDS, seed, record, evidence)


@pytest.mark.timeout(5400)
@pytest.mark.blink_profile("full")
@pytest.mark.parametrize("cls", sorted({m.cls for m in load()}), ids=str)
def test_kill_matrix(built: weave.Woven, cls: str, evidence: Path | None, record: Recorder, seed: int) -> None:
    """Every named mutant of a class against every checker that can name it, in 10 fresh seeds; two checkers that share
    no check function have kills in the class.

    Catches: a fault of that class that the suite would let pass.
    """
    chosen = [m for m in load() if m.cls == cls and m.where != "cuda"]
    print(f"class {cls}: {CLASSES[cls]}: {len(chosen)} mutants")
    _run(chosen, matrix.SEEDS, seed, record, evidence, (cls,))


@pytest.mark.timeout(5400)
@pytest.mark.blink_profile("full")
def test_automatic(
    built: weave.Woven, evidence: Path | None, record: Recorder, thresholds: Thresholds, seed: int
) -> None:
    """A random sample of all mutants that the operators make of the scheduler's headers: the score of the cheap
    checkers, with its 95 % interval.

    Catches: checkers that notice the named faults because those were chosen, and not others.
    """
    limits = thresholds.mutants
    score = automatic.run(
        limits.sample, seed, equivalent=list(matrix.equivalents()), say=lambda line: print(line, flush=True)
    )
    _keep(evidence, "automatic-mutants.json", score.to_json())
    low, high = score.interval
    n = len(score.counted)
    figures = {
        "automatic_mutants_killed": Measurement(score.words["killed"] / max(1, n), limit=limits.least_killed, n=n),
        "automatic_mutants_low": Measurement(low, n=n),
        "automatic_mutants_high": Measurement(high, n=n),
        "automatic_mutants_survived": Measurement(score.words["survived"], n=n),
    }
    word = Verdict.VALID if score.words["killed"] >= limits.least_killed * n else Verdict.INVALID
    record.cases(n)
    record.check(CheckResult(word, PROPERTY, "automatic", str(score), {}, figures))
