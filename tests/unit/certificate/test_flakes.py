"""Counting finished runs that were made side by side, and ending early."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.certificate.conftest import LATEST_S, MakeReport
from verification.benchmarks.flakes import main
from verification.certificate.outcomes import Outcome
from verification.certificate.output import REPORT
from verification.certificate.records import TestRecord
from verification.certificate.supervise import INTERRUPTED

ROOT = Path(__file__).resolve().parents[3]

HANGING = """
import threading, pytest
@pytest.mark.blink_property("queue-ordering")
def test_before(record): record.cases(3)
@pytest.mark.blink_property("streaming")
def test_fails(): assert False
@pytest.mark.blink_property("kv-content")
def test_hangs(): threading.Event().wait()
"""
# The command with another suite. END: the signal comes in the first run's last moment, when its tests are done.
COMMAND = """
import functools, os, signal, sys
from pathlib import Path
from verification.benchmarks import flakes
from verification.certificate import certify as certifying
finish, end = certifying._finish, {end!r}
def late(*arguments):
    if end is not None:
        os.kill(os.getpid(), end)
    return finish(*arguments)
certifying._finish = late
flakes.certify = functools.partial(flakes.certify, suite=Path({suite!r}))
sys.exit(flakes.main(["--runs", "3", "--first-seed", "7", "--out", {out!r}]))
"""


def start(tmp_path: Path, suite: str, end: int | None = None) -> subprocess.Popen[str]:
    """The command in a process of its own, on this suite."""
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / "test_own.py").write_text(suite)
    code = COMMAND.format(suite=str(folder), out=str(tmp_path / "out"), end=end)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


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


def test_a_refused_run_is_not_an_earlier_ones(
    tmp_path: Path, make_report: MakeReport, records: list[TestRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: runs that cannot start in a folder of earlier ones, all of which are counted as passed."""
    run = tmp_path / "seed-3"
    run.mkdir()
    (run / REPORT).write_text(json.dumps(make_report(records)), encoding="utf-8")
    assert main(["--runs", "1", "--first-seed", "3", "--out", str(tmp_path), "--profile", "none-such"]) == 2
    assert "seed 3: the run left no report" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_runs(tmp_path: Path, number: signal.Signals) -> None:
    """Catches: a signal that ends one run and lets the next ones follow, a pytest that is left behind, what had been
    found until then lost, an exit as if all runs had been made."""
    process = start(tmp_path, HANGING)
    assert process.stderr is not None
    for _ in range(2):  # the third test hangs
        assert re.search("queue-ordering/before|streaming/fails", process.stderr.readline())
    process.send_signal(number)
    text, _ = process.communicate(timeout=LATEST_S)
    assert process.returncode == 2, text
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["seed-7"]
    assert "seed 7: streaming/fails is product_failure: " in text
    assert f"seed 7: the run was {INTERRUPTED}" in text
    assert "no further run" in text
    # Neither what hung nor what never ran is an outcome.
    assert "0 runs of 0 s on average, 2 outcomes, 1 not passed" in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_when_a_run_is_over_ends_the_runs(tmp_path: Path, number: signal.Signals) -> None:
    """Catches: a signal that comes when a run's tests are done, and is lost; that run taken for an interrupted one."""
    process = start(tmp_path, HANGING.partition('@pytest.mark.blink_property("streaming")')[0], end=int(number))
    text, _ = process.communicate(timeout=LATEST_S)
    assert process.returncode == 2, text
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["seed-7"]
    assert re.search("^1 runs of ", text, re.MULTILINE)
    assert INTERRUPTED not in text
