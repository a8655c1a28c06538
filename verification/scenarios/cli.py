"""`blink scenarios`: the rows of the fault corpus, and how each is realised."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated

import typer

from verification.scenarios.corpus import Row, load


def _state(row: Row) -> str:
    if row.cannot_apply is not None:
        return f"cannot apply: {row.cannot_apply}"
    parts = [f"{len(row.tests)} test{'s' * (len(row.tests) != 1)}"] if row.tests else []
    parts += [f"later on {row.later.rig}: {row.later.plan}"] if row.later else []
    return "; ".join(parts)


def scenarios(
    kind: Annotated[str, typer.Option("--class", help="Only rows of this class, for example K.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """The rows of the fault corpus: the tests of each, what comes later, or why it cannot apply."""
    rows = {name: row for name, row in load().rows.items() if not kind or kind in row.kind.split("/")}
    if not rows:
        typer.echo(f"error: no row is of class {kind!r}", err=True)
        raise typer.Exit(2)
    if as_json:
        made = {name: row.model_dump(by_alias=True, exclude_defaults=True, mode="json") for name, row in rows.items()}
        typer.echo(json.dumps(made, indent=1, ensure_ascii=False))
        return
    for name, row in rows.items():
        typer.echo(f"{name} {row.kind:4} {row.fault} [{_state(row)}]")
    counts = Counter(
        "cannot apply" if r.cannot_apply else "realised" if r.tests else "later on another rig" for r in rows.values()
    )
    typer.echo(", ".join(f"{counts[state]} {state}" for state in ("realised", "later on another rig", "cannot apply")))
