"""What a row of the kill matrix depends on besides its mutant and its seeds: the text of what its checkers run.

Of the suite, that is the modules that the checkers import, directly or not, and the data beside them. A native mutant
needs of the rest what they import and the C++; a Python one all of the product but its GPU kernels, because checkers
start processes by name.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from verification.mutants import hook, weave
from verification.mutants.model import PRODUCT

PACKAGES = ("blink_core", "verification", "hil_rigs")
CHECKERS = "verification.mutants.checkers"
DRIVERS = ("verification.mutants.matrix", "verification.mutants.worker", "verification.mutants.hook")
STARTED = ("hil_rigs.parts", "hil_rigs.stepped")  # processes of checkers of Python mutants
PROGRAMS = PRODUCT / "tests" / "planted"  # C++ that a native checker runs
EQUIVALENT = "equivalent.yaml"  # judges rows, which are the same with it and without; the registry lies in a folder
_GPU = ("kernels", "gpu")  # folders


def digest(where: str, modules: tuple[str, ...]) -> str:
    """Of the sources that rows of that kind depend on. modules: of its checkers, as `checkers` names them."""
    roots = (*DRIVERS, CHECKERS, f"{CHECKERS}.base", *(f"{CHECKERS}.{name}" for name in modules))
    files = {*_files((*roots, *STARTED) if where == "python" else roots), *hook.SITE.glob("*.py")}
    if where == "native":
        files |= {PRODUCT / "CMakeLists.txt", *weave.sources(), *PROGRAMS.glob("*.cpp")}
    else:
        for package in ("blink_core", "hil_rigs"):
            files |= {
                path
                for path in (PRODUCT / package).rglob("*")
                if path.suffix in (".py", ".hpp", ".cpp", ".yaml", ".json", ".jinja")
                and not set(path.relative_to(PRODUCT).parts) & {*_GPU, "evidence"}
            }
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(f"{path.relative_to(PRODUCT)}\0".encode() + path.read_bytes())
    return total.hexdigest()


def _files(roots: tuple[str, ...]) -> Iterator[Path]:
    """Files of the modules that these import, they themselves included, and YAML beside them."""
    seen, left = set[str](), list(roots)
    while left:
        name = left.pop()
        path = module_file(name)
        if name in seen or path is None:
            continue
        seen.add(name)
        yield path
        yield from (data for data in path.parent.glob("*.yaml") if data.name != EQUIVALENT)
        left += imported(path)
        left += [name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)]


@cache
def imported(path: Path) -> tuple[str, ...]:
    """Names of ours that a file imports anywhere: modules, and what may be one."""
    out: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            out += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            out += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(name for name in out if name.split(".", 1)[0] in PACKAGES)


def module_file(name: str) -> Path | None:
    """The file of a module of ours; None for what is none."""
    base = PRODUCT.joinpath(*name.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)
