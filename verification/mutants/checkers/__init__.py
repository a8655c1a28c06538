"""Checkers as the kill matrix runs them: `base` is the protocol, every other module lists its own in `CHECKERS`."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path

from verification.mutants.checkers.base import Checker

# Of native mutants, with nothing that loads slowly; those of Python ones are found by their files.
NATIVE = ("lock_step", "stepped", "live", "races", "scopes", "conformance", "linearisable")


@cache
def _of(module: str) -> tuple[Checker, ...]:
    return tuple(getattr(importlib.import_module(f"{__name__}.{module}"), "CHECKERS", ()))


@cache
def _others() -> tuple[str, ...]:
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    return tuple(name for name in names if name not in ("__init__", "base", *NATIVE))


def all_modules() -> tuple[str, ...]:
    """Names of the modules here that list checkers."""
    return (*NATIVE, *_others())


def every(where: str | None = None) -> tuple[Checker, ...]:
    """All checkers, or those that notice mutants of that kind, in order of their names.

    Raises ValueError for a name that two have.
    """
    modules = NATIVE if where == "native" else (*NATIVE, *_others())
    chosen = [one for module in modules for one in _of(module) if where is None or where in one.where]
    names = [one.name for one in chosen]
    if len(set(names)) != len(names):
        raise ValueError(f"checkers share a name: {', '.join(sorted(n for n in names if names.count(n) > 1))}")
    return tuple(sorted(chosen, key=lambda one: one.name))


def find(name: str) -> Checker:
    """The checker of that name. Raises KeyError, with the names that there are."""
    for module in (*NATIVE, *_others()):
        for checker in _of(module):
            if checker.name == name:
                return checker
    raise KeyError(f"no checker is named {name!r}; there are {', '.join(one.name for one in every())}")
