"""`blink model fetch` and `blink model info` [design 10]."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from blink_core.model_store import PINNED_MODELS, ModelStoreError, fetch, file_sha256, resolve

EXIT_UNUSABLE = 2

model_app = typer.Typer(help="Models: fetch a pinned one, or look at one.", no_args_is_help=True)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


@model_app.command("fetch")
def fetch_command(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(PINNED_MODELS)}.")],
    as_json: JsonFlag = False,
) -> None:
    """Bring a pinned model onto this machine and print its path. Nothing is downloaded if it is there and intact."""
    try:
        path = fetch(name, report=lambda line: typer.echo(line, err=True))
    except ModelStoreError as error:
        raise _unusable(error) from error
    typer.echo(json.dumps({"name": name, "path": str(path), "sha256": PINNED_MODELS[name].sha256}) if as_json else path)


@model_app.command("info")
def info_command(
    model: Annotated[str, typer.Argument(help="A pinned model's name, a .gguf file, or a folder of safetensors.")],
    as_json: JsonFlag = False,
) -> None:
    """Print a model's configuration, size, digests and number of tensors."""
    try:
        facts = model_facts(resolve(model))
    except (ModelStoreError, OSError) as error:
        raise _unusable(error) from error
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    table = Table(show_header=False)
    for key, value in facts["config"].items():
        table.add_row(key, ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value))
    table.add_section()
    table.add_row("tensors", str(facts["tensors"]))
    table.add_row("size", f"{facts['bytes']:,} bytes")
    console = Console()
    console.print(str(facts["path"]), soft_wrap=True, highlight=False)
    console.print(table)
    for file in facts["files"]:
        typer.echo(f"sha256 {file['sha256']}  {file['name']}")


def model_facts(path: Path) -> dict[str, Any]:
    """JSON-serialisable facts of a model file or folder. Raises ModelStoreError or OSError when it cannot be read."""
    # Imported on use: `fetch` needs no model code.
    from blink_core.models import ModelError, load_config

    try:
        config = load_config(path)
    except ModelError as error:
        raise ModelStoreError(str(error)) from error
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    try:
        tensors = sum(_count_tensors(file) for file in files)
    except Exception as error:  # a damaged file raises anything, deep inside the two libraries
        raise ModelStoreError(f"{path}: its tensors cannot be listed: {error}") from error
    return {
        "path": str(path),
        "config": dataclasses.asdict(config),
        "tensors": tensors,
        "bytes": sum(file.stat().st_size for file in files),
        "files": [{"name": file.name, "sha256": file_sha256(file)} for file in files],
    }


def _count_tensors(file: Path) -> int:
    if file.suffix.lower() == ".gguf":
        from gguf import GGUFReader

        return len(GGUFReader(file).tensors)
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as tensors:
        return len(list(tensors.keys()))


def _unusable(error: Exception) -> typer.Exit:
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(EXIT_UNUSABLE)
