"""A user's own suite against a broken engine: what is left behind, and whether the printed command shows it again."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hil_rigs.description import RIGS_DIR
from tests.unit.failures import engine as planted
from tests.unit.failures.material import everything
from tests.unit.plugin.conftest import ForkServer, run_suite
from verification.certificate.certify import certify
from verification.certificate.verify import verify
from verification.failures import triage
from verification.models.tiny import build_named
from verification.run_context import DEFAULT_SEED

# What a user writes: an engine without a model, programs by hypothesis, the suite's own check.
SUITE = """
import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hil_rigs.description import load_rig
from hil_rigs.local import LocalOptions, LocalRig
from verification.fixtures import RING, Subject
from verification.program import Shape, draw_program
from verification.properties import queue_ordering

SIZES = {"pages": 34, "max_rows": 4, "token_budget": 32, "max_len": 64, "slots": 16}
SIZES |= {"log_entries": 1 << 14, "log_level": 2}


@pytest.fixture
def noop(blink_run, thresholds):
    with LocalRig(load_rig(blink_run.rig), None, http=False, options=LocalOptions(engine=SIZES)) as rig:
        rig.memory
        yield Subject("noop", rig, rig.ring(RING), Shape(2**31 - 1, 16, 60, most_new=12), thresholds, 64)


@pytest.mark.blink_property("queue-ordering")
def test_drawn(noop, judge):
    @settings(phases=(Phase.explicit, Phase.generate))
    @given(st.integers(0, 2**63 - 1))
    def programs(seed):
        history = noop.run(draw_program(random.Random(seed), noop.shape))
        judge(queue_ordering.check_history(history, eos_ids=(), max_len=64), history)

    programs()


def test_bare(noop, seed):
    noop.run(draw_program(random.Random(seed), noop.shape))
    assert noop.dead is not None, "what a user asserts"
"""


def rig_file(folder: Path, fault: str) -> str:
    """A description of the local rig whose engine is the planted one; its name, relative to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = (RIGS_DIR / "local.yaml").read_text(encoding="utf-8")
    description = yaml.safe_load(text) | {"name": "planted", "engine_command": [planted.__file__, fault]}
    (folder / "planted.yaml").write_text(yaml.safe_dump(description), encoding="utf-8")
    return "planted.yaml"


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Any:
    """A run with the default seed against an engine whose step raises."""
    folder = tmp_path_factory.mktemp("broken")
    rig = rig_file(folder, "raise")
    return run_suite(fork_server, folder, SUITE, "--rig", rig, "--out", "out", "-k", "drawn")


def entry(done: Any, test: str) -> dict[str, Any]:
    found: dict[str, Any] = {one["id"]: one for one in done.report["tests"]}[test]
    return found


def bundle_of(done: Any, test: str) -> Path:
    """The bundle that the report names."""
    named = entry(done, test)["bundle"]
    assert named
    return Path(done.out / named)


def everything_passed_on(out: Path) -> str:
    """The text of what a run leaves beside its bundles and logs: report, page, JUnit, allure, journal."""
    files = [out / name for name in ("report.json", "report.html", "junit.xml", "journal.jsonl")]
    files += [path for path in (out / "allure-results").iterdir() if path.is_file()]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def test_failure_is_bundled_and_shown(broken: Any) -> None:
    """Catches: a bundle that a report, a page, allure or the signature does not know of; logs that are not joined."""
    assert broken.code == 1, broken.text
    record = entry(broken, "queue-ordering/drawn")
    bundle = bundle_of(broken, "queue-ordering/drawn")
    failure = triage.read(bundle / "failure.json")
    assert failure["signature"]["id"] == record["signature"]
    assert failure["signature"]["pattern"] == "request N: ended with ERROR MODEL_ERROR, nothing was wrong with it"
    assert failure["engine"]["at_step_boundary"] is True
    assert (failure["versions"]["python"], failure["seeds"]["root"]) != (None, None)
    rows = [json.loads(line) for line in (bundle / "timeline.jsonl").read_text().splitlines()]
    assert {"ring", "engine-log", "engine.log"} <= {row.get("source") for row in rows}
    mine = [row for row in rows if row.get("failing")]
    assert next(row.get("what") for row in mine) == "SUBMIT"
    assert any(row.get("kind") == "ERROR" and row.get("reason") == "MODEL_ERROR" for row in mine)
    assert "model step failed" in (bundle / "engine.log").read_text()
    page = (broken.out / "report.html").read_text(encoding="utf-8")
    assert f'href="{record["bundle"]}/timeline.txt"' in page
    (result,) = [json.loads(path.read_text()) for path in (broken.out / "allure-results").glob("*-result.json")]
    assert {"timeline.txt", "failure.json"} <= {one["name"] for one in result["attachments"]}
    assert all((broken.out / "allure-results" / one["source"]).is_file() for one in result["attachments"])
    assert verify(broken.out).problems == ()
    (group,) = triage.triage([broken.out]).groups
    assert (group.signature, group.replay) == (record["signature"], record["replay"])


def test_printed_command_reproduces_the_failure(broken: Any, fork_server: ForkServer) -> None:
    """Catches: a command that does not run, runs another test or draws other programs; more than one command.

    The run had the default seed, and the command names it: both must draw the same.
    """
    (command,) = re.findall(r"^replay: (.*)$", broken.text, re.MULTILINE)
    assert f"--seed {DEFAULT_SEED}" in command
    record = entry(broken, "queue-ordering/drawn")
    assert command == record["replay"]
    folder = broken.out.parent
    words = shlex.split(command)
    assert words[0] == "pytest"
    arguments = words[3:] if words[1:3] == ["-p", "verification.plugin"] else words[1:]
    again = folder / "again"
    code, text = fork_server.run(folder, [*arguments, "--out", str(again), "--bundle-prompts"])
    assert code == 1, text
    report = json.loads((again / "report.json").read_text())
    (test,) = [one for one in report["tests"] if one["outcome"] == "product_failure"]
    assert (test["id"], test["signature"]) == (record["id"], record["signature"])

    # The same program, draw by draw: lengths in the one bundle are lengths in the other.
    first, second = bundle_of(broken, record["id"]), again / test["bundle"]
    withheld = json.loads((first / "program-0.json").read_text())["requests"]
    shown = json.loads((second / "program-0.json").read_text())["requests"]
    assert [r["prompt"]["tokens"] for r in withheld] == [len(r["prompt"]) for r in shown]
    assert [r["params"]["seed"] for r in withheld] == [r["params"]["seed"] for r in shown]

    # And none of its tokens, nor of those that the engine made or logged, is in the first bundle.
    text = everything(first)
    events = [json.loads(line) for line in (second / "history-0.jsonl").read_text().splitlines()]
    tokens = {t for r in shown for t in r["prompt"] if t > 10**8}
    tokens |= {e["token"] for e in events if e.get("what") == "EVENT" and e["kind"] == "TOKEN"}
    assert len(tokens) > 20
    passed_on = everything_passed_on(broken.out)
    assert [token for token in tokens if str(token) in passed_on] == []
    assert [token for token in tokens if str(token) in text] == []
    assert any(str(token) in (second / "engine.log").read_text() for token in tokens)  # it had logged some


def test_dead_engine_leaves_state_log_and_status(tmp_path: Path, fork_server: ForkServer) -> None:
    """Catches: a crash of which nothing is left: no exit status, no event log, no end of the process log."""
    rig = rig_file(tmp_path / "suite", "segfault")
    done = run_suite(fork_server, tmp_path / "suite", SUITE, "--rig", rig, "--out", "out", "--seed", "5", "-k", "drawn")
    record = entry(done, "queue-ordering/drawn")
    assert (record["outcome"], record["clause"]) == ("product_failure", "bounded-wait"), done.text
    assert "exited with status -11" in record["signature_pattern"]
    bundle = bundle_of(done, "queue-ordering/drawn")
    failure = triage.read(bundle / "failure.json")
    assert failure["engine"]["died"].startswith("engine exited with status -11")
    assert failure["engine"]["log_entries"] > 0
    assert failure["engine"]["at_step_boundary"] is False
    rows = [json.loads(line) for line in (bundle / "timeline.jsonl").read_text().splitlines()]
    assert rows[-1]["what"] == "died"
    assert [row for row in rows if row.get("failing") and row["source"] == "engine-log"]


def test_bare_assert_has_a_bundle_too(tmp_path: Path, fork_server: ForkServer) -> None:
    """Catches: bundles only for those who know of `judge`; a user's suite without it left with nothing."""
    rig = rig_file(tmp_path / "suite", "none")
    done = run_suite(fork_server, tmp_path / "suite", SUITE, "--rig", rig, "--out", "out", "-k", "bare")
    record = entry(done, "mini/bare")
    assert record["outcome"] == "product_failure", done.text
    # What the assertion says may hold what a model answered: it stands on the terminal, not in what is passed on.
    assert record["signature_pattern"] == "AssertionError @ test_bare"
    assert "what a user asserts" not in everything(bundle_of(done, "mini/bare"))
    failure = triage.read(bundle_of(done, "mini/bare") / "failure.json")
    assert [program["subject"] for program in failure["programs"]] == ["noop"]
    assert any(place.endswith("in test_bare") for place in failure["traceback"])


def test_without_output_the_command_is_printed_all_the_same(suite: Callable[..., Any]) -> None:
    """Catches: a replay command that only those get who asked for a report."""
    done = suite("def test_one(): assert 1 == 2\n", "--rig", "local")
    assert re.findall(r"^replay: (.*)$", done.text, re.MULTILINE) == [
        f"{'pytest' if 'verification.plugin' not in done.text else 'pytest -p verification.plugin'} "
        f"test_mini.py::test_one --rig local --profile smoke --seed {DEFAULT_SEED}"
    ]
    assert not (done.out / "failures").exists()


OVER_HTTP = """
import pytest
from verification.result import CheckResult, Verdict

SECRET = "Zebra-quilt 4711: the password is hunter2"


def ask(rig, client):
    for stream in (False, True):
        options = {"model": rig.model_name, "prompt": SECRET, "max_tokens": 12, "temperature": 0.0, "stream": stream}
        answer = client.completions.create(**options)
    text = answer.choices[0].text if not stream else "".join(c.choices[0].text for c in answer if c.choices)
    return text


@pytest.mark.blink_property("streaming")
def test_answer(rig, client):
    text = ask(rig, client)
    assert text == SECRET, f"{text} is no echo of {SECRET}"


@pytest.mark.blink_property("streaming")
def test_said(rig, client, record):
    text = ask(rig, client)
    record.check(CheckResult(Verdict.INVALID, "streaming", "echo", f"{text} is no echo of {SECRET}", {"shown": text}))
"""


def test_http_failure_joins_front_end_and_engine(tmp_path: Path, fork_server: ForkServer) -> None:
    """Catches: HTTP requests that nothing joins with their slot; a prompt or an answer that a user sent by HTTP in a
    bundle, a report, JUnit's or allure's file; the front end's log without the lines that tell a request's slot."""
    build_named("llama-gqa3", tmp_path / "tiny", seed=1)
    arguments = ("--rig", "local", "--model", str(tmp_path / "tiny"), "--out", "out")
    done = run_suite(fork_server, tmp_path / "suite", OVER_HTTP, *arguments)
    record = entry(done, "streaming/answer")
    assert record["outcome"] == "product_failure", done.text
    bundle = bundle_of(done, "streaming/answer")
    rows = [json.loads(line) for line in (bundle / "timeline.jsonl").read_text().splitlines()]
    ids = [row["http_request"] for row in rows if row["source"] == "http"]
    assert len(set(ids)) == 2
    for request_id in ids:
        mine = [row for row in rows if row.get("http_request") == request_id]
        assert {"http", "engine-log", "frontend.log"} <= {row["source"] for row in mine}
        assert {row.get("kind") for row in mine} >= {"ACCEPT", "ADMIT", "FINISH"}
        assert len({(row["ring"], row["slot"], row["generation"]) for row in mine}) == 1
        assert all(row["failing"] for row in mine)
    text = everything(bundle)
    for secret in ("Zebra-quilt", "hunter2", "password"):
        assert secret not in text
    answer = done.text.partition("AssertionError: ")[2].partition(" is no echo")[0]
    assert len(answer) > 12, done.text
    assert answer not in text
    assert answer not in record["signature_pattern"]
    # A check of the user's own says it without quotes: it is known from the wire.
    record = entry(done, "streaming/said")
    assert record["signature_pattern"] == "S is no echo of S"
    text = everything(bundle_of(done, "streaming/said"))
    assert [secret for secret in (answer, answer[1:-1], "hunter2") if secret in text] == []
    passed_on = everything_passed_on(done.out)
    assert [secret for secret in (answer, answer[1:-1], "Zebra-quilt", "hunter2") if secret in passed_on] == []
    assert "in test_said" in record["details"], "the places of the traceback are no secret"


def test_log_of_a_certification_has_no_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: what a test printed or compared, a fixture's error included, in `pytest.log` or a file beside it."""
    (suite := tmp_path / "suite").mkdir()
    text = """
import pytest
ANSWER = "".join(["Zebra", "-", "quilt"])
@pytest.fixture
def broken(): raise ValueError(ANSWER)
def test_said():
    print(ANSWER)
    assert ANSWER == "Paris"
def test_broken(broken): pass
"""
    (suite / "test_mini.py").write_text(text, encoding="utf-8")
    monkeypatch.setenv("BLINK_HOME", str(tmp_path / "home"))
    assert certify("local", None, "smoke", tmp_path / "out", suite=suite) == 1
    log = (tmp_path / "out" / "pytest.log").read_text(encoding="utf-8")
    assert "in test_said" in log
    assert [word for word in ("Zebra-quilt", "Paris") if word in log + everything_passed_on(tmp_path / "out")] == []
