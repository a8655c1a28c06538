"""Runs side by side: processes of a fleet, all shards of a run by one command, smoke runs at once."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from verification.benchmarks import flakes
from verification.certificate import fleet
from verification.certificate.fleet import run_fleet
from verification.certificate.output import REPORT
from verification.certificate.side_by_side import PARTS, WHOLE, certify_shards
from verification.certificate.verify import verify

ROOT = Path(__file__).resolve().parents[3]
LONG_S = 60.0
# Notes when it begins and ends; ends when two have begun.
MEMBER = """
import os, sys, threading
name, log, waited = sys.argv[1], open(sys.argv[2], "a+b", buffering=0), threading.Event()
log.write(f"+ {name}\\n".encode())
for _ in range(1200):
    log.seek(0)
    if log.read().count(b"+") >= 2:
        break
    waited.wait(0.05)
else:
    sys.exit("nobody else begins")
log.write(f"- {name}\\n".encode())
print(os.environ["OMP_NUM_THREADS"])
"""
# `blink` with another suite, whose files are not digested, so that whoever edits the tree meanwhile changes nothing.
BLINK = """
import sys
from pathlib import Path
from verification.certificate import certify as certifying, provenance
provenance.sources_digest = lambda: "ab" * 32
provenance.engine_modules = lambda: {"_native.so": "cd" * 32}
provenance.source_state = lambda: {"git_commit": "0" * 40, "dirty": False}
certify, suite = certifying.certify, Path(sys.argv.pop(1))
certifying.certify = lambda rig, model, *rest, **named: certify(rig, None, *rest, **named, suite=suite)
from verification import cli
cli.main()
"""
SUITE = """
import pytest
from verification.certificate.required import load

def make(name, short):
    @pytest.mark.blink_property(name, id=short)
    def test(record):
        record.cases(10)
        record.situation("preemption", 2)
    return test

for name, requirement in load("local").profile("smoke").properties.items():
    for number, one in enumerate(requirement.tests):
        globals()[f"test_{name}_{number}"] = make(name, one.partition("/")[2])
"""


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outer pytest's own settings are none of the inner ones' business."""
    for name in list(os.environ):
        if name.startswith("PYTEST_") or name in ("BLINK_INVOCATION", "BLINK_JOURNAL_ONLY", *fleet.THREADS):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_no_more_than_asked_for_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: members one after the other, more of them at once than asked for, one that is never started or never
    told, numerical libraries that take all cores in each."""
    monkeypatch.setattr(fleet, "cores", lambda: 8)
    log, told = tmp_path / "log", list[tuple[str, int]]()
    commands = {name: [sys.executable, "-c", MEMBER, name, str(log)] for name in "abcd"}
    commands["bad"] = [sys.executable, "-c", "exit(3)"]
    run_fleet(commands, 2, tmp_path / "logs", threading.Event(), lambda name, code, _: told.append((name, code)))
    assert sorted(told) == [("a", 0), ("b", 0), ("bad", 3), ("c", 0), ("d", 0)]
    signs = [line.split()[0] for line in log.read_text().splitlines()]
    assert max(itertools.accumulate(1 if sign == "+" else -1 for sign in signs)) == 2
    assert [(tmp_path / "logs" / f"{name}.log").read_text() for name in "abcd"] == ["4\n"] * 4


def test_an_interrupt_ends_the_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: members left running, one that is deaf to SIGTERM waited for without end, another one started."""
    monkeypatch.setattr(fleet, "_STOP_S", 1.0)
    deaf = (
        "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); sys.stdin = None; "
    )
    deaf += f"import threading; threading.Event().wait({LONG_S})"
    commands = {name: [sys.executable, "-c", deaf] for name in ("a", "b", "never")}
    interrupted, logs = threading.Event(), tmp_path / "logs"

    def interrupt() -> None:
        for name in ("a", "b"):
            while not (logs / f"{name}.log").is_file() or "up" not in (logs / f"{name}.log").read_text():
                if stop.wait(0.05):
                    return
        interrupted.set()

    stop, told = threading.Event(), list[str]()
    watcher = threading.Thread(target=interrupt)
    watcher.start()
    try:
        run_fleet(commands, 2, logs, interrupted, lambda name, code, seconds: told.append(name))
    finally:
        stop.set()
        watcher.join(LONG_S)
    assert told == []
    assert not (logs / "never.log").exists()
    assert not [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]


def test_members_end_with_whoever_runs_them(tmp_path: Path) -> None:
    """Catches: members that go on for an hour when the command that started them was killed."""
    code = "from verification.certificate.fleet import follow_parent; follow_parent(); "
    code += f"print('up', flush=True); import threading; threading.Event().wait({LONG_S})"
    runner = "import sys, threading; from pathlib import Path; from verification.certificate.fleet import run_fleet; "
    runner += "run_fleet({'a': [sys.executable, '-c', sys.argv[1]]}, 1, Path(sys.argv[2]), threading.Event(), print)"
    process = subprocess.Popen([sys.executable, "-c", runner, code, str(tmp_path)])
    try:
        log, waited = tmp_path / "a.log", threading.Event()
        for _ in range(1200):
            if log.is_file() and "up" in log.read_text():
                break
            waited.wait(0.05)
        (child,) = psutil.Process(process.pid).children()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(LONG_S)
    child.wait(LONG_S)  # raises when it still runs


def blink(tmp_path: Path) -> tuple[str, ...]:
    """The command line of a `blink` that runs SUITE."""
    suite, script = tmp_path / "suite", tmp_path / "blink.py"
    suite.mkdir()
    (suite / "test_mini.py").write_text(SUITE, encoding="utf-8")
    script.write_text(BLINK, encoding="utf-8")
    return (sys.executable, str(script), str(suite))


def test_all_shards_by_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches: a shard that is not run or not joined, a joined run that cannot be verified, a shard's failure that the
    joined verdict does not have, a missing report that is taken for a pass, and so is one of an earlier run."""
    from verification.certificate import provenance

    monkeypatch.setattr(provenance, "sources_digest", lambda: "ab" * 32)
    monkeypatch.setattr(provenance, "engine_modules", lambda: {"_native.so": "cd" * 32})
    monkeypatch.setattr(provenance, "source_state", lambda: {"git_commit": "0" * 40, "dirty": False})
    command, out = blink(tmp_path), tmp_path / "out"
    words = ["--rig", "local", "--profile", "smoke", "--seed", "7"]
    assert certify_shards(words, "local", "smoke", out, "7", 3, 2, command=command) == 0
    said = capfd.readouterr()
    assert [f"shard {i}/3: passed (exit 0)" in said.err for i in (1, 2, 3)] == [True] * 3
    assert said.out.splitlines()[-1] == "verdict: passed (exit 0)"
    assert verify(out / WHOLE).valid
    tests = json.loads((out / WHOLE / REPORT).read_text())["tests"]
    assert {test["outcome"] for test in tests} == {"passed"}
    # Another seed in the same folder: the shards refuse, and what they left for the first one is no answer to this.
    words[-1] = "8"
    assert certify_shards(words, "local", "smoke", out, "8", 3, 2, command=command) == 2
    said = capfd.readouterr()
    assert "no report of this run from shards 1, 2, 3 of 3" in said.err
    assert said.out.splitlines()[-1] == "verdict: could not run (exit 2)"
    assert "seed was 7 and is 8" in (out / PARTS / "1.log").read_text()
    (out / PARTS / "2" / REPORT).unlink()
    # What stands for `blink` leaves nothing now: the reports of the two others do not make a whole.
    assert certify_shards(words, "local", "smoke", out, "7", 3, 2, command=(sys.executable, "-c", "exit(2)")) == 2
    said = capfd.readouterr()
    assert "shard 2/3: no report (exit 2)" in said.err
    assert said.out.splitlines()[-1] == "verdict: could not run (exit 2)"


@pytest.mark.parametrize(
    ("seed", "count", "jobs", "said"),
    [(None, 3, 2, "needs --seed NUMBER"), ("7", 65, 2, "65; 1 to 64"), ("7", 3, 0, "--jobs 0"), ("x", 3, 2, "x")],
)
def test_what_no_shard_could_run_is_refused(
    seed: str | None, count: int, jobs: int, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches: dozens of processes that each say the same error, shards that draw from different seeds."""
    out = tmp_path / "out"
    assert certify_shards([], "local", "smoke", out, seed, count, jobs, command=(sys.executable, "-c", "exit(5)")) == 2
    assert said in capfd.readouterr().err
    assert not out.exists()


def test_smoke_runs_side_by_side(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches: a seed that was not run and is not told, an earlier run's report that is counted for this one's."""
    out = tmp_path / "out"
    arguments = ["--runs", "2", "--first-seed", "5", "--jobs", "2", "--out", str(out), "-k", "same_draws"]
    assert flakes.main(arguments) == 0
    said = capfd.readouterr().out
    assert "2 runs of " in said
    assert "0 not passed" in said
    assert sorted(path.name for path in out.glob("seed-*")) == ["seed-5", "seed-6"]
    assert flakes.main(arguments) == 2
    assert "holds runs of the seeds 5, 6" in capfd.readouterr().err
    assert flakes._tell(flakes.Tally(), [out], (5, 6, 7)) == 2
    assert "seed 7: the run left no report" in capfd.readouterr().out
