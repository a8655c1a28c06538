"""`blink certify`: runs the suite in a child process under a deadline, then reports, signs and decides."""

from __future__ import annotations

import datetime as dt
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from blink_core.model_store import ModelStoreError, resolve
from hil_rigs.description import load_rig
from hil_rigs.locks import LockError, OwnedLock
from hil_rigs.scratch import Scratch
from verification.agreement_record import read as read_agreement
from verification.certificate import corpus as corpora
from verification.certificate import interruptions, junit, output, provenance, report, required, shards
from verification.certificate import replays as replaying
from verification.certificate.collector import JOURNAL, Collector, read_journal
from verification.certificate.console import show_refusal, show_result
from verification.certificate.corpus import PREFIX, Corpus, CorpusError, Entry
from verification.certificate.keys import KeyFileError, signing_key
from verification.certificate.options import PACKAGE, Deadline, Options, deadlines
from verification.certificate.records import TestRecord
from verification.certificate.required import Profile, RequiredSetError
from verification.certificate.supervise import (
    CRASHED,
    GRACE_S,
    INTERRUPTED,
    command_line,
    interruptible,
    root_of,
    supervise,
)
from verification.run_context import RunContext, new_run_id, parse_seed

PROBE, PROBE_S = (sys.executable, "-m", "verification.cli", "rig", "probe"), 120.0


class CannotRun(Exception):
    """A run that cannot start; the message is for the user."""


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
        deadline_s: limit of the whole run, replays of earlier failures included, instead of the profile's.
        as_json: print one JSON object instead of table and verdict line.
        pytest_arguments: passed on to pytest.
        shard: "2/5" runs the second of five parts, and goes on where it was interrupted; `join` makes a whole of them.
        corpus: folder of the failure corpus that profiles nightly and full run first; by default the user's own.
        agree_with: output folder of another run, with whose recorded answers this one's are compared.

    Returns the exit code: 0 passed, 1 a property failed, 2 could not run. The last line printed is
    "verdict: ... (exit N)".
    """
    tests = (suite or PACKAGE / "suite").resolve()
    try:
        part = None if shard is None else shards.parse_shard(shard)
        peer = None if agree_with is None else agree_with.resolve()
        options = Options(
            rig, model, profile, out.resolve(), seed, key, tests, deadline_s, pytest_arguments, part, corpus, peer
        )
        context, limits = _prepare(options)
        found = _run(options, context, limits)
    except (CannotRun, LockError, shards.ShardError, corpora.CorpusError) as error:
        return show_refusal(str(error), as_json)
    show_result(found, options.out, as_json)
    return int(found["verdict"]["exit_code"])


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
        if options.keeps:
            _corpus(options, context).entries(context.rig_kind)  # a damaged one is an error now
    except ModelStoreError as error:
        raise CannotRun(f"the failure corpus: {error}; name a folder with --corpus") from error
    try:
        with OwnedLock(output.lock_name(options.out), owner=context.run_id):
            _make_ready(options, context)
    except (output.OutputError, ModelStoreError, OSError) as error:
        raise CannotRun(str(error)) from error
    return context, limits


def _make_ready(options: Options, context: RunContext) -> None:
    """Empties the output folder, but for what an interrupted session of the same shard has left there."""
    if options.shard is None:
        output.prepare(options.out)
        return
    identity = _identity(options, context)
    there = options.out.is_dir()
    state = shards.read_state(options.out, options.shard, identity) if there else shards.State(identity, [], [])
    resumed = (options.out / shards.STATE).is_file()
    if resumed:  # before the journal goes, from which some are known
        shards.write_state(options.out, options.shard, identity, state.done, state.interrupted)
    output.prepare(options.out, keep=output.RESUMED if resumed else ())
    context.done = shards.write_state(options.out, options.shard, identity, state.done, state.interrupted)
    say = partial(print, file=sys.stderr, flush=True)
    if state.done:
        say(f"shard {options.shard}: {len(state.done)} tests are done already, going on")
    for line in interruptions.warnings(interruptions.summary(state.interrupted)):
        say(f"shard {options.shard}: {line}")


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
    """Run the suite if it can be run, then build, write and sign the report in either case, also when a signal comes.

    One that comes when all tests are done already changes nothing: the report is being written."""
    started = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
    clock = time.monotonic()
    with interruptible() as interrupted, Scratch(context.run_id) as scratch:
        log = scratch.path / output.LOG
        trouble = _unusable(options)
        replays: list[TestRecord] = []
        if trouble is None:
            for_replays, for_all = deadlines(options, limits)
            replays, trouble = _replay_corpus(options, context, limits, for_replays, interrupted)
            if trouble is None:
                trouble = supervise(options, context, limits, log, for_all, interrupted)
        else:
            log.write_text(f"{trouble}\n", encoding="utf-8")
        log.touch()  # a run that ended among the replays has none
        with OwnedLock(output.lock_name(options.out), owner=context.run_id, timeout_s=GRACE_S):
            shutil.copyfile(log, options.out / output.LOG)
            return _finish(options, context, started, time.monotonic() - clock, trouble, replays)


def _unusable(options: Options) -> str | None:
    """Why the suite cannot be started although rig and profile are known; None when it can."""
    if not options.suite.is_dir():
        return f"the suite {options.suite} does not exist"
    return _unusable_model(options.model) or _unusable_gpu(options.rig)


def _unusable_gpu(rig: str) -> str | None:
    """Why no engine of a rig with a GPU can start here, which else every test would say for itself.

    A process of its own looks: whoever asks for a GPU's memory keeps a context there."""
    if "gpu" not in load_rig(rig).capabilities:
        return None
    try:
        done = subprocess.run(
            [*PROBE, rig, "--json"], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=PROBE_S, check=False
        )
        findings = json.loads(done.stdout)["capabilities"]
        detail = next((f["detail"] for f in findings if f["name"] == "gpu" and not f["available"]), None)
    except (subprocess.TimeoutExpired, ValueError, LookupError, TypeError) as error:
        detail = f"`blink rig probe {rig}` says nothing ({type(error).__name__})"
    return None if detail is None else f"no GPU for rig {rig}: {detail}"


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
    from verification.plugin_report import describe_run

    journal = options.out / JOURNAL
    collector = read_journal(journal)[0] if journal.is_file() else Collector()
    if trouble is not None:
        collector.error(trouble)
    records = collector.close(trouble)
    if options.shard is not None:
        records = _with_other_sessions(options, context, collector, records, replays, trouble)
        junit.write(options.out / output.JUNIT, f"blink shard {options.shard}", records)
    records = [*replays, *records]
    if options.keeps:
        _keep(options, context, collector, started, records, len(replays))
    if not records and trouble is None:
        collector.error(f"no test was collected from {options.suite}; see {output.LOG}")
    description = describe_run(
        context,
        collector.facts,
        started,
        duration_s,
        command_line(options),
        required.required_text(options.rig),
        required.thresholds_text(),
    )
    built = report.build(description, records, collector.errors)
    output.finish(options.out, built, description.required_text, description.thresholds_text, options.key)
    return built


def _with_other_sessions(
    options: Options,
    context: RunContext,
    collector: Collector,
    records: Sequence[TestRecord],
    replays: Sequence[TestRecord],
    trouble: str | None,
) -> list[TestRecord]:
    """This session's records with those of the shard's earlier ones; notes what was done and what was interrupted."""
    assert options.shard is not None
    crashed = [record for record in replays if record.message.startswith(CRASHED)]
    if trouble is not None and trouble.startswith(CRASHED):
        crashed += [record for record in records if record.message == trouble]  # what was running
    why = {record.id: record.message for record in (*replays, *records)}
    state = shards.read_state(options.out, options.shard, why=why, crashed=crashed)
    # The identity of when it began: somebody may have edited the sources since, and is not to go on with others.
    shards.write_state(options.out, options.shard, state.identity, state.done, state.interrupted)
    if state.interrupted:
        collector.fact("interrupted", interruptions.summary(state.interrupted))
    done = {record.id: record for record in state.done if not record.id.startswith(PREFIX)}
    return list(({record.id: record for record in records} | done).values())


def _keep(
    options: Options,
    context: RunContext,
    collector: Collector,
    started: str,
    records: Sequence[TestRecord],
    replayed: int,
) -> None:
    """Puts a run's or a shard's failures and cases into the corpus. One that cannot be written to is told, and the run
    has its report all the same."""
    try:
        corpus, line = _corpus(options, context), replaying.ledger_line(context, started, records)
        added = replaying.keep_failures(corpus, context, records)
        collector.fact("corpus", replaying.summary(corpus, line, replayed, added))
        corpus.note(line)
    except CorpusError as error:
        collector.error(f"the failure corpus: {error}")


def _corpus(options: Options, context: RunContext) -> Corpus:
    return Corpus.default(context.rig_kind) if options.corpus is None else Corpus(options.corpus.resolve())


def _replay_corpus(
    options: Options, context: RunContext, limits: Profile, deadline: Deadline, interrupted: threading.Event
) -> tuple[list[TestRecord], str | None]:
    """Earlier failures first, all of them before one deadline. Each is one test with the seed, profile and model that
    it failed with.

    Returns their records, also of those for which no time was left, and why the run ends here if somebody has broken
    it off."""
    if not options.replays:
        return [], None
    root = root_of(options)

    def run(entry: Entry, folder: Path) -> str | None:
        if interrupted.is_set():
            return INTERRUPTED
        if deadline.over:
            return deadline.passed
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
        return supervise(again, its, limits, folder.with_suffix(".log"), deadline, interrupted, root)

    say = partial(print, file=sys.stderr, flush=True)
    settled = {} if context.done is None else shards.done_records(context.done)
    records = replaying.replay(_corpus(options, context), context.rig_kind, options.out, run, say, settled)
    return records, INTERRUPTED if interrupted.is_set() else None
