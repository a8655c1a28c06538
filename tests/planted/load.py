"""Takes a built native module in place of the shipped one, or beside it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import blink_core


def load_native(path: Path, *, name: str = "blink_planted._native") -> ModuleType:
    """The module at `path` under `name`, beside the shipped `blink_core._native`. Raises ImportError."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def replace_native(path: Path) -> ModuleType:
    """Makes the module at `path` this process's `blink_core._native`; must come before any other import of it."""
    if "blink_core._native" in sys.modules:
        raise ImportError("blink_core._native is imported already")
    module = load_native(path, name="blink_core._native")
    sys.modules["blink_core._native"] = module
    blink_core.__dict__["_native"] = module
    return module
