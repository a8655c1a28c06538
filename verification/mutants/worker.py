"""Runs checkers on one product in processes of their own: `python -m verification.mutants.worker`.

Reads jobs as JSON lines (`Job`), answers each with one JSON line (`Outcome`). For every job it forks, so that what the
checkers have prepared is shared, a crash ends one job only, and a hang is ended at its deadline with all that it
started. A native mutant is switched on in the fork; a Python one is in force through the environment from the start.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hil_rigs.scratch import Scratch

GRACE_S = 2.0  # for a checker that sees its own deadline
CRASH_LIMIT = 400  # characters kept of what a crash said

FOUND, NOTHING, CRASH, TIMEOUT = "found", "nothing", "crash", "timeout"


@dataclass(frozen=True, slots=True)
class Job:
    """One checker on one product with one seed. mutant: by name, "" for the product as it is.

    identity: number of a native fault in the woven module, 0: none. seconds: deadline; 0: the checker's own.
    """

    checker: str
    seed: int
    mutant: str = ""
    identity: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Outcome:
    """What became of a job. word: found, nothing, crash or timeout. classes, clause, witness: of the finding."""

    word: str
    clause: str = ""
    classes: list[str] = field(default_factory=list)
    witness: str = ""
    seconds: float = 0.0


def _child(job: Job, out: int, seconds: float, scratch: Path) -> None:
    """Runs the job and writes its outcome to `out`; never returns."""
    code = 1
    try:
        os.setsid()
        signal.setitimer(signal.ITIMER_REAL, seconds + 2 * GRACE_S)  # also when nobody is left to end it
        outcome = _run(job, scratch)
        os.write(out, json.dumps(asdict(outcome)).encode())
        code = 0
    finally:
        os._exit(code)


def _run(job: Job, scratch: Path) -> Outcome:
    from verification.mutants import native
    from verification.mutants.checkers import find
    from verification.mutants.checkers.base import Product
    from verification.mutants.model import by_name

    checker = find(job.checker)
    environ = dict(os.environ)
    started = time.monotonic()
    try:
        if woven := sys.modules.get(native.NAME):
            if job.identity:
                native.activate(woven, job.identity)
            if hasattr(woven, "mutants"):
                environ = native.environment(Path(str(woven.__file__)), job.identity)
        mutant = by_name(job.mutant) if job.mutant and not job.mutant.startswith("auto-") else None
        product = Product(mutant, environ, scratch)
        found = checker.run(product, job.seed, started + (job.seconds or checker.seconds))
    except TimeoutError as error:
        return Outcome(TIMEOUT, witness=str(error)[:CRASH_LIMIT], seconds=time.monotonic() - started)
    except BaseException as error:
        return Outcome(
            CRASH, witness=f"{type(error).__name__}: {error}"[:CRASH_LIMIT], seconds=time.monotonic() - started
        )
    seconds = time.monotonic() - started
    if found is None:
        return Outcome(NOTHING, seconds=seconds)
    return Outcome(FOUND, found.clause, sorted(found.classes), found.witness, seconds)


def _supervise(job: Job, seconds: float) -> Outcome:
    """Forks, waits, and ends what is not over in time. What the job left on disk goes with it, however it ended."""
    with Scratch("mutant") as scratch:
        return _forked(job, seconds, scratch.path)


def _forked(job: Job, seconds: float, scratch: Path) -> Outcome:
    reader, writer = os.pipe()
    started = time.monotonic()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        devnull = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(devnull, stream)
        _child(job, writer, seconds, scratch)
    os.close(writer)
    data, over = b"", False
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while not over and (wait := started + seconds + GRACE_S - time.monotonic()) > 0:
            if selector.select(wait):
                chunk = os.read(reader, 1 << 16)
                data, over = data + chunk, not chunk
    os.close(reader)
    if not over:
        _end(pid)
    _, status = os.waitpid(pid, 0)
    if over:
        _end(pid)  # what it may have left behind
    took = time.monotonic() - started
    if data:
        return Outcome(**json.loads(data))
    if not over:
        return Outcome(TIMEOUT, witness=f"not over after {took:.1f} s", seconds=took)
    code = os.waitstatus_to_exitcode(status)
    what = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return Outcome(CRASH, witness=what, seconds=took)


def _end(pid: int) -> None:
    """Kills the session of a child; a child that has not made one yet by itself."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _prepare(told: dict[str, Any]) -> None:
    from verification.mutants.checkers import find
    from verification.mutants.model import load

    load()
    for name in told["checkers"]:
        if (prepare := getattr(find(name), "prepare", None)) is None:
            continue
        for seed in told["seeds"]:
            prepare(seed)
    gc.collect()
    gc.freeze()  # forks share what is never touched again


def main() -> int:
    """Answers the lines of standard input until it ends: `{"prepare": {"checkers", "seeds"}}` or a job."""
    from verification.mutants.checkers import find

    for line in sys.stdin:
        told = json.loads(line)
        if "prepare" in told:
            _prepare(told["prepare"])
            answer: dict[str, Any] = {"prepared": True}
        else:
            job = Job(**told)
            answer = asdict(_supervise(job, job.seconds or find(job.checker).seconds))
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
