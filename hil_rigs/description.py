"""Rig descriptions: one YAML file a rig under `hil_rigs/rigs/`, or a user's own file [design 2]."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hil_rigs.capabilities import CAPABILITIES

RIGS_DIR = Path(__file__).parent / "rigs"

Count = Annotated[int, Field(ge=1, strict=True)]


class RigError(ValueError):
    """A rig that is unknown, or a description that does not hold; the message names field, value and limit."""


class _Strict(BaseModel):
    # The docstring of a field is its description in the JSON Schema, and its comment in what `blink rig init` writes.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class EngineSettings(_Strict):
    """Sizes and rules of one engine. Sizes are counts; lengths are in tokens [design 3, 4, 5]."""

    rings: Annotated[int, Field(ge=1, le=64, strict=True)] = 1
    """Rings: 0 is the HTTP front end's, 1 the suite's own client's; the suite needs both."""
    slots: Annotated[int, Field(ge=1, le=4096, strict=True)] = 256
    """Request descriptors per ring; fewer are made when /dev/shm is small."""
    page_size: Annotated[int, Field(ge=1, le=1024, strict=True)] = 16
    """Tokens per KV page, a power of two."""
    pages: Annotated[int, Field(ge=8, strict=True)] = 512
    """KV pages of the pool, two of which nobody owns."""
    max_running: Annotated[int, Field(ge=1, le=4096, strict=True)] = 32
    """Rows (requests) in one step."""
    token_budget: Count = 256
    """Tokens in one step, decodes first; at least max_running."""
    max_model_len: Annotated[int, Field(ge=2, strict=True)] = 2048
    """Prompt and output of one request together, tokens."""
    prefix_cache: Annotated[bool, Field(strict=True)] = True
    """Share the KV pages of equal beginnings."""
    admission: Literal["optimistic", "reserve"] = "optimistic"
    """reserve: a request starts only when pages for its longest output are there, so that none is ever preempted."""
    quantum: Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)] = 2048
    """Tokens (prompt and max_tokens) that a ring may start in its turn."""
    reservation_steps: Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)] = 64
    """Step boundaries for which a request that does not fit keeps others waiting."""
    lease_us: Annotated[int, Field(ge=0, le=2**62, strict=True)] = 10_000_000
    """Microseconds without a sign of life after which a front end's requests end; 0: never."""
    masks: Annotated[int, Field(ge=0, le=4096, strict=True)] = 0
    """Grammar-mask mailboxes of a ring: masked requests that may live at once."""
    kv_sanitizer: Annotated[bool, Field(strict=True)] = False
    """Check owner, place and tokens of every KV row that attention reads; slower (docs/kv_sanitizer.md)."""

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size is {self.page_size}: it must be a power of two")
        if self.token_budget < self.max_running:
            raise ValueError(
                f"token_budget is {self.token_budget}, below max_running {self.max_running}: "
                "every running row needs one token of each step"
            )
        if self.max_running > self.rings * self.slots:
            raise ValueError(f"max_running is {self.max_running}, above the {self.rings * self.slots} slots there are")
        if self.masks > self.slots:
            raise ValueError(f"masks is {self.masks}, above the {self.slots} slots of a ring")
        return self


class RigDescription(_Strict):
    """One rig: its kind selects the launcher, its capabilities the tests that apply."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,31}$")]
    """Name of the rig: lower case letters, digits and hyphens, a letter first; at most 32."""
    kind: Literal["local", "gpu"]
    """What launches it, and whose required set judges it."""
    summary: Annotated[str, Field(min_length=1, max_length=200)]
    """What it is, in a line, for `blink rig list`."""
    capabilities: Annotated[tuple[str, ...], Field(min_length=1)]
    """What it is meant to have; tests that need anything else are filtered. `blink rig probe` checks them."""
    engine: EngineSettings = EngineSettings()
    """Sizes of the engine."""
    exclusive: bool = False
    """One run at a time has the whole rig; False where everything that a run takes is named by its own id."""
    engine_command: tuple[str, ...] = ()
    """Arguments of this Python that start the engine process, before Blink's own; empty: the shipped engine."""
    when_host_stops: Literal["stands-still", "goes-on"] = "stands-still"
    """What the engine does while its host process is stopped (SIGSTOP): the scheduler runs in that process and
    stands-still, or runs on a device and goes-on with streams and new requests. Fault engine-stop holds it to this."""

    @model_validator(mode="after")
    def _capabilities_are_known(self) -> Self:
        unknown = sorted(set(self.capabilities) - set(CAPABILITIES))
        if unknown:
            raise ValueError(f"unknown capabilities {', '.join(unknown)}; known: {', '.join(CAPABILITIES)}")
        if len(set(self.capabilities)) != len(self.capabilities):
            raise ValueError("a capability is listed twice")
        return self


def known_rigs() -> tuple[str, ...]:
    """Names of the rigs that Blink ships, sorted."""
    return tuple(sorted(path.stem for path in RIGS_DIR.glob("*.yaml")))


def load_rig(name_or_path: str | Path) -> RigDescription:
    """Read a rig by name (`local`) or from a YAML file (a path that ends in .yaml or .yml).

    Raises RigError for an unknown name (listing the known ones), an unreadable file, or a field that does not hold.
    """
    text = str(name_or_path)
    is_file = text.endswith((".yaml", ".yml"))
    path = Path(text) if is_file else RIGS_DIR / f"{text}.yaml"
    if not is_file and text not in known_rigs():
        raise RigError(f"unknown rig {text!r}; known rigs: {', '.join(known_rigs())}. A path must end in .yaml")
    try:
        content = path.read_text(encoding="utf-8")
        tree = yaml.compose(content, Loader=yaml.SafeLoader)
        raw = yaml.safe_load(content)
    except OSError as error:
        raise RigError(f"cannot read the rig description {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise RigError(f"{path} holds {type(raw).__name__}, not a mapping of a rig's fields")
    twice = list(_repeated(tree))
    if twice:
        raise RigError(f"{path} does not hold:\n" + "\n".join(twice))
    try:
        rig = RigDescription.model_validate(raw)
    except ValidationError as error:
        raise RigError(f"{path} does not hold:\n{_explain(error, tree)}") from error
    if not is_file and rig.name != text:
        raise RigError(f"{path} describes a rig named {rig.name!r}; it must be named {text!r}")
    return rig


def rig_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a rig description, for editors; `load_rig` also checks what a schema cannot say."""
    schema = RigDescription.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Blink rig description"
    schema["properties"]["capabilities"]["items"]["enum"] = list(CAPABILITIES)
    schema["properties"]["capabilities"]["uniqueItems"] = True
    return schema


def _explain(error: ValidationError, tree: yaml.Node | None) -> str:
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "rig"
        value = item.get("input")
        number = _line_of(tree, item["loc"])
        place = f"line {number}: {where}" if number else where
        if item["type"] == "extra_forbidden":
            lines.append(f"  {place}: {_unknown_key(item['loc'])}")
            continue
        shown = "" if isinstance(value, BaseModel | dict) else f" (value: {value!r})"
        lines.append(f"  {place}: {item['msg'].removeprefix('Value error, ')}{shown}")
    return "\n".join(lines)


def _unknown_key(where: tuple[int | str, ...]) -> str:
    """What to say of a key that no field has: the nearest field, or all of them."""
    model: type[BaseModel] = EngineSettings if where[0] == "engine" and len(where) > 1 else RigDescription
    known = list(model.model_fields)
    near = difflib.get_close_matches(str(where[-1]), known, 1)
    return f"unknown key, did you mean {near[0]!r}?" if near else f"unknown key; known: {', '.join(known)}"


def _pairs(node: yaml.Node | None) -> list[tuple[yaml.Node, yaml.Node]]:
    return list(node.value) if isinstance(node, yaml.MappingNode) else []


def _line_of(node: yaml.Node | None, where: tuple[int | str, ...]) -> int | None:
    """Line, from 1, of the key or item at a place; of the nearest thing above it that is there."""
    line = None
    for part in where:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
            continue
        found = next(((key, value) for key, value in _pairs(node) if key.value == str(part)), None)
        if found is None:
            return line
        line, node = found[0].start_mark.line + 1, found[1]
    return line


def _repeated(node: yaml.Node | None) -> Iterator[str]:
    """Keys that stand twice in one mapping: YAML would take the last without a word."""
    seen: dict[str, int] = {}
    for key, value in _pairs(node):
        line = key.start_mark.line + 1
        if (first := seen.setdefault(str(key.value), line)) != line:
            yield f"  line {line}: {key.value}: the key stands in line {first} already"
        yield from _repeated(value)
