"""pytest as the child process of `certify`: its command line, its end, its deadline."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from rich.console import Console

from blink_core.model_store import resolve
from hil_rigs.description import load_rig
from verification.certificate import output
from verification.certificate.collector import JOURNAL, read_journal
from verification.certificate.options import PACKAGE, Deadline, Options
from verification.certificate.progress import JournalReader, ProgressDisplay
from verification.certificate.required import Profile
from verification.run_context import RunContext

_POLL_S = 0.1
GRACE_S = 20.0
INTERRUPTED = "interrupted by a signal"
CRASHED = "pytest crashed"  # by its own doing, which may be the product's: what ran then is not run again
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def command_line(options: Options) -> list[str]:
    """The words of the `blink certify` that was asked for."""
    words = ["blink", "certify", "--rig", options.rig, "--profile", options.profile, "--out", str(options.out)]
    words += [] if options.model is None else ["--model", options.model]
    words += [] if options.shard is None else ["--shard", str(options.shard)]
    words += [] if options.agree_with is None else ["--agree-with", str(options.agree_with)]
    return words + ([] if options.seed is None else ["--seed", str(options.seed)])


def plugin_arguments() -> list[str]:
    """The plugin by name where it is not installed as an entry point; twice would be an error."""
    installed = any(point.name == "blink" for point in importlib.metadata.entry_points(group="pytest11"))
    return [] if installed else ["-p", "verification.plugin"]


def root_of(options: Options) -> Path:
    """The folder that node ids are relative to."""
    return PACKAGE.parent if options.suite.is_relative_to(PACKAGE) else options.suite.parent


def _child(options: Options, context: RunContext, limits: Profile, root: Path) -> tuple[list[str], dict[str, str]]:
    arguments = [sys.executable, "-m", "pytest", "-c", str(PACKAGE / "suite.ini"), "--rootdir", str(root)]
    arguments += [*plugin_arguments(), str(options.suite)]
    arguments += ["--rig", options.rig, "--profile", options.profile, "--out", str(options.out)]
    arguments += ["--junitxml", str(options.out / output.JUNIT), "--alluredir", str(options.out / output.ALLURE)]
    arguments += ["--timeout", str(limits.test_timeout_s)]
    # A default seed is not passed on: that one derandomises hypothesis, a given one seeds it.
    arguments += [] if context.seed_source == "default" else ["--seed", str(context.seed)]
    arguments += [] if options.model is None else ["--model", str(resolve(options.model))]
    arguments += [] if options.agree_with is None else ["--agree-with", str(options.agree_with)]
    arguments += [] if context.shard is None else ["--blink-shard", str(context.shard)]
    arguments += [] if context.done is None else ["--blink-done", str(context.done)]
    arguments += options.pytest_arguments
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")}
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{PACKAGE.parent}{os.pathsep}{path}" if path else str(PACKAGE.parent)
    environment["BLINK_JOURNAL_ONLY"] = "1"
    environment["BLINK_CERTIFY_PID"] = str(os.getpid())  # the run ends with the process that asked for it
    environment["BLINK_INVOCATION"] = json.dumps(command_line(options))
    environment["PYTHONUNBUFFERED"] = "1"
    if "gpu" not in load_rig(options.rig).capabilities:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # torch, as the oracle, would make a context on every GPU it sees
    return arguments, environment


def supervise(
    options: Options,
    context: RunContext,
    limits: Profile,
    log: Path,
    deadline: Deadline,
    interrupted: threading.Event,
    root: Path | None = None,
) -> str | None:
    """Run pytest to its end or to the deadline, or until `interrupted` is set (`interruptible`), be it in the last
    moment. Returns what went wrong with the process, None when nothing did."""
    arguments, environment = _child(options, context, limits, root or root_of(options))
    # Until pytest begins its own an earlier run's would be read: its end for this one's, half a line for a whole one.
    (options.out / JOURNAL).unlink(missing_ok=True)
    reader = JournalReader(options.out / JOURNAL)
    trouble: str | None = None
    with log.open("wb") as stream, ProgressDisplay(Console(stderr=True)) as display:
        child = subprocess.Popen(
            arguments, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
        )
        while child.poll() is None:
            if interrupted.wait(_POLL_S):
                trouble = INTERRUPTED
            elif deadline.over:
                trouble = deadline.passed
            display.update(reader.events())
            display.tick()
            if trouble is not None:
                _stop(child)
                break
        display.update(reader.events())
    _kill_group(child.pid)  # whatever the run left behind, an engine process above all
    if trouble is None and interrupted.is_set():  # behind the loop's last look
        trouble = INTERRUPTED
    return trouble or _abnormal_end(child.returncode, options.out / JOURNAL, log)


def _abnormal_end(code: int | None, journal: Path, log: Path) -> str | None:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        how = "pytest was" if -code in _FROM_OUTSIDE else f"{CRASHED}:"
        return f"{how} killed by {name}; see {output.LOG}"
    ended = journal.is_file() and read_journal(journal)[0].ended
    if ended and code in (0, 1, 2, 5):  # 2: collection errors, which the journal has; 5: no tests
        return None
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    last = next((line for line in lines if "rror" in line), lines[-1] if lines else "no output")
    return f"{CRASHED}: it ended with exit code {code} before the session was over: {last[:300]}"


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Interrupt pytest, so that fixtures stop the rig; kill its whole process group if that takes too long."""
    child.send_signal(signal.SIGINT)
    try:
        child.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        _kill_group(child.pid)
        child.wait(timeout=GRACE_S)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """An event that SIGINT, SIGTERM and SIGHUP set, where signals can be handled at all (the main thread).

    It stands around a whole run: whoever runs something in it looks at the event between one thing and the next.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def handle(number: int, frame: FrameType | None) -> None:
        event.set()

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield event
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
