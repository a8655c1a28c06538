"""Figures in README belong to the code that they were measured with, or say STALE."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from hil_rigs.gpu.evidence import (
    COVERED,
    FOLDER,
    README,
    ROOT,
    STALE,
    cover,
    covered_files,
    mark,
    sources_digest,
    stale_rows,
)


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


# Of the engine's modules that a step or its choice of products is made of, those that no GPU figure depends on.
HOST_ONLY = {
    "attention", "gemm", "kv_tags", "kv_tags_abi", "logits", "numpy_ops", "philox", "rope", "sampling", "sanitized_ops",
}  # fmt: skip


def test_every_module_of_gpu_operations_is_covered() -> None:
    """Catches: code that moves out of a covered file into one that no pattern names, after which figures change and no
    row says STALE (cublaslt.py and tuning.py once)."""
    covered = {path.stem for path in covered_files() if path.parent.name == "ops"}
    there = {path.stem for path in (ROOT / "blink_core/ops").glob("*.py")} - {"__init__"}
    assert there - covered == HOST_ONLY


def test_a_record_is_covered_anew_only_for_the_commit_it_was_measured_at(tmp_path: Path) -> None:
    """Catches: a digest of today's sources given to figures of others; one for a tree that was not committed."""
    root = tmp_path / "root"
    kernel = root / "blink_core/device/kernels/a.cu"
    tuning = root / "blink_core/ops/tuning.py"
    for path in (kernel, tuning):
        path.parent.mkdir(parents=True)
        path.write_text("one")

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=root, check=True)

    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "one")
    old = ["blink_core/device/kernels/*"]
    record = {"commit": "HEAD", "sources": {"digest": sources_digest(root, old), "files": 1, "patterns": old}}
    path = tmp_path / "h.json"
    path.write_text(json.dumps(record))
    expected = sources_digest(root)
    tuning.write_text("two")  # not committed: not what was measured
    cover(path, root)
    assert json.loads(path.read_text())["sources"]["digest"] == expected != sources_digest(root)
    path.write_text(json.dumps(record | {"sources": record["sources"] | {"digest": "0" * 64}}))  # type: ignore[operator]
    with pytest.raises(ValueError, match="measured 000000000000"):
        cover(path, root)
    path.write_text(json.dumps(record | {"commit": "1234567"}))
    with pytest.raises(ValueError, match="no commit 1234567"):
        cover(path, root)
