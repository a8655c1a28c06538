"""Two runs compared, and many runs of one profile tallied."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.unit.certificate.conftest import MakeReport
from verification.benchmarks.flakes import Tally
from verification.certificate import costs, output, required
from verification.certificate.compare import CompareError, compare, lines
from verification.certificate.outcomes import Outcome
from verification.certificate.records import TestRecord


def folder(path: Path, make_report: MakeReport, records: list[TestRecord], **values: object) -> Path:
    path.mkdir()
    built = make_report(records, **values)
    output.finish(path, built, required.required_text("local"), required.thresholds_text())
    return path


def test_what_got_worse_is_named(tmp_path: Path, make_report: MakeReport) -> None:
    """Catches: a regression, a vanished test or a lost situation that the comparison does not mention."""

    def record(test: str, outcome: Outcome, **values: object) -> TestRecord:
        return TestRecord(f"p/{test}", "x", "p", outcome, **values)  # type: ignore[arg-type]

    old = folder(
        tmp_path / "old",
        make_report,
        [
            record("a", Outcome.PASSED, situations={"preemption": 3}),
            record("b", Outcome.UNKNOWN),
            record("c", Outcome.PASSED),
        ],
    )
    new = folder(
        tmp_path / "new",
        make_report,
        [record("a", Outcome.PRODUCT_FAILURE), record("b", Outcome.PASSED), record("d", Outcome.PASSED)],
        seed=8,
    )
    found = compare(old, new)
    assert found.worse == ["p/a: passed -> product_failure"]
    assert found.better == ["p/b: unknown -> passed"]
    assert ("p/d" in found.added, "p/c" in found.gone) == (True, True)
    assert found.situations_lost == ["preemption"]
    assert (found.same["seed"], found.same["thresholds"], found.same["verdict"]) == (False, True, False)
    assert not found.ok
    assert "worse: p/a: passed -> product_failure" in lines(found)
    assert compare(old, old).ok
    with pytest.raises(CompareError, match=r"report\.json"):
        compare(old, tmp_path)


def test_tally_names_every_outcome_that_is_no_pass(make_report: MakeReport, records: list[TestRecord]) -> None:
    """Catches: a flaky test that is hidden among passes, a campaign without runs that passes."""
    tally = Tally()
    assert tally.code == 2
    tally.add(1, make_report(records))
    assert tally.code == 0
    records[3].outcome = Outcome.UNKNOWN
    tally.add(2, make_report(records))
    assert tally.code == 1
    assert any(line.startswith(f"seed 2: {records[3].id} is unknown") for line in tally.lines())
    assert tally.missed["preemption"] == 2


def test_costs_are_written_from_reports(tmp_path: Path, make_report: MakeReport) -> None:
    """Catches: costs that lose a test's brackets, or count what did not pass."""
    slow = TestRecord("p/x[a-1]", "x", "p", Outcome.PASSED, duration_s=12.4)
    failed = TestRecord("p/y", "y", "p", Outcome.UNKNOWN, duration_s=99.0)
    path = folder(tmp_path / "run", make_report, [slow, failed], judges_required=False)
    values = yaml.safe_load(costs.text(costs.durations([path]), 1.0))
    assert values == {"default_s": 1.0, "tests": {"p/x[a-1]": 12}}
