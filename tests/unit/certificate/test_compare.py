"""Two runs compared, and many runs of one profile tallied."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from blink_core.abi.params import SamplingParams
from tests.unit.certificate.conftest import MakeReport
from verification import agreement_record
from verification.benchmarks.flakes import Tally
from verification.canonical import Answer
from verification.certificate import costs, output, required
from verification.certificate.compare import DAMAGED, GONE, NOT_COMPARABLE, CompareError, compare, lines
from verification.certificate.outcomes import Outcome
from verification.certificate.records import TestRecord
from verification.certificate.shards import Costs
from verification.program import Program, RequestSpec
from verification.properties.agreement import Ran
from verification.run_context import RunContext


def folder(path: Path, make_report: MakeReport, records: list[TestRecord], **values: object) -> Path:
    path.mkdir()
    built = make_report(records, **values)
    output.finish(path, built, required.required_text("local"), required.thresholds_text())
    return path


def test_what_got_worse_is_named(tmp_path: Path, make_report: MakeReport) -> None:
    """Catches: a regression, a vanished test or a lost situation that the comparison does not mention."""

    def record(test: str, outcome: Outcome, **values: object) -> TestRecord:
        return TestRecord(f"p/{test}", "x", "p", outcome, **values)  # type: ignore[arg-type]

    old = folder(
        tmp_path / "old",
        make_report,
        [
            record("a", Outcome.PASSED, situations={"preemption": 3}),
            record("b", Outcome.UNKNOWN),
            record("c", Outcome.PASSED),
        ],
    )
    new = folder(
        tmp_path / "new",
        make_report,
        [record("a", Outcome.PRODUCT_FAILURE), record("b", Outcome.PASSED), record("d", Outcome.PASSED)],
        seed=8,
    )
    found = compare(old, new)
    assert found.worse == ["p/a: passed -> product_failure"]
    assert found.better == ["p/b: unknown -> passed"]
    assert ("p/d" in found.added, "p/c" in found.gone) == (True, True)
    assert found.session == ["verdict: could not run -> property failed"]
    assert found.situations_lost == ["preemption"]
    assert (found.same["seed"], found.same["thresholds"], found.same["verdict"]) == (False, True, False)
    assert not found.ok
    assert "worse: p/a: passed -> product_failure" in lines(found)
    assert compare(old, old).ok
    with pytest.raises(CompareError, match=r"report\.json"):
        compare(old, tmp_path)
    with pytest.raises(CompareError, match="nowhere does not exist"):  # a wrong name, not a file in the folder above it
        compare(tmp_path / "nowhere", old)


def test_each_thing_for_the_worse_is_told_and_not_ok(
    tmp_path: Path, make_report: MakeReport, records: list[TestRecord]
) -> None:
    """Catches: a required test that is gone, a new test that failed or could not be decided, a saved failure that was
    not replayed, a session that broke: told or not, and exit code 0 all the same."""

    def extra(test: str, outcome: Outcome, nodeid: str = "x") -> TestRecord:
        return TestRecord(test, nodeid, None, outcome)

    old = folder(tmp_path / "old", make_report, [*records, extra("p/old", Outcome.PASSED)])
    renamed = required.required_text("local").replace(f"- {records[0].id}\n", "- queue-ordering/renamed\n")
    assert renamed != required.required_text("local")
    other = TestRecord("queue-ordering/renamed", "y", "queue-ordering", Outcome.PASSED)
    for name, own, told in (
        ("unrequired", records, "only in the old run: p/old"),
        ("passed", [*records, extra("p/new", Outcome.PASSED)], "only in the new run: p/new"),
        ("filtered", [*records, extra("p/new", Outcome.FILTERED)], "only in the new run: p/new"),
        (
            "not for this rig",
            [*records, extra("corpus/1", Outcome.FILTERED, "z"), extra("p/new", Outcome.FILTERED, "z")],
            "only in the new run: corpus/1",
        ),
    ):
        found = compare(old, folder(tmp_path / name, make_report, list(own)))
        assert found.ok, name
        assert told in lines(found), name
    path = tmp_path / "renamed"
    path.mkdir()
    built = make_report([*records[1:], other], required_text=renamed)
    output.finish(path, built, renamed, required.thresholds_text())
    found = compare(old, path)
    assert (found.ok, f"required and gone: {records[0].id}" in lines(found)) == (False, True)
    broken: dict[str, object] = {"errors": ["it broke"]}
    for name, own, told, values in (
        ("failed", [*records, extra("p/new", Outcome.PRODUCT_FAILURE)], "new fault: p/new: product_failure", {}),
        ("unknown", [*records, extra("p/new", Outcome.UNKNOWN)], "new fault: p/new: unknown", {}),
        ("broken", [*records, extra("p/new", Outcome.TEST_DEFECT)], "new fault: p/new: test_defect", {}),
        ("replay", [*records, extra("corpus/1", Outcome.MISSING)], "new fault: corpus/1: missing", {}),
        ("session", records, "the run itself: session error: it broke", broken),
        ("verdict", records, "the run itself: verdict: passed -> could not run", broken),
    ):
        found = compare(old, folder(tmp_path / name, make_report, list(own), **values))
        assert not found.ok, name
        assert told in lines(found), name


def test_suite_that_asks_less_is_worse(tmp_path: Path, make_report: MakeReport, records: list[TestRecord]) -> None:
    """Catches: tests that draw fewer programs than before and pass; runs of two profiles held against each other."""
    old = folder(tmp_path / "old", make_report, records)
    fewer = [replace(record, cases=19 if number == 2 else 20) for number, record in enumerate(records)]
    for name, own, told, values in (
        ("fewer", fewer, [f"{records[2].id}: 20 -> 19"], {}),
        ("more", [replace(record, cases=21) for record in records], [], {}),
        ("another profile", fewer, [], {"profile": "nightly"}),
    ):
        new = folder(tmp_path / name, make_report, list(own), **values)
        found = compare(old, new)
        assert found.fewer_cases == told, name
        assert [f"fewer cases: {one}" in lines(found) for one in told] == [True] * len(told)
        assert found.ok == (name == "more"), name
    assert compare(new, new).ok


def test_required_set_that_is_not_the_reports_is_refused(
    tmp_path: Path, make_report: MakeReport, records: list[TestRecord]
) -> None:
    """Catches: a required test that is gone and not told, because the file beside the report was cut by hand."""
    old = folder(tmp_path / "old", make_report, records)
    new = folder(tmp_path / "new", make_report, records[1:])
    assert not compare(old, new).ok
    for run in (old, new):
        path = run / output.REQUIRED
        text = path.read_text(encoding="utf-8").replace(f"- {records[0].id}\n", "- queue-ordering/renamed\n")
        path.write_text(text, encoding="utf-8")
    with pytest.raises(CompareError, match=r"required\.yaml: sha256 .* report\.json says"):
        compare(old, new)


def test_recorded_answers_that_are_gone_or_damaged_are_not_ok(
    tmp_path: Path, make_report: MakeReport, records: list[TestRecord]
) -> None:
    """Catches: answers that nobody can read, or that are not there any more, taken for answers that agree."""

    def run(name: str, seed: int = 7, token: int | None = 5, text: str | None = None) -> Path:
        path = folder(tmp_path / name, make_report, records)
        if token is None:
            return path
        record = path / "evidence" / "one" / agreement_record.FILE
        record.parent.mkdir(parents=True)
        spec = RequestSpec((1, 2), SamplingParams(1))
        ran = [Ran(Program((spec,)), (Answer(0, "FINISH LENGTH", (token,)),))]
        context = RunContext("r1", "local", "smoke", None, seed, "given", None)
        agreement_record.write(record, context, 3, "tiny", ran)
        if text is not None:
            record.write_text(text, encoding="utf-8")
        return path

    good, none, damaged = run("good"), run("none", token=None), run("damaged", text="{")
    for old, new, word, ok in (
        (good, good, "valid", True),
        (good, run("other", token=6), "invalid", False),
        (good, run("seed", seed=8), NOT_COMPARABLE, True),
        (good, none, GONE, False),
        (none, good, None, True),
        (none, none, None, True),
        (good, damaged, DAMAGED, False),
        (damaged, none, DAMAGED, False),
    ):
        found = compare(old, new)
        assert (found.agreement, found.ok) == (word, ok), (old.name, new.name)
    twice = run("twice")
    (twice / "evidence" / "two").mkdir()
    shutil.copy(twice / "evidence" / "one" / agreement_record.FILE, twice / "evidence" / "two")
    assert compare(good, twice).agreement == DAMAGED


def test_tally_names_every_outcome_that_is_no_pass(make_report: MakeReport, records: list[TestRecord]) -> None:
    """Catches: a flaky test that is hidden among passes, a campaign without runs that passes."""
    tally = Tally()
    assert tally.code == 2
    tally.add(1, make_report(records))
    assert tally.code == 0
    records[3].outcome = Outcome.UNKNOWN
    tally.add(2, make_report(records))
    assert tally.code == 1
    assert any(line.startswith(f"seed 2: {records[3].id} is unknown") for line in tally.lines())
    assert tally.missed["preemption"] == 2


def test_costs_are_written_from_reports(tmp_path: Path, make_report: MakeReport) -> None:
    """Catches: costs that lose a test's brackets, or count what did not pass."""
    slow = TestRecord("p/x[a-1]", "x", "p", Outcome.PASSED, duration_s=12.4)
    failed = TestRecord("p/y", "y", "p", Outcome.UNKNOWN, duration_s=99.0)
    path = folder(tmp_path / "run", make_report, [slow, failed], judges_required=False)
    values = yaml.safe_load(costs.text(costs.durations([path]), 1.0))
    assert values == {"default_s": 1.0, "tests": {"p/x[a-1]": 12}}


def test_costs_keep_what_was_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_folder: Path) -> None:
    """Catches: a nightly's times that make the tests of full alone cost a second each; a pattern that stays although
    all its tests were measured, or that speaks of a measured test that is short; a folder without a report that empties
    the file; shards of a run of which only one counts."""
    known = Costs(
        3.0, {"small-scopes/*": 240.0, "specification/lockstep[*": 90.0, "gone/*": 7.0, "mutants/sample": 60.0}
    )
    tests = ["small-scopes/scope[a]", "small-scopes/scope[b]", "specification/lockstep[1]", "mutants/sample"]
    measured = {"small-scopes/scope[a]": 0.2, "specification/lockstep[1]": 33.4, "mutants/sample": 50.0, "x/y": 0.1}
    found = yaml.safe_load(costs.text(costs.merged(measured, known, tests), 1.0))["tests"]
    assert found == {
        "small-scopes/scope[a]": 1,
        "specification/lockstep[1]": 33,
        "mutants/sample": 50,
        "small-scopes/*": 240,
    }
    assert list(found)[-1] == "small-scopes/*"

    monkeypatch.setattr(costs, "FILE", tmp_path / "costs.yaml")
    assert costs.main([str(tmp_path / "nowhere")]) == 2
    assert costs.main([]) == 2
    assert not costs.FILE.exists()
    assert costs.main([str(run_folder)]) == 0  # every test passed in half a second
    values = yaml.safe_load(costs.FILE.read_text(encoding="utf-8"))["tests"]
    assert all(seconds >= 1 for seconds in values.values())
