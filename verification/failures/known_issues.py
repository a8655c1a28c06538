"""Known issues: a file that explains failures and excuses none.

A match is a note beside a failure, in the report and in triage. Outcome, verdict and exit code are made without it.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

DEFAULT_PATH = Path(__file__).resolve().parents[1] / "known_issues.yaml"
SCHEMA_PATH = DEFAULT_PATH.with_name("known_issues.schema.json")

_Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=1000)]
_Glob = Annotated[str, StringConstraints(min_length=1, max_length=300)]
_SIGNATURE_ID = re.compile(r"[0-9a-f]{12}")


class KnownIssuesError(ValueError):
    """The file cannot be read, is no YAML, or breaks its schema; the message says where."""


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class KnownIssue(_Frozen):
    """One known fault, and who answers for it until when."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="unique name of the issue")]
    property: Annotated[_Glob, Field(description="property that fails; * and ? are wildcards")]
    clause: Annotated[_Glob, Field(description="clause of the property; * and ? are wildcards")] = "*"
    signature: Annotated[
        _Glob, Field(description="a signature's 12 digits, or its pattern, where * and ? are wildcards; not * alone")
    ]
    rig: Annotated[_Glob, Field(description="rig on which it is known; * and ? are wildcards")] = "*"
    owner: Annotated[_Text, Field(description="who answers for it")]
    reason: Annotated[_Text, Field(description="what is wrong, in a sentence")]
    link: Annotated[str, Field(max_length=500, description="where it is followed up")] = ""
    expires: Annotated[dt.date, Field(description="last day on which it counts as known")]

    @model_validator(mode="after")
    def _names_something(self) -> KnownIssue:
        if not self.signature.strip("*? "):
            raise ValueError(f"signature {self.signature!r} matches every failure: name one")
        return self

    def matches(self, failure: Mapping[str, Any]) -> bool:
        """Whether a failure, by property, clause, rig, signature_id and signature_pattern, is this issue."""
        return (
            _glob(str(failure["property"] or ""), self.property)
            and _glob(str(failure["clause"]), self.clause)
            and _glob(str(failure["rig"]), self.rig)
            and (
                failure["signature_id"] == self.signature
                if _SIGNATURE_ID.fullmatch(self.signature)
                else _glob(str(failure["signature_pattern"]), self.signature)
            )
        )

    def is_of(self, rig: str) -> bool:
        return _glob(rig, self.rig)

    def expired(self, today: dt.date) -> bool:
        return today > self.expires


class _File(_Frozen):
    schema_version: Literal[1]
    issues: tuple[KnownIssue, ...] = ()

    @model_validator(mode="after")
    def _ids_are_unique(self) -> _File:
        ids = [issue.id for issue in self.issues]
        twice = sorted({one for one in ids if ids.count(one) > 1})
        if twice:
            raise ValueError(f"ids are used twice: {', '.join(twice)}")
        return self


def json_schema() -> dict[str, Any]:
    """JSON Schema of the file; `known_issues.schema.json` is this, for editors."""
    return _File.model_json_schema()


def load(path: Path = DEFAULT_PATH) -> tuple[KnownIssue, ...]:
    """The issues of a file. Raises KnownIssuesError with file, place and value."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KnownIssuesError(f"cannot read {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise KnownIssuesError(f"{path} is not YAML: {error}") from error
    try:
        return _File.model_validate(raw).issues
    except ValidationError as error:
        lines = []
        for item in error.errors():
            where = ".".join(map(str, item["loc"])) or "file"
            given = item.get("input")
            value = f" (value: {given!r})" if isinstance(given, (str, int, float)) else ""
            lines.append(f"  {where}: {item['msg'].removeprefix('Value error, ')}{value}")
        raise KnownIssuesError(f"{path} does not hold:\n" + "\n".join(lines)) from error


def match(failure: Mapping[str, Any], issues: Iterable[KnownIssue]) -> KnownIssue | None:
    """The first issue that a failure is, expired or not."""
    return next((issue for issue in issues if issue.matches(failure)), None)


def status(issues: Iterable[KnownIssue], matched: Mapping[str, list[str]], today: dt.date) -> list[dict[str, Any]]:
    """Each issue as JSON, with "tests" (that it explains), "expired" and "unmatched"."""
    return [
        {
            **issue.model_dump(mode="json"),
            "expired": issue.expired(today),
            "unmatched": not matched.get(issue.id),
            "tests": list(matched.get(issue.id, [])),
        }
        for issue in issues
    ]


@cache
def _pattern(glob: str) -> str:
    return glob.replace("[", "[[]")  # brackets of a message are brackets


def _glob(text: str, glob: str) -> bool:
    return fnmatchcase(text, _pattern(glob))
