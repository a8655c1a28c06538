"""Mutants as declared in `registry/*.yaml`: loading, validation, and where their text stands in a product file.

A mutant's `old` is looked for exactly as it is written; of a text of several lines, every line after the first is
indented like the line of the file in which the text begins, and so is `new`. It must occur once in the file; with
`within`, a text that occurs once, it is the first one behind that, at most 60 lines on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

import blink_core

REGISTRY = Path(__file__).parent / "registry"
PRODUCT = Path(blink_core.__file__).resolve().parents[1]  # holds the folder blink_core
CLASSES: dict[str, str] = {  # as in the fault corpus
    "Q": "queue, admission, starvation, hang",
    "R": "result delivery: lost, duplicated, reordered tokens",
    "K": "KV page lifecycle",
    "P": "prefix reuse and block boundaries",
    "S": "scheduler state over preemption and cancel",
    "G": "graph bucket, padding, step launch",
    "A": "attention mask, window, NaN",
    "O": "rotary embedding, positions",
    "M": "model semantics",
    "L": "logits, sampling",
    "T": "tokenise, detokenise, stop",
    "B": "request bounds",
    "D": "RDMA, NIC: visibility, validation and order on the rings",
    "X": "device hang, module loading, watchdog",
    "N": "numeric batch invariance",
    "V": "integer width",
}
Where = Literal["native", "python", "cuda"]
PLACES: tuple[str, ...] = get_args(Where)
_WITHIN_LINES = 60
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same language, ten times as fast

_Text = Annotated[str, StringConstraints(min_length=1, max_length=8000)]


class RegistryError(ValueError):
    """A registry file cannot be read or breaks a rule; the message says which entry and why."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where a mutant stands: offsets [start, end) into the text of its file, and its replacement, indented."""

    start: int
    end: int
    new: str


class Mutant(BaseModel):
    """One seeded fault.

    name: unique, kebab-case. cls (`class` in the file): letter of `CLASSES`. corpus: rows of the fault corpus that it
    stands for. summary: what is wrong. where: `native` (C++ of the scheduler), `python`, or `cuda` (kernels; needs a
    GPU). file: product file, relative to `PRODUCT`. old, new: its text and what stands there instead. within: a text
    that occurs once in the file; `old` is then the first behind it. kind: native only, how the weaver guards it.
    numeric: whether it may change the tokens of a plain single request. hidden_by: a condition under which it cannot
    be seen.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    name: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=80)]
    cls: Annotated[str, Field(alias="class", pattern=r"^[A-Z]$")]
    corpus: tuple[Annotated[str, Field(pattern=r"^[A-Z][0-9]{2}$")], ...] = ()
    summary: _Text
    where: Where
    file: _Text
    old: _Text
    new: Annotated[str, StringConstraints(max_length=8000)]
    within: _Text | None = None
    kind: Literal["expression", "statement"] | None = None
    numeric: bool = False
    hidden_by: _Text | None = None

    @field_validator("old", "new", "within")
    @classmethod
    def _without_last_newline(cls, text: str | None) -> str | None:
        return text.rstrip("\n") if text is not None else None

    @model_validator(mode="after")
    def _holds_together(self) -> Mutant:
        if self.cls not in CLASSES:
            raise ValueError(f"class {self.cls!r} is none of {', '.join(CLASSES)}")
        if self.old == self.new:
            raise ValueError("old and new are the same text")
        path = PurePosixPath(self.file)
        if path.is_absolute() or ".." in path.parts or path.parts[:1] != ("blink_core",):
            raise ValueError(f"file {self.file!r} is no product file: it begins with blink_core/")
        if (self.kind is None) == (self.where == "native"):
            raise ValueError(f"kind is for native mutants, which need it; this is a {self.where} one")
        return self

    @property
    def path(self) -> Path:
        return PRODUCT / self.file

    @property
    def module(self) -> str:
        """Dotted name of the Python module that it changes."""
        return PurePosixPath(self.file).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")

    def locate(self, source: str) -> Span:
        """Where it stands in the text of its file. Raises RegistryError unless that is exactly one place."""
        begin, end = 0, len(source)
        if self.within is not None:
            found = _places(source, self.within)
            if len(found) != 1:
                raise RegistryError(f"mutant {self.name}: within occurs {len(found)} times in {self.file}, not once")
            begin = found[0][1]
            lines = source[begin:].splitlines(keepends=True)[: _WITHIN_LINES + 1]
            end = begin + sum(map(len, lines))
        found = [place for place in _places(source, self.old) if begin <= place[0] and place[1] <= end]
        if not found or (self.within is None and len(found) > 1):
            behind = " behind its within" if self.within is not None else ""
            raise RegistryError(f"mutant {self.name}: old occurs {len(found)} times in {self.file}{behind}, not once")
        start, stop = found[0]
        return Span(start, stop, _indented(self.new, _indent_at(source, start)))

    def apply(self, source: str) -> str:
        """The text of its file with the fault in it. Raises RegistryError if the text has moved on."""
        span = self.locate(source)
        return source[: span.start] + span.new + source[span.end :]


def _indent_at(source: str, position: int) -> str:
    line = source[source.rfind("\n", 0, position) + 1 :]
    return line[: len(line) - len(line.lstrip(" \t"))].split("\n")[0]


def _indented(text: str, indent: str) -> str:
    first, *rest = text.split("\n")
    return "\n".join([first, *(indent + line if line.strip() else line for line in rest)])


def _places(source: str, text: str) -> list[tuple[int, int]]:
    first = text.split("\n")[0]
    places, at = [], source.find(first)
    while at >= 0:
        wanted = _indented(text, _indent_at(source, at))
        if source.startswith(wanted, at):
            places.append((at, at + len(wanted)))
        at = source.find(first, at + 1)
    return places


def read(path: Path) -> tuple[Mutant, ...]:
    """The mutants of one registry file. Raises RegistryError with file, entry and reason."""
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)
    except OSError as error:
        raise RegistryError(f"cannot read {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RegistryError(f"{path} is not YAML: {error}") from error
    if not isinstance(raw, list):
        raise RegistryError(f"{path}: expected a list of mutants, got {type(raw).__name__}")
    mutants = []
    for number, entry in enumerate(raw):
        try:
            mutants.append(Mutant.model_validate(entry))
        except ValidationError as error:
            name = entry.get("name", "?") if isinstance(entry, dict) else "?"
            problems = "; ".join(
                f"{'.'.join(map(str, item['loc'])) or 'entry'}: {item['msg'].removeprefix('Value error, ')}"
                for item in error.errors()
            )
            raise RegistryError(f"{path}: entry {number} ({name}): {problems}") from error
    return tuple(mutants)


@cache
def load(folder: Path = REGISTRY) -> tuple[Mutant, ...]:
    """All mutants of a registry, by file name and then as written. Raises RegistryError."""
    mutants = [mutant for path in sorted(folder.glob("*.yaml")) for mutant in read(path)]
    names = [mutant.name for mutant in mutants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise RegistryError(f"{folder}: names are used twice: {', '.join(twice)}")
    return tuple(mutants)


def by_name(name: str, mutants: Iterable[Mutant] | None = None) -> Mutant:
    """The mutant of that name. Raises RegistryError, with names that come near."""
    import difflib

    every = {mutant.name: mutant for mutant in (load() if mutants is None else mutants)}
    if name not in every:
        near = difflib.get_close_matches(name, every, n=3)
        raise RegistryError(f"no mutant is named {name!r}" + (f"; near: {', '.join(near)}" if near else ""))
    return every[name]
