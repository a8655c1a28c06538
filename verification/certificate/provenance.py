"""Where a run came from: machine, packages, git state, digests of the engine, its sources and the model."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

DISTRIBUTION = "blink-hil"
_PACKAGES = (
    "numpy",
    "scipy",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "gguf",
    "pytest",
    "hypothesis",
    "allure-pytest",
    "pytest-xdist",
    "cryptography",
    "openai",
    "httpx",
)
_SOURCE_SUFFIXES = (".py", ".hpp", ".cpp", ".h", ".cu", ".cuh", ".yaml", ".json", ".j2", ".ini")
_GIT_TIMEOUT_S = 20.0
_CHUNK = 1 << 20


def tool_version() -> str:
    """Version of the installed distribution, "0+source" when it is run from a source tree without being installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "0+source"


def file_digest(path: Path) -> str:
    """SHA-256 of a file, hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def tree_digest(files: dict[str, Path]) -> str:
    """SHA-256 over the sorted lines "<sha256>  <name>" of files given by name, as sha256sum would print them."""
    lines = [f"{file_digest(files[name])}  {name}\n" for name in sorted(files)]
    return hashlib.sha256("".join(lines).encode("utf-8")).hexdigest()


def package_folders(name: str) -> list[Path]:
    """Folders of a package, without importing it; none when it is not installed.

    An editable install may keep the sources in one folder and the compiled modules in another.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        return []
    return [Path(folder) for folder in spec.submodule_search_locations if Path(folder).is_dir()]


def _files(package: str, suffixes: tuple[str, ...]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for folder in package_folders(package):
        for path in sorted(folder.rglob("*")):
            if path.suffix in suffixes and path.is_file() and "__pycache__" not in path.parts:
                found.setdefault(f"{package}/{path.relative_to(folder).as_posix()}", path)
    return found


def engine_modules() -> dict[str, str]:
    """SHA-256 of each compiled module of the engine, by its name within the package."""
    return {name: file_digest(path) for name, path in sorted(_files("blink_core", (".so",)).items())}


def sources_digest() -> str:
    """Tree digest of all source and data files of the three packages."""
    files: dict[str, Path] = {}
    for package in ("blink_core", "verification", "hil_rigs"):
        files |= _files(package, _SOURCE_SUFFIXES)
    return tree_digest(files)


def model_digest(path: Path) -> str:
    """SHA-256 of a model file, or the tree digest of a model directory."""
    if path.is_dir():
        return tree_digest({p.relative_to(path).as_posix(): p for p in path.rglob("*") if p.is_file()})
    return file_digest(path)


def machine() -> dict[str, Any]:
    """CPU, memory, operating system, Python and package versions of this machine."""
    from hil_rigs.probe import machine_facts  # psutil and pydantic are not needed to load this module

    packages: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = "absent"
    try:
        release = platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    except OSError:
        release = "unknown"
    return {
        **machine_facts(),
        "hostname": platform.node(),
        "os": release,
        "python_implementation": sys.implementation.name,
        "packages": packages,
    }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def source_state() -> dict[str, Any]:
    """Git commit and dirtiness of the tree that holds this package; both null when it is not in a git tree.

    `dirty` counts changed and untracked files that git does not ignore.
    """
    folder = Path(__file__).resolve().parent
    # An installed copy may lie inside a git-ignored environment of some other project: its state is not ours.
    if _git(folder, "ls-files", "--error-unmatch", "provenance.py") is None:
        return {"git_commit": None, "dirty": None}
    commit = _git(folder, "rev-parse", "HEAD")
    top = _git(folder, "rev-parse", "--show-toplevel")
    status = _git(Path(top), "status", "--porcelain") if top else None
    return {"git_commit": commit, "dirty": None if status is None else bool(status)}
