"""`blink rig list`, `probe`, `init` and `schema` [design 10]."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hil_rigs.capabilities import CAPABILITIES
from hil_rigs.description import RigError, known_rigs, load_rig, rig_schema
from hil_rigs.probe import ProbeReport, probe_rig

EXIT_NOT_READY = 1
EXIT_UNUSABLE = 2

rig_app = typer.Typer(help="Rigs: what is described, and what is there on this machine.", no_args_is_help=True)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


@rig_app.command("list")
def list_rigs(as_json: JsonFlag = False) -> None:
    """List the rigs that can be named with --rig."""
    rigs = [load_rig(name) for name in known_rigs()]
    if as_json:
        typer.echo(json.dumps([rig.model_dump(mode="json") for rig in rigs], indent=2))
        return
    table = Table("rig", "kind", "what it is", "capabilities")
    for rig in rigs:
        table.add_row(rig.name, rig.kind, rig.summary, ", ".join(rig.capabilities))
    Console().print(table)


@rig_app.command("probe")
def probe(
    rig: Annotated[str, typer.Argument(help="A rig's name, or a path of a description that ends in .yaml.")],
    as_json: JsonFlag = False,
) -> None:
    """Say what is there for RIG, and what each property would need.

    Exit 0: all there. 1: something is missing. 2: no such rig.
    """
    try:
        description = load_rig(rig)
    except RigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_UNUSABLE) from error
    report = probe_rig(description)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        _print_report(report)
    raise typer.Exit(0 if report.ready else EXIT_NOT_READY)


@rig_app.command("init")
def init(
    name: Annotated[str, typer.Argument(help="Name of the new rig.")],
    out: Annotated[Path | None, typer.Option("--out", help="File to write; NAME.yaml by default.")] = None,
) -> None:
    """Write a commented description of a rig of your own, to be edited.

    Exit 0: written. 2: a bad name, or a file that is there already.
    """
    from hil_rigs.template import write_rig

    path = out or Path(f"{name}.yaml")
    try:
        write_rig(name, path)
    except RigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_UNUSABLE) from error
    typer.echo(str(path))


@rig_app.command("schema")
def schema() -> None:
    """Print the JSON Schema of rig descriptions, for editors and other tools."""
    typer.echo(json.dumps(rig_schema(), indent=2))


def _print_report(report: ProbeReport) -> None:
    console = Console()
    machine = report.machine
    memory_gib = int(machine["memory_bytes"]) / (1 << 30)
    console.print(
        f"rig [bold]{report.rig}[/bold] on {machine['cpu']}, {machine['cpus']} CPUs, {memory_gib:.1f} GiB memory, "
        f"{machine['architecture']}, Linux {machine['kernel']}, Python {machine['python']}",
        highlight=False,
    )
    table = Table("capability", "state", "detail", "what it is")
    for finding in report.capabilities:
        state = "[green]available[/green]" if finding.available else "[red]missing[/red]"
        table.add_row(finding.name, state, escape(finding.detail), CAPABILITIES[finding.name])
    console.print(table)
    table = Table("property", "can run", "needs", "missing")
    for item in report.properties:
        table.add_row(
            item.name, "yes" if item.runnable else "no", ", ".join(item.needs), ", ".join(item.missing) or "-"
        )
    console.print(table)
