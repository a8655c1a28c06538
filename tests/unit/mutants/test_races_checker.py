"""Checkers that run the scheduler under ThreadSanitizer: what they make of how the program ends."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from verification.mutants.checkers import races
from verification.mutants.checkers.base import Checker, Product

CHECKERS = {checker.name: checker for checker in races.CHECKERS}
RACE = races.REPORT


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program of both checkers, a script: it is to be written."""
    program = tmp_path / "threads"
    monkeypatch.setattr(races, "_built", lambda mutant: program)
    monkeypatch.setattr(races, "_woven", lambda environ: (program, 0))
    return program


def run(
    program: Path, checker: Checker, code: int, word: str, *, last: str = "exit", seconds: float = 30.0
) -> str | None:
    """The clause that it objects with. last: what the program does at its end with `code`."""
    program.write_text(f"#!/bin/sh\necho '{word}' >&2\n{last} {code}\n", encoding="utf-8")
    program.chmod(0o755)
    finding = checker.run(Product(None, {}, program.parent), 1, time.monotonic() + seconds)
    return None if finding is None else finding.clause


@pytest.mark.parametrize("checker", CHECKERS)
def test_deadline_is_no_finding(checker: str, ends: Path) -> None:
    """Catches: a busy machine that kills a mutant, or objects to the product, or whose slowness counts as a crash,
    which refutes an argument for equivalence; a run that broke off, taken for a clean one or for a slow one."""
    assert run(ends, CHECKERS[checker], 0, "") is None
    for code, kind in ((4, TimeoutError), (1, RuntimeError)):
        with pytest.raises(kind, match=f"exit code {code}: not in time: no acknowledgement"):
            run(ends, CHECKERS[checker], code, "not in time: no acknowledgement of an epoch")


@pytest.mark.parametrize("checker", CHECKERS)
def test_program_that_does_not_end_is_late(checker: str, ends: Path) -> None:
    """Catches: a program that hangs beyond its own deadline and is ended, counted as a crash."""
    with pytest.raises(TimeoutError, match="ended after 1.0 s"):
        run(ends, CHECKERS[checker], 30, "", last="exec sleep", seconds=0.0)


@pytest.mark.parametrize(
    ("checker", "clause"), [("thread-sanitizer", "data race"), ("group-races", "data race in a group")]
)
def test_race_is_found(checker: str, clause: str, ends: Path) -> None:
    """Catches: a race that goes by the exit code, which the sanitizer's options or a deadline decide."""
    assert [run(ends, CHECKERS[checker], code, RACE) for code in (66, 4, 0)] == [clause] * 3


def test_group_objects(ends: Path) -> None:
    """Catches: what the program finds wrong, taken for a crash of its own."""
    assert run(ends, CHECKERS["group-races"], 3, "failed: a token out of order") == "what a group does"
