"""`blink mutants`: the registry of seeded faults and the kill matrix."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verification.mutants.model import CLASSES, PLACES, Mutant, RegistryError, by_name, load

if TYPE_CHECKING:
    from verification.mutants.matrix import ClassResult, Verdict

app = typer.Typer(help="Seeded faults of the product, and which checkers notice them.", no_args_is_help=True)

ClassOption = Annotated[list[str] | None, typer.Option("--class", help="Only this fault class; may be repeated.")]
EXIT_SURVIVORS = 1
EXIT_UNUSABLE = 2


def _fail(message: str) -> typer.Exit:
    typer.echo(f"error: {message}", err=True)
    return typer.Exit(EXIT_UNUSABLE)


def _chosen(classes: list[str] | None, names: list[str] | None, where: str | None) -> list[Mutant]:
    """Raises typer.Exit with exit code 2 for what is not there."""
    for cls in classes or ():
        if cls not in CLASSES:
            raise _fail(f"--class {cls}: the classes are {', '.join(CLASSES)}")
    if where not in (None, *PLACES):
        raise _fail(f"--where {where}: one of {', '.join(PLACES)}")
    try:
        mutants = [by_name(name) for name in names] if names else list(load())
    except RegistryError as error:
        raise _fail(str(error)) from error
    return [m for m in mutants if (not classes or m.cls in classes) and (where is None or m.where == where)]


@app.command("list")
def list_command(
    classes: ClassOption = None,
    where: Annotated[str | None, typer.Option("--where", help="native, python or cuda.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """List the registered mutants."""
    mutants = _chosen(classes, None, where)
    if as_json:
        typer.echo(json.dumps([m.model_dump(mode="json", by_alias=True) for m in mutants], indent=1))
        return
    for m in mutants:
        typer.echo(f"{m.cls} {m.name:38} {m.where:7} {m.summary}")
    counts = {cls: sum(m.cls == cls for m in mutants) for cls in CLASSES}
    typer.echo(f"{len(mutants)} mutants: " + ", ".join(f"{cls} {n}" for cls, n in counts.items() if n))


def _parts(text: str) -> tuple[int, int]:
    """Raises typer.Exit with exit code 2 for what is no shard."""
    part, slash, parts = text.partition("/")
    if not (slash and part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise _fail(f"--shard {text}: write i/n with i from 1 to n")
    return int(part), int(parts)


@app.command("run")
def run_command(
    classes: ClassOption = None,
    names: Annotated[list[str] | None, typer.Option("--name", help="Only this mutant; may be repeated.")] = None,
    where: Annotated[str | None, typer.Option("--where", help="native or python only.")] = None,
    checkers: Annotated[list[str] | None, typer.Option("--checker", help="Only this checker; may be repeated.")] = None,
    shard: Annotated[str | None, typer.Option("--shard", help="i/n: every n-th mutant, from the i-th on.")] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=1000, help="Seeds of each checker.")] = 10,
    seed: Annotated[int | None, typer.Option("--seed", help="Root of the seeds (default: a fresh one).")] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of the results; finished ones are kept.")] = Path(
        "out/mutants"
    ),
) -> None:
    """Run mutants against checkers. Exit 0 all killed, 1 survivors or a failed control, 2 could not run."""
    from verification.mutants import matrix
    from verification.mutants.checkers import every, find
    from verification.mutants.session import WorkerLost
    from verification.mutants.weave import BuildFailed

    part, parts = _parts(shard or "1/1")
    if where == "cuda":
        raise _fail("--where cuda: these run on a GPU only, by python -m hil_rigs.gpu.all --stages 'mutants-*'")
    selected = [m for m in _chosen(classes, names, where)[part - 1 :: parts] if m.where != "cuda"]
    if not selected:
        raise _fail("no mutant is selected")
    try:
        for name in checkers or ():
            find(name)
    except KeyError as error:
        raise _fail(str(error.args[0])) from error
    root = secrets.randbits(32) if seed is None else seed
    typer.echo(f"{len(selected)} mutants, {seeds} seeds of root {root}, results in {out}")
    try:
        run = matrix.Matrix(out, matrix.seeds_of(root, seeds), checkers=checkers, say=typer.echo)
        rows = run.rows(selected)
        excused = matrix.equivalents()
    except (RegistryError, BuildFailed, WorkerLost) as error:
        raise _fail(str(error)) from error
    whole = () if names or shard or where or checkers else sorted({m.cls for m in selected})
    verdict = matrix.judge(rows, whole=whole, excused=excused)
    kept = {"root": root, "seeds": seeds, "rows": [row.to_json() for row in rows], "problems": list(verdict.problems)}
    kept["checkers"] = {one.name: sorted(one.functions) for one in every() if any(one.name in r.cells for r in rows)}
    name = "matrix" if parts == 1 else f"matrix-{part}-of-{parts}"
    (out / f"{name}.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")
    (out / f"{name}.txt").write_text(matrix.table(rows) + "\n", encoding="utf-8")
    _tell(matrix.by_class(rows, excused), verdict)


def _tell(classes: Sequence[ClassResult], verdict: Verdict) -> None:
    """Prints what became of each class and the verdict. Raises typer.Exit with its code."""
    for one in classes:
        typer.echo(str(one))
    for problem in verdict.problems:
        typer.echo(f"problem: {problem}")
    typer.echo(str(verdict))
    raise typer.Exit(EXIT_SURVIVORS if verdict.problems else 0)


@app.command("report")
def report_command(
    folders: Annotated[list[Path], typer.Argument(help="Folders with results of `run`, such as those of its shards.")],
    where: Annotated[str | None, typer.Option("--where", help="Only mutants of this kind.")] = None,
    full: Annotated[bool, typer.Option("--table", help="Print the matrix, too.")] = False,
) -> None:
    """Join results into one matrix and judge it, without running anything. Exit codes as those of `run`."""
    from verification.mutants import matrix

    try:
        rows = [row for row in matrix.kept(folders) if where is None or row.where == where]
        excused = matrix.equivalents()
    except RegistryError as error:
        raise _fail(str(error)) from error
    asked = {m.name: m.cls for m in _chosen(None, None, where) if m.where != "cuda"}
    there = {row.mutant for row in rows}
    rows = [row for row in rows if not row.cls or row.mutant in asked]
    whole = sorted(set(asked.values()))
    verdict = matrix.judge(rows, whole=whole, excused=excused)
    more = [f"{len(asked.keys() - there)} mutants were not run"] if asked.keys() - there else []
    for kind in sorted({row.where for row in rows}):
        versions = len({row.sources for row in rows if row.where == kind})
        more += [f"the {kind} rows are of {versions} versions of the sources"] if versions > 1 else []
    if full:
        typer.echo(matrix.table(rows))
    _tell(matrix.by_class(rows, excused), replace(verdict, problems=(*verdict.problems, *more)))


@app.command("automatic")
def automatic_command(
    count: Annotated[int, typer.Option("--count", min=1, help="Size of the sample.")] = 300,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the sample and of the tests.")] = 1,
    shard: Annotated[str, typer.Option("--shard", help="i/n: every n-th of the sample, from the i-th on.")] = "1/1",
    least: Annotated[float, typer.Option("--least", help="Least share that must be killed.")] = 0.0,
    out: Annotated[Path, typer.Option("--out", help="Folder of the result.")] = Path("out/mutants"),
) -> None:
    """Score the checkers on sampled automatic C++ mutants. Exit 0, 1 below the least share or with a wrong argument,
    2 could not run."""
    from verification.mutants import automatic, matrix
    from verification.mutants.session import WorkerLost
    from verification.mutants.weave import BuildFailed

    part, parts = _parts(shard)
    try:
        score = automatic.run(count, seed, shard=(part, parts), equivalent=matrix.equivalents(), say=typer.echo)
    except (RegistryError, BuildFailed, WorkerLost) as error:
        raise _fail(str(error)) from error
    out.mkdir(parents=True, exist_ok=True)
    name = "automatic.json" if parts == 1 else f"automatic-{part}-of-{parts}.json"
    told = score.to_json() | {"seed": seed, "count": count}
    (out / name).write_text(json.dumps(told, indent=1), encoding="utf-8")
    for refuted in score.refuted:
        typer.echo(f"problem: argued equivalent: {refuted}")
    typer.echo(str(score))
    bad = bool(score.refuted) or score.words["killed"] < least * len(score.counted)
    raise typer.Exit(EXIT_SURVIVORS if bad else 0)


@app.command("tester")
def of_tester_command(
    count: Annotated[int, typer.Option("--count", min=1, help="Size of the sample.")] = 100,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the sample.")] = 1,
    shard: Annotated[str, typer.Option("--shard", help="i/n: every n-th of the sample, from the i-th on.")] = "1/1",
    out: Annotated[Path, typer.Option("--out", help="Folder of the result.")] = Path("out/mutants"),
) -> None:
    """Score the tests on mutants of specification and checkers, made with mutmut. Exit 0, 1 an argument for
    equivalence is refuted, or 2 could not run."""
    from verification.mutants import matrix, tester
    from verification.mutants.weave import BuildFailed

    part, parts = _parts(shard)
    try:
        score = tester.run(count, seed, shard=(part, parts), equivalent=matrix.equivalents(), say=typer.echo)
    except (BuildFailed, RegistryError) as error:
        raise _fail(str(error)) from error
    out.mkdir(parents=True, exist_ok=True)
    name = "tester.json" if parts == 1 else f"tester-{part}-of-{parts}.json"
    (out / name).write_text(json.dumps(score.to_json() | {"seed": seed}, indent=1), encoding="utf-8")
    for refuted in score.refuted:
        typer.echo(f"problem: argued equivalent: {refuted}")
    typer.echo(str(score))
    raise typer.Exit(EXIT_SURVIVORS if score.refuted else 0)
