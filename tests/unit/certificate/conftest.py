"""A finished, signed run folder, made in this process from records, for tests of report, signature, verification."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from verification.certificate import output, report, required
from verification.certificate.options import Deadline
from verification.certificate.outcomes import Outcome
from verification.certificate.records import TestRecord

MakeReport = Callable[..., dict[str, Any]]
LATEST_S = 150.0  # for a whole run of a small suite, which takes some five seconds on a machine with nothing else to do


@dataclass(frozen=True)
class WhenThere(Deadline):
    """A deadline that passes as soon as a file is there, which says that a run has come so far: one in seconds passes
    before that on a slow machine."""

    file: Path

    @property
    def over(self) -> bool:
        return self.file.is_file() or super().over


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test signs with, or makes, the user's own key."""
    home = tmp_path / "home"
    monkeypatch.setenv("BLINK_HOME", str(home))
    monkeypatch.delenv("BLINK_SIGNING_KEY", raising=False)
    monkeypatch.delenv("BLINK_LOCK_DIR", raising=False)
    return home


def passed_records(profile: str) -> list[TestRecord]:
    """Every test that rig `local` requires in a profile, passed."""
    return [
        TestRecord(test, f"suite/test_x.py::{test}", name, Outcome.PASSED, duration_s=0.5, cases=20)
        for name, requirement in required.load("local").profile(profile).properties.items()
        for test in requirement.tests
    ]


@pytest.fixture
def records() -> list[TestRecord]:
    """Every test that rig `local` requires in smoke, passed."""
    return passed_records("smoke")


@pytest.fixture
def make_report() -> MakeReport:
    def make(
        records: Sequence[TestRecord], errors: Sequence[str] = (), profile: str = "smoke", **changes: Any
    ) -> dict[str, Any]:
        values: dict[str, Any] = {
            "run_id": "r1",
            "rig": "local",
            "profile": profile,
            "seed": 7,
            "seed_source": "given",
            "started": "2026-01-02T03:04:05.000+00:00",
            "ended": "2026-01-02T03:05:05.000+00:00",
            "duration_s": 60.0,
            "command": ["blink", "certify"],
            "required_text": required.required_text("local"),
            "thresholds_text": required.thresholds_text(),
            "model": {"name": "tiny", "path": None, "sha256": "ab" * 32},
        }
        return report.build(report.RunDescription(**(values | changes)), records, errors)

    return make


@pytest.fixture
def run_folder(tmp_path: Path, records: list[TestRecord], make_report: MakeReport) -> Path:
    """A signed folder of a passed smoke run, with a JUnit file and one allure result."""
    folder = tmp_path / "run"
    allure = folder / output.ALLURE
    allure.mkdir(parents=True)
    (folder / output.JUNIT).write_text("<testsuites/>", encoding="utf-8")
    result = {"historyId": "x", "labels": [{"name": "as_id", "value": records[0].id}]}
    (allure / "a-result.json").write_text(json.dumps(result), encoding="utf-8")
    output.finish(folder, make_report(records), required.required_text("local"), required.thresholds_text())
    return folder
