"""The out-of-tree sample suite, as a user runs it: copied away, in a process of its own, with the plugin alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from verification.certificate.report import validate
from verification.certificate.supervise import plugin_arguments
from verification.certificate.verify import verify
from verification.models.tiny import build_named

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "examples" / "sample_suite"
LIMIT_S = 500


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_named("llama-gqa3", tmp_path_factory.mktemp("sample-model") / "tiny", seed=3).path


@dataclass(frozen=True)
class Finished:
    code: int
    text: str
    out: Path

    @property
    def report(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.out / "report.json").read_text(encoding="utf-8"))
        return values

    @property
    def outcomes(self) -> dict[str, str]:
        return {test["id"]: test["outcome"] for test in self.report["tests"]}


def run(folder: Path, model: Path, *arguments: str, out: str = "out") -> Finished:
    """pytest in `folder`, which has no configuration; `-p` only where the plugin is not installed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BLINK_", "PYTEST_"))}
    environment = kept | {"PYTHONPATH": str(ROOT), "BLINK_HOME": str(folder / "home")}
    command = [sys.executable, "-m", "pytest", *plugin_arguments(), "-p", "no:cacheprovider", "-q", "--strict-markers"]
    command += ["--rootdir", str(folder), "--rig", "local", "--model", str(model), "--out", out, *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    return Finished(done.returncode, done.stdout + done.stderr, folder / out)


def left_behind(before: set[str]) -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("blink-")} - before


EXPECTED = {
    "repeatable-answers/greedy_answers_repeat": "passed",
    "ordered-delivery/drawn_programs": "passed",
    "small-pool/a_pool_that_is_too_small": "passed",
    "freeze/frozen_front_end_pauses_only_its_own": "passed",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__")))


def test_sample_suite_passes_with_two_workers(folder: Path, model: Path) -> None:
    """Catches: a plugin that works inside this repository only; workers that meet in names, ports or reports; records
    or process logs of a worker that are lost."""
    before = left_behind(set())
    done = run(folder, model, "-n", "2")
    assert done.code == 0, done.text
    assert done.outcomes == EXPECTED
    assert done.report["verdict"]["word"] == "passed"
    assert done.report["claim"]["model"]["sha256"]
    validate(done.report)
    assert verify(done.out).problems == ()
    logs = sorted(path.relative_to(done.out / "logs") for path in done.out.glob("logs/*/*.log"))
    names = {str(path.parent) for path in logs}
    assert {str(path) for path in logs} >= {f"{name}/engine.log" for name in names}
    assert {name.partition("-")[0] for name in names} == {"gw0", "gw1"}
    assert {name for name in left_behind(before) if done.report["run"]["id"] in name} == set()


FAILING = """
import pytest
from blink_core.abi.params import SamplingParams

def test_impossible(history):
    seen = history(history.draw()[0])
    print("prompts", sorted(len(r.prompt) for r in seen.program.requests))
    assert not seen.complete

def test_other(): pass

def test_nobody_is_hit(fault):
    with fault("engine-stop") as hit:
        assert hit.requests == ()

def test_fault_names(fault):
    assert {"engine-kill", "cancel-storm"} <= set(fault.names)
    with pytest.raises(ValueError, match="use fault.scenario"), fault("cancel-storm"):
        pass
    with pytest.raises(ValueError, match="unknown fault 'engine-kil', did you mean"):
        fault.about("engine-kil")

def test_killed_engine_is_started_again(engine, history, fault):
    with engine.start(http=True, cq_entries=128) as other:
        # It pauses for want of credits: it is live however long the next steps take.
        other.client.submit([1, 2, 3], SamplingParams(400, ignore_eos=True))
        assert len(other.client.poll(30.0))
        with fault("engine-kill", on=other) as hit:
            assert other.rig.exited("engine") or other.rig.wait(30.0)
        assert [request.ring for request in hit.requests] == [1]
        history.check(history(history.draw(on=other)[0], on=other), on=other)
"""


def test_failing_test_replays_from_its_recording(tmp_path: Path, model: Path) -> None:
    """Catches: a failure that leaves no recording; a replay that draws another program, or runs other tests; a fault
    that hit nobody and passes, or that a test cannot use under its own load."""
    (tmp_path / "test_mine.py").write_text(FAILING, encoding="utf-8")
    first = run(tmp_path, model, "--seed", "77", "--bundle-prompts")
    assert first.outcomes == {
        "mine/impossible": "product_failure",
        "mine/other": "passed",
        "mine/nobody_is_hit": "unknown",
        "mine/fault_names": "passed",
        "mine/killed_engine_is_started_again": "passed",
    }, first.text
    (recording,) = first.out.glob("evidence/*/failure-0.json")
    content = json.loads(recording.read_text(encoding="utf-8"))
    assert (content["run"]["seed"], content["test"]["id"]) == (77, "mine/impossible")
    # The recorded program is what runs, not one that the seed would give.
    content["history"]["program"]["requests"] = content["history"]["program"]["requests"][:1]
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps(content), encoding="utf-8")
    again = run(tmp_path, model, "--replay", "kept.json", out="again")
    length = len(content["history"]["program"]["requests"][0]["prompt"])
    assert f"prompts [{length}]" in again.text
    assert again.report["run"]["seed"] == 77
    assert again.outcomes["mine/impossible"] == "product_failure"
    assert "1 failed, 4 deselected" in again.text
    assert list(again.out.glob("evidence/*/failure-*.json")) == [], "recordings hold prompts that nobody asked for"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ('{"a": 1}', "is not a recording of Blink"),
        ('{"format": "blink-recording", "version": 9}', "has version 9, this Blink replays version 1"),
        ('{"format": "blink-recording", "version": 1, "run": {}}', "is a damaged recording"),
        (None, "cannot read the recording"),
    ],
)
def test_foreign_recording_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    """Catches: a file of another tool or version replayed as something else, or a traceback for it."""
    from verification.recording import RecordingError, read_recording

    path = tmp_path / "failure-0.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(RecordingError, match=message):
        read_recording(path)
