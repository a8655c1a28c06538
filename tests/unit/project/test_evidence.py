"""Figures in README belong to the code that they were measured with, or say STALE."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from hil_rigs.gpu import evidence
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


def part(code: str, limit: float = 20.0) -> tuple[tuple[str, ...], float]:
    return ("-c", f"import sys, json, time, subprocess, os; {code}", "{out}"), limit


def write(value: str) -> str:
    return f"open(sys.argv[1], 'w').write({value!r})"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[tuple[str, ...], float]]:
    """Parts of three kinds in place of the real ones, on a machine that is named."""
    found = {"writes": part(write("[1]")), "tells": part("print('RESULT [2]')"), "third": part(write("[3]"))}
    monkeypatch.setattr(evidence, "PARTS", found)
    monkeypatch.setattr(evidence, "machine", lambda: {"gpu": "H", "driver": "1", "cuda_driver": 13000})
    return found


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "h.json").read_text())
    return found


def results(folder: Path) -> dict[str, Any]:
    return {name: found["result"] for name, found in read(folder)["parts"].items()}


def test_parts_that_fail_waste_no_others(parts: dict[str, Any], tmp_path: Path) -> None:
    """Catches: a part that hangs, leaves a child behind, fails or writes half a file, and with it the parts after it or
    what it had measured until then."""
    pid = tmp_path / "pid"
    child = f"p = subprocess.Popen(['sleep', '600']); open({str(pid)!r}, 'w').write(str(p.pid)); "
    parts["hangs"] = part(f"{write('[9]')}; {child} time.sleep(600)", 6.0)
    parts["fails"] = part("print('told'); sys.exit('wrong')")
    parts["half"] = part(write('{"a": '))
    parts["last"] = part(write("[5]"))
    assert evidence.main(["h", "--out", str(tmp_path)]) == 1
    found = read(tmp_path)["parts"]
    assert results(tmp_path) == {
        "writes": [1], "tells": [2], "third": [3], "hangs": [9], "fails": None, "half": None, "last": [5],
    }  # fmt: skip
    assert found["hangs"]["failed"] == "not over after 6 s"
    assert "wrong" in found["fails"]["failed"]
    assert {name for name, one in found.items() if "failed" in one} == {"hangs", "fails", "half"}
    gone, deadline = Path(f"/proc/{pid.read_text()}/stat"), time.monotonic() + 20
    while gone.exists() and gone.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "what a part started lives on beside the next one"
        time.sleep(0.01)


def test_a_record_is_made_in_several_calls(parts: dict[str, Any], tmp_path: Path) -> None:
    """Catches: parts of an earlier call lost, or measured again though they are there; a failure that replaces what was
    measured; a part begun for which there is no time."""
    parts["third"] = part("sys.exit(1)")
    assert evidence.main(["h", "--out", str(tmp_path), "--only", "writes,third"]) == 1
    first = read(tmp_path)["parts"]["writes"]
    assert evidence.main(["h", "--out", str(tmp_path), "--merge", "--limit", "5"]) == 1
    assert results(tmp_path).keys() == {"writes", "third"}  # each may take 20 s
    parts["third"] = part(write("[3]"))
    assert evidence.main(["h", "--out", str(tmp_path), "--merge"]) == 0
    assert results(tmp_path) == {"writes": [1], "third": [3], "tells": [2]}
    assert read(tmp_path)["parts"]["writes"] == first
    parts["writes"] = part("sys.exit(1)")
    assert evidence.main(["h", "--out", str(tmp_path), "--merge", "--only", "writes"]) == 1
    assert read(tmp_path)["parts"]["writes"] == first
    assert evidence.main(["h", "--out", str(tmp_path), "--merge"]) == 0
    assert len(read(tmp_path)["merged"]) == 2  # calls that measured something


def test_parts_of_other_sources_or_machines_are_not_merged(
    parts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: figures of two versions of the code, or of two GPUs, under one digest."""
    assert evidence.main(["h", "--out", str(tmp_path), "--only", "writes"]) == 0
    before = (tmp_path / "h.json").read_bytes()
    monkeypatch.setattr(evidence, "sources_digest", lambda: "0" * 64)
    assert evidence.main(["h", "--out", str(tmp_path), "--merge"]) == 2
    monkeypatch.undo()
    monkeypatch.setattr(evidence, "PARTS", parts)
    monkeypatch.setattr(evidence, "machine", lambda: {"gpu": "H", "driver": "2", "cuda_driver": 13000})
    assert evidence.main(["h", "--out", str(tmp_path), "--merge"]) == 2
    assert (tmp_path / "h.json").read_bytes() == before


def test_a_machine_without_a_gpu_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: a record of a machine that nothing could be asked of, begun or overwritten; exit status 1, which says
    that parts were run, and a traceback in place of the reason."""

    def refuse() -> dict[str, Any]:
        raise RuntimeError("facts of the machine: there is no usable GPU")

    monkeypatch.setattr(evidence, "machine", refuse)
    assert evidence.main(["h", "--out", str(tmp_path)]) == 2
    assert "there is no usable GPU" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
