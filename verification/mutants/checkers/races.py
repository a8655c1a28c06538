"""Checkers: the scheduler among real threads under ThreadSanitizer, for mutants of the memory order of ring words, and
for those of what a group of threads agrees upon.

A machine with a total store order hides the former from every checker that looks at what was computed.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from filelock import FileLock

from blink_core.abi.enums import LogLevel
from verification.mutants import native, weave
from verification.mutants.checkers.base import Finding, Product, found, left
from verification.mutants.model import PRODUCT, Mutant

SOURCE = PRODUCT / "tests" / "planted" / "threads.cpp"
_OBJECTS, _LATE = 3, 4  # exit codes of the program for what it finds wrong itself, and for a deadline of its own
_LEAST_S = 1.0  # seconds of a run, however little is left
_SOONER_S = 2.0  # by which the program's deadline is before ours, so that it says what it waits for
_FEW_ROWS = 4  # of a step, unless many are asked for
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
        """One run of some 50 requests a ring. Raises TimeoutError for one that is not done in time, RuntimeError for
        one that ends otherwise than by a race."""
        requests = random.Random(f"races/{seed}").randrange(40, 80)
        done = _ran(_built(product.mutant), 0, deadline, 1, requests, LogLevel.ALL, _FEW_ROWS)
        race = reported(done.stderr)
        if race is not None:
            return found(self, "data race", race)
        _done(done)
        return None


class GroupRaces:
    """The scheduler as a group of three threads, below log level ALL too: a barrier that is missing is a data race.

    Its loop is that of a resident group: a plan is looked at before the boundary is finished, as the step would, and
    words of front ends are asked for by the names that such a group reads them by. The last run has more rows than one
    word of a row set holds.

    All mutants of a woven build are in one program. Of automatic mutants only: named ones have their checkers.
    """

    name = "group-races"
    where = frozenset({"native"})
    clauses: Mapping[str, frozenset[str]] = {
        "data race in a group": frozenset("D"),
        "what a group does": frozenset("DGKRS"),
    }
    functions = frozenset({"verification.mutants.checkers.races.reported"})
    seconds = 60.0

    def applies(self, mutant: Mutant) -> bool:
        return False

    def prepare(self, seed: int) -> None:
        """Builds the program."""
        _woven(os.environ)

    def run(self, product: Product, seed: int, deadline: float) -> Finding | None:
        """One run at each level, and one of many rows. Raises TimeoutError for one that is not done in time, which a
        busy machine can cause, RuntimeError for one that crashes."""
        program, identity = _woven(product.environ)
        rng = random.Random(f"group-races/{seed}")
        rows = rng.randrange(70, 90)
        runs = [(rng.randrange(150, 250), level, _FEW_ROWS) for level in (LogLevel.DECISIONS, LogLevel.ALL)]
        for requests, level, width in [*runs, (2 * rows, LogLevel.DECISIONS, rows)]:
            done = _ran(program, identity, deadline, 3, requests, level, width)
            race = reported(done.stderr)
            if race is not None:
                return found(self, "data race in a group", race)
            if done.returncode == _OBJECTS:
                return found(self, "what a group does", done.stderr)
            _done(done, f"level {level}: ")
        return None


def _ran(
    program: Path, identity: int, deadline: float, group: int, requests: int, level: LogLevel, rows: int
) -> subprocess.CompletedProcess[str]:
    """One run of the program, with what is left until the deadline. Raises TimeoutError for one that goes on beyond."""
    limit = max(_LEAST_S, left(deadline) - 1.0)
    own = max(_LEAST_S, limit - _SOONER_S)
    try:
        return subprocess.run(
            [str(program), *map(str, (group, requests, int(level), rows, int(own)))],
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
            env={"TSAN_OPTIONS": "halt_on_error=1 exitcode=66", "BLINK_MUTANT": str(identity)},
        )
    except subprocess.TimeoutExpired as error:  # no TimeoutError, which is what counts as a hang
        raise TimeoutError(f"level {level}: ended after {limit:.1f} s") from error


def _done(run: subprocess.CompletedProcess[str], where: str = "") -> None:
    """Raises TimeoutError for a run that says it was not done in time, RuntimeError for one that ended otherwise."""
    if run.returncode:
        kind = TimeoutError if run.returncode == _LATE else RuntimeError
        raise kind(f"{where}exit code {run.returncode}: {run.stderr[-300:]}")


def _woven(environ: Mapping[str, str]) -> tuple[Path, int]:
    """The program with all mutants of the woven build that the environment names, or with none, and which is on."""
    told = json.loads(environ.get(native.VARIABLE, "null"))
    if told is None:
        return _built(None), 0
    folder = Path(told["module"]).parent
    headers = folder / "woven"
    total = hashlib.sha256(SOURCE.read_bytes())
    for part in weave.FOLDERS:
        for path in sorted((headers / part).glob("*.[ch]pp")):
            total.update(path.read_bytes())
    return _compiled(folder / "races", headers, total.hexdigest()), int(told["identity"])


def reported(text: str) -> str | None:
    """The first data race of a sanitizer's output, by its first lines; None if it reports none."""
    at = text.find(REPORT)
    return None if at < 0 else text[at : at + 500]


def _built(mutant: Mutant | None) -> Path:
    """The program with that mutant in a copy of its headers; built once. Raises BuildFailed."""
    if not SOURCE.is_file():
        raise weave.BuildFailed(f"{SOURCE} is not there: it is run in a clone of Blink")
    folder = PRODUCT / "build" / "mutants" / f"races-{mutant.name if mutant else 'clean'}"
    total = hashlib.sha256((mutant.model_dump_json() if mutant else "").encode())
    for path in [SOURCE, *weave.sources()]:
        total.update(path.read_bytes())

    def copy() -> None:
        for part in weave.FOLDERS:
            shutil.copytree(PRODUCT / part, folder / part, dirs_exist_ok=True)
        if mutant is not None:
            text = mutant.path.read_text(encoding="utf-8")
            (folder / mutant.file).write_text(mutant.apply(text), encoding="utf-8")

    return _compiled(folder, folder, total.hexdigest(), copy)


def _compiled(folder: Path, headers: Path, digest: str, before: Callable[[], None] = lambda: None) -> Path:
    """The program in `folder`, made from the headers under `headers` unless that of this digest is there."""
    folder.mkdir(parents=True, exist_ok=True)
    program, stamp = folder / "threads", folder / "digest"
    with FileLock(folder / "lock", timeout=weave.BUILD_TIMEOUT_S):
        if not (program.exists() and stamp.exists() and stamp.read_text() == digest):
            stamp.unlink(missing_ok=True)
            before()
            includes = [f"-I{headers / part}" for part in weave.FOLDERS]
            weave.run(weave.compiler(), *_OPTIONS, *includes, *weave.includes(), str(SOURCE), "-o", str(program))
            stamp.write_text(digest)
    return program


CHECKERS = (Races(), GroupRaces())
