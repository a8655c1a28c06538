"""The project's own files: what is packaged, pinned and promised."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import hil_rigs

ROOT = Path(hil_rigs.__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins() -> dict[str, str]:
    found = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            found[canonical(name)] = version
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> list[Requirement]:
    project = PROJECT["project"]
    extras = project["optional-dependencies"].values()
    return [Requirement(text) for group in (project["dependencies"], *extras) for text in group]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_pins_hold_every_range(requirement: Requirement) -> None:
    """Catches: a dependency without a pin, or a pin outside its range, which makes the install fail or drift."""
    assert pins()[canonical(requirement.name)] in requirement.specifier


def test_engine_needs_no_oracle() -> None:
    """Catches: torch or transformers becoming a dependency of the engine."""
    names = {canonical(Requirement(text).name) for text in PROJECT["project"]["dependencies"]}
    assert not names & {"torch", "transformers", "pytest", "cupy-cuda13x", "pyverbs"}


def test_no_registry_host_or_machine_path() -> None:
    """Catches: an index address or one machine's path written into the project."""
    pattern = re.compile(r"https?://[\w.-]*(pypi|pythonhosted|npmjs|debian|pytorch)\b|/root/|/home/|/opt/wheels|/work/")
    offenders = []
    # Walked, not asked of git: the sources may lie here without a repository, and git need not be installed.
    names = ("blink_core", "verification", "hil_rigs", "traces", "tests", "docs", "examples", ".ci")
    roots = [ROOT / name for name in names]
    files = [path for root in roots for path in root.rglob("*") if "__pycache__" not in path.parts]
    # A work tree's `.git` is a file that names this machine's folders; it is no part of the project.
    for path in [*files, *(path for path in ROOT.glob("*") if path.name != ".git")]:
        name = path.relative_to(ROOT)
        if (
            path.suffix in {".py", ".toml", ".txt", ".md", ".yaml", ".yml", ".json", ".cpp", ".hpp", ".j2", ""}
            and path.is_file()
        ):
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
                if pattern.search(line) and path != Path(__file__):
                    offenders.append(f"{name}:{number}: {line.strip()[:80]}")
    assert offenders == []


def test_makefile_and_readme_name_the_two_commands() -> None:
    """Catches: a README that promises a command which the Makefile no longer has."""
    makefile = (ROOT / "Makefile").read_text()
    readme = (ROOT / "README.md").read_text()
    for command in re.findall(r"\bmake ([a-z-]+)", readme):
        assert re.search(rf"^{command}:", makefile, re.M), f"README says `make {command}`"
    assert readme.index("make certify") < readme.index("make test") < readme.index("## ")
