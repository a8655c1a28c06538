"""The calls that explain a log, with what each read: made by the monitor, carried out again by `replay`."""

from __future__ import annotations

from dataclasses import dataclass, field

from verification.spec.state import Result
from verification.trace.calls import Key, PollInputs


@dataclass(frozen=True, slots=True)
class Call:
    """boundaries: counted before the call. results: by request, of the step in flight. polled: read of rings."""

    kind: str  # boundary or poll
    now: int
    boundaries: int
    stop: int = 0
    drain: int = 0
    failed: bool = False
    results: dict[Key, Result] = field(default_factory=dict)
    polled: PollInputs = field(default_factory=PollInputs)
