"""`blink explore list | run` [design 9], also `python -m verification.explore`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from blink_core.abi.config import ConfigError
from verification.explore.run import MAX_BYTES, MAX_STATES, Search, explore
from verification.explore.scope import Plant, Scope
from verification.explore.scopes import SCOPES, named, of_profile
from verification.explore.witness import decode
from verification.result import Verdict

EXIT_VALID, EXIT_VIOLATED, EXIT_UNKNOWN = 0, 1, 2
_PROFILES = ("smoke", "nightly", "full")

explore_app = typer.Typer(help="Small scopes, exhaustively, on the compiled scheduler.", no_args_is_help=True)
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


@explore_app.command("list")
def list_command(as_json: JsonFlag = False) -> None:
    """The named scopes, the first profile that finishes each, and what each is about."""
    if as_json:
        typer.echo(json.dumps([{"name": s.name, "profiles": s.profiles, "about": s.about} for s in SCOPES], indent=1))
        return
    width = max(len(scope.name) for scope in SCOPES)
    for scope in SCOPES:
        typer.echo(f"{scope.name:{width}}  {scope.profiles[0]:7}  {scope.about}")


@explore_app.command("run")
def run_command(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[SCOPE]...", help="Default: those of a profile.")
    ] = None,
    profile: Annotated[str, typer.Option("--profile", help="smoke, nightly or full.")] = "smoke",
    symmetry: Annotated[str, typer.Option("--symmetry", help="Reduction: on, off or both.")] = "both",
    deadline: Annotated[float, typer.Option("--deadline", min=0.1, help="Limit of each search, s.")] = 900.0,
    max_states: Annotated[int, typer.Option("--max-states", min=1, help="Limit of each search.")] = MAX_STATES,
    max_mib: Annotated[int, typer.Option("--max-mib", min=1, help="Limit of each search's memory.")] = MAX_BYTES >> 20,
    plant: Annotated[str, typer.Option("--plant", help="Plant a fault, to see a counterexample.")] = "none",
    as_json: JsonFlag = False,
) -> None:
    """Search scopes to their ends. Exit 0 all hold, 1 a clause is broken, 2 one was not finished."""
    if profile not in _PROFILES:
        raise _usage(f"--profile {profile}: one of {', '.join(_PROFILES)}")
    if symmetry not in ("on", "off", "both"):
        raise _usage(f"--symmetry {symmetry}: one of on, off, both")
    plants = {p.name.lower().replace("_", "-"): p for p in Plant}
    if plant not in plants:
        raise _usage(f"--plant {plant}: one of {', '.join(plants)}")
    try:
        scopes: tuple[Scope, ...] = tuple(named(name) for name in names) if names else of_profile(profile)
    except KeyError as error:
        raise _usage(str(error.args[0])) from error
    found: list[Search] = []
    for scope in scopes:
        if plants[plant] != Plant.NONE:
            scope = scope.planted(plants[plant])
        for reduced in {"on": (True,), "off": (False,), "both": (True, False)}[symmetry]:
            try:
                search = explore(
                    scope,
                    symmetry=reduced,
                    deadline_s=deadline,
                    max_states=max_states,
                    max_bytes=max_mib << 20,
                    progress=lambda line: typer.echo(line, err=True),
                )
            except (ConfigError, IndexError) as error:
                raise _usage(f"{scope.name}: {error}") from error
            found.append(search)
            if not as_json:
                _show(search)
    verdicts = [search.check().verdict for search in found]
    if as_json:
        typer.echo(json.dumps([search.check().to_json() for search in found], indent=1))
    if Verdict.INVALID in verdicts:
        raise typer.Exit(EXIT_VIOLATED)
    if Verdict.UNKNOWN in verdicts:
        raise typer.Exit(EXIT_UNKNOWN)


def _usage(message: str) -> typer.Exit:
    typer.echo(f"error: {message}", err=True)
    return typer.Exit(EXIT_UNKNOWN)


def _show(search: Search) -> None:
    result, n = search.check(), search.figures
    state = "frontier empty" if search.finished else search.stopped_by or "clause broken"
    typer.echo(
        f"{search.scope.name}, symmetry {'on' if search.symmetry else 'off'}: {result.verdict.value}: {state}, "
        f"{n['states']:,} states, {n['transitions']:,} transitions, depth {n['depth']}, "
        f"omission probability {search.omission:.1e}, {search.rate:,.0f} transitions/s"
    )
    if result.verdict is Verdict.INVALID:
        typer.echo(f"clause {result.clause}: {search.message or result.message}")
        for line in decode(search):
            typer.echo(line)
    elif search.symmetry:
        typer.echo(f"  occurred: {', '.join(name for name, seen in search.situations.items() if seen)}")
