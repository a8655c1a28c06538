"""Figures in README belong to the code that they were measured with, or say STALE."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hil_rigs.gpu.evidence import COVERED, FOLDER, README, ROOT, STALE, mark, sources_digest, stale_rows


def test_readme_marks_stale_figures() -> None:
    """Catches: a figure that stays in README after the code it was measured with has changed."""
    text = README.read_text(encoding="utf-8")
    rows = stale_rows(text)
    named = {path.name for path in FOLDER.glob("*.json") if f"evidence/{path.name}" in text}
    assert named == {path.name for path in FOLDER.glob("*.json")}, "every evidence file has its row"
    lines = text.splitlines()
    wrong = [lines[number] for number, stale in rows if (STALE in lines[number]) != stale]
    assert wrong == [], "run `python -m hil_rigs.gpu.evidence --mark`, or measure again"


def test_digest_covers_names_and_contents(tmp_path: Path) -> None:
    """Catches: a covered file that may change, move or vanish without the digest noticing."""
    kernel = tmp_path / "blink_core/device/kernels/a.cu"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("one")
    first = sources_digest(tmp_path)
    kernel.write_text("two")
    second = sources_digest(tmp_path)
    kernel.rename(kernel.with_name("b.cu"))
    assert len({first, second, sources_digest(tmp_path)}) == 3
    assert all(list(ROOT.glob(pattern)) for pattern in COVERED), "a pattern that covers nothing"


@pytest.mark.parametrize("stale", [True, False])
def test_marks(tmp_path: Path, stale: bool) -> None:
    """Catches: a mark that is put on other rows, put twice, or not taken away after a new measurement."""
    digest = "0" * 64 if stale else sources_digest()
    (tmp_path / "h.json").write_text(json.dumps({"sources": {"digest": digest}}))
    row = "| decode step | 4.1 ms, `hil_rigs/evidence/h.json` |"
    text = f"evidence/h.json in prose\n| other | row |\n{row}\n"
    rows = stale_rows(text, tmp_path)
    assert rows == [(2, stale)]
    marked = mark(text, rows)
    assert (f"| {STALE}: decode" in marked) == stale
    assert marked.count(STALE) == int(stale)
    assert mark(marked, rows) == marked
    assert mark(marked, [(2, False)]) == text
