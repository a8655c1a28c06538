"""Puts one native mutant in force: the woven build (`weave`) becomes `blink_core._native`, with one fault switched on.

Only the standard library is imported here: by `site/sitecustomize.py` it runs in children before the product does.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType

VARIABLE = "BLINK_NATIVE_MUTANT"  # JSON: module (path of the woven build), identity (the fault's number in it)
HOOK = "BLINK_NATIVE_MUTANT_HOOK"  # path of this file, for sitecustomize
NAME = "blink_core._native"
SITE = Path(__file__).parent / "site"


class NotInForce(ImportError):
    """A woven module cannot be put in force in this process; says why."""


@cache
def read(path: Path, name: str = "blink_woven._native") -> ModuleType:
    """The woven module under `name`, beside the shipped one; one of a path, whoever asks, because a process loads a
    library once. Raises NotInForce for what is no woven module."""
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    if spec is None or not path.is_file():
        raise NotInForce(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    activate(module, 0)
    return module


def activate(module: ModuleType, identity: int) -> None:
    """Switches the fault of that number on and any other off; 0: none. Raises NotInForce for another number."""
    most = getattr(module, "mutants", 0)
    if not most:
        raise NotInForce(f"{module.__file__} is no build with mutants")
    if not 0 <= identity <= most:
        raise NotInForce(f"{module.__file__} holds mutants 1 to {most}, not {identity}")
    module.activate_mutant(identity)


def install(path: Path, identity: int = 0) -> ModuleType:
    """Makes the woven module this process's `blink_core._native`. Raises NotInForce if that is imported already."""
    if NAME in sys.modules:
        raise NotInForce(f"{NAME} is imported already")
    import blink_core

    module = read(path, NAME)
    activate(module, identity)
    sys.modules[NAME] = module
    blink_core.__dict__["_native"] = module
    return module


def environment(path: Path, identity: int, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of a child process in which the fault is in force. base: None for this process's."""
    variables = dict(os.environ if base is None else base)
    variables[VARIABLE] = json.dumps({"module": str(path), "identity": identity})
    variables[HOOK] = __file__
    paths = [entry for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != str(SITE)]
    variables["PYTHONPATH"] = os.pathsep.join([str(SITE), *paths])
    return variables


def install_from_environment() -> ModuleType | None:
    """As `environment` says; None where it says nothing."""
    value = os.environ.get(VARIABLE)
    if not value:
        return None
    told = json.loads(value)
    return install(Path(told["module"]), int(told["identity"]))
