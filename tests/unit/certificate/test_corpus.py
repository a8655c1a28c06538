"""Nightly: a fresh printed seed, earlier failures first, cases over all nights."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.unit.certificate.conftest import LATEST_S, WhenThere
from verification.certificate import certify as certifying
from verification.certificate import provenance, replays
from verification.certificate.certify import certify
from verification.certificate.corpus import LEDGER, Corpus, CorpusError, cumulative, entry_of
from verification.certificate.join import join
from verification.certificate.options import Deadline, Options, deadlines
from verification.certificate.outcomes import Outcome
from verification.certificate.records import TestRecord
from verification.certificate.required import Profile
from verification.run_context import DEFAULT_SEED, parse_seed

# A test that fails until the file `mended` is there, and others; what ran is noted, with the seed.
SUITE = """
import pathlib, pytest
HERE = pathlib.Path(__file__).parent

@pytest.mark.blink_property("streaming", id="old_fault")
def test_old_fault(record, blink_run):
    record.cases(3)
    with (HERE / "ran").open("a") as stream:
        stream.write(f"old_fault {blink_run.seed} {blink_run.profile_name}\\n")
    assert (HERE / "mended").exists()

@pytest.mark.blink_property("streaming", id="fine")
def test_fine(record, blink_run):
    record.cases(10)
    with (HERE / "ran").open("a") as stream:
        stream.write(f"fine {blink_run.seed}\\n")
"""

HANGING = """
import pathlib, threading, pytest

@pytest.mark.blink_property("streaming", id="hang")
def test_hang(blink_run):
    if blink_run.seed != 99:
        pathlib.Path(__file__).with_name("hangs").touch()
        threading.Event().wait(600)
"""


@pytest.fixture(autouse=True)
def child_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outer pytest's own settings are none of the inner one's business."""
    for name in list(os.environ):
        if name.startswith("PYTEST_") or name in ("BLINK_INVOCATION", "BLINK_JOURNAL_ONLY"):
            monkeypatch.delenv(name)


def test_seeds_are_fresh_outside_smoke() -> None:
    """Catches: a nightly that draws the same programs every night, continuous integration that does not."""
    assert parse_seed(None) == (DEFAULT_SEED, "default")
    for profile in ("nightly", "full"):
        one, other = parse_seed(None, profile), parse_seed(None, profile)
        assert one[1] == "random"
        assert one != other
        assert parse_seed("7", profile) == (7, "given")


def test_failures_run_first_the_next_night_with_their_seed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches: a failure that is forgotten, or drawn anew; a corpus that is run last; cases that are counted twice, or
    for one night only."""
    suite, folder = tmp_path / "suite", tmp_path / "corpus"
    suite.mkdir()
    (suite / "test_mini.py").write_text(SUITE, encoding="utf-8")
    outs = [tmp_path / f"night-{i}" for i in range(2)]
    assert certify("local", None, "nightly", outs[0], seed=5, suite=suite, corpus=folder) == 1
    (suite / "ran").unlink()
    (suite / "mended").touch()
    certify("local", None, "nightly", outs[1], seed=6, suite=suite, corpus=folder)
    first, *rest = (suite / "ran").read_text(encoding="utf-8").splitlines()
    assert first == "old_fault 5 nightly"
    assert sorted(rest) == ["fine 6", "old_fault 6 nightly"]
    assert "corpus [1/1]: streaming/old_fault, seed 5" in capfd.readouterr().err
    report = json.loads((outs[1] / "report.json").read_text(encoding="utf-8"))
    replayed = report["tests"][0]
    assert (replayed["id"].partition("/")[0], replayed["outcome"], replayed["property"]) == (
        "corpus",
        "passed",
        "streaming",
    )
    corpus = report["run"]["facts"]["corpus"]
    assert (corpus["replayed"], corpus["added"], corpus["cumulative"]["runs"]) == (1, 0, 2)
    assert corpus["cumulative"]["properties"]["streaming"] == {"cases": 26, "failures": 1}


def test_replay_that_failed_is_kept_and_not_run_again(tmp_path: Path) -> None:
    """Catches: evidence of a replay that the night's own tests remove; a failed replay that runs again, and passes,
    when a shard goes on; a model that is gone and takes the whole night with it."""
    suite, folder, out = tmp_path / "suite", tmp_path / "corpus", tmp_path / "out"
    suite.mkdir()
    (suite / "test_mini.py").write_text(SUITE, encoding="utf-8")
    entries = [
        TestRecord(f"streaming/{name}", f"suite/test_mini.py::test_{name}", "streaming", Outcome.PRODUCT_FAILURE)
        for name in ("old_fault", "fine")
    ]
    kept = entry_of(entries[0], "local", "nightly", None, 5)
    gone = entry_of(entries[1], "local", "nightly", str(tmp_path / "gone.gguf"), 5)
    for entry in (kept, gone):
        Corpus(folder).add(entry, None)
    for _ in range(2):
        assert certify("local", None, "nightly", out, seed=6, suite=suite, corpus=folder, shard="1/2") == 1
        (suite / "mended").touch()
        tests = {t["id"]: t for t in json.loads((out / "report.json").read_text(encoding="utf-8"))["tests"]}
        assert tests[f"corpus/{kept.name}"]["outcome"] == "product_failure"
        assert (out / tests[f"corpus/{kept.name}"]["bundle"]).is_dir()
        assert tests[f"corpus/{gone.name}"]["outcome"] == "missing"
        assert "gone.gguf" in tests[f"corpus/{gone.name}"]["message"]
    assert (suite / "ran").read_text(encoding="utf-8").count("old_fault 5") == 1


def test_failures_and_cases_of_every_shard_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a failure that another shard than the first found, forgotten; its cases not counted, or counted twice
    when the shard goes on; a joined report with the corpus of its last shard."""
    monkeypatch.setattr(provenance, "sources_digest", lambda: "ab" * 32)  # whoever edits the tree meanwhile
    monkeypatch.setattr(replays, "sources_digest", lambda: "ab" * 32)
    monkeypatch.setattr(provenance, "engine_modules", lambda: {"_native.so": "cd" * 32})
    monkeypatch.setattr(provenance, "source_state", lambda: {"git_commit": "0" * 40, "dirty": False})
    suite, folder = tmp_path / "suite", tmp_path / "corpus"
    suite.mkdir()
    (suite / "test_mini.py").write_text(SUITE, encoding="utf-8")
    Corpus(folder).note(
        {"seed": 1, "profile": "nightly", "model": None, "sources": "a", "started": "2026-01-02"}
        | {"properties": {"streaming": {"cases": 100, "failures": 0}}}
    )
    outs = [tmp_path / f"shard-{i}" for i in (1, 2)]
    codes = [
        certify("local", None, "nightly", out, seed=5, suite=suite, corpus=folder, shard=f"{i}/2")
        for i, out in ((1, outs[0]), (2, outs[1]), (2, outs[1]))
    ]
    assert codes == [0, 1, 1]
    (entry,) = Corpus(folder).entries("local")
    assert (entry.test, entry.seed) == ("streaming/old_fault", 5)
    report = json.loads((outs[1] / "report.json").read_text(encoding="utf-8"))
    corpus = report["run"]["facts"]["corpus"]
    assert corpus["own"] == {"streaming": {"cases": 3, "failures": 1}}
    assert corpus["cumulative"]["properties"] == {"streaming": {"cases": 113, "failures": 1}}
    assert corpus["cumulative"]["runs"] == 2
    joined = join(outs, tmp_path / "whole")["run"]["facts"]["corpus"]
    assert joined["own"] == {"streaming": {"cases": 13, "failures": 1}}
    assert joined["cumulative"] == corpus["cumulative"]
    assert joined["replayed"] == 0


def test_replays_have_one_deadline_and_what_was_not_replayed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: replays that take a whole run's time each; one that was not run for want of time, of which the report
    says nothing; the run's own tests left out with them."""
    suite, folder, out = tmp_path / "suite", tmp_path / "corpus", tmp_path / "out"
    suite.mkdir()
    (suite / "test_mini.py").write_text(HANGING, encoding="utf-8")
    for number in range(3):
        record = TestRecord("streaming/hang", "suite/test_mini.py::test_hang", "streaming", Outcome.PRODUCT_FAILURE)
        Corpus(folder).add(entry_of(record, "local", "nightly", None, 5 + number), None)

    def when_one_hangs(options: Options, limits: Profile) -> tuple[Deadline, Deadline]:
        replays, whole = deadlines(options, limits)
        return WhenThere(replays.end, replays.passed, suite / "hangs"), whole

    monkeypatch.setattr(certifying, "deadlines", when_one_hangs)
    assert certify("local", None, "nightly", out, seed=99, suite=suite, corpus=folder, deadline_s=LATEST_S) == 2
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    first, second, third = (test for test in report["tests"] if test["id"].startswith("corpus/"))
    assert first["outcome"] == "infrastructure"
    for test in (first, second, third):
        assert f"the deadline of {LATEST_S / 2:g} s for all replays of earlier failures passed" in test["message"]
    assert [second["outcome"], third["outcome"]] == ["missing", "missing"]
    assert any(f"saved failure {third['id']} was not replayed" in reason for reason in report["verdict"]["reasons"])
    assert {test["id"]: test["outcome"] for test in report["tests"]}["streaming/hang"] == "passed"


def test_replay_in_which_the_process_crashed_is_not_run_again(tmp_path: Path) -> None:
    """Catches: a crash, maybe by a fault of the product, that a replay passes when the shard goes on."""
    suite, folder, out = tmp_path / "suite", tmp_path / "corpus", tmp_path / "out"
    suite.mkdir()
    (suite / "test_mini.py").write_text(
        SUITE.replace("assert (", "import os; (").replace(".exists()", ".exists() or os.kill(os.getpid(), 11)"),
        encoding="utf-8",
    )
    record = TestRecord(
        "streaming/old_fault", "suite/test_mini.py::test_old_fault", "streaming", Outcome.PRODUCT_FAILURE
    )
    entry = entry_of(record, "local", "nightly", None, 5)
    Corpus(folder).add(entry, None)
    for _ in range(2):
        assert certify("local", None, "nightly", out, seed=6, suite=suite, corpus=folder, shard="1/2") == 2
        (suite / "mended").touch()
        tests = {t["id"]: t for t in json.loads((out / "report.json").read_text(encoding="utf-8"))["tests"]}
        assert tests[f"corpus/{entry.name}"]["outcome"] == "infrastructure"
        assert "SIGSEGV" in tests[f"corpus/{entry.name}"]["message"]
    assert (suite / "ran").read_text(encoding="utf-8").count("old_fault 5") == 1


def test_corpus_that_cannot_be_written_costs_no_report(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches: a night whose report is lost because its failure could not be kept; one that says nothing of that."""
    suite, folder = tmp_path / "suite", tmp_path / "file" / "corpus"
    suite.mkdir()
    (suite / "test_mini.py").write_text(SUITE, encoding="utf-8")
    (tmp_path / "file").touch()
    assert certify("local", None, "nightly", tmp_path / "out", seed=5, suite=suite, corpus=folder) == 1
    assert "session: the failure corpus: cannot keep a failure" in capfd.readouterr().out


def test_ledger_survives_a_writer_that_died(tmp_path: Path) -> None:
    """Catches: a line cut short that takes with it all that was noted after it."""
    corpus = Corpus(tmp_path)
    corpus.note({"seed": 1})
    with (tmp_path / LEDGER).open("a") as stream:
        stream.write('{"seed": 2, "pro')
    corpus.note({"seed": 3})
    assert corpus.runs() == [{"seed": 1}, {"seed": 3}]


def test_shards_of_one_run_add_up_and_other_divisions_do_not(tmp_path: Path) -> None:
    """Catches: shards counted as repeated runs, of which the last counts; a run divided otherwise counted again."""
    run = {"seed": 1, "profile": "nightly", "model": None, "sources": "a", "started": "2026-01-02"}

    def shard(name: str | None, cases: int, failures: int = 0) -> dict[str, object]:
        return run | {"shard": name, "properties": {"p": {"cases": cases, "failures": failures}}}

    halves = [shard("1/2", 10), shard("2/2", 7, 1), shard("2/2", 20), shard("2/2", 3)]
    found = cumulative(halves)
    assert (found["runs"], found["properties"]) == (1, {"p": {"cases": 30, "failures": 1}})
    assert cumulative([*halves, shard("1/3", 5), shard(None, 29)])["properties"]["p"]["cases"] == 30


def test_same_draws_count_once(tmp_path: Path) -> None:
    """Catches: a repeated run that is counted as new evidence."""
    run = {"seed": 1, "profile": "nightly", "model": None, "sources": "a", "started": "2026-01-02"}
    run |= {"properties": {"p": {"cases": 10, "failures": 0}}}
    found = cumulative([run, run, run | {"seed": 2}, run | {"sources": "b"}])
    assert (found["runs"], found["properties"]["p"]["cases"]) == (3, 30)


def test_entries_keep_their_recording_and_damage_is_named(tmp_path: Path) -> None:
    """Catches: a corpus that drops what it cannot read, or forgets the recorded program."""
    corpus = Corpus(tmp_path / "corpus")
    record = TestRecord("p/x", "suite/test_x.py::test_x", "p", Outcome.PRODUCT_FAILURE)
    recording = tmp_path / "failure-0.json"
    recording.write_text("{}", encoding="utf-8")
    entry = entry_of(record, "local", "nightly", "m", 7)
    assert corpus.add(entry, recording)
    assert not corpus.add(entry, recording)
    (found,) = corpus.entries("local")
    assert (found.test, found.seed, found.model, found.recording is not None) == ("p/x", 7, "m", True)
    assert corpus.entries("gpu") == []
    (corpus.folder / "broken.json").write_text('{"format": "other"}', encoding="utf-8")
    with pytest.raises(CorpusError, match=r"broken\.json"):
        corpus.entries("local")
