"""Runs an encoded program on the compiled scheduler and finds the first observable that differs."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Protocol

from blink_core import _native
from blink_core.abi.config import EngineConfig
from blink_core.abi.enums import LogKind
from verification.lockstep.driver import Driver
from verification.lockstep.observe import describe

CALLS = ("init", "boundary without a step", "boundary that launched", "poll")
# Clauses to read first when an observable differs.
CLAUSES = (
    ("clock", "T2"), ("call", "P1 to P4, A1 to A4"), ("arrivals", "R6, R10"), ("header.live", "L1, L3 to L7"),
    ("boundaries", "T3"), ("epoch", "R2"), ("sq_", "R5"), ("cq_head", "R4"), ("bad_heads", "R4"),
    ("judged", "R6, R10"), ("duplicates", "R6"), ("torn", "R8"), ("stale_cancels", "R10"), ("event", "R9, C3, L1"),
    ("cq_", "R9"), ("mask", "R11"), ("lease", "L4, R10"), ("laps", "L4"), ("deficit", "A2"), ("turn", "A2, A7"),
    ("reserved", "A5 to A7"), ("waiting", "L2"), ("planned", "P3"), ("paused", "P2"), ("plan", "P1 to P4, A4"),
    ("free_list", "K2, K4, K5"), ("quarantine", "K4, K5"), ("lru", "K4"), ("evictions", "K2"), ("page", "K1 to K7"),
    ("block_table", "K6, K7"), ("hits", "K7"), ("lookups", "K7"), ("published", "K6"), ("cached", "K7, L1"),
    ("computed", "C2, K7"), ("emitted", "C3"), ("state", "L1, L6, L7"), ("row", "A4"), ("running", "L2"),
)  # fmt: skip


class Native(Protocol):
    """A built native module."""

    def run_lockstep(self, config: bytes, program: bytes, group_size: int = 1) -> bytes: ...


@dataclass(slots=True)
class Difference:
    """The first observable on which specification and scheduler disagree."""

    step: int
    call: str
    name: str
    specification: object
    scheduler: object
    excerpt: str = ""

    def __str__(self) -> str:
        clause = next((clauses for part, clauses in CLAUSES if part in self.name), "none: a counter")
        return (
            f"step {self.step} ({self.call}): {self.name} is {self.specification} in the specification and "
            f"{self.scheduler} in the scheduler; clauses to read: {clause}{self.excerpt}"
        )


def run_native(driver: Driver, native: Native = _native, group_size: int = 1) -> bytes:
    """Records of the compiled scheduler for the driver's program."""
    return native.run_lockstep(driver.config.pack().tobytes(), array("q", driver.words).tobytes(), group_size)


def compare(driver: Driver, native: Native = _native, group_size: int = 1) -> Difference | None:
    """None if every observable after every call is equal."""
    got = run_native(driver, native, group_size)
    if got == array("q", driver.expected).tobytes():
        return None
    theirs = array("q")
    theirs.frombytes(got)
    return first_difference(driver.config, driver.expected, theirs.tolist())


def records(words: list[int]) -> list[list[int]]:
    """Splits records that are each preceded by their length."""
    out, at = [], 0
    while at < len(words):
        out.append(words[at + 1 : at + 1 + words[at]])
        at += 1 + words[at]
    return out


def first_difference(config: EngineConfig, expected: list[int], got: list[int]) -> Difference | None:
    ours, theirs = records(expected), records(got)
    for step, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return _explain(config, step, a, b)
    if len(ours) != len(theirs):
        return Difference(min(len(ours), len(theirs)), "-", "number of calls", len(ours), len(theirs))
    return None


def _explain(config: EngineConfig, step: int, a: list[int], b: list[int]) -> Difference:
    call = CALLS[a[0]]
    named, other = describe(config, a), describe(config, b)
    excerpt = f"\n  log, specification: {_log(named)}\n  log, scheduler:     {_log(other)}"
    for (name, x), (there, y) in zip(named, other, strict=False):
        if name != there:
            return Difference(step, call, f"{name} / {there}", x, y, excerpt)
        if x != y:
            return Difference(step, call, name, x, y, excerpt)
    return Difference(step, call, "length", len(a), len(b), excerpt)


def _log(named: list[tuple[str, int]]) -> str:
    at = next((i for i, (name, _) in enumerate(named) if name == "len(log)"), len(named))
    values = [value for _, value in named[at + 1 :]]
    rows = [values[i : i + 8] for i in range(0, len(values) - 7, 8)]
    return "; ".join(f"{LogKind(r[1]).name} {r[2]}:{r[3]}g{r[4]} {r[5]},{r[6]},{r[7]} @{r[0]}" for r in rows) or "none"
