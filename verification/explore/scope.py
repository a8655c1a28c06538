"""A small scope as data: an engine's sizes, and what front ends, NIC, clock, host and model may do to it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum, IntFlag

from blink_core.abi.config import EngineConfig
from blink_core.abi.enums import LogLevel

EOS_ID = 1
VOCAB = 64  # prompts use ids below VOCAB / 2, the model's outputs those above


class Outcome(IntFlag):
    """How a sampled row may come out; STEP_FAILED is of a whole step. A row that comes out well is always possible."""

    OK = 1
    EOS = 2
    NAN_ROW = 4
    NO_TOKEN_ROW = 8
    BAD_ID = 16
    STEP_FAILED = 32


class Host(IntEnum):
    """What the host process may ask for at any time, once."""

    NOTHING = 0
    DRAIN = 1
    STOP = 2
    DRAIN_THEN_STOP = 3  # the stop once it has asked to drain, whether that has come to its end or not


class Plant(IntEnum):
    """Faults of the environment or of the explorer, for its self tests: each must give a counterexample."""

    NONE = 0
    MISSTATED = 1
    KV_ELSEWHERE = 2
    EARLY_REUSE = 3
    FREED_IN_STEP = 4
    LOST_EVENT = 5
    NO_BOUNDARY = 6
    ENTRY_FIRST = 7
    BLIND = 8
    READS_AGAIN = 9
    DEAF = 10
    NEVER_STOPS = 11
    ATTACH_ONCE = 12
    NO_LOOK = 13


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a front end's program. prompt: length in tokens, or the ids."""

    prompt: int | tuple[int, ...]
    max_tokens: int
    slot: int = 0
    ring: int = 0
    priority: int = 0
    deadline_us: int = 0


@dataclass(frozen=True, slots=True)
class Submit:
    request: int  # index into Scope.requests
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Cancel:
    request: int
    optional: bool = True


@dataclass(frozen=True, slots=True)
class Attach:
    """From any moment before it the front end may die; its successor then attaches with this epoch.

    beside: the successor may also come while the front end lives, which goes on with the operations before this one
    until it finds another epoch than its own.
    during: it may also begin while the attach before it is under way; both go on, word by word, until one finds that
    the last fence is not its own. The other then has the ring, and nobody comes after it.
    """

    epoch: int
    beside: bool = False
    during: bool = False


Operation = Submit | Cancel | Attach


@dataclass(frozen=True, slots=True)
class Scope:
    """A named scope.

    config: sizes of the engine (fields of EngineConfig). programs: each ring's front end. unordered: the words of one
    submission become visible in any order, else payload, descriptor, entry. consume_all: a front end reads all events
    at once, else it may stop after any. ticks: how often the clock may go on by tick_us; -1: for ever. may_die: rings
    whose front end may die for good. claims: situations that must occur, or the scope shows less than it says.
    profiles: of the suite in which it must be finished; smoke implies the others.
    """

    name: str
    about: str
    config: dict[str, int]
    requests: tuple[Request, ...]
    programs: tuple[tuple[Operation, ...], ...]
    claims: tuple[str, ...]
    outcomes: Outcome = Outcome.OK
    unordered: bool = False
    consume_all: bool = False
    ticks: int = 0
    tick_us: int = 1
    may_die: tuple[int, ...] = ()
    host: Host = Host.NOTHING
    plant: Plant = Plant.NONE
    profiles: tuple[str, ...] = ("smoke", "nightly", "full")

    def engine(self) -> EngineConfig:
        """Raises ConfigError for sizes that no engine has."""
        sizes = {
            "slots": 2, "sq_entries": 4, "cq_entries": 4, "max_len": 6, "page_size": 2, "pages": 5, "max_rows": 2,
            "token_budget": 3, "paused_limit": 2, "quantum": 4, "reservation_steps": 2, "visibility_us": 1,
            "lease_us": 0, "prefix_cache": 0, "max_bias": 0, "max_logprobs": 0, "log_entries": 1,
            "log_level": int(LogLevel.OFF),
        } | self.config  # fmt: skip
        arena = max(sizes["max_len"], max(self.extents()[r] for r in range(len(self.programs))))
        return EngineConfig(
            vocab=VOCAB, eos_ids=(EOS_ID,), rings=len(self.programs), arena_tokens=arena, **sizes
        )  # fmt: skip

    def prompt(self, index: int) -> tuple[int, ...]:
        """Ids of a request's prompt: its own, so that a foreign row shows."""
        given = self.requests[index].prompt
        if isinstance(given, tuple):
            return given
        return tuple(2 + (index * 7 + i) % (VOCAB // 2 - 2) for i in range(given))

    def extents(self) -> list[int]:
        """Arena words that each ring's requests take, one behind the other."""
        words = [0] * len(self.programs)
        for index, request in enumerate(self.requests):
            words[request.ring] += len(self.prompt(index))
        return words

    def planted(self, plant: Plant) -> Scope:
        return replace(self, name=f"{self.name}+{plant.name.lower()}", plant=plant)
