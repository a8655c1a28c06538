"""Shards: the same parts everywhere, a shard that goes on where it was interrupted, one report of all of them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.certificate.conftest import MakeReport
from verification.certificate import certify as certifying
from verification.certificate import output, provenance, required
from verification.certificate.certify import certify
from verification.certificate.collector import JOURNAL, Collector
from verification.certificate.interruptions import DIED, MOST
from verification.certificate.join import JoinError, check_shards, join
from verification.certificate.outcomes import Outcome
from verification.certificate.records import TestRecord
from verification.certificate.required import load
from verification.certificate.shards import (
    Costs,
    ShardError,
    parse_shard,
    partition,
    read_state,
    registered_costs,
    write_state,
)
from verification.certificate.supervise import supervise
from verification.certificate.verify import verify

# A test for each own id that rig `local` requires; each notes that it ran. RUN names the file.
SUITE = """
import os, pathlib, pytest
from verification.certificate.required import load
from verification.result import CheckResult, Verdict

RAN = pathlib.Path(__file__).with_name("ran")
STOP = pathlib.Path(__file__).with_name("stop")

def make(name, short, number):
    @pytest.mark.blink_property(name, id=short)
    def test(record):
        record.cases(10)
        record.situation("preemption", 2)
        if number == 3 and STOP.exists():  # the process dies in the midst
            os.kill(os.getpid(), int(STOP.read_text() or 9))
        with RAN.open("a") as stream:
            stream.write(f"{name}/{short}\\n")
    return test

for name, requirement in load("local").profile("smoke").properties.items():
    for number, one in enumerate(requirement.tests):
        globals()[f"test_{name}_{number}"] = make(name, one.partition("/")[2], number)
"""
COUNT = 2


@pytest.fixture(autouse=True)
def child_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outer pytest's own settings are none of the inner one's business."""
    for name in list(os.environ):
        if name.startswith("PYTEST_") or name in ("BLINK_INVOCATION", "BLINK_JOURNAL_ONLY"):
            monkeypatch.delenv(name)
    # Whoever edits the tree while this runs would make other runs of what are two shards of one.
    monkeypatch.setattr(provenance, "sources_digest", lambda: "ab" * 32)
    monkeypatch.setattr(provenance, "engine_modules", lambda: {"_native.so": "cd" * 32})
    monkeypatch.setattr(provenance, "source_state", lambda: {"git_commit": "0" * 40, "dirty": False})


def write(folder: Path) -> Path:
    folder.mkdir()
    (folder / "test_mini.py").write_text(SUITE, encoding="utf-8")
    return folder


def run(suite: Path, out: Path, shard: str, seed: int | None = 7) -> int:
    return certify("local", None, "smoke", out, seed=seed, suite=suite, shard=shard)


def everything() -> list[str]:
    return sorted(test for entry in load("local").profile("smoke").properties.values() for test in entry.tests)


def ran(suite: Path) -> list[str]:
    return sorted((suite / "ran").read_text(encoding="utf-8").split("\n")[:-1])


@pytest.mark.parametrize("text", ["0/3", "4/3", "1/0", "1", "a/b", "1/65", "-1/3", "1/3/5", ""])
def test_bad_shards_are_refused(text: str) -> None:
    """Catches: a shard that does not exist and runs nothing, or everything."""
    with pytest.raises(ShardError, match="shard"):
        parse_shard(text)


def test_shard_of_a_model_that_is_not_there_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches: a traceback instead of the line that says how the model is fetched, and no verdict line."""
    assert certify("local", "SmolLM2-135M-Instruct", "smoke", tmp_path / "out", seed=7, shard="1/2") == 2
    said = capfd.readouterr()
    assert "run: blink model fetch SmolLM2-135M-Instruct" in said.err
    assert said.out.splitlines()[-1] == "verdict: could not run (exit 2)"


def test_parts_are_disjoint_whole_even_and_the_same_in_any_order() -> None:
    """Catches: a test that is in no shard or in two, groups torn apart, one shard with all the long tests."""
    costs = Costs(1.0, {"p/long[*]": 40.0, "p/long[a]": 50.0, "q/*": 10.0})
    ids = [f"p/long[{c}]" for c in "abcdef"] + [f"q/{i}" for i in range(20)] + [f"r/{i}[fam]" for i in range(7)]
    group = {test: "fam" if test.endswith("[fam]") else test for test in ids}.__getitem__
    parts = partition(ids, 4, costs, group)
    assert sorted(test for part in parts for test in part) == sorted(ids)
    assert partition(reversed(ids), 4, costs, group) == parts
    assert sum(any(test.endswith("[fam]") for test in part) for part in parts) == 1
    loads = [sum(map(costs.of, part)) for part in parts]
    assert (costs.of("p/long[a]"), costs.of("p/long[b]"), costs.of("p/longer")) == (50.0, 40.0, 1.0)
    assert max(loads) - min(loads) <= 50.0
    assert max(loads) <= sum(loads) / 4 + 50.0


def test_registered_costs_name_tests_that_there_are() -> None:
    """Catches: costs of tests that were renamed: their shard would be too long, and nobody would know why."""
    costs = registered_costs()
    ids = [test for entry in load("local").profile("full").properties.values() for test in entry.tests]
    unknown = [name for name in costs.tests if not any(Costs(0.0, {name: 1.0}).of(test) for test in ids)]
    assert unknown == []


def test_interrupted_shard_goes_on_and_all_shards_make_one_certificate(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches: a shard that starts anew or forgets what it has done; a test that runs twice or never; a joined report
    that misses a test, or that verifies although a shard was changed."""
    suite = write(tmp_path / "suite")
    outs = [tmp_path / f"shard-{i}" for i in range(1, COUNT + 1)]
    (suite / "stop").touch()
    assert run(suite, outs[0], "1/2") == 2  # killed in its midst
    (suite / "stop").unlink()
    before = len(ran(suite))
    done = read_state(outs[0], parse_shard("1/2")).done
    assert 0 < before == len(done) < len(everything())
    codes = [run(suite, out, f"{i}/2") for i, out in enumerate(outs, 1)]
    text = capfd.readouterr()
    assert codes == [0, 0], text.out + text.err
    assert f"{before} tests are done already" in text.err
    assert ran(suite) == everything()

    report = json.loads((outs[0] / output.REPORT).read_text(encoding="utf-8"))
    (interrupted,) = report["run"]["facts"]["interrupted"]
    assert (interrupted["times"], interrupted["reasons"]) == (1, ["pytest was killed by SIGKILL; see pytest.log"])
    warned = f"test {interrupted['test']} was interrupted 1 times, and begun anew each time"
    assert any(line.startswith(warned) for line in report["warnings"])
    assert warned in text.err  # and to whoever lets the shard go on
    assert (report["run"]["judged"], report["run"]["shard"], report["kind"]) == ("shard", "1/2", "report")
    joined = join(outs, tmp_path / "whole")
    assert joined["verdict"]["word"] == "passed"
    assert joined["counts"]["passed"] == len(everything())
    assert sorted(t["id"] for t in joined["tests"]) == everything()
    assert joined["run"]["judged"] == "required-set"
    assert [s["shard"] for s in joined["run"]["facts"]["shards"]] == ["1/2", "2/2"]
    assert joined["run"]["facts"]["interrupted"] == [interrupted]
    assert any(line.startswith(warned) for line in joined["warnings"])
    preemption = next(s for s in joined["situations"] if s["name"] == "preemption")
    assert (preemption["count"], len(preemption["tests"])) == (2 * len(everything()), len(everything()))
    assert verify(tmp_path / "whole").problems == ()

    with pytest.raises(JoinError, match=r"shards 2 of 2 are not among"):
        join(outs[:1], tmp_path / "half")
    with pytest.raises(JoinError, match="both hold shard 1/2"):
        join([outs[0], outs[0]], tmp_path / "twice")
    with pytest.raises(JoinError, match="no shard of one"):
        join([tmp_path / "whole"], tmp_path / "again")
    absent = tmp_path / "absent"
    with pytest.raises(JoinError, match=f"^{re.escape(str(absent))} does not exist$"):
        join([outs[0], absent], tmp_path / "less")
    page = outs[1] / output.PAGE
    page.write_text(page.read_text(encoding="utf-8") + " ", encoding="utf-8")
    with pytest.raises(JoinError, match=r"is not intact.*report\.html was changed"):
        join(outs, tmp_path / "changed")


def test_crash_is_not_run_again(tmp_path: Path) -> None:
    """Catches: a test in which the process crashed, maybe by a fault of the product, that runs again and passes."""
    suite, out = write(tmp_path / "suite"), tmp_path / "one"
    (suite / "stop").write_text("11", encoding="utf-8")
    assert run(suite, out, "1/2") == 2
    (crashed,) = [one for one in read_state(out, parse_shard("1/2")).done if one.outcome is not Outcome.PASSED]
    (suite / "stop").unlink()
    assert run(suite, out, "1/2") == 2
    report = json.loads((out / output.REPORT).read_text(encoding="utf-8"))
    found = {t["id"]: t for t in report["tests"]}
    assert found[crashed.id]["outcome"] == Outcome.INFRASTRUCTURE
    assert "pytest crashed: killed by SIGSEGV" in found[crashed.id]["message"]
    assert crashed.id not in ran(suite)
    assert report["counts"]["passed"] == len(ran(suite))


def test_test_that_never_comes_to_its_end_is_given_up(tmp_path: Path) -> None:
    """Catches: a test that fits no session and is begun anew for ever, or that ends as anything but a shard that could
    not be run; the same interruption counted twice."""
    suite, out = write(tmp_path / "suite"), tmp_path / "one"
    (suite / "stop").touch()
    for times in range(1, MOST + 1):
        assert run(suite, out, "1/2") == 2
        report = json.loads((out / output.REPORT).read_text(encoding="utf-8"))
        (told,) = report["run"]["facts"]["interrupted"]
        assert told["times"] == times
        assert read_state(out, parse_shard("1/2")).interrupted == read_state(out, parse_shard("1/2")).interrupted
        assert len(read_state(out, parse_shard("1/2")).interrupted) == times
    (suite / "stop").unlink()  # from now on it would pass
    assert run(suite, out, "1/2") == 2
    report = json.loads((out / output.REPORT).read_text(encoding="utf-8"))
    found = {t["id"]: t for t in report["tests"]}[told["test"]]
    assert (found["outcome"], told["test"] in ran(suite)) == ("infrastructure", False)
    assert f"interrupted {MOST} times and not run again" in found["message"]
    assert report["counts"]["passed"] == len(ran(suite)) > 0  # all others went on
    assert any(f"{told['test']} is infrastructure" in reason for reason in report["verdict"]["reasons"])


def test_sources_edited_during_a_session_are_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches: a shard of two engines, because the sources at a session's end were noted as those that it had run."""
    suite, out = write(tmp_path / "suite"), tmp_path / "one"
    (suite / "stop").touch()
    whole = supervise

    def edit(*arguments: Any) -> str | None:
        monkeypatch.setattr(provenance, "sources_digest", lambda: "ef" * 32)
        return whole(*arguments)

    monkeypatch.setattr(certifying, "supervise", edit)
    assert run(suite, out, "1/2") == 2
    assert run(suite, out, "1/2") == 2
    assert f"sources was {'ab' * 32!r} and is {'ef' * 32!r}" in capfd.readouterr().err


def test_interruption_is_known_though_the_session_died(tmp_path: Path) -> None:
    """Catches: a test that ran when `certify` itself was killed, run again without a word; a replay likewise."""
    shard, identity = parse_shard("1/2"), {"seed": 7}
    write_state(tmp_path, shard, identity, [])
    for folder, number in ((tmp_path, 1), (tmp_path / "corpus" / "0123", 2)):
        folder.mkdir(parents=True, exist_ok=True)
        journal = Collector(folder / JOURNAL)
        journal.session({"run_id": f"r{number}"})
        journal.collected([{"nodeid": f"x::{number}", "id": f"p/{number}", "property": "p"}])
        journal.started(f"x::{number}")
    state = read_state(tmp_path, shard, identity)
    assert [(one.run, one.id, one.reason) for one in state.interrupted] == [
        ("r1", "p/1", DIED),
        ("r2", "corpus/0123", DIED),
    ]
    write_state(tmp_path, shard, identity, state.done, state.interrupted)
    assert read_state(tmp_path, shard, identity) == state  # seen twice, counted once


def test_records_survive_a_death_between_journal_and_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: what only the journal knows, lost when a session that goes on dies before it has noted it."""
    suite, out = write(tmp_path / "suite"), tmp_path / "one"
    (suite / "stop").touch()
    assert run(suite, out, "1/2") == 2
    before = read_state(out, parse_shard("1/2")).done
    prepare = output.prepare

    def die(*args: Any, **kwargs: Any) -> None:
        prepare(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(output, "prepare", die)
    with pytest.raises(KeyboardInterrupt):
        run(suite, out, "1/2")
    assert read_state(out, parse_shard("1/2")).done == before != []


def test_shard_of_another_run_is_refused_and_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches: a shard that goes on with another seed or number, one without a seed, a finished one that runs again."""
    suite = write(tmp_path / "suite")
    out = tmp_path / "one"
    assert run(suite, out, "1/2") == 0
    before = ran(suite)
    assert run(suite, out, "1/2") == 0  # nothing is left to do
    assert ran(suite) == before
    capfd.readouterr()
    assert run(suite, out, "1/2", seed=8) == 2
    assert "seed was 7 and is 8" in capfd.readouterr().err
    assert run(suite, out, "2/2") == 2
    assert "holds shard 1/2, not 2/2" in capfd.readouterr().err
    assert run(suite, out, "1/2", seed=None) == 2
    assert "needs --seed" in capfd.readouterr().err
    assert run(suite, out, "3/2") == 2
    assert "numbered from 1 to 2" in capfd.readouterr().err
    assert (out / JOURNAL).is_file()  # refused, and nothing was removed


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"seed": 8}, "different runs: seed 7 and 8"),
        ({"profile": "nightly"}, "different runs: profile 'smoke' and 'nightly'"),
        ({"model": {"name": "tiny", "path": None, "sha256": "cd" * 32}}, "different runs: model"),
        ({"facts": {"options": {"engine_command": ["-m", "other"]}}}, "different runs: engine command"),
        ({"shard": "2/3"}, "holds shard 2/3, others are of 2"),
    ],
)
def test_shards_of_other_runs_are_not_joined(
    tmp_path: Path, make_report: MakeReport, changes: dict[str, Any], why: str
) -> None:
    """Catches: two seeds, profiles, models or engines in one certificate."""
    text, limits = required.required_text("local"), required.thresholds_text()
    folders = []
    for number, values in enumerate(({}, changes), 1):
        records = [TestRecord(f"other/{number}", "test_x.py", None, Outcome.PASSED)]
        built = make_report(records, **({"judges_required": False, "shard": f"{number}/2"} | values))
        folders.append(tmp_path / f"shard-{number}")
        folders[-1].mkdir()
        output.finish(folders[-1], built, text, limits)
    with pytest.raises(JoinError, match=why):
        join(folders, tmp_path / "whole")


def test_model_is_that_of_any_shard_that_has_one(tmp_path: Path, make_report: MakeReport) -> None:
    """Catches: two models behind a first shard that needs none; a report of no model; a joined report that leaves out a
    shard's failure, or a shard."""
    text, limits = required.required_text("local"), required.thresholds_text()

    def shard(number: int, model: str | None, outcome: Outcome = Outcome.PASSED) -> Path:
        folder = tmp_path / f"{number}-{model}-{outcome}"
        folder.mkdir()
        name = {"name": model, "path": None, "sha256": model and model * 32}
        records = [TestRecord(f"other/{number}", "test_x.py", None, outcome)]
        built = make_report(records, judges_required=False, shard=f"{number}/3", model=name)
        output.finish(folder, built, text, limits)
        return folder

    one, two, three = shard(1, None), shard(2, "ab"), shard(3, "cd")
    with pytest.raises(JoinError, match="different runs: model"):
        join([one, two, three], tmp_path / "mixed")
    failed = shard(3, "ab", Outcome.PRODUCT_FAILURE)
    whole = join([one, two, failed], tmp_path / "whole")
    assert whole["claim"]["model"]["name"] == "ab"
    assert check_shards(tmp_path / "whole", whole) is None
    whole["tests"] = [t for t in whole["tests"] if t["id"] != "other/3"]
    assert "test other/3 is None here and product_failure" in str(check_shards(tmp_path / "whole", whole))
    del whole["run"]["facts"]["shards"][2]
    assert "are not all of one run" in str(check_shards(tmp_path / "whole", whole))
