"""The record of one test, as it travels from a pytest process to the report."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from verification.certificate.outcomes import Outcome


@dataclass(slots=True)
class TestRecord:
    """One test of a run. All values are JSON values."""

    __test__ = False  # not a test class, whatever pytest thinks of its name

    id: str
    nodeid: str
    property: str | None
    outcome: Outcome
    duration_s: float = 0.0
    phase: str = "call"
    message: str = ""
    details: str = ""
    clause: str = ""
    witness: Any = None
    measurements: dict[str, dict[str, Any]] = field(default_factory=dict)
    series: list[dict[str, Any]] = field(default_factory=list)
    situations: dict[str, int] = field(default_factory=dict)
    planted_faults: list[dict[str, Any]] = field(default_factory=list)
    cases: int = 0
    seed: int | None = None
    replay: str = ""
    signature: str = ""
    signature_pattern: str = ""
    known_issue: str = ""
    bundle: str = ""  # folder relative to the output folder

    def to_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> TestRecord:
        values = json.loads(text)
        values["outcome"] = Outcome(values["outcome"])
        return cls(**values)
