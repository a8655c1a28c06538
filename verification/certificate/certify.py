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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from blink_core.model_store import ModelStoreError, resolve
from hil_rigs.locks import LockError, OwnedLock
from verification.agreement_record import read as read_agreement
from verification.certificate import corpus as corpora
from verification.certificate import junit, output, provenance, report, required, shards
from verification.certificate import replays as replaying
from verification.certificate.collector import JOURNAL, Collector, read_journal
from verification.certificate.corpus import Corpus, Entry
from verification.certificate.keys import KeyFileError, signing_key
from verification.certificate.progress import JournalReader, ProgressDisplay
from verification.certificate.records import TestRecord
from verification.certificate.required import Profile, RequiredSetError
from verification.certificate.shards import Shard
from verification.certificate.verdict import ExitCode
from verification.run_context import RunContext, new_run_id, parse_seed

_POLL_S = 0.1
_GRACE_S = 20.0
INTERRUPTED = "interrupted by a signal"
CRASHED = "pytest crashed"  # by its own doing, which may be the product's: what ran then is not run again
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
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
    shard: Shard | None = None
    corpus: Path | None = None
    agree_with: Path | None = None

    @property
    def replays(self) -> bool:
        """Whether the failure corpus runs first: in whole runs of its profiles, and in the first shard."""
        return self.profile in corpora.REPLAYING and (self.shard is None or self.shard.index == 1)


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
    shard: str | None = None,
    corpus: Path | None = None,
    agree_with: Path | None = None,
) -> int:
    """Run the suite on a rig, print the result, leave a signed report in `out`.

    Args:
        rig: name of a rig that has a required set.
        model: path of a model file or folder, or a pinned name (None: the suite's own choice).
        profile: "smoke", "nightly" or "full", as far as the rig has it.
        out: output folder; made when absent, emptied when an earlier run's.
        seed: root seed, "random", or None: the fixed default in smoke, a fresh one in other profiles.
        key: private key file that signs; see `keys.signing_key`.
        suite: folder of tests instead of the package's own.
        deadline_s: limit of the whole run instead of the profile's.
        as_json: print one JSON object instead of table and verdict line.
        pytest_arguments: passed on to pytest.
        shard: "2/5" runs the second of five parts, and goes on where it was interrupted; `join` makes a whole of them.
        corpus: folder of the failure corpus that profiles nightly and full run first; by default the user's own.
        agree_with: output folder of another run, with whose recorded answers this one's are compared.

    Returns the exit code: 0 passed, 1 a property failed, 2 could not run. The last line printed is
    "verdict: ... (exit N)".
    """
    tests = (suite or _PACKAGE / "suite").resolve()
    try:
        part = None if shard is None else shards.parse_shard(shard)
        peer = None if agree_with is None else agree_with.resolve()
        options = Options(
            rig, model, profile, out.resolve(), seed, key, tests, deadline_s, pytest_arguments, part, corpus, peer
        )
        context, limits = _prepare(options)
        found = _run(options, context, limits)
    except (CannotRun, LockError, shards.ShardError, corpora.CorpusError) as error:
        return _refuse(str(error), as_json)
    show_result(found, options.out, as_json)
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
        seed, source = parse_seed(options.seed, options.profile)
        limits = required.load(options.rig).profile(options.profile)
        if options.shard is not None and source != "given":
            raise ValueError(f"--shard {options.shard} needs --seed NUMBER: all shards of a run draw from one seed")
        if options.agree_with is not None:
            read_agreement(options.agree_with)
        signing_key(options.key)
    except (RequiredSetError, KeyFileError, ValueError) as error:  # RigError, AgreementError among them
        raise CannotRun(str(error)) from error
    except OSError as error:
        raise CannotRun(f"the signing key cannot be made: {error}") from error
    context = RunContext(
        new_run_id(), options.rig, options.profile, options.model, seed, source, options.out, key=options.key
    )
    context.shard = options.shard
    try:
        if options.replays:
            _corpus(options, context).entries(context.rig_kind)  # a damaged one is an error now
    except ModelStoreError as error:
        raise CannotRun(f"the failure corpus: {error}; name a folder with --corpus") from error
    try:
        with OwnedLock(output.lock_name(options.out), owner=context.run_id):
            _make_ready(options, context)
    except (output.OutputError, OSError) as error:
        raise CannotRun(str(error)) from error
    return context, limits


def _make_ready(options: Options, context: RunContext) -> None:
    """Empties the output folder, but for what an interrupted session of the same shard has left there."""
    if options.shard is None:
        output.prepare(options.out)
        return
    identity = _identity(options, context)
    done = shards.finished_before(options.out, options.shard, identity) if options.out.is_dir() else []
    resumed = (options.out / shards.STATE).is_file()
    if resumed:  # before the journal goes, from which some are known
        shards.write_state(options.out, options.shard, identity, done)
    output.prepare(options.out, keep=output.RESUMED if resumed else ())
    context.done = shards.write_state(options.out, options.shard, identity, done)
    if done:
        print(f"shard {options.shard}: {len(done)} tests are done already, going on", file=sys.stderr, flush=True)


def _identity(options: Options, context: RunContext) -> dict[str, Any]:
    """What must not change while a shard is interrupted, and what all shards of a run share."""
    model = None if options.model is None else resolve(options.model)
    thresholds = required.thresholds_text()
    return {
        "rig": options.rig,
        "profile": options.profile,
        "seed": context.seed,
        "model": None if model is None else provenance.model_digest(model),
        "sources": provenance.sources_digest(),
        "engine": provenance.engine_modules(),
        "required": required.text_digest(required.required_text(options.rig)),
        "thresholds": None if thresholds is None else required.text_digest(thresholds),
        "options": list(options.pytest_arguments),
    }


def _run(options: Options, context: RunContext, limits: Profile) -> dict[str, Any]:
    """Run the suite if it can be run, then build, write and sign the report in either case."""
    started = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
    clock = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"blink-{context.run_id}-") as scratch:
        log = Path(scratch) / output.LOG
        trouble = _unusable(options)
        replays: list[TestRecord] = []
        if trouble is None:
            replays, trouble = _replay_corpus(options, context, limits)
            trouble = trouble or _supervise(options, context, limits, log)
        else:
            log.write_text(f"{trouble}\n", encoding="utf-8")
        with OwnedLock(output.lock_name(options.out), owner=context.run_id, timeout_s=_GRACE_S):
            shutil.copyfile(log, options.out / output.LOG)
            return _finish(options, context, started, time.monotonic() - clock, trouble, replays)


def _unusable(options: Options) -> str | None:
    """Why the suite cannot be started although rig and profile are known; None when it can."""
    if not options.suite.is_dir():
        return f"the suite {options.suite} does not exist"
    return _unusable_model(options.model)


def _unusable_model(model: str | None) -> str | None:
    if model is None:
        return None
    try:
        resolve(model)
    except ModelStoreError as error:
        return str(error)
    return None


def _finish(
    options: Options,
    context: RunContext,
    started: str,
    duration_s: float,
    trouble: str | None,
    replays: Sequence[TestRecord] = (),
) -> dict[str, Any]:
    from verification.plugin_session import describe_run

    journal = options.out / JOURNAL
    collector = read_journal(journal)[0] if journal.is_file() else Collector()
    if trouble is not None:
        collector.error(trouble)
    records = collector.close(trouble)
    if options.shard is not None:
        done = shards.finished_before(options.out, options.shard)
        if trouble is not None and trouble.startswith(CRASHED):
            done += [record for record in records if record.message == trouble]  # what was running
            shards.write_state(options.out, options.shard, _identity(options, context), done)
        records = list(({record.id: record for record in records} | {record.id: record for record in done}).values())
        junit.write(options.out / output.JUNIT, f"blink shard {options.shard}", records)
    records = [*replays, *records]
    night = None
    if options.replays:
        corpus = _corpus(options, context)
        night = replaying.ledger_line(context, started, records)
        added = replaying.keep_failures(corpus, context, records)
        collector.fact("corpus", replaying.summary(corpus, night, len(replays), added))
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
    if night is not None:
        _corpus(options, context).note(night)
    output.finish(options.out, built, description.required_text, description.thresholds_text, options.key)
    return built


def _corpus(options: Options, context: RunContext) -> Corpus:
    return Corpus.default(context.rig_kind) if options.corpus is None else Corpus(options.corpus.resolve())


def _replay_corpus(options: Options, context: RunContext, limits: Profile) -> tuple[list[TestRecord], str | None]:
    """Earlier failures first. Each is one test with the seed, profile and model that it failed with.

    Returns their records, and why the run ends here if somebody has broken it off."""
    if not options.replays:
        return [], None
    root, stopped = _root(options), list[str]()

    def run(entry: Entry, folder: Path) -> str | None:
        if stopped:
            return stopped[0]
        recording = () if entry.recording is None else ("--replay", str(entry.recording))
        again = replace(
            options,
            suite=root / entry.nodeid,
            profile=entry.profile,
            model=entry.model or options.model,
            out=folder,
            shard=None,
            agree_with=None,
            pytest_arguments=(*options.pytest_arguments, *recording),
        )
        its = replace(
            context, out=folder, seed=entry.seed, seed_source="given", profile_name=entry.profile, shard=None, done=None
        )
        if (unusable := _unusable_model(again.model)) is not None:
            return unusable
        folder.mkdir(parents=True, exist_ok=True)
        trouble = _supervise(again, its, limits, folder.with_suffix(".log"), root=root)
        stopped.extend([INTERRUPTED] if trouble == INTERRUPTED else [])
        return trouble

    say = partial(print, file=sys.stderr, flush=True)
    records = replaying.replay(_corpus(options, context), context.rig_kind, options.out, run, say)
    return records, stopped[0] if stopped else None


def _command(options: Options) -> list[str]:
    words = ["blink", "certify", "--rig", options.rig, "--profile", options.profile, "--out", str(options.out)]
    words += [] if options.model is None else ["--model", options.model]
    words += [] if options.shard is None else ["--shard", str(options.shard)]
    words += [] if options.agree_with is None else ["--agree-with", str(options.agree_with)]
    return words + ([] if options.seed is None else ["--seed", str(options.seed)])


def plugin_arguments() -> list[str]:
    """The plugin by name where it is not installed as an entry point; twice would be an error."""
    installed = any(point.name == "blink" for point in importlib.metadata.entry_points(group="pytest11"))
    return [] if installed else ["-p", "verification.plugin"]


def _root(options: Options) -> Path:
    """The folder that node ids are relative to."""
    return _PACKAGE.parent if options.suite.is_relative_to(_PACKAGE) else options.suite.parent


def _child(options: Options, context: RunContext, limits: Profile, root: Path) -> tuple[list[str], dict[str, str]]:
    arguments = [sys.executable, "-m", "pytest", "-c", str(_PACKAGE / "suite.ini"), "--rootdir", str(root)]
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
    environment["PYTHONPATH"] = f"{_PACKAGE.parent}{os.pathsep}{path}" if path else str(_PACKAGE.parent)
    environment["BLINK_JOURNAL_ONLY"] = "1"
    environment["BLINK_CERTIFY_PID"] = str(os.getpid())  # the run ends with the process that asked for it
    environment["BLINK_INVOCATION"] = json.dumps(_command(options))
    environment["PYTHONUNBUFFERED"] = "1"
    return arguments, environment


def _supervise(
    options: Options, context: RunContext, limits: Profile, log: Path, root: Path | None = None
) -> str | None:
    """Run pytest to its end or to the deadline. Returns what went wrong with the process, None when nothing did."""
    limit = options.deadline_s or (limits.deadline_s if options.shard is None else limits.shard_deadline_s)
    arguments, environment = _child(options, context, limits, root or _root(options))
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
                trouble = INTERRUPTED
            elif time.monotonic() >= end:
                on = "the whole run passed"
                if options.shard is not None:
                    on = "a shard passed; the same command goes on with what is left"
                trouble = f"the deadline of {limit:g} s for {on}"
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


def show_result(built: dict[str, Any], out: Path, as_json: bool) -> None:
    """Prints a report's table, warnings, reasons and verdict line, or one JSON object."""
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
