"""A copy of the sources in which a guide may add to them, and the commands that it uses."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.copied_tree import goes_before_installed
from verification.certificate.supervise import plugin_arguments
from verification.models.tiny import build_named

ROOT = Path(__file__).resolve().parents[2]
# What a guide may touch. Where the native module lies elsewhere, its import is not the copy's business.
COPIED = ("blink_core", "verification", "hil_rigs", "tests", "examples", "docs")
FILES = ("pyproject.toml", "CMakeLists.txt", "conftest.py", "README.md", "Makefile")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_named("llama-gqa3", tmp_path_factory.mktemp("guide-model") / "tiny", seed=3).path


Clone = Callable[[str], tuple[Path, dict[str, str]]]


@pytest.fixture(scope="session")
def new_clone(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Clone:
    """`new_clone(name)` gives the folder of a clone, as the reader of a guide has it, and its commands' environment."""

    def make(name: str) -> tuple[Path, dict[str, str]]:
        folder = tmp_path_factory.mktemp(name.removesuffix(".md"))
        sources = folder / "blink"
        for package in COPIED:
            shutil.copytree(ROOT / package, sources / package, ignore=shutil.ignore_patterns("__pycache__"))
        for file in FILES:
            shutil.copy(ROOT / file, sources / file)
        return sources, _environment(folder, sources, model)

    return make


def _environment(folder: Path, sources: Path, model: Path) -> dict[str, str]:
    plugin = "".join(f"{word} " for word in plugin_arguments())
    scripts = folder / "bin"
    scripts.mkdir()
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
        **goes_before_installed(sources),
        "BLINK_HOME": str(folder / "home"),
        "MODEL": str(model),
        "COLUMNS": "160",
    }
