"""Starts engines for the suite on the rig of a run: locked, named by the run, with their logs in its output folder."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from blink_core.abi.config import EngineConfig
from blink_core.abi.enums import LogLevel
from hil_rigs.description import load_rig
from hil_rigs.local import LocalOptions, LocalRig, RigFailure
from hil_rigs.locks import LockTimeout, rig_lock
from verification.certificate.outcomes import InfrastructureError, PropertyViolation, RigBroken
from verification.program import Program, Shape
from verification.properties import kv_sanitizer
from verification.run_context import RunContext
from verification.subject import RING, Subject
from verification.thresholds import Thresholds

# Small on purpose: the pool is a fraction of what the drawn programs ask for, so that preemption and reuse must occur.
MODEL_SIZES = {"pages": 66, "max_rows": 8, "token_budget": 64, "max_len": 512, "slots": 64, "sq_entries": 256}
TINY_SIZES = {"pages": 18, "max_rows": 6, "token_budget": 24, "max_len": 160, "slots": 16, "sq_entries": 64}
TINY_SIZES |= {"quantum": 48, "masks": 4}  # a quantum below the cost of most requests: turns are given up and come back
# Few slots and events, so that a front end that gives no credits back soon pauses its rows.
FAULT_SIZES = {"pages": 130, "max_rows": 8, "token_budget": 64, "max_len": 256, "slots": 8, "cq_entries": 64}
COMMON_SIZES = {"cq_entries": 1024, "arena_tokens": 1 << 14, "log_entries": 1 << 18, "log_level": int(LogLevel.ALL)}

_ENGINE_FIELDS = {field.name for field in fields(EngineConfig)}
_OPTION_FIELDS = {field.name for field in fields(LocalOptions)} - {"engine", "logs"}
_STARTED = "engine-"
_numbers = itertools.count(1)


def options_of(sizes: dict[str, int], logs: Path | None, **options: Any) -> LocalOptions:
    """`LocalOptions` from fields of `EngineConfig` and of `LocalOptions` itself. ValueError for any other."""
    unknown = sorted(set(options) - _ENGINE_FIELDS - _OPTION_FIELDS)
    if unknown:
        known = ", ".join(sorted(_ENGINE_FIELDS | _OPTION_FIELDS))
        raise ValueError(f"no option of an engine: {', '.join(unknown)}; known: {known}")
    engine = COMMON_SIZES | sizes | {name: value for name, value in options.items() if name in _ENGINE_FIELDS}
    rest = {name: value for name, value in options.items() if name in _OPTION_FIELDS}
    # At level debug the front end says which slot a request has: that joins its log with the engine's.
    defaults: dict[str, Any] = {"capture": True, "verbosity": "debug"}
    return LocalOptions(logs=logs, engine=engine, **(defaults | rest))


@contextlib.contextmanager
def serving(
    run: RunContext, name: str, model: Path | None, sizes: dict[str, int], *, http: bool, **options: Any
) -> Iterator[LocalRig]:
    """The run's rig, serving a model while inside; None for the no-op model, where the scheduler alone is judged.

    name: unique within the run and worker; it names all resources.

    An exclusive rig is waited for only while another worker of this same run has it. Raises RigBroken when an engine
    does not start, InfrastructureError when somebody else has the rig. Where the engine runs under the KV sanitizer,
    raises PropertyViolation at the end if that had anything to report, unless the options expect it.
    """
    description = load_rig(run.rig)
    logs = None if run.out is None else run.out / "logs" / f"{run.worker}-{name}"
    chosen = options_of(sizes, logs, **options)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(rig_lock(description, run.run_id, sibling_s=run.profile.deadline_s))
        except LockTimeout as error:
            raise InfrastructureError(str(error)) from error
        rig = LocalRig(description, model, http=http, name=f"{run.run_id}-{run.worker}-{name}", options=chosen)
        try:
            rig.start()
        except RigFailure as error:
            raise RigBroken(f"{name}: {error}") from error
        stack.push(partial(_require_quiet, name, rig))
        stack.callback(rig.stop)
        rig.memory  # noqa: B018  (mapped now: the memory of an engine that has died can be read, but not opened)
        require_poison(name, rig)
        rig.on_stop = run.watch(name, rig).collect
        if run.out is not None and rig.memory.config.log_level == LogLevel.ALL:  # for the bundles of failures
            from verification.trace.live import following

            run.traces[name] = stack.enter_context(following(rig.memory))
            stack.callback(run.traces.pop, name)
        try:
            yield rig
        except BaseException:  # of a test that started this engine itself: it is gone when the failure is explained
            from verification.failures.evidence import look_at

            run.seen_last[name] = look_at(name, rig)
            run.seen_last[name].log_verdict = run.log_verdict(name)
            raise


def require_poison(name: str, rig: LocalRig) -> None:
    """Raises RigBroken unless a fresh engine's whole KV pool is NaN: rows nobody wrote must not read as plausible."""
    if rig.descriptor.kv is None:
        return
    clean = int((~rig.memory.poisoned_pages()).sum())
    if clean:
        raise RigBroken(f"{name}: {clean} pages of the fresh KV pool are not poisoned with NaN")


def _require_quiet(name: str, rig: LocalRig, _: object, error: BaseException | None, __: object) -> None:
    """Raises PropertyViolation if the KV sanitizer of the engine, which has stopped, reported anything: a reader that
    was cancelled shows its client nothing. A test that fails already keeps its own error, with a note."""
    if not rig.kv_reported or rig.options.kv_reports_expected:
        return
    result = kv_sanitizer.unexpected(name, rig.kv_reported, rig.kv_first_report)
    if error is None:
        raise PropertyViolation(result)
    error.add_note(result.message)


def shape_of(rig: LocalRig, requests: tuple[int, int], most_new: int) -> Shape:
    """What programs are drawn for on a running rig: its vocabulary, pages and lengths."""
    config = rig.descriptor.config
    usable = (config.pages - 2) * config.page_size
    longest = min(config.max_len, usable)
    return Shape(config.vocab, config.page_size, longest, requests, most_new, masks=config.masks)


def replayed(run: RunContext, subject: str) -> Program | None:
    """The recorded program, if `--replay` gave one that ran on this engine.

    One that a test started counts whichever time it is started: hypothesis starts it once for each example.
    """
    if run.replay is None or _lineage(run.replay.subject) != _lineage(subject):
        return None
    return run.replay.program


def _lineage(subject: str) -> str:
    """The name of an engine that `engine.start` gave, without the count at its end; any other name as it is."""
    return subject.rpartition("-")[0] if subject.startswith(_STARTED) else subject


def started_name(test: str, model: Path, http: bool, options: dict[str, Any]) -> str:
    """The name of an engine that a test starts: unique in the process, and but for the count at its end the same in
    every run, made of the test, the model's name and the options."""
    told = json.dumps([test, model.name, http, sorted(options.items())], default=str)
    return f"{_STARTED}{hashlib.sha256(told.encode()).hexdigest()[:6]}-{next(_numbers)}"


class Starter:
    """`Subject.start` of a run: further engines, each for as long as its `with` lasts."""

    def __init__(self, run: RunContext, thresholds: Thresholds, sizes: dict[str, int]) -> None:
        self._run, self._thresholds, self._sizes = run, thresholds, sizes

    @contextlib.contextmanager
    def __call__(self, model: Path | str, *, http: bool, **options: Any) -> Iterator[Subject]:
        from blink_core.model_store import ModelStoreError, resolve

        try:
            path = model if isinstance(model, Path) else resolve(model)
        except ModelStoreError as error:
            raise InfrastructureError(str(error)) from error
        name = started_name(self._run.test, path, http, options)
        with serving(self._run, name, path, self._sizes, http=http, **options) as rig:
            shape = shape_of(rig, requests=(3, 10), most_new=40)
            asked = rig.options.engine["max_len"]
            yield Subject(
                name,
                rig,
                rig.ring(RING),
                shape,
                self._thresholds,
                asked,
                starter=self,
                replayed=replayed(self._run, name),
                on_replay=self._run.replay_ran,
                on_ran=self._run.look,
            )
