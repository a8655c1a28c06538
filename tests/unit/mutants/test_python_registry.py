"""Python and CUDA mutants: their texts stand in the product, compile, and are in force where the hook puts them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from verification.mutants import gpu, hook
from verification.mutants.model import PRODUCT, by_name, load

PYTHON = tuple(m for m in load() if m.where == "python")


def test_texts_stand_once_and_compile() -> None:
    """Catches: a mutant whose text the product no longer has, or that is a syntax error and no fault."""
    for mutant in PYTHON:
        source = mutant.path.read_text(encoding="utf-8")
        mutated = mutant.apply(source)
        assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source)), mutant.name
        assert mutant.hidden_by, mutant.name


def test_classes_are_covered() -> None:
    """Catches: a class of the corpus that lost its mutants."""
    counts = Counter(m.cls for m in PYTHON)
    least = {"A": 6, "O": 6, "M": 6, "L": 6, "T": 6, "B": 6, "R": 6, "D": 4, "N": 4, "V": 4, "X": 4, "S": 4, "K": 2}
    assert sum(counts.values()) >= 60
    assert {cls: n for cls, n in least.items() if counts[cls] < n} == {}


def test_cuda_texts_stand_once(tmp_path: Path) -> None:
    """Catches: a kernel that has moved on from its mutant, or one whose checks are not known."""
    gpu.write(tmp_path)
    plan = json.loads((tmp_path / "mutants.json").read_text())
    assert len(plan) >= 20
    for entry in plan:
        mutant = by_name(entry["name"])
        name = Path(mutant.file).name
        different = [
            file.name
            for file in (tmp_path / entry["name"]).iterdir()
            if file.read_text() != (gpu.KERNELS / file.name).read_text()
        ]
        assert different == [name]


def test_a_mutant_is_in_force_in_children_only(tmp_path: Path) -> None:
    """Catches: a hook that replaces nothing, another module, or the product's file."""
    mutant = by_name("philox-seven-rounds")
    before = mutant.path.read_bytes()
    told = "from blink_core.ops import philox, sampling; print(philox.ROUNDS, philox.__file__, sampling.BLOCK)"
    seen = []
    for environ in (hook.environment(mutant, tmp_path), hook.environment(None, tmp_path)):
        done = subprocess.run([sys.executable, "-c", told], env=environ, capture_output=True, text=True, check=True)
        seen.append(done.stdout.split())
    assert [seen[0][0], seen[1][0]] == ["7", "10"]
    assert seen[0][1:] == seen[1][1:] == [str(mutant.path), "8192"]
    assert mutant.path.read_bytes() == before
    assert hook.VARIABLE not in os.environ


def test_a_mutant_that_comes_too_late_is_refused(tmp_path: Path) -> None:
    """Catches: a run that reports on a mutant that was never in force."""
    mutant = by_name("philox-seven-rounds")
    environ = hook.environment(mutant, tmp_path)
    import blink_core.ops.philox  # noqa: F401

    with pytest.raises(hook.HookError, match="imported already"):
        hook.install(environ[hook.VARIABLE])
    (tmp_path / f"{mutant.name}-{mutant.module}.py.txt").unlink()
    late = [sys.executable, "-c", "print(1)"]
    done = subprocess.run(late, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 70
    assert "not in force" in done.stderr


def test_the_product_knows_no_python_mutant() -> None:
    """Catches: a hook for mutants that got into the product."""
    for path in (PRODUCT / "blink_core").rglob("*.py"):
        assert "MUTANT" not in path.read_text(encoding="utf-8"), path
