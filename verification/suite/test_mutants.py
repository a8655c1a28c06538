"""The suite's own worth: seeded faults of the product, each to be noticed, by its class (design section 9)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from hil_rigs.scratch import Scratch
from verification.certificate.identity import own_id
from verification.certificate.recorder import Recorder
from verification.mutants import automatic, matrix, weave
from verification.mutants.model import CLASSES, Mutant, by_name, load
from verification.mutants.weave import BuildFailed
from verification.plugin_session import leave_out
from verification.result import JSON, CheckResult, Measurement, Verdict
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
PAIR_SECONDS = 1800.0  # for two checkers of a class: most have them after one mutant or two
PART = 6  # mutants of one test: a whole class would not fit into the time of one, nor into a shard
CONTROLS = [("native", (1, 1)), *(("python", (i, 3)) for i in (1, 2, 3))]  # checkers of one test
SHARES = 6  # tests among which the sample of automatic mutants is dealt out, for the same reason


@pytest.fixture
def built(request: pytest.FixtureRequest) -> weave.Woven:
    """The mutant build; a machine that cannot build leaves these tests out."""
    try:
        return weave.build()
    except BuildFailed as failed:
        leave_out(request.node, str(failed).splitlines()[0])


@contextmanager
def _matrix(seeds: int, seed: int, *, controls: bool = False) -> Iterator[matrix.Matrix]:
    """A matrix in a folder of its own; without controls: profile full has them once (`test_control`)."""
    with Scratch("matrix") as scratch:
        yield matrix.Matrix(
            scratch.path, matrix.seeds_of(seed, seeds), controls=controls, say=partial(print, flush=True)
        )


def _report(rows: Sequence[matrix.Row], record: Recorder, evidence: Path | None) -> None:
    """Each cell of a mutant is a line of the report's planted faults, all of it stands in `evidence`."""
    for row in rows:
        for name, cell in row.cells.items():
            if row.cls and cell.run:
                record.planted_fault(f"{row.cls} {row.mutant}: {name}", caught=cell.hits, planted=cell.run)
    excused = matrix.equivalents()
    for one in matrix.by_class(rows, excused):
        print(one)
    verdict = matrix.judge(rows, excused=excused)
    record.cases(sum(cell.run for row in rows for cell in row.cells.values()))
    _keep(evidence, "kill-matrix.json", [row.to_json() for row in rows])
    figures = {
        "mutants_killed": Measurement(verdict.killed, limit=verdict.total, n=verdict.total, limit_is="min"),
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
    with _matrix(NIGHTLY_SEEDS, seed, controls=True) as made:
        _report(made.rows([by_name(name) for name in NIGHTLY]), record, evidence)


def _by_class() -> dict[str, list[Mutant]]:
    """The mutants that this machine can run, by class."""
    found: dict[str, list[Mutant]] = {}
    for mutant in load():
        if mutant.where != "cuda":
            found.setdefault(mutant.cls, []).append(mutant)
    return dict(sorted(found.items()))


def _parts() -> dict[str, list[Mutant]]:
    """The classes in parts of at most `PART` mutants, by name: "A-1"."""
    return {
        f"{cls}-{number}": own[first : first + PART]
        for cls, own in _by_class().items()
        for number, first in enumerate(range(0, len(own), PART), 1)
    }


@pytest.mark.blink_profile("full")
@pytest.mark.parametrize("part", list(_parts()))
def test_kill_matrix(built: weave.Woven, part: str, evidence: Path | None, record: Recorder, seed: int) -> None:
    """Named mutants of a class, each against every checker that can name it, in 10 fresh seeds.

    Catches: a fault of that class that the suite would let pass.
    """
    chosen = _parts()[part]
    print(f"class {chosen[0].cls}: {CLASSES[chosen[0].cls]}: part {part}, {len(chosen)} mutants")
    with _matrix(matrix.SEEDS, seed) as made:
        _report(made.rows(chosen), record, evidence)


@pytest.mark.blink_profile("full")
@pytest.mark.parametrize(("where", "share"), CONTROLS, ids=[f"{where}-{i}-of-{n}" for where, (i, n) in CONTROLS])
def test_control(
    built: weave.Woven, where: str, share: tuple[int, int], evidence: Path | None, record: Recorder, seed: int
) -> None:
    """The control column of the kill matrix: every checker, with the seeds of its mutants, on the product as it is.

    Catches: a checker that objects to the sound product, whose kills would say nothing.
    """
    with _matrix(matrix.SEEDS, seed) as made:
        row = made.control(where, share)
    verdict = matrix.judge([row])
    record.cases(sum(cell.run for cell in row.cells.values()))
    _keep(evidence, f"control-{where}.json", row.to_json())
    word = Verdict.INVALID if verdict.problems else Verdict.VALID
    message = f"{len(row.cells)} checkers, {matrix.SEEDS} seeds each, on the product as it is"
    record.check(CheckResult(word, PROPERTY, "control", message, {"problems": list(verdict.problems[:20])}))


@pytest.mark.timeout(3300)  # the budget, and the last mutant that is begun in it
@pytest.mark.blink_profile("full")
@pytest.mark.parametrize("cls", list(_by_class()))
def test_two_checkers(built: weave.Woven, cls: str, record: Recorder, seed: int) -> None:
    """Mutants of a class, those that most checkers can name first, until two checkers that share no check function have
    kills in it. One in which none are found in `PAIR_SECONDS` fails.

    Catches: a class that hangs on one check function, with which all its mutants would survive.
    """
    with _matrix(matrix.SEEDS, seed) as made:
        order = sorted(_by_class()[cls], key=lambda m: -len(matrix.able(m, made.checkers(m.where))))
        rows, told = matrix.until_pair(lambda mutant: made.rows([mutant]), order, PAIR_SECONDS)
    record.cases(sum(cell.run for row in rows for cell in row.cells.values()))
    word = Verdict.VALID if any(one.pair for one in matrix.by_class(rows)) else Verdict.INVALID
    record.check(CheckResult(word, PROPERTY, "two-checkers", f"class {cls}: {told}"))


@pytest.mark.blink_profile("full")
@pytest.mark.parametrize("share", range(1, SHARES + 1), ids=lambda share: f"{share}-of-{SHARES}")
def test_automatic(
    built: weave.Woven,
    share: int,
    evidence: Path | None,
    record: Recorder,
    thresholds: Thresholds,
    blink_run: RunContext,
) -> None:
    """A random sample of all mutants that the operators make of the scheduler's headers, each share of it every n-th:
    the score of the cheap checkers, with its 95 % interval. The report has one of all shares beside it.

    Catches: checkers that notice the named faults because those were chosen, and not others.
    """
    limits = thresholds.mutants
    score = automatic.run(
        limits.sample,
        blink_run.derive_seed(PROPERTY, "automatic"),  # one draw for all shares
        shard=(share, SHARES),
        equivalent=matrix.equivalents(),
        argued=False,
        say=partial(print, flush=True),
    )
    _keep(evidence, "automatic-mutants.json", score.to_json())
    low, high = score.interval
    n = len(score.counted)
    figures = {
        "automatic_mutants_killed": Measurement(
            score.words["killed"] / max(1, n), limit=limits.least_killed, n=n, limit_is="min"
        ),
        "automatic_mutants_low": Measurement(low, n=n),
        "automatic_mutants_high": Measurement(high, n=n),
        "automatic_mutants_survived": Measurement(score.words["survived"], n=n),
    }
    if n:
        record.planted_fault("automatic mutants", caught=score.words["killed"], planted=n)
    enough = score.words["killed"] >= limits.least_killed * n and not score.refuted
    word = Verdict.VALID if enough else Verdict.INVALID
    record.cases(n)
    record.check(CheckResult(word, PROPERTY, "automatic", str(score), {"refuted": list[JSON](score.refuted)}, figures))


@pytest.mark.blink_profile("full")
def test_argued(built: weave.Woven, evidence: Path | None, record: Recorder, seed: int) -> None:
    """Automatic mutants that are argued to be equivalent, all of them, whatever the sample holds.

    Catches: an argument that a checker refutes, by a fault of the product that it explains away; one whose mutant is
    not there any more.
    """
    score = automatic.run(0, seed, equivalent=matrix.equivalents(), say=partial(print, flush=True))
    _keep(evidence, "argued-mutants.json", score.to_json())
    word = Verdict.INVALID if score.refuted else Verdict.VALID
    record.cases(len(score.argued))
    message = (
        f"{len(score.argued)} mutants that are argued equivalent were run, {len(score.refuted)} arguments are wrong"
    )
    record.check(CheckResult(word, PROPERTY, "argued", message, {"refuted": list[JSON](score.refuted)}))
