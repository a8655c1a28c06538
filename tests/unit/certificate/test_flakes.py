"""Counting finished runs that were made side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.certificate.conftest import MakeReport
from verification.benchmarks.flakes import main
from verification.certificate.outcomes import Outcome
from verification.certificate.output import REPORT
from verification.certificate.records import TestRecord


def test_finished_runs_are_counted_once_each(
    tmp_path: Path, make_report: MakeReport, records: list[TestRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: a run without a report that is not told, a bad run of the second folder that is lost, the same seed
    counted twice, an empty folder that passes."""
    assert main(["--tally", str(tmp_path)]) == 2
    for folder, seed in (("a", 1), ("b", 2), ("b", 1)):
        run = tmp_path / folder / f"seed-{seed}"
        run.mkdir(parents=True)
        (run / REPORT).write_text(json.dumps(make_report(records)), encoding="utf-8")
    folders = ["--tally", str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(folders) == 0
    assert "2 runs of " in capsys.readouterr().out
    records[3].outcome = Outcome.UNKNOWN
    (tmp_path / "b" / "seed-2" / REPORT).write_text(json.dumps(make_report(records)), encoding="utf-8")
    assert main(folders) == 1
    assert f"seed 2: {records[3].id} is unknown" in capsys.readouterr().out
    (tmp_path / "b" / "seed-3").mkdir()
    assert main(folders) == 2
