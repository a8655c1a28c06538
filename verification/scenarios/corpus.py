"""Reads `corpus.yaml` and says what a rig leaves open (design section 9, issue 4)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

CLASSES = "QRKPSGAOMLTBDXNV"
_Text = Annotated[str, Field(min_length=10)]
_NodeId = Annotated[str, Field(pattern=r"^[\w/]+/test_\w+\.py::test_\w+$")]
_Reference = Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+(#\d+|@[0-9a-f]{7,40}| \(.+\))$")]


class CorpusError(ValueError):
    """The table is absent or not valid."""


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Later(_Frozen):
    """What another rig will add to a row, or where it will be realised at all."""

    rig: Literal["gpu", "softroce", "bluefield"]
    plan: _Text


class Row(_Frozen):
    """One fault. Either it is realised (`tests`), or will be (`later`), or `cannot_apply` says why not."""

    kind: Annotated[str, Field(alias="class", pattern=rf"^[{CLASSES}](/[{CLASSES}])?$")]
    reference: Annotated[tuple[_Reference, ...], Field(min_length=1)]
    fault: _Text
    condition: _Text | None = None
    tests: tuple[_NodeId, ...] = ()
    cannot_apply: _Text | None = None
    later: Later | None = None

    @model_validator(mode="after")
    def _one_state(self) -> Row:
        if self.cannot_apply is not None and (self.tests or self.later or self.condition):
            raise ValueError("a row that cannot apply has neither tests nor condition, and nothing comes later")
        if self.cannot_apply is None and not (self.tests or self.later):
            raise ValueError("a row that applies has at least one test, or says what comes later")
        if self.cannot_apply is None and self.condition is None:
            raise ValueError("a row that applies states its revealing condition")
        if len(set(self.tests)) < len(self.tests):
            raise ValueError("a test stands twice")
        return self


class Corpus(_Frozen):
    """All rows by id."""

    rows: dict[Annotated[str, Field(pattern=r"^[A-Z]\d\d$")], Row]

    def not_covered(self, rig: str) -> Iterator[str]:
        """What a report of a rig says of the rows that are not realised there, in the order of the table."""
        for row_id, row in self.rows.items():
            if row.cannot_apply is not None:
                yield f"fault {row_id} cannot apply: {row.cannot_apply}"
            elif row.later is not None and row.later.rig != rig:
                part = "in part" if row.tests else "not"
                yield f"fault {row_id} is realised {part} here, the rest on rig {row.later.rig}: {row.later.plan}"


def parse(text: str, source: str) -> Corpus:
    """Reads a table; raises CorpusError with its source and the place."""
    try:
        return Corpus.model_validate(yaml.safe_load(text))
    except (yaml.YAMLError, ValidationError) as error:
        raise CorpusError(f"{source}: {error}") from error


@cache
def load() -> Corpus:
    """The table of this package."""
    return parse((resources.files("verification") / "scenarios" / "corpus.yaml").read_text("utf-8"), "corpus.yaml")
