"""`certify` from start to end, on small suites: exit codes, last line, report in every case, nothing left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.unit.certificate.conftest import LATEST_S, WhenThere
from tests.waiting import ended, until
from verification.certificate import certify as certifying
from verification.certificate import replays
from verification.certificate.certify import certify
from verification.certificate.options import Deadline, Options, deadlines
from verification.certificate.records import TestRecord
from verification.certificate.required import Profile, load
from verification.certificate.supervise import INTERRUPTED, supervise
from verification.certificate.verify import verify
from verification.run_context import RunContext

ROOT = Path(__file__).resolve().parents[3]

PASSING = """
import pytest
from verification.certificate.required import load

def make(name, short):
    @pytest.mark.blink_property(name, id=short)
    def test(record):
        record.cases(10)
    return test

for name, requirement in load("local").profile("smoke").properties.items():
    for number, one in enumerate(requirement.tests):
        globals()[f"test_{name}_{number}"] = make(name, one.partition("/")[2])
"""
VIOLATING = (
    PASSING
    + """
@pytest.mark.blink_property("kv-content")
def test_foreign_row():
    assert [1, 2] == [1, 3], "row 1 is another request's"
"""
)
CRASHING = """
import os, signal, pytest
@pytest.mark.blink_property("queue-ordering")
def test_before(record): record.cases(3)
@pytest.mark.blink_property("streaming")
def test_crash(): os.kill(os.getpid(), signal.SIGSEGV)
@pytest.mark.blink_property("kv-content")
def test_after(): pass
"""
HANGING = """
import pathlib, subprocess, sys, threading, pytest
@pytest.mark.blink_property("queue-ordering")
def test_before(record): record.cases(3)
@pytest.mark.blink_property("streaming")
def test_hang():
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    told = pathlib.Path(__file__).with_name("child.pid")
    told.with_suffix(".new").write_text(str(child.pid))
    told.with_suffix(".new").rename(told)
    threading.Event().wait(600)
"""


@pytest.fixture(autouse=True)
def child_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outer pytest's own settings are none of the inner one's business."""
    for name in list(os.environ):
        if name.startswith("PYTEST_") or name in ("BLINK_INVOCATION", "BLINK_JOURNAL_ONLY"):
            monkeypatch.delenv(name)


def write(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "test_mini.py").write_text(text, encoding="utf-8")
    return folder


def outcomes(out: Path) -> dict[str, str]:
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return {test["id"]: test["outcome"] for test in report["tests"]}


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_passed_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches: a pass with another exit code, without table, report, log or signature."""
    out = tmp_path / "out"
    code = certify("local", None, "smoke", out, suite=write(tmp_path / "suite", PASSING))
    text = capfd.readouterr()
    assert code == 0, text.out + text.err
    assert last_line(text.out) == "verdict: passed (exit 0)"
    assert f"report: {out / 'report.html'}" in text.out
    assert "token-equivalence" in text.out
    required = sum(len(entry.tests) for entry in load("local").profile("smoke").properties.values())
    assert f"[{required}/{required}] passed" in text.err  # progress, a line a test where there is no terminal
    names = {entry.name for entry in out.iterdir()}
    assert {"report.json", "report.html", "junit.xml", "allure-results", "pytest.log", "attestation.dsse.json"} <= names
    assert verify(out).problems == ()
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["run"]["command"][:4] == ["blink", "certify", "--rig", "local"]


def test_violated_property_is_exit_1_and_named_in_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches: a planted fault that does not fail the run, or fails it without naming the property."""
    out = tmp_path / "out"
    suite = write(tmp_path / "suite", VIOLATING)
    assert certify("local", None, "smoke", out, seed=5, suite=suite, as_json=True) == 1
    summary = json.loads(capfd.readouterr().out)
    assert summary["exit_code"] == 1
    assert summary["properties"]["kv-content"] == "product_failure"
    assert summary["reasons"][0] == "kv-content: kv-content/foreign_row is a product failure"
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert (report["run"]["seed"], report["run"]["seed_source"]) == (5, "given")
    assert verify(out).verdict == "property failed"


def test_crash_leaves_what_was_found_and_a_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches: a segmentation fault that loses the results before it, or that passes."""
    out = tmp_path / "out"
    assert certify("local", None, "smoke", out, suite=write(tmp_path / "suite", CRASHING)) == 2
    text = capfd.readouterr().out
    assert last_line(text) == "verdict: could not run (exit 2)"
    assert "killed by SIGSEGV" in text
    found = outcomes(out)
    assert found["queue-ordering/before"] == "passed"
    assert found["streaming/crash"] == "infrastructure"
    assert found["kv-content/after"] == "missing"
    assert verify(out).valid


def test_deadline_ends_the_run_and_everything_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches: a run that hangs for ever, or that leaves an engine process behind."""
    suite, out = write(tmp_path / "suite", HANGING), tmp_path / "out"
    file = suite / "child.pid"

    def when_it_hangs(options: Options, limits: Profile) -> tuple[Deadline, Deadline]:
        replays, whole = deadlines(options, limits)
        return replays, WhenThere(whole.end, whole.passed, file)

    monkeypatch.setattr(certifying, "deadlines", when_it_hangs)
    assert certify("local", None, "smoke", out, suite=suite, deadline_s=LATEST_S) == 2
    assert f"the deadline of {LATEST_S:g} s for the whole run passed" in capfd.readouterr().out
    assert outcomes(out)["streaming/hang"] == "infrastructure"
    pid = int(file.read_text())
    until(lambda: ended(pid), "what the run had started still runs")


def test_deadlines_in_seconds() -> None:
    """Catches: a limit that never passes, or has passed at once; replays that may take the whole run's time."""
    profile = load("local").profile("nightly")
    replays, whole = deadlines(Options("local", None, "nightly", Path("out"), deadline_s=60.0), profile)
    assert not replays.over
    assert not whole.over
    assert whole.end - replays.end == pytest.approx(30.0)
    assert replays.passed == "the deadline of 30 s for all replays of earlier failures passed"
    assert whole.passed == "the deadline of 60 s for the whole run passed"
    assert Deadline(time.monotonic() - 0.001, "").over


@pytest.mark.parametrize(
    ("rig", "profile", "seed", "message"),
    [
        ("moon", "smoke", None, "unknown rig 'moon'; known rigs: "),
        ("local", "lunch", None, "no profile 'lunch'"),
        ("local", "lunch", None, "no profile 'lunch'; it has: smoke, nightly, full"),
        ("local", "smoke", "soon", "neither a number nor 'random'"),
    ],
)
def test_bad_request_is_refused_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], rig: str, profile: str, seed: str | None, message: str
) -> None:
    """Catches: a misspelt option that starts a run, or an error without the last line that scripts read."""
    assert certify(rig, None, profile, tmp_path / "out", seed=seed) == 2
    text = capfd.readouterr()
    assert message in text.err
    assert last_line(text.out) == "verdict: could not run (exit 2)"
    assert not (tmp_path / "out").exists()


def test_unknown_model_is_refused_with_a_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches: a missing model found out by an engine that does not start; a refusal without a record."""
    out = tmp_path / "out"
    assert certify("local", "NoSuchModel-9B", "smoke", out, as_json=True) == 2
    assert "NoSuchModel-9B" in json.loads(capfd.readouterr().out)["reasons"][0]
    assert verify(out).verdict == "could not run"


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ('{"capabilities": [{"name": "gpu", "available": false, "detail": "there is no GPU"}]}', "there is no GPU"),
        ("Segmentation fault", "`blink rig probe gpu` says nothing (JSONDecodeError)"),
    ],
)
def test_machine_without_a_gpu_is_refused_with_a_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, says: str, reason: str
) -> None:
    """Catches: a GPU that is not there found out by each test of the suite (once 278 lines, none of which said so)."""
    monkeypatch.setattr(certifying, "PROBE", (sys.executable, "-c", f"print({says!r})"))
    out = tmp_path / "out"
    assert certify("gpu", None, "smoke", out, suite=write(tmp_path / "suite", PASSING), as_json=True) == 2
    assert json.loads(capfd.readouterr().out)["reasons"][0] == f"session: no GPU for rig gpu: {reason}"
    assert verify(out).verdict == "could not run"


def test_empty_suite_does_not_pass(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches: zero tests taken for zero failures."""
    (tmp_path / "suite").mkdir()
    assert certify("local", None, "smoke", tmp_path / "out", suite=tmp_path / "suite") == 2
    assert "no test was collected" in capfd.readouterr().out


def test_signing_key_is_checked_before_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches: an hour's run that cannot be signed at its end."""
    assert certify("local", None, "smoke", tmp_path / "out", key=tmp_path / "no.pem") == 2
    assert "no.pem" in capfd.readouterr().err


def blink(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from verification.cli import main; main()"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LATEST_S,
        check=False,
    )


def test_certificate_commands(run_folder: Path, own_home: Path, tmp_path: Path) -> None:
    """Catches: `verify` or `show` with a wrong exit code, or `verify` that says more than integrity without keys."""
    alone = blink(tmp_path, "certificate", "verify", str(run_folder))
    assert (alone.returncode, last_line(alone.stdout)[:14]) == (0, "integrity only")
    public = own_home / "keys" / "signing-key.pub"
    trusted = blink(tmp_path, "certificate", "verify", str(run_folder), "--trust", str(public), "--json")
    assert json.loads(trusted.stdout)["trusted"] is True
    shown = blink(tmp_path, "certificate", "show", str(run_folder / "report.html"))
    assert shown.returncode == 0
    assert last_line(shown.stdout) == "verdict: passed (exit 0)"
    assert "nothing about GPUs" in shown.stdout.replace("\n", " ")
    (run_folder / "junit.xml").write_text("<changed/>", encoding="utf-8")
    changed = blink(tmp_path, "certificate", "verify", str(run_folder))
    assert changed.returncode == 1
    assert "junit.xml was changed" in changed.stdout
    absent = blink(tmp_path, "certificate", "verify", str(tmp_path / "nowhere"))
    assert absent.returncode == 2
    assert "does not exist" in absent.stderr


def test_mounted_commands_and_help(tmp_path: Path) -> None:
    """Catches: a command of another package that the front command does not reach, or lists and cannot run."""
    text = blink(tmp_path, "--help").stdout
    assert all(name in text for name in ("certify", "certificate", "model", "rig", "serve", "trace", "triage"))
    assert " bench " not in text  # a later issue: absent
    rigs = blink(tmp_path, "rig", "list", "--json")
    assert "local" in [rig["name"] for rig in json.loads(rigs.stdout)]
    assert "--port" in blink(tmp_path, "serve", "--help").stdout
    unknown = blink(tmp_path, "fly")
    assert unknown.returncode == 2
    assert "fly" in unknown.stderr
    unfetched = blink(tmp_path, "certify", "--json")  # the pinned model by default, and this home has none
    assert unfetched.returncode == 2
    assert "SmolLM2-135M-Instruct" in json.loads(unfetched.stdout)["reasons"][0]
    assert verify(tmp_path / "out" / "certify").valid


def hanging_run(tmp_path: Path) -> tuple[subprocess.Popen[str], Path, Path]:
    """`certify` in a process of its own, on its way into a test that hangs; its suite and output folders."""
    suite, out = write(tmp_path / "suite", HANGING), tmp_path / "out"
    code = (
        "import sys; from pathlib import Path; from verification.certificate.certify import certify\n"
        f"sys.exit(certify('local', None, 'smoke', Path({str(out)!r}), suite=Path({str(suite)!r})))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    line = process.stderr.readline()  # the first test's progress: the run is on its way
    assert "queue-ordering/before" in line
    return process, suite, out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_interrupt_stops_the_run_and_reports(tmp_path: Path, number: signal.Signals) -> None:
    """Catches: Ctrl-C or a closed terminal that leaves pytest running, or loses what was found."""
    process, _, out = hanging_run(tmp_path)
    process.send_signal(number)
    text, _ = process.communicate(timeout=LATEST_S)
    assert process.returncode == 2
    assert "interrupted by a signal" in text
    assert last_line(text) == "verdict: could not run (exit 2)"
    assert verify(out).valid


def test_signal_between_two_replays_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches: a signal while no pytest runs, which ends the run without a report, or after which it goes on."""
    suite, out, ran = write(tmp_path / "suite", PASSING), tmp_path / "out", list[str]()

    def replay(corpus: Any, rig: str, folder: Path, run: Callable[..., str | None], *rest: Any) -> list[TestRecord]:
        os.kill(os.getpid(), signal.SIGTERM)
        ran.append(str(run(None, folder / "one")))
        return []

    monkeypatch.setattr(replays, "replay", replay)
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(certifying, "supervise", lambda *arguments: pytest.fail("the suite was begun"))
    # Whoever has no handler in force would be ended by it, and this test with them.
    signal.signal(signal.SIGTERM, lambda number, frame: ran.append("no handler of the run"))
    try:
        code = certify("local", None, "nightly", out, seed=5, suite=suite, corpus=tmp_path / "corpus")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (code, ran) == (2, ["interrupted by a signal"])
    assert last_line(capfd.readouterr().out) == "verdict: could not run (exit 2)"
    assert verify(out).valid


def latest() -> Deadline:
    """That of a run which must come to its own end."""
    return Deadline(time.monotonic() + LATEST_S, "passed")


def test_signal_behind_the_last_look_is_not_lost(tmp_path: Path) -> None:
    """Catches: a signal that comes when pytest has ended and its end is not noticed yet, dropped without a word."""

    class Late(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            threading.Event().wait(timeout)  # a loop that spins would take the run its processor, and then its time
            return False

    late = Late()
    late.set()
    out, suite = tmp_path / "out", write(tmp_path / "suite", PASSING)
    out.mkdir()
    options = Options("local", None, "smoke", out, 5, suite=suite)
    context = RunContext("r1", "local", "smoke", None, 5, "given", out)
    limits = load("local").profile("smoke")
    assert supervise(options, context, limits, tmp_path / "log", latest(), late) == INTERRUPTED
    late.clear()
    assert supervise(options, context, limits, tmp_path / "log", latest(), late) is None


def test_end_of_an_earlier_journal_is_not_this_runs(tmp_path: Path) -> None:
    """Catches: a run that dies before its session in a folder with a whole journal, taken for one that ended well."""
    out, suite = tmp_path / "out", write(tmp_path / "suite", PASSING)
    out.mkdir()
    options = Options("local", None, "smoke", out, 5, suite=suite)
    context = RunContext("r1", "local", "smoke", None, 5, "given", out)
    limits, never = load("local").profile("smoke"), threading.Event()
    assert supervise(options, context, limits, tmp_path / "log", latest(), never) is None
    (suite / "conftest.py").write_text("import os\nos._exit(0)\n")
    assert (supervise(options, context, limits, tmp_path / "log", latest(), never) or "").startswith("pytest crashed")


def test_killed_run_leaves_nothing_running(tmp_path: Path) -> None:
    """Catches: a suite that goes on as an orphan, with its engines, when `certify` itself is killed."""
    process, _, _ = hanging_run(tmp_path)
    (run,) = psutil.Process(process.pid).children()
    process.kill()
    process.communicate(timeout=LATEST_S)
    run.wait(LATEST_S)  # raises when it still runs
