"""A copy of the sources in which a guide may add to them, and the commands that it uses."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from verification.models.tiny import build_tiny

ROOT = Path(__file__).resolve().parents[2]
# What a guide may touch. Where the native module lies elsewhere, its import is not the copy's business.
COPIED = ("blink_core", "verification", "hil_rigs", "tests", "examples", "docs")
FILES = ("pyproject.toml", "CMakeLists.txt", "conftest.py", "README.md", "Makefile")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("guide-model") / "tiny", seed=3).path


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A clone, as the reader of a guide has it."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        shutil.copytree(ROOT / name, tmp_path / "blink" / name, ignore=ignore)
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / "blink" / name)
    return tmp_path / "blink"


@pytest.fixture
def environment(tmp_path: Path, model: Path) -> Callable[[Path], dict[str, str]]:
    """The environment of a guide's commands, for a copy of the sources."""

    def make(sources: Path) -> dict[str, str]:
        import blink_core._native as native

        built = Path(str(native.__file__))
        if not (sources / "blink_core" / built.name).exists():
            shutil.copy(built, sources / "blink_core" / built.name)
        installed = any(point.name == "blink" for point in importlib.metadata.entry_points(group="pytest11"))
        plugin = "" if installed else "-p verification.plugin "
        scripts = tmp_path / "bin"
        scripts.mkdir(exist_ok=True)
        commands = {
            "python": f'exec "{sys.executable}" "$@"',
            "blink": f'exec "{sys.executable}" -m verification.cli "$@"',
            "pytest": f'exec "{sys.executable}" -m pytest {plugin}"$@"',
        }
        for name, line in commands.items():
            (scripts / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
            (scripts / name).chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("BLINK_", "PYTEST_"))}
        return kept | {
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(sources),
            "BLINK_HOME": str(tmp_path / "home"),
            "MODEL": str(model),
            "COLUMNS": "160",
        }

    return make
