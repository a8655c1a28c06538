"""`--replay`: the recorded program runs where it ran, or the test says that it did not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blink_core.abi.params import SamplingParams
from tests.unit.plugin.conftest import ForkServer, run_suite
from verification.history import History
from verification.models.tiny import build_named
from verification.program import Program, RequestSpec
from verification.recording import read_recording, recording
from verification.run_context import RunContext
from verification.serving import replayed, started_name

PROGRAM = Program((RequestSpec((5, 6, 7), SamplingParams(max_tokens=3)),))

STARTED = """
import pytest


@pytest.mark.blink_property("queue-ordering")
def test_started(engine, history):
    for _ in range(2):  # the second one fails: engines of one kind are told by their count
        with engine.start(pages=18) as small:
            (program,) = history.draw(on=small)
            ran = history(program, on=small)
    print("lengths", [len(request.prompt) for request in ran.program.requests])
    assert False
"""


def write(path: Path, *, rig: str = "local", subject: str = "model", test: str = "mini/plain") -> Path:
    about = {"run": RunContext("r", rig, "smoke", None, 7, "given", None).describe() | {"rig_kind": rig}}
    about["test"] = {"id": test, "nodeid": "test_mini.py::test_plain", "property": None}
    content = recording(about, None, history=History(PROGRAM, 1, subject=subject))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_recording_that_never_ran_is_undecided(suite: Any, tmp_path: Path) -> None:
    """Catches: a test that passes under `--replay` although nothing of the recording was run."""
    file = write(tmp_path / "failure-0.json")
    done = suite("def test_plain(): pass\n", "--rig", "local", "--out", "out", "--replay", str(file))
    assert done.outcome("mini/plain") == "unknown", done.text
    (test,) = [one for one in done.report["tests"] if one["id"] == "mini/plain"]
    assert "never ran in this test" in test["message"]
    assert done.code == 1


def test_recording_of_another_rig_is_refused(suite: Any, tmp_path: Path) -> None:
    """Catches: a program of one rig judged on another, as if it had been run there."""
    file = write(tmp_path / "failure-0.json", rig="moon")
    done = suite("def test_plain(): pass\n", "--rig", "local", "--replay", str(file))
    assert done.code == 4
    assert "is of rig moon (kind moon), this run is on rig local (kind local)" in done.text


def test_started_engines_have_stable_names(tmp_path: Path) -> None:
    """Catches: a recording that names an engine by a count which another run gives to another engine."""
    options = {"pages": 18, "max_rows": 6}
    first, again = (started_name("a/b", Path(folder) / "tiny", False, dict(options)) for folder in ("x", "y"))
    assert first != again, "two engines of one run would meet in their names"
    run = RunContext("r", "local", "smoke", None, 7, "given", None)
    run.replay = read_recording(write(tmp_path / "f.json", subject=first))
    assert replayed(run, again) == PROGRAM
    others = [
        started_name("a/c", Path("tiny"), False, options),
        started_name("a/b", Path("other"), False, options),
        started_name("a/b", Path("tiny"), True, options),
        started_name("a/b", Path("tiny"), False, {"pages": 19}),
    ]
    assert [replayed(run, name) for name in (*others, "model")] == [None] * 5


def test_started_engine_replays(tmp_path: Path, fork_server: ForkServer) -> None:
    """Catches: `--replay` of a program that ran on an engine of `engine.start`, ignored without a word."""
    build_named("llama-gqa3", tmp_path / "tiny", seed=1)
    arguments = ("--rig", "local", "--model", str(tmp_path / "tiny"))
    folder = tmp_path / "suite"
    first = run_suite(fork_server, folder, STARTED, *arguments, "--seed", "11", "--out", "out", "--bundle-prompts")
    assert first.outcome("queue-ordering/started") == "product_failure", first.text
    files = sorted((first.out / "evidence").rglob("failure-*.json"))
    recorded = read_recording(files[0])
    assert recorded.subject.startswith("engine-")
    changed = json.loads(files[0].read_text(encoding="utf-8"))
    changed["history"]["program"] = PROGRAM.to_json()  # one that no draw gives
    (tmp_path / "mine.json").write_text(json.dumps(changed), encoding="utf-8")
    code, text = fork_server.run(folder, ["test_mini.py", *arguments, "--replay", str(tmp_path / "mine.json")])
    assert code == 1, text
    assert "lengths [3]" in text


def test_own_failure_outranks_the_recording_that_never_ran(suite: Any, tmp_path: Path) -> None:
    """Catches: a failure of the test itself hidden behind the note on its recording."""
    file = write(tmp_path / "failure-0.json")
    done = suite("def test_plain(): assert False\n", "--rig", "local", "--out", "out", "--replay", str(file))
    assert done.outcome("mini/plain") == "product_failure"
