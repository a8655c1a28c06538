"""The outcome of one check: a verdict, the clause it decided, what was seen, and what was measured (design section 9).

Every checker of the suite is a pure function that returns a ``CheckResult``; reports and certificates are built from
these values alone, so all of them serialise to plain JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeAlias

LimitSense = Literal["max", "min"]
JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"


class Verdict(StrEnum):
    """Three-valued: ``unknown`` means that the evidence decides nothing, and never counts as a pass."""

    VALID = "valid"
    UNKNOWN = "unknown"
    INVALID = "invalid"


_SEVERITY = {Verdict.VALID: 0, Verdict.UNKNOWN: 1, Verdict.INVALID: 2}


@dataclass(frozen=True, slots=True)
class Measurement:
    """One named value with its unit.

    value: the number measured. limit: what it was compared with, in the same unit (None: reported, not judged).
    n: how many observations stand behind the value (None: does not apply). limit_is: whether the limit is the most or
    the least that is allowed.
    """

    value: float | int
    unit: str = "1"
    limit: float | int | None = None
    n: int | None = None
    limit_is: LimitSense = "max"

    def to_json(self) -> dict[str, JSON]:
        told: dict[str, JSON] = {"value": plain(self.value), "unit": self.unit, "limit": plain(self.limit), "n": self.n}
        return told | {"limit_is": self.limit_is}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        limit = _optional_number(data["limit"])
        return cls(_number(data["value"]), data["unit"], limit, data["n"], data["limit_is"])


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check.

    verdict: valid, unknown or invalid. property: registered property name (``token-equivalence``). clause: the rule
    within the property that was decided. message: one sentence for a reader. witness: what shows the violation, small
    enough to print. measurements: values by name. ``witness`` is converted to plain JSON on construction and a value
    that has no JSON form raises ``TypeError`` there, not when the report is written.
    """

    verdict: Verdict
    property: str
    clause: str
    message: str
    witness: dict[str, JSON] = field(default_factory=dict)
    measurements: dict[str, Measurement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        witness = {str(key): plain(value) for key, value in self.witness.items()}
        object.__setattr__(self, "verdict", Verdict(self.verdict))
        object.__setattr__(self, "witness", witness)
        object.__setattr__(self, "measurements", dict(self.measurements))

    def ok(self) -> bool:
        """True for ``valid`` only."""
        return self.verdict is Verdict.VALID

    def to_json(self) -> dict[str, JSON]:
        return {
            "verdict": self.verdict.value,
            "property": self.property,
            "clause": self.clause,
            "message": self.message,
            "witness": dict(self.witness),
            "measurements": {name: measurement.to_json() for name, measurement in self.measurements.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CheckResult:
        measurements = {name: Measurement.from_json(value) for name, value in data["measurements"].items()}
        return cls(
            Verdict(data["verdict"]),
            data["property"],
            data["clause"],
            data["message"],
            data["witness"],
            measurements,
        )

    def __str__(self) -> str:
        text = f"{self.property}: {self.clause}: {self.verdict.value}: {self.message}"
        return f"{text} {json.dumps(dict(self.witness))}" if self.witness else text


def merge(results: Iterable[CheckResult], *, property: str | None = None, clause: str | None = None) -> CheckResult:
    """One result for many: the worst verdict wins, and the first result with that verdict gives message and witness.

    property, clause: names for the merged result; by default those of the deciding result. Nothing to merge is
    ``unknown``: a check that saw nothing decided nothing (then ``property`` must be given). Measurements keep their
    names, and get the prefix ``clause[i].`` where two results share one.
    """
    items = list(results)
    if not items:
        if property is None:
            raise ValueError("merge of no results needs the property's name")
        return CheckResult(Verdict.UNKNOWN, property, clause or "merge", "nothing was checked")
    worst = max(items, key=lambda item: _SEVERITY[item.verdict])
    names = [name for item in items for name in item.measurements]
    measurements = {
        (name if names.count(name) == 1 else f"{item.clause}[{index}].{name}"): measurement
        for index, item in enumerate(items)
        for name, measurement in item.measurements.items()
    }
    message = worst.message
    if worst.verdict is not Verdict.VALID and len(items) > 1:
        bad = sum(item.verdict is worst.verdict for item in items)
        message = f"{message} ({bad} of {len(items)} checks {worst.verdict.value})"
    return CheckResult(
        worst.verdict, property or worst.property, clause or worst.clause, message, worst.witness, measurements
    )


def plain(value: Any) -> Any:
    """``value`` as strict JSON: NumPy scalars and arrays become numbers and lists, non-finite floats become strings."""
    if value is None or isinstance(value, (bool, str)):
        return value if not isinstance(value, StrEnum) else value.value
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    raise TypeError(f"no JSON form for {type(value).__name__}: {value!r}")


def _number(value: Any) -> float | int:
    return value if isinstance(value, int) and not isinstance(value, bool) else float(value)


def _optional_number(value: Any) -> float | int | None:
    return None if value is None else _number(value)
