"""Processes side by side: runs of `blink` of which each uses few cores, on a machine that has many."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blink_core.runtime.parent import ParentWatch
from verification.certificate.options import PACKAGE
from verification.certificate.supervise import GRACE_S

PARENT = "BLINK_FLEET_PID"
CORES_EACH = 2  # what costs and deadlines are measured on
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_POLL_S = 0.2
_STOP_S = 3 * GRACE_S  # a run that is interrupted stops pytest within twice the grace, and then writes its report


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    process: subprocess.Popen[bytes]
    started: float


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def follow_parent() -> None:
    """In a process of a fleet: ends as by SIGTERM, in order, when the process that runs the fleet is gone."""
    parent = os.environ.pop(PARENT, None)
    if parent is not None:
        ParentWatch(int(parent)).on_gone(lambda: os.kill(os.getpid(), signal.SIGTERM))


def run_fleet(
    commands: Mapping[str, Sequence[str]],
    jobs: int,
    logs: Path,
    interrupted: threading.Event,
    ended: Callable[[str, int, float], None],
) -> None:
    """Runs every command, at most `jobs` at once, in the order given, until all ended or `interrupted` is set.

    Args:
        commands: by name; the name is that of its log, too.
        logs: folder for what they print, NAME.log; made when absent.
        ended: called with name, exit code and seconds of each that ended by itself.

    Those that run when `interrupted` is set get SIGTERM, and SIGKILL a minute later. Each has as many threads of
    numerical libraries as its share of the cores, unless the environment says otherwise.
    """
    environment = _environment(max(1, cores() // max(1, min(jobs, len(commands)))))
    logs.mkdir(parents=True, exist_ok=True)
    waiting, running = list(commands), list[_Member]()
    try:
        while (waiting or running) and not interrupted.is_set():
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                running.append(_start(name, commands[name], environment, logs))
            interrupted.wait(_POLL_S)
            for member in [m for m in running if m.process.poll() is not None]:
                running.remove(member)
                ended(member.name, member.process.returncode, time.monotonic() - member.started)
    finally:
        _stop(running)


def _environment(threads: int) -> dict[str, str]:
    environment = dict(os.environ)
    for name in THREADS:  # these libraries take every core, which the others want too
        environment.setdefault(name, str(threads))
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{PACKAGE.parent}{os.pathsep}{path}" if path else str(PACKAGE.parent)
    environment[PARENT] = str(os.getpid())
    return environment


def _start(name: str, command: Sequence[str], environment: Mapping[str, str], logs: Path) -> _Member:
    with (logs / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    return _Member(name, process, time.monotonic())


def _stop(running: Sequence[_Member]) -> None:
    for member in running:
        member.process.terminate()
    end = time.monotonic() + _STOP_S
    for member in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            member.process.wait(max(0.0, end - time.monotonic()))
        if member.process.poll() is None:
            member.process.kill()
            member.process.wait(GRACE_S)
