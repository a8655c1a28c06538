"""The searches: each model at its bounds, and its wrong variants with the clause by which each must fail."""

from __future__ import annotations

from dataclasses import dataclass

PROGRESS = "progress"  # in place of a clause: the temporal property of the model does not hold
DEADLOCK = "deadlock"  # in place of a clause: a state in which nobody can go on, and somebody is not at an end


@dataclass(frozen=True, slots=True)
class Search:
    """One run of the checker. fails: clauses by which it must fail, empty for the protocol as it is.

    progress: the temporal property under weak fairness instead of assertions and end states.
    """

    model: str
    name: str
    defines: tuple[str, ...] = ()
    fails: tuple[str, ...] = ()
    progress: bool = False

    def __str__(self) -> str:
        return f"{self.model}/{self.name}"


def _sizes(slots: int, reqs: int, sq: int, cq: int) -> tuple[str, ...]:
    return (f"SLOTS={slots}", f"REQS={reqs}", f"SQ={sq}", f"CQ={cq}")


REUSE = _sizes(1, 3, 2, 2)  # one slot that three requests have in turn
PAIR = _sizes(2, 2, 4, 3)  # two at a time, more events than the queue has places

CORRECT = (
    Search("ring", "reuse", REUSE),
    Search("ring", "reuse-progress", REUSE, progress=True),
    Search("ring", "pair", PAIR),
    Search("ring", "lapse", (*REUSE, "LAPSE")),
    Search("epoch", "takeover"),
    Search("epoch", "takeover-progress", progress=True),
    Search("recover", "spare-queue-pair"),
    Search("recover", "spare-queue-pair-progress", progress=True),
    Search("mask", "mailbox"),
    Search("mask", "mailbox-progress", progress=True),
)
# Larger, for profile full.
LARGE = (
    Search("ring", "lapse-progress", (*REUSE, "LAPSE"), progress=True),
    Search("ring", "pair-lapse", (*PAIR, "LAPSE")),
    Search("ring", "pair-progress", PAIR, progress=True),
)


def _wrong(
    model: str,
    define: str,
    *fails: str,
    sizes: tuple[str, ...] = (),
    more: tuple[str, ...] = (),
    progress: bool = False,
) -> Search:
    return Search(model, define.lower().replace("_", "-"), (*sizes, *more, define), fails, progress)


VARIANTS = (
    _wrong("ring", "ENTRY_FIRST", "R8", sizes=REUSE),
    _wrong("ring", "RELAXED_NIC", "R8", sizes=REUSE),
    _wrong("ring", "RELAXED_PUBLISH", "R9", sizes=REUSE),
    _wrong("ring", "EVENTS_BEFORE_TAIL", "R9", sizes=REUSE),
    _wrong("ring", "CREDITS_FIRST", "P3", sizes=PAIR),
    _wrong("ring", "NO_TERMINAL_CREDIT", "P3", sizes=PAIR),
    _wrong("ring", "NO_GENERATION_CHECK", "C1", sizes=REUSE),
    _wrong("ring", "SEQ_OF_PLACE", "R3", sizes=REUSE),
    _wrong("ring", "LAPSE_SAYS_NOTHING", PROGRESS, sizes=REUSE, more=("LAPSE",), progress=True),
    _wrong("epoch", "RELAXED_NIC", "R2"),
    _wrong("epoch", "RELAXED_PUBLISH", "R2"),
    _wrong("epoch", "EPOCH_FIRST", "R2"),
    _wrong("epoch", "NO_CLEAR", "R2"),
    _wrong("epoch", "NO_WAIT", "R2"),
    _wrong("epoch", "ACK_EARLY", "R2"),
    _wrong("recover", "LATE_WRITES", "R3", "R8"),
    _wrong("recover", "ENTRY_ONLY", "R8"),
    _wrong("recover", "NO_REWRITE", PROGRESS, progress=True),
    _wrong("recover", "AT_THE_TAIL", PROGRESS, progress=True),
    _wrong("mask", "RELAXED_NIC", "R11"),
    _wrong("mask", "READY_FIRST", "R11"),
    _wrong("mask", "NO_INDEX", "R11"),
    _wrong("mask", "NO_GENERATION", "R11", more=("TOKENS=1",)),
)
