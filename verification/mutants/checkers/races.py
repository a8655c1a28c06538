"""Checker: the scheduler among real threads under ThreadSanitizer, for mutants of the memory order of ring words.

A machine with a total store order hides these from every checker that looks at what was computed.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock

from verification.mutants import weave
from verification.mutants.checkers.base import Finding, Product, found, left
from verification.mutants.model import PRODUCT, Mutant

SOURCE = PRODUCT / "tests" / "planted" / "threads.cpp"
REPORT = "WARNING: ThreadSanitizer: data race"
_OPTIONS = ("-std=c++20", "-O1", "-g", "-w", "-fsanitize=thread", "-pthread")


class Races:
    """Front ends, scheduler and model as threads of one program; the race detector objects, or nobody does."""

    name = "thread-sanitizer"
    where = frozenset({"native"})
    clauses: Mapping[str, frozenset[str]] = {"data race": frozenset("D")}
    functions = frozenset({"verification.mutants.checkers.races.reported"})
    seconds = 240.0

    def applies(self, mutant: Mutant) -> bool:
        """It sees memory orders, and each mutant takes it a build of its own."""
        return mutant.file.endswith("/atomics.hpp")

    def run(self, product: Product, seed: int, deadline: float) -> Finding | None:
        """One run of some 50 requests a ring."""
        program = _built(product.mutant)
        requests = random.Random(f"races/{seed}").randrange(40, 80)
        done = subprocess.run(
            [str(program), "1", str(requests)],
            capture_output=True,
            text=True,
            timeout=max(1.0, left(deadline)),
            check=False,
            env={"TSAN_OPTIONS": "halt_on_error=1 exitcode=66"},
        )
        race = reported(done.stderr)
        return None if race is None else found(self, "data race", race)


def reported(text: str) -> str | None:
    """The first data race of a sanitizer's output, by its first lines; None if it reports none."""
    at = text.find(REPORT)
    return None if at < 0 else text[at : at + 500]


def _built(mutant: Mutant | None) -> Path:
    """The program with that mutant in a copy of its headers; built once. Raises BuildFailed."""
    if not SOURCE.is_file():
        raise weave.BuildFailed(f"{SOURCE} is not there: it is run in a clone of Blink")
    folder = PRODUCT / "build" / "mutants" / f"races-{mutant.name if mutant else 'clean'}"
    folder.mkdir(parents=True, exist_ok=True)
    total = hashlib.sha256((mutant.model_dump_json() if mutant else "").encode())
    for path in [SOURCE, *weave.sources()]:
        total.update(path.read_bytes())
    program, stamp = folder / "threads", folder / "digest"
    with FileLock(folder / "lock", timeout=weave.BUILD_TIMEOUT_S):
        if not (program.exists() and stamp.exists() and stamp.read_text() == total.hexdigest()):
            stamp.unlink(missing_ok=True)
            for part in weave.FOLDERS:
                shutil.copytree(PRODUCT / part, folder / part, dirs_exist_ok=True)
            if mutant is not None:
                text = mutant.path.read_text(encoding="utf-8")
                (folder / mutant.file).write_text(mutant.apply(text), encoding="utf-8")
            includes = [f"-I{folder / part}" for part in weave.FOLDERS]
            weave.run(weave.compiler(), *_OPTIONS, *includes, *weave.includes(), str(SOURCE), "-o", str(program))
            stamp.write_text(total.hexdigest())
    return program


CHECKERS = (Races(),)
