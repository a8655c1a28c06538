"""Puts one Python mutant in force: its module is compiled from mutated text when it is imported, in any process.

`environment` writes the mutated text to a file and gives the variables with which a child process is started: a
`sitecustomize` on its path calls `install`, so engine, front end and worker need no option of their own. Nothing is
written into the product, and a process without the variables imports it as it is.

Only the standard library is imported here: the module runs in every child, before the product does.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verification.mutants.model import Mutant

VARIABLE = "BLINK_PYTHON_MUTANT"  # JSON: a list of name, module, source (path of the mutated text)
SITE = Path(__file__).parent / "site"  # holds sitecustomize.py
HOOK = "BLINK_MUTANT_HOOK"  # path of this file, for sitecustomize: `verification` may not be importable yet


class HookError(RuntimeError):
    """A mutant cannot be put in force here; says why."""


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module under its own name and file, from other text."""

    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        # Not through the cache of byte code, which knows the file's own text only.
        return self.source_to_code(self._text.encode("utf-8"), self.path)

    def get_source(self, fullname: str) -> str:
        return self._text


class MutantFinder(importlib.abc.MetaPathFinder):
    """Finds one module; `applied` says whether it has been imported."""

    def __init__(self, name: str, module: str, text: str) -> None:
        self.name, self.module, self._text = name, module, text
        self.applied = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's spec with the mutated text; None for any other module."""
        if fullname != self.module:
            return None
        found = next(
            (
                spec
                for finder in sys.meta_path
                if not isinstance(finder, MutantFinder) and (find := getattr(finder, "find_spec", None)) is not None
                if (spec := find(fullname, path, target)) is not None
            ),
            None,
        )
        if found is None or found.origin is None:
            raise HookError(f"mutant {self.name}: module {fullname} is not found")
        self.applied = True
        loader = _Loader(fullname, found.origin, self._text)
        return importlib.util.spec_from_file_location(
            fullname, found.origin, loader=loader, submodule_search_locations=found.submodule_search_locations
        )


def environment(mutant: Mutant | None, folder: Path, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of a child process in which `mutant` is in force; the mutated text goes to `folder`.

    base: the variables to add to, by default this process's. None for the mutant gives them without any mutant.
    Raises RegistryError if the product's text has moved on.
    """
    if mutant is None or mutant.where != "python":
        return environment_of({}, folder, base)
    text = mutant.apply(mutant.path.read_text(encoding="utf-8"))
    return environment_of({mutant.module: text}, folder, base, name=mutant.name)


def environment_of(
    texts: Mapping[str, str], folder: Path, base: Mapping[str, str] | None = None, *, name: str = "several"
) -> dict[str, str]:
    """Environment of a child process in which each module of `texts` is compiled from its text there."""
    variables = dict(os.environ if base is None else base)
    variables.pop(VARIABLE, None)
    if not texts:
        return variables
    told = []
    for module, text in texts.items():
        source = folder / f"{name}-{module}.py.txt"
        source.write_text(text, encoding="utf-8")
        told.append({"name": name, "module": module, "source": str(source)})
    variables[VARIABLE] = json.dumps(told)
    variables[HOOK] = __file__
    paths = [entry for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != str(SITE)]
    variables["PYTHONPATH"] = os.pathsep.join([str(SITE), *paths])
    return variables


def install(value: str | None = None) -> tuple[MutantFinder, ...]:
    """Puts what the environment (or `value`, as the variable holds it) says in force in this process.

    Empty where there is nothing. Raises HookError if a module has been imported already, or a text cannot be read.
    """
    value = os.environ.get(VARIABLE) if value is None else value
    finders = []
    for told in json.loads(value) if value else ():
        if told["module"] in sys.modules:
            raise HookError(f"mutant {told['name']}: {told['module']} is imported already")
        try:
            text = Path(told["source"]).read_text(encoding="utf-8")
        except OSError as error:
            raise HookError(f"mutant {told['name']}: {error}") from error
        finders.append(MutantFinder(told["name"], told["module"], text))
    sys.meta_path[:0] = finders
    return tuple(finders)
