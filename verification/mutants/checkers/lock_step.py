"""Checker: whole drawn programs on the compiled scheduler and on the executable specification, every observable."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from types import MappingProxyType

from blink_core.abi.config import EngineConfig
from blink_core.abi.enums import ErrorReason, EventKind, LogKind, LogLevel
from verification.lockstep.faulty import FIELDS
from verification.lockstep.observe import describe
from verification.lockstep.programs import TABLE, Program, config_of, execute, random_program
from verification.lockstep.run import CALLS, records
from verification.mutants.checkers.base import Finding, Product, found, left
from verification.mutants.model import Mutant
from verification.trace.drawn import logged

PROGRAMS, LENGTH = 345, 45  # of one seed


@dataclass(frozen=True)
class Theme:
    """What a program has more of than `KINDS` weighs.

    kinds: a third of its operations are of these. shape: bytes of the configuration that are of these values (see
    `config_of`). story: operations that follow each other, in so many places of the program; of each the kind, and
    bytes that are given.
    """

    kinds: tuple[str, ...] = ()
    shape: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    story: tuple[tuple[str, Mapping[int, tuple[int, ...]]], ...] = ()


_PLAIN: Mapping[int, tuple[int, ...]] = {
    4: (0, 2, 3, 4),
    6: (0, 1),
}  # of a submission: no mask, no deadline, no stop id
_SAME = {**_PLAIN, 2: (0, 2, 1), 3: (37, 45, 5, 4)}  # of few prompts, long ones
_TIGHT = {
    13: (0, 1),
    9: (0, 1, 2, 0, 1),
    1: (0, 1, 2),
    2: (1, 2, 3),
    10: (1, 4),
}  # prefix cache, barely a request more than one
_SHARED = {2: (0,), 3: (44, 43, 46), 5: (0,), 6: (0,)}  # of one prompt, with a long output
_MASKED = {4: (5, 13, 5, 3), 5: (0,), 6: (0,)}
# Each gets a share of the programs.
THEMES: tuple[Theme, ...] = (
    Theme(),
    Theme(("bad",)),
    # Two rules broken at once, those asked about first more often; deadlines about as far as the clock goes.
    Theme(("bad",), {}, (("bad", {7: (*range(192, 200), *range(192, 192 + len(FIELDS)), *(58,) * 8)}), ("poll", {}))),
    Theme(("bad", "fix", "poll", "wait")),
    Theme(("cancel", "burst", "poll")),
    Theme(("slow", "consume", "bad_head", "burst")),
    Theme(("silent", "wait", "restart")),
    Theme(("fault", "mask", "burst")),
    Theme(("fault", "cancel", "poll")),
    Theme(("fault", "cancel", "step")),
    Theme(("bad", "step")),
    Theme(("cancel", "submit", "poll", "boundary")),
    Theme(("end", "burst", "submit")),
    # The slot of a row in flight gets another owner, which does not run yet when the row's result comes.
    Theme(
        ("submit", "step"),
        {0: (0, 1), 13: (2,), 7: (0,), 12: (0,)},
        (
            *(("step", {2: (0,)}), ("boundary", {}), ("cancel", {2: (0,)}), ("poll", {})),
            *(("submit", _PLAIN), ("poll", {}), ("boundary", {}), ("step", {})),
        ),
    ),
    # Masked requests give way and are resumed.
    Theme(
        ("mask", "step"),
        {15: (0, 1, 2), 9: (0, 1, 2), 0: (1, 2), 2: (1, 2, 3), 3: (2, 3, 4), 13: (2,)},
        (
            *(("submit", _MASKED), ("submit", _MASKED), ("poll", {}), ("mask", {3: (0,)}), ("boundary", {})),
            *(("mask", {3: (0,)}), ("step", {}), ("mask", {3: (0,)}), ("poll", {}), ("step", {})),
        ),
    ),
    # Masks are late: for rows that gave way, and for an urgent prompt that others' growth leaves no page for.
    Theme(
        ("step", "burst"),
        {15: (0, 1, 2), 9: (0, 1, 2), 0: (1, 2), 2: (1, 2, 3), 3: (2, 3, 4), 11: (0, 1, 8), 13: (2,)},
        (
            *(("submit", _MASKED), ("submit", _MASKED), ("step", {}), ("step", {2: (2,)}), ("submit", _MASKED)),
            *(("step", {2: (2,)}), ("mask", {3: (0,)}), ("poll", {}), ("step", {2: (2,)})),
        ),
    ),
    Theme(
        ("step",),
        {
            15: (0,),
            0: (2,),
            1: (0,),
            2: (1,),
            3: (4,),
            6: (1,),
            7: (0,),
            9: (0, 1),
            10: (1,),
            11: (24,),
            13: (2,),
            14: (0, 1),
        },
        (
            *(("submit", {1: (0,), 3: (40, 47), 4: (34,), 5: (0,), 6: (0,), 7: (0,)}), ("poll", {1: (0,)})),
            *(("step", {1: (0,), 2: (0, 1, 2)}), ("step", {1: (0,), 2: (2,)})),
            *(("submit", {1: (4,), 3: (6, 46), 4: (5,), 5: (0,), 6: (0,), 7: (0,)}), ("poll", {1: (0,)})),
            *(("step", {1: (0,), 2: (2,)}),) * 3,
        ),
    ),
    # Pages without holders are found by a request that needs nearly all of the pool.
    Theme(
        ("step",),
        _TIGHT,
        (
            ("submit", _SAME),
            ("step", {}),
            ("submit", _SAME),
            ("step", {2: (2,)}),
            ("cancel", {2: (0,)}),
            ("step", {2: (2,)}),
        ),
    ),
    # Rows give way to a reservation in vain: what they let go of, others hold as well.
    Theme(
        ("step",),
        {
            13: (16, 17),
            0: (2, 3),
            1: (0, 1, 2),
            2: (1, 2, 3),
            3: (2, 3, 4),
            6: (1,),
            9: (0, 1, 2),
            12: (0, 1),
            14: (0, 1),
        },
        (
            *(("submit", {**_SHARED, 4: (0, 2)}), ("step", {2: (0,)}), ("step", {2: (0,)})),
            *(("submit", {**_SHARED, 4: (48, 50, 58)}), ("step", {2: (0,)}), ("step", {2: (0,)})),
            *(("submit", {**_SHARED, 2: (13, 29), 3: (5, 13, 6, 14), 4: (0, 2)}), ("step", {2: (0,)})),
            *(("step", {2: (0,)}), ("step", {2: (1,)})),
        ),
    ),
    # A decode that grows makes the last row give way, and a prefill between them is short of budget.
    Theme(
        ("step",),
        {
            13: (2,),
            0: (2, 3),
            1: (0,),
            2: (2,),
            3: (4,),
            6: (1,),
            7: (0,),
            9: (1,),
            10: (1,),
            12: (0, 1),
        },
        (
            *(("submit", {**_SHARED, 3: (44, 47), 4: (0, 2)}), ("submit", {**_SHARED, 3: (44, 47), 4: (48, 50, 58)})),
            *(("step", {2: (2,)}), ("submit", {**_SHARED, 3: (6, 14), 4: (0, 2)})),
            *(("step", {2: (2,)}),) * 3,
        ),
    ),
    # Of many rings two wait, one for more than there is.
    Theme(
        ("step",),
        {
            7: (255,),
            13: (2,),
            0: (0,),
            1: (0, 1),
            2: (1, 2, 3),
            3: (2, 3),
            6: (1,),
            9: (0, 1),
            12: (0, 1),
            14: (0, 1, 2),
        },
        (
            *(("submit", {**_SHARED, 1: (0,), 3: (44, 43), 4: (0, 2)}), ("step", {2: (0,)}), ("step", {2: (0,)})),
            *(("submit", {**_SHARED, 1: (64,), 3: (5, 13), 4: (0, 2)}), ("step", {1: (1,), 2: (0,)})),
            ("submit", {**_SHARED, 1: (65, 66), 3: (0, 8), 4: (0, 2)}),
            *(("step", {2: (1,)}),) * 3,
        ),
    ),
)

# Classes that a log entry speaks of when specification and scheduler do not write the same one there.
ENTRIES: dict[LogKind, str] = {
    LogKind.ACCEPT: "BDRV",
    LogKind.REJECT: "BDRV",
    LogKind.ADMIT: "QS",
    LogKind.PREEMPT: "QS",
    LogKind.FINISH: "RSB",
    LogKind.ERROR: "RSX",
    LogKind.CANCEL: "RS",
    LogKind.RESERVATION: "QS",
    LogKind.PREFIX_HIT: "P",
    LogKind.PLAN_ROW: "GQS",
    LogKind.STEP: "GQS",
    LogKind.TOKEN: "RS",
    LogKind.RESULT: "GRS",
    LogKind.PAGE_ALLOC: "KS",
    LogKind.PAGE_FREE: "K",
    LogKind.PAGE_UNQUARANTINE: "K",
    LogKind.PAGE_SHARE: "P",
    LogKind.PAGE_UNSHARE: "KP",
    LogKind.PAGE_PUBLISH: "P",
    LogKind.PAGE_EVICT: "KP",
    LogKind.LEASE: "X",
    LogKind.EPOCH: "DX",
    LogKind.STATE: "X",
    LogKind.CONTROL: "X",
    LogKind.CLOCK: "VX",
    LogKind.CREDITS: "DR",
    LogKind.SQ_ENTRY: "DV",
    LogKind.MASK: "DSV",
}
REFUSALS: dict[ErrorReason, str] = {
    ErrorReason.CHECKSUM: "D",
    ErrorReason.BAD_GENERATION: "DSV",
    ErrorReason.NEVER_FITS: "BQ",
    ErrorReason.DRAINING: "X",
    ErrorReason.SLOT_BUSY: "RS",
    ErrorReason.DEADLINE: "XV",
    ErrorReason.LEASE_LOST: "X",
    ErrorReason.MODEL_ERROR: "BGRS",
}
# An end or a preemption comes after the entries of what it gives back, and an entry's outcome after it (E3).
_BEFORE = (LogKind.PAGE_FREE, LogKind.PAGE_UNSHARE, LogKind.SQ_ENTRY)
_ENDS = (LogKind.FINISH, LogKind.ERROR, LogKind.PREEMPT, LogKind.EPOCH)
_PLANNED = frozenset({"ADMIT", "PREFIX_HIT", "RESERVATION", "PLAN_ROW", "STEP", "PREEMPT", "PAGE_ALLOC", "PAGE_EVICT"})
EVENTS = {"TOKEN": "R", "LOGPROBS": "R", "FINISH": "RS", "ERROR": "RS"}
# By parts of an observable's name, where the logs are equal or not kept; the first that is part of it.
OBSERVABLES: tuple[tuple[str, str], ...] = (
    ("sampling", "SV"), ("bias", "S"), ("plan", "GS"), ("mask", "DSV"), ("lease", "X"),
    ("laps", "X"), ("expires", "VX"), ("clock", "VX"), ("epoch", "D"), ("sq_", "D"), ("bad_heads", "DR"),
    ("cq_", "DR"), ("torn", "DR"), ("duplicates", "DRV"), ("stale_cancels", "RS"), ("judged", "BDRV"),
    ("deficit", "QS"), ("turn", "Q"), ("reserved", "Q"), ("paused", "QS"), ("waiting", "QS"), ("running", "S"),
    ("hits", "P"), ("lookups", "P"), ("published", "P"), ("cached", "P"), ("children", "P"), ("parent", "P"),
    ("refs", "P"), ("lru", "P"), ("evictions", "P"), ("committed_pages", "K"), ("block_table", "KP"),
    ("free_list", "K"), ("quarantine", "K"), ("page", "KP"), ("row", "KS"), ("admissions", "QS"),
    ("preemptions", "QS"), ("tokens", "RS"), ("emitted", "RS"), ("computed", "PS"), ("arrivals", "BDRV"),
    ("state", "RSX"), ("live", "RSX"), ("admitted", "S"), ("call", "GQ"), ("in_flight", "G"), ("step", "G"),
)  # fmt: skip
OTHER = "other"
GROUPED, GROUP = 160, 2  # programs of a seed whose calls a group of threads works on
GROUP_ONLY = ("/steady.hpp", "/thread_group.hpp", "/next.hpp")  # where a group of one never comes
GROUP_FILES = (*GROUP_ONLY, "/group.hpp")
_TWIN = {1: (0,), 2: (0,), 3: (40, 47, 48), 4: (0, 2), 5: (0,), 6: (0,), 7: (0,)}  # always the same, with a long output
# Of programs that a group of threads runs.
TOGETHER: tuple[Theme, ...] = (
    Theme(("step", "step", "submit", "boundary")),
    # One member alone sees what is wrong: words of a payload are shared out.
    Theme(("bad", "step"), {5: (2,)}, (("bad", {5: (3,), 7: (31, 34, 35, 57)}), ("poll", {}))),
    # Requests that fill equal pages at the same boundaries.
    Theme(
        ("step",),
        {0: (2, 3), 2: (1, 2, 3), 3: (3, 4), 6: (1,), 9: (4,), 10: (0, 4), 13: (0, 1), 14: (0, 1, 2)},
        (
            *(("submit", _TWIN), ("submit", _TWIN), ("poll", {1: (0,)})),
            *(("boundary", {}), ("poll", {1: (0,)})) * 4,
            ("step", {2: (2,)}),
            ("step", {2: (2,)}),
        ),
    ),
)
_PLACES = {kind: [at for at, one in enumerate(TABLE) if one.__name__ == kind] for kind in {t.__name__ for t in TABLE}}
Named = list[tuple[str, int]]
Log = list[tuple[int, ...]]
Drawn = tuple[EngineConfig, bytes, bytes, int]


def _clauses() -> dict[str, frozenset[str]]:
    out = {f"observable {name}": frozenset(classes) for name, classes in OBSERVABLES}
    names = {kind.name: classes for kind, classes in ENTRIES.items()}
    names |= {f"refused {reason.name}": classes for reason, classes in REFUSALS.items()}
    for one, classes in names.items():
        out[f"log {one}"] = frozenset(classes)
        for other, more in names.items():
            out[f"log {one}, not {other}"] = frozenset(classes + more)
    for kind, classes in EVENTS.items():
        out[f"event {kind}"] = frozenset(classes)
    for reason in ErrorReason:
        out[f"event ERROR {reason.name}"] = frozenset(REFUSALS.get(reason, "B") + "R")
    return out | {"event sequence": frozenset("DR"), OTHER: frozenset()}


def draw(rng: random.Random, theme: Theme, length: int = LENGTH) -> Program:
    """A drawn program at log level ALL, of a theme."""
    drawn = random_program(rng, length)
    ops = list(drawn.ops)
    if theme.kinds:
        ops = [_of(rng, rng.choice(theme.kinds), op) if rng.random() < 0.33 else op for op in ops]
    at = rng.randrange(8) if theme.story else length
    while at + len(theme.story) <= length:
        for kind, given in theme.story:
            ops[at] = _of(rng, kind, ops[at], given)
            at += 1
        at += rng.randrange(4)
    if "fault" in theme.kinds:  # of eight kinds, that of the whole step is half
        whole = [op[:2] + b"\7" + op[3:] for op in ops]
        ops = [
            w if TABLE[op[0]].__name__ == "fault" and rng.random() < 0.5 else op
            for op, w in zip(ops, whole, strict=True)
        ]
    shape = bytearray(drawn.shape)
    for place, values in theme.shape.items():
        shape[place] = rng.choice(values)
    return logged(Program(bytes(shape), tuple(ops)))


def _of(rng: random.Random, kind: str, op: bytes, given: Mapping[int, tuple[int, ...]] = MappingProxyType({})) -> bytes:
    """The operation as one of that kind, with some of its bytes given."""
    out = bytearray(op)
    out[0] = rng.choice(_PLACES[kind])
    for place, values in given.items():
        out[place] = rng.choice(values)
    return bytes(out)


@lru_cache(maxsize=64)
def _drawn(seed: int) -> tuple[Drawn, ...]:
    """Configuration, words, the specification's records and size of the group of each program of a seed."""
    out = []
    for number in range(PROGRAMS):
        program = draw(random.Random(f"{seed}/{number}"), THEMES[number % len(THEMES)])
        out.append(_run(program, 1))
    return tuple(out)


@lru_cache(maxsize=64)
def _grouped(seed: int) -> tuple[Drawn, ...]:
    """The same for a group of threads, mostly below log level ALL: there it takes steady boundaries together."""
    out = []
    for number in range(GROUPED):
        program = draw(random.Random(f"{seed}/group/{number}"), TOGETHER[number % len(TOGETHER)])
        out.append(_run(program if number % 4 == 3 else _decisions(program), GROUP))
    return tuple(out)


def _run(program: Program, size: int) -> Drawn:
    driver = execute(program).d
    return driver.config, array("q", driver.words).tobytes(), array("q", driver.expected).tobytes(), size


def _decisions(program: Program) -> Program:
    """The program with an event log of level DECISIONS."""
    shape = bytearray(program.shape)
    shape[12] = next(
        v for v in range(256) if config_of(bytes([*shape[:12], v, *shape[13:]])).log_level == LogLevel.DECISIONS
    )
    return Program(bytes(shape), program.ops)


def _words(data: bytes) -> list[int]:
    words = array("q")
    words.frombytes(data)
    return words.tolist()


class LockStep:
    """The specification predicts every observable after every call; the first difference names the clause."""

    name = "lock-step"
    where = frozenset({"native"})
    clauses: Mapping[str, frozenset[str]] = _clauses()
    functions = frozenset(
        {
            "verification.lockstep.observe.observe",
            "verification.lockstep.observe.describe",
            "verification.lockstep.run.records",
            "verification.spec.machine.Machine",
        }
    )
    seconds = 8.0

    def drawn(self, seed: int) -> tuple[Drawn, ...]:
        """The programs of a seed, drawn once in a process."""
        return _drawn(seed)

    def prepare(self, seed: int) -> None:
        """Draws the programs of a seed and has the specification run them; kept for later runs of this process."""
        self.drawn(seed)

    def run(self, product: Product, seed: int, deadline: float) -> Finding | None:
        """Programs until one differs."""
        for number, (config, program, expected, size) in enumerate(self.drawn(seed)):
            if left(deadline) == 0:
                raise TimeoutError(f"{number} programs were run")
            got = product.native.run_lockstep(config.pack().tobytes(), program, size)
            if got != expected:
                return self._difference(config, number, _words(expected), _words(got))
        return None

    def _difference(self, config: EngineConfig, number: int, expected: list[int], got: list[int]) -> Finding:
        pairs = list(zip_longest(records(expected), records(got), fillvalue=list[int]()))
        call = next(i for i, (mine, its) in enumerate(pairs) if mine != its)
        ours, theirs = pairs[call]
        named, other = describe(config, ours), describe(config, theirs)
        name, x, y = next(
            (n if n == m else f"{n} / {m}", a, b)
            for (n, a), (m, b) in zip_longest(named, other, fillvalue=("end", 0))
            if (n, a) != (m, b)
        )
        witness = f"program {number}, call {call} ({CALLS[ours[0]] if ours else 'none'}): {name} is {y}, not {x}"
        clause, more = _clause(named, other, name)
        return found(self, clause, f"{witness}{more}")


def _clause(ours: Named, theirs: Named, name: str) -> tuple[str, str]:
    """What the first difference is called, and words for it: by the log, else by events, else by the observable."""
    logs = _log(ours), _log(theirs)
    told = [[entry for entry in log if entry[1] != LogKind.CLOCK] for log in logs]  # says nothing beside others
    logs = (told[0], told[1]) if told[0] != told[1] else logs
    at = next((i for i, (e, g) in enumerate(zip_longest(*logs)) if e != g), None)
    events = _events(ours), _events(theirs)
    pair = next(((e, g) for e, g in zip_longest(*events) if e != g), None)
    planned = at is not None and all(_name(log, at) in ("", *_PLANNED) for log in logs)
    if at is not None and not (pair and planned):  # events come before a plan, and take credits from it
        said, wrote = _name(logs[0], at), _name(logs[1], at)
        ends = [_end(log, at) for log in logs]
        if ends[0] is not None and ends[0] == ends[1]:  # one end, told of alike: what it gives back differs
            said, wrote = (LogKind(log[at][1]).name for log in logs)
            said, wrote = sorted((said, wrote), key=lambda kind: kind not in ("PAGE_FREE", "PAGE_UNSHARE"))[:1] * 2
        clause = f"log {said or wrote}" if said == wrote or not (said and wrote) else f"log {said}, not {wrote}"
        return clause, f"; the log has {wrote or 'nothing'}, not {said or 'nothing'}, at entry {at}"
    if pair is not None:
        return _event_name(*pair), f"; events {pair[1]}, not {pair[0]}"
    return next((f"observable {part}" for part, _ in OBSERVABLES if part in name), OTHER), ""


def _end(log: Log, at: int) -> tuple[int, ...] | None:
    """The end or preemption that the entry at `at` belongs to: kind, ring, slot, generation."""
    behind = next((entry for entry in log[at:] if entry[1] not in _BEFORE), None)
    return None if behind is None or behind[1] not in _ENDS else behind[1:5]


def _events(named: Named) -> list[tuple[int, ...]]:
    """Events of a record: kind, reason, and the rest."""
    out: list[list[int]] = []
    for name, value in named:
        if ".event[" in name:
            if name.endswith(".seq"):
                out.append([])
            out[-1].append(value)
    return [(*event[2:4], *event[:2], *event[4:]) for event in out if len(event) > 4]


def _event_name(said: tuple[int, ...] | None, wrote: tuple[int, ...] | None) -> str:
    if said and wrote and (*said[:2], *said[3:]) == (*wrote[:2], *wrote[3:]):
        return "event sequence"
    one = said or wrote or ()
    kind = EventKind(one[0]) if one[0] in set(EventKind) else EventKind.ERROR
    if kind == EventKind.ERROR and one[1] in set(ErrorReason):
        return f"event ERROR {ErrorReason(one[1]).name}"
    return f"event {kind.name}"


def _log(named: Named) -> Log:
    """Log entries of a record: step, kind, ring, slot, generation, a, b, c."""
    at = next((i for i, (name, _) in enumerate(named) if name == "len(log)"), len(named))
    values = [value for _, value in named[at + 1 :]]
    return [tuple(values[i : i + 8]) for i in range(0, len(values) - 7, 8)]


def _name(log: Log, at: int) -> str:
    """What the entry at `at` is called in `clauses`, or what it belongs to: its kind, or the reason in `REFUSALS`."""
    if [entry[1:5] for entry in log[at : at + 1]] == [
        (LogKind.RESERVATION, *entry[2:5]) for entry in log[at + 1 : at + 2]
    ]:
        at += 1  # its holder is admitted, as the next entry tells
    entry = next((entry for entry in log[at:] if entry[1] not in _BEFORE), log[at] if at < len(log) else None)
    if entry is None:
        return ""
    kind, reason = entry[1], entry[5]
    if kind in (LogKind.REJECT, LogKind.ERROR) and reason in REFUSALS:
        return f"refused {ErrorReason(reason).name}"
    return LogKind(kind).name


class GroupLockStep(LockStep):
    """The same with a group of threads, which take a steady boundary together; slow, so for what groups do only."""

    name = "lock-step-group"
    seconds = 60.0

    def applies(self, mutant: Mutant) -> bool:
        """Whether only a group of threads runs what it changes."""
        return mutant.file.endswith(GROUP_FILES)

    def drawn(self, seed: int) -> tuple[Drawn, ...]:
        return _grouped(seed)


CHECKERS = (LockStep(), GroupLockStep())
