"""The event log holds every input that was acted on (design section 4): looked for, call by call, in raw memory."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from blink_core.abi.dtypes import Array
from blink_core.abi.enums import LogKind


class Entry(NamedTuple):
    """One LogEntry as plain integers."""

    step: int
    kind: int
    ring: int
    slot: int
    generation: int
    a: int
    b: int
    c: int

    @property
    def request(self) -> tuple[int, int, int]:
        return self.ring, self.slot, self.generation

    @property
    def wide(self) -> int:
        """a and b as the halves of one word."""
        return self.a | self.b << 32


@dataclass
class Inputs:
    """What the scheduler had taken of each ring at one moment."""

    epochs: list[int]
    heads: list[int]  # cq_head as followed
    entries: list[int]  # sq_next
    tokens: int
    masks: dict[tuple[int, int, int], int]  # ring, slot, generation -> mask_index


def take(state: dict[str, Array], slots: int) -> Inputs:
    rings, requests = state["rings"], state["requests"]
    taken = (requests["mask_index"] * requests["generation"]).nonzero()[0].tolist()  # generation 0: of no epoch
    masks = {(r // slots, r % slots, int(requests["generation"][r])): int(requests["mask_index"][r]) for r in taken}
    fields = (rings["epoch"].tolist(), rings["cq_head"].tolist(), rings["sq_next"].tolist())
    return Inputs(*fields, int(state["header"]["tokens"][0]), masks)


def check(before: Inputs, after: Inputs, made: list[Entry], clock: int, sq: list[Array]) -> None:
    """made: log entries of the call in order. clock: as the scheduler followed it. sq: each ring's submission queue."""
    of: dict[int, list[Entry]] = defaultdict(list)
    for e in made:
        of[e.kind].append(e)
    readings = of[LogKind.CLOCK]
    assert all(e.wide == clock for e in readings), f"the log reads another clock than {clock}"
    assert readings == made[:1], "the first entry of a call is its CLOCK, and there is no other"
    for ring in range(len(sq)):
        if after.epochs[ring] != before.epochs[ring]:
            assert [e.a for e in of[LogKind.EPOCH] if e.ring == ring] == [after.epochs[ring]]
            continue
        credits = [e.wide for e in of[LogKind.CREDITS] if e.ring == ring]
        changed = after.heads[ring] != before.heads[ring]
        assert credits == ([after.heads[ring]] if changed else []), f"ring {ring}: credits {credits} in the log"
        taken = range(before.entries[ring], after.entries[ring])
        words = [(e.c, e.wide) for e in of[LogKind.SQ_ENTRY] if e.ring == ring]
        expected = [(i % 2**32, int(sq[ring][i % len(sq[ring])])) for i in taken]
        assert words == expected, f"ring {ring}: entries {words} in the log, taken {expected}"
    sampled = [e.request for e in of[LogKind.TOKEN]]
    assert len(sampled) == after.tokens - before.tokens
    results = {e.request: e for e in of[LogKind.RESULT] if e.b == 0}
    for e in of[LogKind.TOKEN]:
        assert results[e.request].a == e.b, f"{e} without the result that it came from"
    masks = {e.request: e.a + 1 for e in of[LogKind.MASK]}
    new = {x: i for x, i in after.masks.items() if before.masks.get(x) != i}
    assert {x: i for x, i in masks.items() if x in after.masks} == new, f"masks taken {new}, in the log {masks}"


def check_clock(made: list[Entry], clock: int, logged: int) -> int:
    """Every entry stands behind a reading of the clock it was made at. logged: newest reading. Returns the new one."""
    for e in made:
        if e.kind == LogKind.CLOCK:
            logged = e.wide
        assert logged == clock, f"{e} was made at {clock}, the log's newest reading is {logged}"
    return logged
