"""What a fault is, and the registry of all of them by name.

A fault declares what it may touch and how that ends; the scenario holds it to that. To add one: a subclass of `Fault`
with `@register`, see docs/add_a_fault.md.
"""

from __future__ import annotations

import difflib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from blink_core.abi.enums import RequestState
from hil_rigs.description import RigDescription
from hil_rigs.engine_memory import StateSnapshot
from hil_rigs.local import LocalRig

if TYPE_CHECKING:
    from verification.faults.traffic import Call, RingLane

HTTP_RING, SUITE_RING = 0, 1  # the front end's ring, and the suite's own


class Blast(StrEnum):
    """Which requests a fault may keep from finishing as in the control run; all others must."""

    NONE = "none"  # nobody: at most a delay while it lasts
    REQUESTS = "requests"  # the victims themselves
    RING = "ring"  # all requests of the victims' ring
    ENGINE = "engine"  # all requests


class End(StrEnum):
    """How a request ended, as its client sees it."""

    FINISHED = "finished"  # by length or stop, to be compared with the control run
    CANCELLED = "cancelled"
    ERROR = "error"
    DISCONNECTED = "disconnected"  # the server closed the connection without an end
    LEFT = "left"  # the client itself went away
    OPEN = "open"  # not yet


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A request of raw memory that was being served: at the injection it had `emitted` tokens and no terminal event."""

    ring: int
    slot: int
    generation: int
    emitted: int


@dataclass(slots=True)
class Hit:
    """What a fault hit: requests that were live at the step boundary where it was injected.

    log_from: index of the event log there. notes: what the fault noted for its own proof.
    """

    requests: tuple[LiveRequest, ...] = ()
    log_from: int = 0
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Proof:
    """Whether the fault took effect on a live request, and the evidence in a sentence."""

    holds: bool
    evidence: str


@dataclass
class Site:
    """Where a fault strikes: the rig, the victims, and the suite's lane when the scenario has one.

    lane: ring client of the suite, with its requests. victims: requests in the fault's lane. rng: for what it draws.
    pump: lets the lanes' events in for up to so many seconds.
    """

    rig: LocalRig
    hit: Hit = field(default_factory=Hit)
    lane: RingLane | None = None
    victims: tuple[Call, ...] = ()
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    pump: Callable[[float], None] = lambda seconds: None

    def state(self, log_from: int = 2**63) -> StateSnapshot:
        """The engine's state at a step boundary; raises EngineUnreachable."""
        memory = self.rig.memory
        with memory.hold():
            return memory.snapshot(log_from)

    def ring_lane(self) -> RingLane:
        """The suite's lane; ValueError where there is none (`fault(name, on)` under a test's own load)."""
        if self.lane is None:
            raise ValueError("this fault needs traffic on the suite's ring: use fault.scenario(name)")
        return self.lane


def live_requests(state: StateSnapshot, ring: int | None = None) -> tuple[LiveRequest, ...]:
    """Requests that are being served at a boundary and have spoken, of one ring or of all."""
    found = []
    for index, request in enumerate(state.requests):
        at, slot = divmod(index, state.config.slots)
        if request["state"] != RequestState.FREE and request["emitted"] > 0 and ring in (None, at):
            found.append(LiveRequest(at, slot, int(request["generation"]), int(request["emitted"])))
    return tuple(found)


def paused_rows(state: StateSnapshot, ring: int) -> tuple[int, int]:
    """How many running rows of a ring pause for want of credits (or of a mask), and how many it has."""
    rows = state.running[state.running // state.config.slots == ring]
    return int((state.requests["paused"][rows] > 0).sum()), len(rows)


class Fault(ABC):
    """One fault. Class attributes declare it; `inject` runs while the engine is held at a step boundary."""

    name: ClassVar[str]
    summary: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ("cpu", "shared-memory", "http")
    """Capabilities of the rig, beside those of every fault."""
    ring: ClassVar[int] = HTTP_RING
    """The victims' ring: HTTP requests for 0, the suite's own ring client for 1."""
    blast: ClassVar[Blast]
    ends: ClassVar[frozenset[End]]
    """How victims may end."""
    expected: ClassVar[str]
    """The expected outcome, in a sentence."""
    recovery_s: ClassVar[float]
    """Seconds from the heal until everyone is served again."""
    stalls: ClassVar[bool] = False
    """Nobody is waited for between injection and heal: none is served, or the fault must be short."""
    told_after_heal: ClassVar[bool] = False
    """Victims that do not finish learn of it only when the fault is healed."""
    told_within_s: ClassVar[float | None] = None
    """Seconds from the injection within which the last victim must have its end; None: no bound."""
    says: ClassVar[str] = ""
    """What a victim's error must name."""
    lease_us: ClassVar[int] = 0
    """Leases of the engine that its scenarios need, in microseconds; 0: those of the rig."""
    alone: ClassVar[bool] = True
    """Works under any load, without the scenario's own traffic."""

    def stalls_on(self, rig: RigDescription) -> bool:
        """`stalls` on a rig, where that hangs on what the rig is."""
        return self.stalls

    @abstractmethod
    def inject(self, site: Site) -> None:
        """Strikes. The engine is held meanwhile, so the victims of `site.hit` cannot end before."""

    @abstractmethod
    def proof(self, site: Site) -> Proof:
        """Evidence, beyond `site.hit.requests`, that the fault took effect. Called before the heal."""

    def wrong(self, site: Site) -> str | None:
        """What the engine did wrong while the fault lasted, None if nothing. Called between proof and heal."""
        return None

    def heal(self, site: Site) -> None:  # noqa: B027  (what ends by itself needs none)
        """Takes the fault away. After a failure it may be called twice."""

    def void(self, site: Site) -> str | None:
        """Why what was seen decides nothing, although the fault took effect: it was not the one that is declared, e.g.
        a stop that became longer than a lease. None if it was. Called after the heal."""
        return None

    @classmethod
    def about(cls) -> str:
        """One paragraph for a reader."""
        return (
            f"{cls.name}: {cls.summary} Blast radius: {cls.blast}. Expected: {cls.expected} "
            f"Served again within {cls.recovery_s:g} s."
        )


FAULTS: dict[str, type[Fault]] = {}


def register(kind: type[Fault]) -> type[Fault]:
    """Class decorator that puts a fault into the registry. Raises ValueError for a name that is taken."""
    if FAULTS.setdefault(kind.name, kind) is not kind:
        raise ValueError(
            f"fault {kind.name!r} is registered twice: {FAULTS[kind.name].__qualname__}, {kind.__qualname__}"
        )
    return kind


def known_faults() -> tuple[str, ...]:
    """Names of all registered faults, sorted."""
    from verification.faults import clients, leases, processes, rings  # noqa: F401  (they register theirs)

    return tuple(sorted(FAULTS))


def find(name: str) -> Fault:
    """The fault of that name. Raises ValueError with the known names."""
    known = known_faults()
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown fault {name!r}{hint}; known: {', '.join(known)}")
    return FAULTS[name]()
