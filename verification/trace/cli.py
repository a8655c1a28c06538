"""`blink trace record | check | replay | convert` [design 10]."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verification.trace.format import Header, Trace, TraceError, read, write

if TYPE_CHECKING:
    from hil_rigs.local import LocalRig
    from verification.trace.record import Recorder

EXIT_VALID, EXIT_VIOLATED, EXIT_UNKNOWN = 0, 1, 2

trace_app = typer.Typer(
    help="Recorded event logs: record, check against the rules, replay, convert.", no_args_is_help=True
)
Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Trace files.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


def _fail(message: str) -> typer.Exit:
    typer.echo(f"error: {message}", err=True)
    return typer.Exit(EXIT_UNKNOWN)


def _read(path: Path) -> Trace:
    try:
        return read(path)
    except TraceError as error:
        raise _fail(str(error)) from error


@trace_app.command("record")
def record_command(
    out: Annotated[Path, typer.Option("--out", help="The new trace file.")],
    engine: Annotated[
        Path | None, typer.Option("--engine", help="engine.json of a running engine, or its folder.")
    ] = None,
    program: Annotated[
        int | None, typer.Option("--program", help="Start the local rig's no-op engine and run the programs of a seed.")
    ] = None,
    lockstep: Annotated[
        int | None, typer.Option("--lockstep", help="Run the lock-step program of a seed on the compiled scheduler.")
    ] = None,
    seconds: Annotated[float | None, typer.Option("--seconds", min=0.1, help="With --engine: how long.")] = None,
    payloads: Annotated[
        bool, typer.Option("--payloads", help="Keep prompts, bias and stop ids too; `replay` needs them.")
    ] = False,
    snapshot_every: Annotated[
        float | None, typer.Option("--snapshot-every", min=0.01, help="Hold the engine every N s and keep raw state.")
    ] = None,
) -> None:
    """Record an engine's event log, until Ctrl-C or for a time. Exit 0, or 2 when it cannot be recorded."""
    if sum(source is not None for source in (engine, program, lockstep)) != 1:
        raise _fail("name one source: --engine, --program or --lockstep")
    if out.exists():
        raise _fail(f"{out} is there already")
    if lockstep is not None:
        _record_drawn(out, lockstep, payloads)
    elif program is not None:
        _record_program(out, program, payloads, snapshot_every)
    else:
        assert engine is not None
        _record_engine(out, engine, seconds, payloads, snapshot_every)


def _record_drawn(out: Path, seed: int, payloads: bool) -> None:
    from verification.lockstep.programs import random_program
    from verification.trace.drawn import logged, trace_of

    trace = trace_of(logged(random_program(random.Random(seed), 50)), payloads=payloads, seed=str(seed))
    write(out, trace)
    typer.echo(f"{out}: {len(trace.entries)} entries")


def _record_program(out: Path, seed: int, payloads: bool, snapshot_every: float | None) -> None:
    from hil_rigs.description import load_rig
    from hil_rigs.local import LocalOptions, LocalRig, RigFailure
    from verification.drivers.ring import run_program
    from verification.program import draw_program
    from verification.serving import COMMON_SIZES, TINY_SIZES, shape_of

    options = LocalOptions(engine=COMMON_SIZES | TINY_SIZES)
    try:
        with (
            LocalRig(load_rig("local"), None, http=False, options=options) as rig,
            _recording(rig, out, payloads, snapshot_every, str(seed)),
        ):
            client, rng = rig.ring(1), random.Random(seed)
            for _ in range(4):
                run_program(client, draw_program(rng, shape_of(rig, (3, 10), 24)))
    except RigFailure as error:
        raise _fail(str(error)) from error


@contextlib.contextmanager
def _recording(rig: LocalRig, out: Path, payloads: bool, snapshot_every: float | None, seed: str) -> Iterator[Recorder]:
    from verification.trace.record import Recorder

    header = header_of(rig.memory.descriptor.model.name, "local", payloads, seed, rig)
    with Recorder(rig.memory, out, header, snapshot_every_s=snapshot_every) as recorder:
        yield recorder
    _say(recorder, out)


def header_of(model: str, rig_name: str, payloads: bool, seed: str, rig: LocalRig) -> Header:
    from verification.certificate.provenance import sources_digest, tool_version

    return Header(
        rig.memory.config, "live", f"blink {tool_version()}", engine_digest=sources_digest(), rig=rig_name, model=model,
        seed=seed, clock_base=time.time(), payloads=payloads,
    )  # fmt: skip


def _record_engine(
    out: Path, engine: Path, seconds: float | None, payloads: bool, snapshot_every: float | None
) -> None:
    from blink_core.runtime.descriptor import DescriptorError, EngineDescriptor
    from hil_rigs.engine_memory import EngineMemory, EngineUnreachable
    from verification.certificate.provenance import tool_version
    from verification.trace.record import Recorder

    path = engine / "engine.json" if engine.is_dir() else engine
    try:
        memory = EngineMemory(EngineDescriptor.read(path))
    except (DescriptorError, EngineUnreachable) as error:
        raise _fail(str(error)) from error
    header = Header(
        memory.config, "live", f"blink {tool_version()}", model=memory.descriptor.model.name, payloads=payloads,
        clock_base=time.time(),
    )  # fmt: skip
    with Recorder(memory, out, header, snapshot_every_s=snapshot_every) as recorder:
        if recorder.warning:
            typer.echo(f"warning: {recorder.warning}", err=True)
        typer.echo("recording; Ctrl-C ends it", err=True)
        deadline = None if seconds is None else time.monotonic() + seconds
        with contextlib.suppress(KeyboardInterrupt):
            while recorder.problem is None and (deadline is None or time.monotonic() < deadline):
                time.sleep(0.05 if deadline is None else min(0.05, max(0.0, deadline - time.monotonic())))
    _say(recorder, out)


def _say(recorder: Recorder, out: Path) -> None:
    w = recorder.writer
    typer.echo(f"{out}: {w.entries} entries, {w.lost} lost, {recorder.submissions_missed} descriptors missed")
    if recorder.warning:
        typer.echo(f"warning: {recorder.warning}", err=True)
    if recorder.problem is not None:
        raise _fail(recorder.problem)


@trace_app.command("check")
def check_command(files: Files, as_json: JsonFlag = False) -> None:
    """Check logs against docs/rules.md. Exit 0 valid, 1 a clause is violated, 2 unknown or unreadable."""
    from verification.trace.monitor import UNKNOWN, VALID, VIOLATED, check

    words = []
    for path in files:
        verdict = check(_read(path))
        words.append(verdict.word)
        if as_json:
            typer.echo(json.dumps({"file": str(path), **verdict.to_json()}))
        else:
            typer.echo(f"{path}: {verdict.word}\n{verdict}")
    code = {VALID: EXIT_VALID, VIOLATED: EXIT_VIOLATED, UNKNOWN: EXIT_UNKNOWN}
    raise typer.Exit(EXIT_VIOLATED if VIOLATED in words else max(code[word] for word in words))


@trace_app.command("replay")
def replay_command(files: Files, as_json: JsonFlag = False) -> None:
    """Replay logs on the compiled scheduler. Exit 0 equal, 1 an entry differs, 2 it cannot be replayed to its end."""
    from verification.trace.replay import replay

    codes = []
    for path in files:
        done = replay(_read(path))
        codes.append(EXIT_VALID if done.same and done.whole else EXIT_VIOLATED if done.whole else EXIT_UNKNOWN)
        word = ("equal", "differs", "not replayed")[codes[-1]]
        if as_json:
            facts = {"file": str(path), "word": word, "compared": done.compared, "calls": done.calls}
            typer.echo(json.dumps(facts | {"message": done.message}))
        else:
            typer.echo(f"{path}: {word}: {done.message}")
    raise typer.Exit(EXIT_VIOLATED if EXIT_VIOLATED in codes else max(codes))


@trace_app.command("convert")
def convert_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A trace file.")],
    to: Annotated[str, typer.Option("--to", help="jsonl, or perfetto (Chrome trace events).")],
    out: Annotated[Path | None, typer.Option("--out", help="The new file; standard output if not given.")] = None,
    content: Annotated[bool, typer.Option("--content", help="jsonl: with token ids and log-probabilities.")] = False,
) -> None:
    """Convert a log for other tools. Exit 0, or 2 when it cannot be read."""
    from verification.trace import convert

    if to not in ("jsonl", "perfetto"):
        raise _fail(f"--to {to}: jsonl or perfetto")
    trace = _read(file)
    text = "\n".join(convert.jsonl(trace, content=content)) if to == "jsonl" else json.dumps(convert.perfetto(trace))
    if out is None:
        typer.echo(text)
    else:
        out.write_text(text + "\n", encoding="utf-8")
    if trace.problem is not None:
        typer.echo(f"warning: {file}: {trace.problem}", err=True)
