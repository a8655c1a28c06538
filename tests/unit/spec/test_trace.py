"""The trace table: clause of docs/rules.md -> checkers -> tests -> report line."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
CLAUSES = re.findall(r"\*\*([A-Z]\d+)\*\*", (ROOT / "docs/rules.md").read_text())
TRACE: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "verification/spec/trace.yaml").read_text())
PROPERTIES = {
    name
    for path in (ROOT / "verification/required").glob("*.yaml")
    for name in yaml.safe_load(path.read_text())["properties"]
}


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_clause_is_traced() -> None:
    """Catches: a clause that is added and checked by nothing, or one that is gone and still claimed."""
    assert len(CLAUSES) == len(set(CLAUSES)) > 40
    assert set(TRACE) == set(CLAUSES)


@pytest.mark.parametrize("clause", TRACE)
def test_what_the_table_names_exists(clause: str) -> None:
    """Catches: a trace to a test, checker or report line that was renamed or removed."""
    row = TRACE[clause]
    assert row["tests"], "no test"
    for name in row["tests"]:
        path, function = name.split("::")
        assert function in functions(ROOT / path), name
        assert re.search(rf"\b{clause}\b", source_of(ROOT / path, function)), f"{name} does not say {clause}"
    for name in row["checkers"]:
        module, function = name.split(":")
        assert function in functions(ROOT / f"{module.replace('.', '/')}.py"), name
    assert row["report"] in PROPERTIES
    assert row["checkers"]


def source_of(path: Path, function: str) -> str:
    text = path.read_text()
    node = next(n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == function)
    return ast.get_source_segment(text, node) or ""


@pytest.mark.parametrize("clause", CLAUSES)
def test_every_clause_stands_in_the_specification(clause: str) -> None:
    """Catches: a clause that the specification leaves out, or code whose clause nobody can find."""
    sources = [path.read_text() for path in (ROOT / "verification/spec").glob("*.py")]
    assert any(re.search(rf"\b{clause}\b", text) for text in sources)


def test_the_specification_stays_short_and_plain() -> None:
    """Catches: a specification that nobody reads in one sitting, or that leans on what it is to check."""
    allowed = ("__future__", "blink_core.abi", "verification.spec", "dataclasses", "math", "collections")
    lines = 0
    for path in (ROOT / "verification/spec").glob("*.py"):
        text, apart = path.read_text(), set[int]()  # lines of imports and docstrings
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                assert all(name.startswith(allowed) for name in names), (path.name, names)
                apart |= set(range(node.lineno, (node.end_lineno or 0) + 1))
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                apart |= set(range(node.lineno, (node.end_lineno or 0) + 1))
        lines += sum(
            bool(line.strip()) and not line.strip().startswith("#") and number not in apart
            for number, line in enumerate(text.splitlines(), 1)
        )
    assert lines <= 650, f"{lines} lines of code"
