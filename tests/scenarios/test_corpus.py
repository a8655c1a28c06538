"""The table of the fault corpus: whole, consistent, and every test that it names is there and says what it is for."""

from __future__ import annotations

import ast
import copy
import json
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from verification.cli import mount
from verification.scenarios import CorpusError, load
from verification.scenarios.corpus import parse

ROOT = Path(__file__).parents[2]
# Numbers of each class; the corpus is a sample, so they have gaps. A row that is added is added here as well.
IDS = {
    "Q": (1, 2, 4, 5, 7, 8, 10, 11, 13, 14),
    "R": (2, 3, 5, 6, 8, 9, 11, 12),
    "K": (2, 3, 5, 6, 8, 9, 11, 12, 14, 15, 17, 18, 20, 21),
    "P": (2, 3, 5, 6, 8, 9, 11, 12, 14, 15),
    "S": (2, 3, 5, 6, 8, 9),
    "G": (2, 3, 5, 6, 8, 9, 11, 12, 14, 15, 17, 18),
    "A": (2, 3, 5, 6, 8, 9),
    "O": (1, 2, 4, 5, 7, 8, 10, 11),
    "M": (1, 2, 4, 5, 7, 8, 10, 11, 13),
    "L": (1, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16, 18, 19, 20, 22),
    "T": (2, 3, 5, 6, 8, 9, 11),
    "B": (1, 3, 4),
    "D": (1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17),
    "X": (1, 2, 4, 5, 7, 8),
}
# Seeded first by the corpus: silent damage or no progress. Each is realised here, or on the GPU where it needs a graph.
FIRST = "Q01 Q05 Q10 R06 R08 K17 P11 S03 S06 L07 L13 M01 M08 O05 X04".split()


@cache
def functions_of(path: str) -> dict[str, str]:
    """Docstrings of a file's test functions, skipped ones left out."""
    file = ROOT / path
    assert file.is_file(), f"{path} is not there"
    found = {}
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            marks = " ".join(ast.unparse(d) for d in node.decorator_list)
            assert not re.search(r"mark\.(skip|xfail)\b", marks), f"{path}::{node.name} is skipped"
            found[node.name] = ast.get_docstring(node) or ""
    return found


def test_every_row_is_there() -> None:
    """Catches: a row of the corpus that is left out, or one that nobody knows."""
    expected = {f"{kind}{number:02}" for kind, numbers in IDS.items() for number in numbers}
    assert set(load().rows) == expected
    assert len(expected) == 126


def test_named_tests_are_there() -> None:
    """Catches: a test that was renamed, removed or skipped and is still claimed; a node id that collects nothing."""
    for name, row in load().rows.items():
        for node in row.tests:
            path, _, function = node.partition("::")
            assert function in functions_of(path), f"{name}: {node} is not there"
            assert "Catches:" in functions_of(path)[function] or "Condition:" in functions_of(path)[function], node


def test_scenarios_state_row_fault_and_condition() -> None:
    """Catches: a scenario that no row names, or whose docstring leaves out its row, the fault or the condition."""
    rows = load().rows
    folders = (ROOT / "tests/scenarios", "test_*.py"), (ROOT / "verification/suite", "test_scenarios*.py")
    files = [file for folder, pattern in folders for file in folder.glob(pattern)]
    named = {node for row in rows.values() for node in row.tests}
    for file in files:
        if file.name == Path(__file__).name:
            continue
        path = file.relative_to(ROOT).as_posix()
        for function, text in functions_of(path).items():
            assert f"{path}::{function}" in named, f"no row names {path}::{function}"
            start, _, rest = text.partition("Catches:")
            mentioned = set(re.findall(r"\b[A-Z]\d\d\b", start))
            assert mentioned <= set(rows), f"{path}::{function} names {mentioned - set(rows)}"
            assert mentioned, f"{path}::{function} names no row"
            assert "Condition:" in rest, f"{path}::{function} states no condition"
            for row_id in mentioned:
                assert f"{path}::{function}" in rows[row_id].tests, f"{row_id} does not name {path}::{function}"


def test_what_is_seeded_first_is_realised() -> None:
    """Catches: one of the faults of silent damage or no progress put off although the host can show it."""
    rows = load().rows
    assert [name for name in FIRST if not rows[name].tests] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tests": []}, "at least one test"),
        ({"cannot_apply": "there is no such thing here"}, "neither tests nor condition"),
        ({"condition": None}, "revealing condition"),
        ({"tests": ["tests/scenarios/test_queue.py::test_x", "tests/scenarios/test_queue.py::test_x"]}, "stands twice"),
        ({"tests": ["tests/scenarios/test_queue.py"]}, "should match pattern"),
        ({"reference": ["somewhere"]}, "should match pattern"),
        ({"class": "Z"}, "should match pattern"),
        ({"later": {"rig": "moon", "plan": "some day perhaps"}}, "'gpu', 'softroce' or 'bluefield'"),
    ],
)
def test_a_bad_row_is_refused(change: dict[str, Any], message: str) -> None:
    """Catches: a table that takes a row with both tests and a reason why it cannot apply, with neither, or misspelt."""
    row = {"class": "Q", "reference": ["a/b#1"], "fault": "something goes wrong", "condition": "whenever it occurs"}
    row |= {"tests": ["tests/scenarios/test_queue.py::test_x"]}
    parse(yaml.safe_dump({"rows": {"Q01": row}}), "good")
    with pytest.raises(CorpusError, match=message):
        parse(yaml.safe_dump({"rows": {"Q01": copy.deepcopy(row) | change}}), "bad")


def test_a_report_says_what_is_not_covered() -> None:
    """Catches: rows that cannot apply, or that another rig realises, left out of a report, or told on that rig."""
    here, gpu = (list(load().not_covered(rig)) for rig in ("local", "gpu"))
    rows = load().rows
    for name, row in rows.items():
        if row.cannot_apply or row.later:
            assert [line for line in here if line.startswith(f"fault {name} ")], name
    assert [line for line in gpu if line.startswith("fault G12 ")] == []
    assert [line for line in gpu if line.startswith("fault K09 ")]


def test_command_lists_the_rows() -> None:
    """Catches: a row that the command leaves out, or a class that it does not know answered with nothing."""
    app, runner = mount("scenarios"), CliRunner()
    text = runner.invoke(app, ["scenarios"]).stdout
    assert all(re.search(rf"^{name} ", text, re.M) for name in load().rows)
    only = json.loads(runner.invoke(app, ["scenarios", "--class", "K", "--json"]).stdout)
    assert set(only) == {name for name, row in load().rows.items() if "K" in row.kind}
    assert only["K11"]["cannot_apply"]
    assert runner.invoke(app, ["scenarios", "--class", "Z"]).exit_code == 2


def test_the_table_is_in_the_package() -> None:
    """Catches: a table that an installed package does not have."""
    assert (resources.files("verification") / "scenarios" / "corpus.yaml").is_file()
