"""Triage: groups over runs, and nothing that lies around can break it."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.failures import material as made
from verification.cli import app
from verification.failures.bundle import write
from verification.failures.known_issues import load
from verification.failures.redact import Redactor
from verification.failures.signature import signature
from verification.failures.triage import triage


def failure(folder: Path, message: str, time: str, *, seed: int = 1, clause: str = "delivery", **facts: Any) -> None:
    found = signature("product_failure", "queue-ordering", clause, message)
    run = {"id": f"run{seed}", "rig": "local", "profile": "smoke", "worker": "main", "time": time}
    values = {"signature": {"id": found.id, "pattern": found.pattern}, "clause": clause, "run": run}
    values |= {"seeds": {"root": seed}, "replay": f"pytest t --seed {seed}"}
    write(folder, made.material(**(values | facts)), Redactor())


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three runs: one fault under two seeds, another once."""
    failure(tmp_path / "a/failures/t1", "request 3 got index 4", "2026-01-01T00:00:00+00:00", seed=1)
    failure(tmp_path / "b/failures/t1", "request 7 got index 0", "2026-01-03T00:00:00+00:00", seed=2)
    failure(tmp_path / "b/failures/t2", "page 3 leaked", "2026-01-02T00:00:00+00:00", seed=2, test="kv/leak")
    return tmp_path


def test_one_fault_across_seeds_is_one_group(runs: Path) -> None:
    """Catches: groups by seed or by run; a wrong first or last time; an example that is not the newest."""
    result = triage([runs])
    assert [(group.count, group.pattern) for group in result.groups] == [
        (2, "request N got index N"),
        (1, "page N leaked"),
    ]
    first = result.groups[0]
    assert (first.first_seen[:10], first.last_seen[:10]) == ("2026-01-01", "2026-01-03")
    assert first.example == str((runs / "b/failures/t1").resolve())
    assert first.replay == "pytest t --seed 2"
    assert (first.seeds, first.runs) == ({1, 2}, {"run1", "run2"})
    assert (result.bundles, result.problems) == (3, [])
    # Named twice or from above: counted once, in the same order.
    assert triage([runs / "b", runs, runs / "a"]).to_json() == result.to_json()


def test_foreign_and_damaged_folders_are_told(runs: Path, tmp_path: Path) -> None:
    """Catches: triage that dies of or counts a bundle cut short, of a failure.json of others, of rubbish."""
    (runs / "c/failures/cut").mkdir(parents=True)
    (runs / "c/failures/cut/failure.json").write_text('{"schema_version": 1, "te')
    (runs / "c/failures/none").mkdir()
    (runs / "c/failures/foreign").mkdir()
    (runs / "c/failures/foreign/failure.json").write_text(json.dumps({"failure": "of something else"}))
    (runs / "c/failures/binary").mkdir()
    (runs / "c/failures/binary/failure.json").write_bytes(b"\xff\xfe\x00")
    (runs / "c/failures/list").mkdir()
    (runs / "c/failures/list/failure.json").write_text("[" * 100_000)
    (runs / "a/failures/t1/timeline.jsonl").write_text("{}")
    result = triage([runs, runs / "absent"])
    assert {(group.count, group.pattern) for group in result.groups} == {
        (1, "page N leaked"),
        (1, "request N got index N"),
    }
    told = "\n".join(result.problems)
    for name in ("cut", "none", "foreign", "binary", "list", "absent", "t1"):
        assert name in told
    assert len(result.problems) == 7


def test_known_issue_is_named_beside_its_group(runs: Path, tmp_path: Path) -> None:
    """Catches: a known issue that triage does not show, or shows as valid after its day."""
    path = tmp_path / "known.yaml"
    common = "owner: me, reason: r, expires: 2026-02-01"
    known = f"{{id: KI-7, property: queue-ordering, signature: request N got*, {common}}}"
    path.write_text(f"schema_version: 1\nissues:\n- {known}\n- {{id: KI-8, property: x, signature: y, {common}}}\n")
    result = triage([runs], load(path), dt.date(2026, 2, 2))
    assert result.groups[0].known_issue is not None
    assert (result.groups[0].known_issue["id"], result.groups[0].known_issue["expired"]) == ("KI-7", True)
    assert result.groups[1].known_issue is None
    assert [(issue["id"], issue["unmatched"]) for issue in result.issues] == [("KI-7", False), ("KI-8", True)]


def test_command(runs: Path) -> None:
    """Catches: a command that does not run, text and JSON that differ, an exit 0 although nothing was read."""
    done = CliRunner().invoke(app, ["triage", str(runs)])
    assert done.exit_code == 0, done.output
    assert "2 x queue-ordering: delivery: request N got index N" in done.output
    assert "replay pytest t --seed 2" in done.output
    as_json = json.loads(CliRunner().invoke(app, ["triage", str(runs), "--json"]).output)
    assert [group["count"] for group in as_json["groups"]] == [2, 1]
    assert CliRunner().invoke(app, ["triage", str(runs / "absent")]).exit_code == 2
