"""`blink certify`: runs the suite in a child process under a deadline, then reports, signs and decides."""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from blink_core.model_store import ModelStoreError, resolve
from hil_rigs.locks import LockError, OwnedLock
from verification.certificate import output, report, required
from verification.certificate.collector import JOURNAL, Collector, read_journal
from verification.certificate.keys import KeyFileError, signing_key
from verification.certificate.progress import JournalReader, ProgressDisplay
from verification.certificate.required import Profile, RequiredSetError
from verification.certificate.verdict import ExitCode
from verification.run_context import RunContext, new_run_id, parse_seed

_POLL_S = 0.1
_GRACE_S = 20.0
_PACKAGE = Path(__file__).resolve().parents[1]


class CannotRun(Exception):
    """A run that cannot start; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Options:
    """What `certify` was asked for. `suite` is a folder of tests, by default the package's own."""

    rig: str
    model: str | None
    profile: str
    out: Path
    seed: str | int | None = None
    key: Path | None = None
    suite: Path = _PACKAGE / "suite"
    deadline_s: float | None = None
    pytest_arguments: tuple[str, ...] = ()


def certify(
    rig: str,
    model: str | None,
    profile: str,
    out: Path,
    seed: str | int | None = None,
    *,
    key: Path | None = None,
    suite: Path | None = None,
    deadline_s: float | None = None,
    as_json: bool = False,
    pytest_arguments: tuple[str, ...] = (),
) -> int:
    """Run the suite on a rig, print the result, leave a signed report in `out`.

    Args:
        rig: name of a rig that has a required set.
        model: path of a model file or folder, or a pinned name (None: the suite's own choice).
        profile: "smoke", "nightly" or "full", as far as the rig has it.
        out: output folder; made when absent, emptied when an earlier run's.
        seed: root seed, "random", or None for the fixed default.
        key: private key file that signs; see `keys.signing_key`.
        suite: folder of tests instead of the package's own.
        deadline_s: limit of the whole run instead of the profile's.
        as_json: print one JSON object instead of table and verdict line.
        pytest_arguments: passed on to pytest.

    Returns the exit code: 0 passed, 1 a property failed, 2 could not run. The last line printed is
    "verdict: ... (exit N)".
    """
    tests = (suite or _PACKAGE / "suite").resolve()
    options = Options(rig, model, profile, out.resolve(), seed, key, tests, deadline_s, pytest_arguments)
    try:
        context, limits = _prepare(options)
        found = _run(options, context, limits)
    except (CannotRun, LockError) as error:
        return _refuse(str(error), as_json)
    _print(found, options.out, as_json)
    return int(found["verdict"]["exit_code"])


def _refuse(reason: str, as_json: bool) -> int:
    code = int(ExitCode.COULD_NOT_RUN)
    if as_json:
        print(json.dumps({"verdict": "could not run", "exit_code": code, "reasons": [reason], "report": None}))
    else:
        print(f"error: {reason}", file=sys.stderr, flush=True)
        print(f"verdict: could not run (exit {code})", flush=True)
    return code


def _prepare(options: Options) -> tuple[RunContext, Profile]:
    """Check everything that can be checked before a process is started; make the output folder ready."""
    try:
        seed, source = parse_seed(options.seed)
        limits = required.load(options.rig).profile(options.profile)
        signing_key(options.key)
    except (RequiredSetError, KeyFileError, ValueError) as error:
        raise CannotRun(str(error)) from error
    except OSError as error:
        raise CannotRun(f"the signing key cannot be made: {error}") from error
    context = RunContext(
        new_run_id(), options.rig, options.profile, options.model, seed, source, options.out, key=options.key
    )
    try:
        with OwnedLock(output.lock_name(options.out), owner=context.run_id):
            output.prepare(options.out)
    except (output.OutputError, OSError) as error:
        raise CannotRun(str(error)) from error
    return context, limits


def _run(options: Options, context: RunContext, limits: Profile) -> dict[str, Any]:
    """Run the suite if it can be run, then build, write and sign the report in either case."""
    started = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
    clock = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"blink-{context.run_id}-") as scratch:
        log = Path(scratch) / output.LOG
        trouble = _unusable(options)
        if trouble is None:
            trouble = _supervise(options, context, limits, log)
        else:
            log.write_text(f"{trouble}\n", encoding="utf-8")
        with OwnedLock(output.lock_name(options.out), owner=context.run_id, timeout_s=_GRACE_S):
            shutil.copyfile(log, options.out / output.LOG)
            return _finish(options, context, started, time.monotonic() - clock, trouble)


def _unusable(options: Options) -> str | None:
    """Why the suite cannot be started although rig and profile are known; None when it can."""
    if not options.suite.is_dir():
        return f"the suite {options.suite} does not exist"
    if options.model is None:
        return None
    try:
        resolve(options.model)
    except ModelStoreError as error:
        return str(error)
    return None


def _finish(
    options: Options, context: RunContext, started: str, duration_s: float, trouble: str | None
) -> dict[str, Any]:
    from verification.plugin_session import describe_run

    journal = options.out / JOURNAL
    collector = read_journal(journal)[0] if journal.is_file() else Collector()
    if trouble is not None:
        collector.error(trouble)
    records = collector.close(trouble)
    if not records and trouble is None:
        collector.error(f"no test was collected from {options.suite}; see {output.LOG}")
    description = describe_run(
        context,
        collector.facts,
        started,
        duration_s,
        _command(options),
        required.required_text(options.rig),
        required.thresholds_text(),
    )
    built = report.build(description, records, collector.errors)
    output.finish(options.out, built, description.required_text, description.thresholds_text, options.key)
    return built


def _command(options: Options) -> list[str]:
    words = ["blink", "certify", "--rig", options.rig, "--profile", options.profile, "--out", str(options.out)]
    words += [] if options.model is None else ["--model", options.model]
    return words + ([] if options.seed is None else ["--seed", str(options.seed)])


def plugin_arguments() -> list[str]:
    """The plugin by name where it is not installed as an entry point; twice would be an error."""
    installed = any(point.name == "blink" for point in importlib.metadata.entry_points(group="pytest11"))
    return [] if installed else ["-p", "verification.plugin"]


def _child(options: Options, context: RunContext, limits: Profile) -> tuple[list[str], dict[str, str]]:
    root = _PACKAGE.parent if options.suite.is_relative_to(_PACKAGE) else options.suite.parent
    arguments = [sys.executable, "-m", "pytest", "-c", str(_PACKAGE / "suite.ini"), "--rootdir", str(root)]
    arguments += [*plugin_arguments(), str(options.suite)]
    arguments += ["--rig", options.rig, "--profile", options.profile, "--out", str(options.out)]
    arguments += ["--junitxml", str(options.out / output.JUNIT), "--alluredir", str(options.out / output.ALLURE)]
    arguments += ["--timeout", str(limits.test_timeout_s)]
    # A default seed is not passed on: that one derandomises hypothesis, a given one seeds it.
    arguments += [] if context.seed_source == "default" else ["--seed", str(context.seed)]
    arguments += [] if options.model is None else ["--model", str(resolve(options.model))]
    arguments += options.pytest_arguments
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")}
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{_PACKAGE.parent}{os.pathsep}{path}" if path else str(_PACKAGE.parent)
    environment["BLINK_JOURNAL_ONLY"] = "1"
    environment["BLINK_CERTIFY_PID"] = str(os.getpid())  # the run ends with the process that asked for it
    environment["BLINK_INVOCATION"] = json.dumps(_command(options))
    environment["PYTHONUNBUFFERED"] = "1"
    return arguments, environment


def _supervise(options: Options, context: RunContext, limits: Profile, log: Path) -> str | None:
    """Run pytest to its end or to the deadline. Returns what went wrong with the process, None when nothing did."""
    limit = options.deadline_s or limits.deadline_s
    arguments, environment = _child(options, context, limits)
    reader = JournalReader(options.out / JOURNAL)
    trouble: str | None = None
    with (
        log.open("wb") as stream,
        ProgressDisplay(Console(stderr=True)) as display,
        _interruptible() as interrupted,
    ):
        child = subprocess.Popen(
            arguments, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
        )
        end = time.monotonic() + limit
        while child.poll() is None:
            if interrupted.wait(_POLL_S):
                trouble = "interrupted by a signal"
            elif time.monotonic() >= end:
                trouble = f"the deadline of {limit:g} s for the whole run passed"
            display.update(reader.events())
            display.tick()
            if trouble is not None:
                _stop(child)
                break
        display.update(reader.events())
    _kill_group(child.pid)  # whatever the run left behind, an engine process above all
    return trouble or _abnormal_end(child.returncode, options.out / JOURNAL, log)


def _abnormal_end(code: int | None, journal: Path, log: Path) -> str | None:
    if code is not None and code < 0:
        return f"pytest was killed by {signal.Signals(-code).name}; see {output.LOG}"
    ended = journal.is_file() and read_journal(journal)[0].ended
    if ended and code in (0, 1, 2, 5):  # 2: collection errors, which the journal has; 5: no tests
        return None
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    last = next((line for line in lines if "rror" in line), lines[-1] if lines else "no output")
    return f"pytest ended with exit code {code} before the session was over: {last[:300]}"


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Interrupt pytest, so that fixtures stop the rig; kill its whole process group if that takes too long."""
    child.send_signal(signal.SIGINT)
    try:
        child.wait(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        _kill_group(child.pid)
        child.wait(timeout=_GRACE_S)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """An event that SIGINT, SIGTERM and SIGHUP set, where signals can be handled at all (the main thread)."""
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


def _print(built: dict[str, Any], out: Path, as_json: bool) -> None:
    verdict = built["verdict"]
    if as_json:
        summary = {
            "verdict": verdict["word"],
            "exit_code": verdict["exit_code"],
            "kind": built["kind"],
            "reasons": verdict["reasons"],
            "properties": {entry["name"]: entry["outcome"] for entry in built["properties"]},
            "counts": built["counts"],
            "warnings": built["warnings"],
            "report": str(out / output.REPORT),
        }
        print(json.dumps(summary, indent=1), flush=True)
        return
    console = Console()
    console.print(summary_table(built))
    for warning in built["warnings"]:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    for reason in verdict["reasons"]:
        console.print(f"- {reason}", markup=False, highlight=False, soft_wrap=True)
    for test in built["tests"]:
        if test["bundle"]:
            console.print(f"bundle: {out / test['bundle']}", markup=False, highlight=False, soft_wrap=True)
            console.print(f"replay: {test['replay']}", markup=False, highlight=False, soft_wrap=True)
    for line in report.known_issue_lines(built):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(built["claim"]["standing"], markup=False, highlight=False, soft_wrap=True)
    print(f"report: {out / output.PAGE}")
    print(f"verdict: {verdict['word']} (exit {verdict['exit_code']})", flush=True)


def summary_table(built: dict[str, Any]) -> Table:
    """The properties of a report as a table for a terminal."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for header in ("property", "outcome", "passed", "n", "failed", "95 % bounds", "time"):
        table.add_column(header, no_wrap=True)
    styles = {"passed": "green", "product_failure": "bold red"}
    for entry in built["properties"]:
        interval = entry["failure_rate_interval"]
        table.add_row(
            entry["name"],
            f"[{styles.get(entry['outcome'], 'yellow')}]{entry['outcome'].replace('_', ' ')}[/]",
            f"{entry['passed']}/{entry['tests']}",
            str(entry["cases"]),
            str(entry["failures"]),
            "" if interval is None else f"{interval[0]:.2g}..{interval[1]:.2g}",
            f"{entry['duration_s']:.1f} s",
        )
    return table
