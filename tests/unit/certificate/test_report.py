"""report.json against its schema, and the HTML page."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest

from tests.unit.certificate.conftest import passed_records
from verification.certificate import provenance, report
from verification.certificate.corpus import PREFIX
from verification.certificate.html import render
from verification.certificate.outcomes import Outcome
from verification.certificate.records import TestRecord
from verification.certificate.statistics import rate_interval

MakeReport = Callable[..., dict[str, Any]]
EVIL = "<script>alert('x')</script><img src=//evil.example/x> $\\frac{1}{2}$ & \"q\""


def evil_record() -> TestRecord:
    series = {"unit": EVIL, "x_label": EVIL, "limit": 2.0, "points": 3}
    return TestRecord(
        f"kv-content/{EVIL}",
        "suite/test_x.py::test_evil",
        "kv-content",
        Outcome.PRODUCT_FAILURE,
        message=EVIL,
        details=EVIL,
        clause=EVIL,
        witness={EVIL: [EVIL]},
        measurements={EVIL: {"value": 3.0, "unit": EVIL, "limit": 2.0, "limit_is": "max", "n": 4}},
        series=[
            {"name": EVIL, "x": [0.0, 1.0, 2.0], "y": [1.0, "nan", 3.0], "kind": kind, **series}
            for kind in ("line", "steps", "bars")
        ]
        + [{"name": EVIL, "x": [], "y": [0.001, 1.0, 300.0], "kind": "histogram", **series}],
        situations={EVIL: False},
        planted_faults=[{"name": EVIL, "caught": 1, "planted": 2}],
        cases=3,
        replay=EVIL,
    )


class Page(HTMLParser):
    """Tags and attributes of a page, with void elements and nesting checked."""

    VOID = frozenset({"meta", "br", "link", "img", "hr", "input"})

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_schema_is_a_schema_and_a_report_satisfies_it(make_report: MakeReport, records: list[TestRecord]) -> None:
    """Catches: a schema that accepts anything because it is not valid itself."""
    jsonschema.Draft202012Validator.check_schema(report.schema())
    built = make_report([*records, evil_record()])
    report.validate(json.loads(json.dumps(built, allow_nan=False)))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("verdict", "word"), "splendid"),
        (("verdict", "exit_code"), 3),
        (("counts", "passed"), -1),
        (("digests", "required"), "abc"),
        (("run", "profile"), "lunch"),
        (("run", "started"), "yesterday"),
        (("tests", 0, "outcome"), "error"),
        (("tests", 0, "duration_s"), -0.5),
        (("claim", "text"), ""),
        (("extra",), 1),
    ],
)
def test_schema_refuses_what_no_run_can_say(
    make_report: MakeReport, records: list[TestRecord], path: tuple[Any, ...], value: Any
) -> None:
    """Catches: a schema too loose to notice a damaged or foreign report."""
    broken = copy.deepcopy(make_report(records))
    target: Any = broken
    for part in path[:-1]:
        target = target[part]
    target[path[-1]] = value
    with pytest.raises(report.ReportError, match=re.escape(str(path[-1]))):
        report.validate(broken)


def test_schema_requires_each_of_its_fields(make_report: MakeReport, records: list[TestRecord]) -> None:
    """Catches: a field that a later version forgets to write."""
    built = make_report(records)
    for name in built:
        with pytest.raises(report.ReportError, match=name):
            report.validate({key: value for key, value in built.items() if key != name})


def test_claim_limits_and_standing(make_report: MakeReport, records: list[TestRecord]) -> None:
    """Catches: a local smoke run that is called a certificate, or that does not say what it is silent about."""
    built = make_report(records)
    assert built["kind"] == "report"
    assert built["verdict"] == {"word": "passed", "exit_code": 0, "certified": False, "reasons": []}
    assert "not a certificate" in built["claim"]["standing"]
    assert "nothing about GPUs" in built["claim"]["scope"]
    assert "abababababab" in built["claim"]["text"]
    assert any("GPU" in line for line in built["not_covered"])


@pytest.mark.parametrize(
    ("profile", "dirty", "fail", "certified"),
    [
        ("full", False, False, True),
        ("full", True, False, False),
        ("full", None, False, False),
        ("full", False, True, False),
        ("smoke", False, False, False),
    ],
)
def test_only_full_clean_and_complete_is_a_certificate(
    make_report: MakeReport,
    monkeypatch: pytest.MonkeyPatch,
    profile: str,
    dirty: bool | None,
    fail: bool,
    certified: bool,
) -> None:
    """Catches: a certificate from a smoke run, a dirty tree, no tree at all, or an incomplete required set."""
    monkeypatch.setattr(provenance, "source_state", lambda: {"git_commit": "c" * 40, "dirty": dirty})
    records = passed_records(profile)
    built = make_report(records[1:] if fail else records, profile=profile)
    assert built["verdict"]["certified"] is certified
    assert built["kind"] == ("certificate" if certified else "report")


def test_counts_situations_faults_and_what_was_not_run(make_report: MakeReport, records: list[TestRecord]) -> None:
    """Catches: a situation not reached, or a test not run, that the report does not mention."""
    records[0].situations = {"preemption": True, "page-reuse": False}
    records[0].planted_faults = [{"name": "foreign row", "caught": 20, "planted": 20}]
    more = [
        TestRecord("x/gpu", "n1", None, Outcome.FILTERED, message="rig local has no gpu"),
        TestRecord("x/late", "n2", None, Outcome.MISSING),
    ]
    built = make_report([*records, *more])
    assert built["counts"]["passed"] == len(records)
    assert sum(built["counts"].values()) == len(records) + 2
    reached = {entry["name"]: entry["reached"] for entry in built["situations"]}
    assert reached["preemption"] is True
    assert reached["page-reuse"] is reached["cancel"] is False
    assert "situation page-reuse was not reached" in built["warnings"]
    assert [entry["id"] for entry in built["not_run"]] == ["x/gpu", "x/late"]
    (fault,) = built["faults"]["planted"]
    assert fault["kill_rate_interval"][0] == pytest.approx(0.8316, abs=1e-3)
    assert fault["kill_rate_interval"][1] == 1.0


def test_shares_of_one_sample_have_one_rate(make_report: MakeReport, records: list[TestRecord]) -> None:
    """Catches: a sample that is dealt out among tests, and shards, and whose one rate with its interval is nowhere; a
    rate of faults that have nothing to do with each other; a replay that counts twice."""

    def of(test: str, caught: int, planted: int, name: str = "automatic mutants") -> TestRecord:
        fault = {"name": name, "caught": caught, "planted": planted}
        return TestRecord(test, "n", "mutants", Outcome.PASSED, planted_faults=[fault])

    shares = [of(f"mutants/automatic[{i}-of-3]", caught, 50) for i, caught in ((1, 45), (2, 50), (3, 40))]
    others = [of("mutants/sample", 3, 3), of("mutants/automatic[9]", 1, 1, "another")]
    replay = of(f"{PREFIX}1/mutants/automatic[1-of-3]", 0, 50)
    built = make_report([*records, *shares, *others, replay])
    (pooled,) = built["faults"]["pooled"]
    assert pooled["kill_rate_interval"] == pytest.approx(rate_interval(135, 150))
    assert {name: pooled[name] for name in pooled if name != "kill_rate_interval"} == {
        "name": "automatic mutants", "test": "mutants/automatic[*]", "property": "mutants", "caught": 135,
        "planted": 150, "tests": 3,
    }  # fmt: skip
    assert len(built["faults"]["planted"]) == 6
    html = render(built, [])
    assert "automatic mutants, all 3 tests" in html
    assert "135 of 150" in html


def test_bounds_are_clopper_pearson() -> None:
    """Catches: a bound from the normal approximation, which is zero wide when nothing failed."""
    assert rate_interval(0, 100) == pytest.approx((0.0, 1 - 0.025 ** (1 / 100)), rel=1e-9)
    assert rate_interval(0, 0) is None
    with pytest.raises(ValueError, match="3 events in 2 trials"):
        rate_interval(3, 2)


def test_page_escapes_everything_and_asks_for_nothing(make_report: MakeReport, records: list[TestRecord]) -> None:
    """Catches: text of a test that runs as script, a plot that breaks on `$`, any request to another machine."""
    text = render(make_report([*records, evil_record()]), ["report.json"])
    page = Page(text)
    assert page.open == []
    assert not {"script", "img", "link", "iframe", "object"} & set(page.tags)
    names = {name for name, _ in page.attributes}
    assert "src" not in names
    assert not any(name.startswith("on") for name in names)
    targets = [value or "" for name, value in page.attributes if name in ("href", "xlink:href")]
    assert all(target.startswith("#") for target in targets)
    assert not re.search(r"url\((?!#)|@import", text)
    svgs = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(svgs) == 6  # outcomes, margins and four series
    for svg in svgs:
        ElementTree.fromstring(svg)
    ids = re.findall(r'\sid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_first_page_has_claim_verdict_and_limits_before_details(
    make_report: MakeReport, records: list[TestRecord]
) -> None:
    """Catches: a page that a reader must search for the answer."""
    built = make_report(records)
    text = render(built, [])
    order = [text.index(part) for part in ("exit 0", "On rig local", "Properties</h2>", "Limits", "Tests</h2>")]
    assert order == sorted(order)
    assert "color-scheme: light dark" in text
    assert "@media print" in text


def test_page_of_a_run_without_any_test(make_report: MakeReport) -> None:
    """Catches: a report that cannot be shown just when nothing ran."""
    built = make_report([], ["nothing was collected"])
    assert built["verdict"]["exit_code"] == 2
    assert "nothing was collected" in render(built, [])


def test_statistical_tests_of_a_run_are_counted_together(make_report: MakeReport, records: list[TestRecord]) -> None:
    """Catches: error rates of single tests that add up to a night in which something fails by chance."""
    value = {"value": 0.5, "unit": report.P_VALUE, "limit": 1e-6, "limit_is": "min", "n": 400}
    records[0].measurements = {f"p {i}": value for i in range(100)}
    built = make_report(records)
    assert built["verdict"]["word"] == "passed"
    assert built["statistics"] == {
        "tests": 100,
        "most_tests": 100,
        "error_rate": 1e-6,
        "family_wise_error_rate": pytest.approx(1e-4),
    }
    records[1].measurements = {"one more": value}
    built = make_report(records)
    assert built["verdict"]["word"] == "could not run"
    assert "101 statistical tests were made, at most 100 are registered" in built["session_errors"]
    assert make_report(records, thresholds_text="tokens: []")["verdict"]["word"] == "could not run"


def test_situation_that_the_rig_cannot_reach_is_no_warning(make_report: MakeReport, records: list[TestRecord]) -> None:
    """Catches: a warning on every laptop about device launches, which nobody reads any more; a count that is lost."""
    records[0].situations = {"preemption": 3}
    records[1].situations = {"preemption": 2}
    built = make_report(records, capabilities=frozenset({"cpu"}), profile="nightly")
    by_name = {entry["name"]: entry for entry in built["situations"]}
    assert (by_name["launch-118"]["expected"], by_name["launch-118"]["applies"]) == (True, False)
    assert "situation launch-118 was not reached" not in built["warnings"]
    assert "situation ring-wrap was not reached" in built["warnings"]
    assert (by_name["preemption"]["count"], by_name["preemption"]["tests"]) == (5, [records[0].id, records[1].id])


def test_property_of_another_profile_is_filtered_and_not_missing(
    make_report: MakeReport, records: list[TestRecord]
) -> None:
    """Catches: a report that calls missing what nobody asked for, as `mutants` in profile smoke."""
    extra = [TestRecord("mutants/sample", "n1", "mutants", Outcome.FILTERED, message="for profile nightly")]
    values = make_report([*records, *extra])
    assert {p["name"]: p["outcome"] for p in values["properties"]}["mutants"] == Outcome.FILTERED


def test_replays_decide_a_property_and_count_nowhere(make_report: MakeReport, records: list[TestRecord]) -> None:
    """Catches: a replayed case that is counted again in n and its bounds; a failed replay that its property does not
    show; a saved failure that cannot be replayed here, of which the report says nothing."""
    name = records[0].property
    filtered = TestRecord("x/gpu", "suite/test_y.py::gpu", None, Outcome.FILTERED)

    def replay(outcome: Outcome, nodeid: str = "suite/test_x.py::y") -> TestRecord:
        return TestRecord("corpus/1", nodeid, name, outcome, cases=1000)

    def entry(*more: TestRecord) -> dict[str, Any]:
        built = make_report([*more, *records, filtered])
        own: dict[str, Any] = next(one for one in built["properties"] if one["name"] == name)
        return own | {"warnings": built["warnings"]}

    plain, passed, failed = entry(), entry(replay(Outcome.PASSED)), entry(replay(Outcome.PRODUCT_FAILURE))
    for key in ("tests", "passed", "cases", "failure_rate_interval"):
        assert plain[key] == passed[key] == failed[key], key
    assert (passed["outcome"], failed["outcome"]) == ("passed", "product_failure")
    excused = entry(replay(Outcome.FILTERED, filtered.nodeid))
    assert any(line.startswith("saved failure corpus/1 was not replayed") for line in excused["warnings"])
