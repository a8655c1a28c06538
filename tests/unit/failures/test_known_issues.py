"""Known issues: checked, matched, dated, and never an excuse."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from verification.failures.known_issues import (
    DEFAULT_PATH,
    SCHEMA_PATH,
    KnownIssuesError,
    json_schema,
    load,
    match,
    status,
)

ENTRY = {
    "id": "KI-1",
    "property": "kv-conservation",
    "clause": "K1",
    "signature": "page N leaked",
    "owner": "scheduler team",
    "reason": "a page leaks on cancel",
    "expires": "2999-01-31",
}
FAILURE = {
    "property": "kv-conservation",
    "clause": "K1",
    "rig": "local",
    "signature_id": "0123456789ab",
    "signature_pattern": "page N leaked",
}
FAILING = """
import pytest
from verification.result import CheckResult, Measurement, Verdict

@pytest.mark.blink_property("kv-conservation")
@pytest.mark.parametrize("n", [1, 2])
def test_leak(record, n):
    record.check(CheckResult(Verdict.INVALID, "kv-conservation", "K1", f"page {n} leaked", {"page": n}))

@pytest.mark.blink_property("kv-content")
def test_gap(record):
    record.check(CheckResult(Verdict.UNKNOWN, "kv-content", "C1", "undecided"))

@pytest.mark.blink_property("kv-content")
def test_fine(record):
    record.cases(3)

def test_bare():
    assert 3 == 4, "numbers differ"
"""


def write(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump({"schema_version": 1, "issues": list(entries)}), encoding="utf-8")
    return path


def test_shipped_file_and_schema_hold() -> None:
    """Catches: a shipped file that is not valid or has expired unseen; a JSON Schema that is not the code's."""
    today = dt.datetime.now(dt.UTC).date()
    assert [issue.id for issue in load(DEFAULT_PATH) if issue.expired(today)] == []
    assert json.loads(SCHEMA_PATH.read_text(encoding="utf-8")) == json_schema()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"owner": ""}, "owner"),
        ({"owner": None}, "owner"),
        ({"expires": "soon"}, "expires"),
        ({"expires": None}, "expires"),
        ({"signature": "*"}, "matches every failure"),
        ({"property": ""}, "property"),
        ({"skip": True}, "skip"),
        ({"id": "KI-2"}, "used twice"),
    ],
)
def test_bad_entry_is_refused_by_name(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    """Catches: an entry without owner or end, one that matches everything, an unknown field, two with one id."""
    path = write(tmp_path / "k.yaml", ENTRY | {"id": "KI-2"}, ENTRY | change)
    with pytest.raises(KnownIssuesError, match=named):
        load(path)


def test_unreadable_files(tmp_path: Path) -> None:
    """Catches: a traceback for a file that is absent or no YAML."""
    with pytest.raises(KnownIssuesError, match="cannot read"):
        load(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("issues: [", encoding="utf-8")
    with pytest.raises(KnownIssuesError, match="not YAML"):
        load(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1", encoding="utf-8")
    with pytest.raises(KnownIssuesError, match="does not hold"):
        load(tmp_path / "list.yaml")


@pytest.mark.parametrize(
    ("change", "matches"),
    [
        ({}, True),
        ({"signature": "page N*"}, True),
        ({"signature": "0123456789ab"}, True),
        ({"signature": "0123456789ac"}, False),
        ({"signature": "[p]age N leaked"}, False),
        ({"clause": "K2"}, False),
        ({"property": "kv-*"}, True),
        ({"rig": "other"}, False),
    ],
)
def test_match(tmp_path: Path, change: dict[str, Any], matches: bool) -> None:
    """Catches: an entry that explains another fault, another clause, another rig; wildcards that do not work."""
    issues = load(write(tmp_path / "k.yaml", ENTRY | change))
    assert (match(FAILURE, issues) is not None) is matches


def test_expired_and_unmatched_are_told(tmp_path: Path) -> None:
    """Catches: an entry that stays for ever because nobody hears that its day is over."""
    issues = load(write(tmp_path / "k.yaml", ENTRY | {"expires": "2026-05-01"}))
    on_the_day, after = dt.date(2026, 5, 1), dt.date(2026, 5, 2)
    (fresh,), (old,) = status(issues, {"KI-1": ["t"]}, on_the_day), status(issues, {}, after)
    assert (fresh["expired"], fresh["unmatched"], fresh["tests"]) == (False, False, ["t"])
    assert (old["expired"], old["unmatched"]) == (True, True)


def test_known_issue_never_turns_red_green(suite: Callable[..., Any], tmp_path: Path) -> None:
    """Catches: outcome, counts, verdict or exit code that a known issue changes; an annotation that gets lost."""
    entries = (
        ENTRY,
        ENTRY | {"id": "KI-2", "signature": "never seen"},
        ENTRY | {"id": "KI-3", "signature": "elsewhere", "rig": "other"},
        ENTRY
        | {"id": "KI-4", "property": "kv-content", "clause": "*", "signature": "undecided", "expires": "2020-01-01"},
    )
    path = write(tmp_path / "k.yaml", *entries)
    without = suite(FAILING, "--rig", "local", "--out", "out")
    plain = without.report
    with_issues = suite(FAILING, "--rig", "local", "--out", "out", "--known-issues", str(path))
    noted = with_issues.report
    assert with_issues.code == without.code == 1
    for name in ("verdict", "counts", "properties", "warnings"):
        without_time = [
            {k: v for k, v in entry.items() if k != "duration_s"} if isinstance(entry, dict) else entry
            for entry in (noted[name] if isinstance(noted[name], list) else [noted[name]])
        ]
        before = [
            {k: v for k, v in entry.items() if k != "duration_s"} if isinstance(entry, dict) else entry
            for entry in (plain[name] if isinstance(plain[name], list) else [plain[name]])
        ]
        assert without_time == before
    tests = {test["id"]: test for test in noted["tests"]}
    assert tests["kv-conservation/leak[1]"]["outcome"] == "product_failure"
    assert {tests[f"kv-conservation/leak[{n}]"]["known_issue"] for n in (1, 2)} == {"KI-1"}
    assert tests["kv-content/gap"]["known_issue"] == "KI-4"
    assert tests["kv-content/fine"]["known_issue"] == ""
    state = {issue["id"]: (issue["expired"], issue["unmatched"]) for issue in noted["known_issues"]}
    assert state == {"KI-1": (False, False), "KI-2": (False, True), "KI-4": (True, False)}
    assert "known issue: KI-1 (a note: the failure counts)" in with_issues.text
    assert "known issue KI-4 expired on 2020-01-01; its owner is scheduler team" in with_issues.text
    assert "known issue KI-2 matched no failure" in with_issues.text
    page = (with_issues.out / "report.html").read_text(encoding="utf-8")
    assert "Known issue: <strong>KI-1</strong>" in page


def test_bundles_under_xdist(suite: Callable[..., Any]) -> None:
    """Catches: bundles, signatures or known issues that get lost between a worker and the report."""
    done = suite(FAILING, "--rig", "local", "--out", "out", "-n", "2")
    failed = {test["id"]: test for test in done.report["tests"] if test["signature"]}
    names = {"kv-conservation/leak[1]", "kv-conservation/leak[2]", "kv-content/gap", "mini/bare"}
    assert set(failed) == names
    assert all((done.out / test["bundle"] / "failure.json").is_file() for test in failed.values())
    assert failed["kv-conservation/leak[1]"]["signature"] == failed["kv-conservation/leak[2]"]["signature"]
    assert len({test["bundle"] for test in failed.values()}) == len(failed)


def test_bad_file_ends_the_run_at_its_start(suite: Callable[..., Any], tmp_path: Path) -> None:
    """Catches: a known-issues file that is silently ignored."""
    path = write(tmp_path / "k.yaml", ENTRY | {"owner": ""})
    done = suite(FAILING, "--rig", "local", "--known-issues", str(path))
    assert done.code == 4
    assert "--known-issues" in done.text
    assert "owner" in done.text
