"""The required set of a rig: what must have passed before anything is certified, as a file with a digest."""

from __future__ import annotations

import hashlib
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from verification.situations.registry import SITUATIONS

ProfileName = Literal["smoke", "nightly", "full"]
_Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]


class RequiredSetError(ValueError):
    """The required set is absent or not valid."""


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PropertyText(_Frozen):
    """What a property says, and which faults its checks are built to see and not to see."""

    title: str
    statement: str
    would_detect: tuple[str, ...] = ()
    would_not_detect: tuple[str, ...] = ()


class PropertyRequirement(_Frozen):
    """How much of a property must have passed."""

    min_passed: int = Field(default=1, ge=1, description="fewest tests of the property that must have passed")
    tests: tuple[str, ...] = Field(default=(), description="own ids of tests that must each have passed")


class Profile(_Frozen):
    """One profile of a rig: limits of time, required properties, situations that should occur."""

    deadline_s: float = Field(gt=0, description="limit of a whole certify run, seconds")
    shard_deadline_s: float = Field(default=3600, gt=0, description="limit of one shard of a run, seconds")
    test_timeout_s: float = Field(gt=0, description="limit of one test, seconds")
    max_examples: int = Field(gt=0, description="hypothesis examples of one test")
    properties: dict[_Name, PropertyRequirement] = Field(min_length=1)
    situations: tuple[_Name, ...] = ()


class RequiredSet(_Frozen):
    """`verification/required/<rig>.yaml`."""

    schema_version: Literal[1]
    rig: _Name
    scope: str = Field(description="what a result on this rig is about, and what it says nothing about")
    not_covered: tuple[str, ...] = ()
    properties: dict[_Name, PropertyText]
    profiles: dict[ProfileName, Profile] = Field(min_length=1)

    @model_validator(mode="after")
    def _known_properties(self) -> RequiredSet:
        for name, profile in self.profiles.items():
            unknown = sorted(set(profile.properties) - set(self.properties))
            if unknown:
                raise ValueError(f"profile {name} requires properties without a text: {', '.join(unknown)}")
            strange = sorted(set(profile.situations) - set(SITUATIONS))
            if strange:
                raise ValueError(f"profile {name} expects situations that are not registered: {', '.join(strange)}")
        return self

    def profile(self, name: str) -> Profile:
        """The profile of that name; `RequiredSetError` with the known names otherwise."""
        for known, profile in self.profiles.items():
            if known == name:
                return profile
        raise RequiredSetError(f"rig {self.rig} has no profile {name!r}; it has: {', '.join(self.profiles)}")


def parse(text: str, source: str) -> RequiredSet:
    """Parse and validate the YAML text of a required set; `source` names it in errors."""
    try:
        return RequiredSet.model_validate(yaml.safe_load(text))
    except (yaml.YAMLError, ValidationError) as error:
        raise RequiredSetError(f"{source}: {error}") from error


def _folder() -> Traversable:
    return resources.files("verification") / "required"


def known_rigs() -> list[str]:
    """The rigs that have a required set."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _folder().iterdir() if entry.name.endswith(".yaml"))


def required_name(rig: str) -> str:
    """Name of the required set of a rig: its own name, or for a description file the kind of rig it describes."""
    if not rig.endswith((".yaml", ".yml")):
        return rig
    from hil_rigs.description import RigError, load_rig

    try:
        return load_rig(rig).kind
    except RigError as error:
        raise RequiredSetError(str(error)) from error


def required_text(rig: str) -> str:
    """The text of a rig's required set; `RequiredSetError` for a rig that has none."""
    name = required_name(rig)
    if name not in known_rigs():
        raise RequiredSetError(f"unknown rig {rig!r}; known rigs: {', '.join(known_rigs())}")
    return (_folder() / f"{name}.yaml").read_text(encoding="utf-8")


def load(rig: str) -> RequiredSet:
    """The required set of a rig."""
    name = required_name(rig)
    required = parse(required_text(rig), f"required/{name}.yaml")
    if required.rig != name:
        raise RequiredSetError(f"required/{name}.yaml is for rig {required.rig!r}")
    return required


def thresholds_text() -> str | None:
    """The text of `verification/thresholds.yaml`, or None where the package has none."""
    entry = resources.files("verification") / "thresholds.yaml"
    return entry.read_text(encoding="utf-8") if entry.is_file() else None


def text_digest(text: str) -> str:
    """SHA-256 of a text's UTF-8 bytes, hex."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
