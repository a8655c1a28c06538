"""The commented YAML that `blink rig init` writes, made from the model that later reads it."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from hil_rigs.capabilities import CAPABILITIES
from hil_rigs.description import RIGS_DIR, EngineSettings, RigDescription, RigError, load_rig

_WIDTH = 118


def rig_text(name: str, base: str = "local") -> str:
    """A description named `name` with the values of the shipped rig `base`, every field with its comment."""
    values = load_rig(base).model_dump(mode="json") | {"name": name}
    lines = [
        f"# Rig {name}: check it with `blink rig probe FILE`, run on it with `blink certify --rig-file FILE`",
        "# or `pytest --rig-file FILE`. `blink rig schema` prints the JSON Schema of this file.",
        *_fields(RigDescription, values, ""),
    ]
    return "\n".join(lines) + "\n"


def _fields(model: type[BaseModel], values: dict[str, Any], indent: str) -> list[str]:
    lines = []
    for name, field in model.model_fields.items():
        lines.append("")
        comment = " ".join((field.description or "").replace("`", "").split())
        lines += [f"{indent}# {line}" for line in textwrap.wrap(comment, _WIDTH - len(indent))]
        if name == "capabilities":
            lines += [f"{indent}#   {known}: {what}" for known, what in CAPABILITIES.items()]
        value = values[name]
        if name == "engine":
            lines += [f"{indent}{name}:", *_fields(EngineSettings, value, indent + "  ")]
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=10_000).splitlines()[0]
            lines.append(f"{indent}{name}: {text}")
    return lines


def write_rig(name: str, path: Path) -> RigDescription:
    """Writes a description that `load_rig` takes. Raises RigError for a bad name, or a file that exists already."""
    if path.suffix not in (".yaml", ".yml"):
        raise RigError(f"{path}: the file of a rig ends in .yaml or .yml")
    if (RIGS_DIR / f"{name}.yaml").exists():
        raise RigError(f"rig {name!r} is one that Blink ships; choose another name")
    text = rig_text(name)
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        raise RigError(f"{path} is there already; nothing was changed") from error
    except OSError as error:
        raise RigError(f"cannot write {path}: {error.strerror}") from error
    try:
        return load_rig(path)
    except RigError:
        path.unlink()
        raise
