"""Runs a scope to its end and judges it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from blink_core import _native
from verification.explore.encode import encode
from verification.explore.scope import Scope
from verification.result import JSON, CheckResult, Measurement, Verdict

PROPERTY = "small-scopes"
MAX_STATES = 120_000_000
MAX_BYTES = 3 << 30
STATE_BYTES = 4096  # design section 4: of the scheduler's state in small scopes
_RUNNING, _FINISHED, _VIOLATED, _STATE_LIMIT, _MEMORY_LIMIT = range(5)


class NativeExplorer(Protocol):
    def run(self, seconds: float, max_states: int, max_bytes: int) -> int: ...
    def analyse(self) -> bool: ...
    def violation(self) -> list[str]: ...
    def witness(self) -> list[int]: ...
    def replay(self, labels: list[int]) -> list[list[int]]: ...
    def figures(self) -> dict[str, int]: ...
    def situations(self) -> dict[str, bool]: ...


class Native(Protocol):
    """A built native module: the shipped one, or one with a fault woven in."""

    def Explorer(self, config: bytes, scope: bytes, symmetry: bool = True) -> NativeExplorer: ...


@dataclass(slots=True)
class Search:
    """What the search of one scope found.

    finished: every reachable state was visited, and the graph was analysed. clause, message: the first broken clause,
    else empty. witness: transition labels of a shortest path to it; records: what each did (witness.py reads both).
    """

    scope: Scope
    symmetry: bool
    finished: bool
    stopped_by: str
    clause: str
    message: str
    figures: dict[str, int]
    situations: dict[str, bool]
    seconds: float
    cpu_seconds: float
    witness: list[int] = field(default_factory=list)
    records: list[list[int]] = field(default_factory=list)

    @property
    def omission(self) -> float:
        """Bound on the probability that some state was taken for another: n (n - 1) / 2 pairs of 128-bit hashes."""
        n = self.figures["states"]
        return n * (n - 1) / 2 / 2.0**128

    @property
    def missing(self) -> list[str]:
        """Situations that the scope claims and the search did not meet."""
        return [name for name in self.scope.claims if not self.situations[name]]

    @property
    def rate(self) -> float:
        """Transitions a second of processor time, so that a busy machine does not count."""
        return self.figures["transitions"] / max(self.cpu_seconds, 1e-9)

    @property
    def holds(self) -> bool:
        return self.finished and not self.clause

    def check(self) -> CheckResult:
        """Valid: finished, no clause broken, and everything claimed has occurred."""
        name, n = self.scope.name, self.figures
        reduced = "with" if self.symmetry else "without"
        measured = {
            "states": Measurement(n["states"], "states"),
            "transitions": Measurement(n["transitions"], "transitions"),
            "depth": Measurement(n["depth"], "transitions"),
            "omission_probability": Measurement(self.omission, "1"),
            "rate": Measurement(round(self.rate), "transitions/s"),
        }
        if self.clause:
            from verification.explore.witness import decode

            witness: dict[str, JSON] = {"labels": list(self.witness), "steps": list(decode(self))}
            return CheckResult(Verdict.INVALID, PROPERTY, self.clause, f"{name}: {self.message}", witness, measured)
        if not self.finished:
            message = f"{name}: stopped by {self.stopped_by} with {n['states']} states visited"
            return CheckResult(Verdict.UNKNOWN, PROPERTY, "finished", message, {}, measured)
        if self.missing or n["state_bytes"] > STATE_BYTES:
            gap = f"never met: {', '.join(self.missing)}" if self.missing else f"a state of {n['state_bytes']} bytes"
            return CheckResult(Verdict.INVALID, PROPERTY, "situations", f"{name}: {gap}", {}, measured)
        message = f"{name}: finished {reduced} symmetry reduction, {n['states']} states"
        return CheckResult(Verdict.VALID, PROPERTY, "finished", message, {}, measured)


def explore(
    scope: Scope,
    *,
    symmetry: bool = True,
    native: Native = _native,
    deadline_s: float = 900.0,
    max_states: int = MAX_STATES,
    max_bytes: int = MAX_BYTES,
    progress: Callable[[str], None] | None = None,
) -> Search:
    """Searches every reachable state of `scope`.

    deadline_s: seconds after which it gives up, with `finished` False. progress: told every 2 s where it is.
    Raises ConfigError or IndexError (std::out_of_range) for a scope that cannot be.
    """
    explorer = native.Explorer(scope.engine().pack().tobytes(), encode(scope), symmetry)
    begin, cpu = time.monotonic(), time.process_time()
    status = _RUNNING
    while status == _RUNNING:
        left = begin + deadline_s - time.monotonic()
        if left <= 0:
            break
        status = explorer.run(min(2.0, left), max_states, max_bytes)
        if progress is not None and status == _RUNNING:
            n = explorer.figures()
            progress(
                f"{scope.name}: {n['states']:,} states, {n['transitions']:,} transitions, depth {n['depth']}, "
                f"{n['bytes'] >> 20} MiB"
            )
    seconds, cpu = time.monotonic() - begin, time.process_time() - cpu
    if status == _FINISHED:
        if progress is not None and seconds > 2:
            progress(f"{scope.name}: frontier empty, looking for deadlock and livelock")
        if not explorer.analyse():
            status = _VIOLATED
    clause, message = explorer.violation() if status == _VIOLATED else ("", "")
    labels = explorer.witness()
    return Search(
        scope,
        symmetry,
        status == _FINISHED,
        {_STATE_LIMIT: "its limit of states", _MEMORY_LIMIT: "its limit of memory", _RUNNING: "its deadline"}.get(
            status, ""
        ),
        clause,
        message,
        explorer.figures(),
        explorer.situations(),
        seconds,
        cpu,
        labels,
        explorer.replay(labels) if labels else [],
    )


def same_verdict(reduced: Search, plain: Search) -> CheckResult:
    """Whether a scope was judged alike with and without symmetry reduction."""
    name = reduced.scope.name
    told = [(s.holds, s.clause, s.missing) for s in (reduced, plain)]
    states = {
        "reduced": Measurement(reduced.figures["states"], "states"),
        "plain": Measurement(plain.figures["states"], "states"),
    }
    if not all(s.finished or s.clause for s in (reduced, plain)):
        message = f"{name}: a search that is not finished says nothing of the other one"
        return CheckResult(Verdict.UNKNOWN, PROPERTY, "symmetry", message, {}, states)
    if told[0] != told[1]:
        witness: dict[str, JSON] = {"reduced": repr(told[0]), "plain": repr(told[1])}
        message = f"{name}: symmetry reduction changes what is found"
        return CheckResult(Verdict.INVALID, PROPERTY, "symmetry", message, witness, states)
    return CheckResult(Verdict.VALID, PROPERTY, "symmetry", f"{name}: the same without symmetry reduction", {}, states)
