"""One specified engine driven by hand, for tests of single clauses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blink_core.abi.config import EngineConfig
from blink_core.abi.enums import EventKind, LogKind, LogLevel, Op, StepStatus
from verification.spec.machine import Machine
from verification.spec.ring import entry_word
from verification.spec.state import Descriptor, PlanRow, Request, Result


class Small(Machine):
    """A machine with front ends attached, `now` under control, and a model that says what it is told (7 by default)."""

    def __init__(self, **fields: Any) -> None:
        sizes = {"vocab": 20, "rings": 1, "slots": 4, "sq_entries": 16, "cq_entries": 32, "max_len": 24, "page_size": 4}
        sizes |= {"pages": 14, "max_rows": 3, "token_budget": 8, "max_bias": 2, "max_logprobs": 4, "log_entries": 64}
        waits = {"visibility_us": 3, "paused_limit": 3, "quantum": 8, "reservation_steps": 3, "lease_us": 0}
        merged: dict[str, Any] = sizes | waits | {"log_level": LogLevel.ALL} | fields
        merged.setdefault("masks", merged["slots"])
        super().__init__(EngineConfig(arena_tokens=merged["slots"] * 40, **merged))
        self.now, self.index = 1, [0] * self.config.rings
        for ring in self.rings:
            ring.memory.epoch = 1
        self.go()
        self.log.clear()

    def go(self) -> None:
        self.poll(self.now)

    def entry(self, op: int, slot: int, generation: int, ring: int = 0) -> None:
        memory, index = self.rings[ring].memory, self.index[ring]
        memory.sq[index % self.config.sq_entries] = entry_word(index, op, slot, generation)
        self.index[ring] += 1

    def write(self, slot: int, prompt: Sequence[int], max_tokens: int, ring: int = 0, **fields: Any) -> Descriptor:
        """A descriptor with its payload, and no entry."""
        memory = self.rings[ring].memory
        made: dict[str, Any] = {
            "generation": 1,
            "prompt_len": len(prompt),
            "prompt_offset": slot * 40,
            "max_tokens": max_tokens,
        }
        made |= {"intact": True, "signed": tuple(prompt)}
        d = Descriptor(**{**made, **fields})
        if "prompt_offset" not in fields:
            memory.arena[slot * 40 : slot * 40 + len(d.signed)] = d.signed
        memory.slots[slot] = d
        return d

    def submit(
        self, slot: int, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 4, ring: int = 0, **fields: Any
    ) -> None:
        """Descriptor, payload and entry."""
        self.entry(Op.SUBMIT, slot, self.write(slot, prompt, max_tokens, ring, **fields).generation, ring)

    def tick(self, token: int = 7, **fields: Any) -> list[PlanRow]:
        """Boundary; the model then gives `token` for each row of the step before."""
        results = [Result(token, 0, fields.get("status", StepStatus.OK), fields.get("tops", ()))] * 16
        return list(self.boundary(self.now, results, fields.get("failed", False)))

    def run(self, steps: int, token: int = 7) -> None:
        for _ in range(steps):
            self.tick(token)
            self.go()

    def at(self, slot: int, ring: int = 0) -> Request:
        request = self.rings[ring].requests[slot]
        assert request is not None
        return request

    def ends(self, ring: int = 0) -> list[tuple[int, EventKind, int, int]]:
        """(slot, kind, reason, index) of the terminal events."""
        return [(e[2], EventKind(e[3]), e[4], e[6]) for e in self.events if e[0] == ring and e[3] >= EventKind.FINISH]

    def kinds(self) -> list[LogKind]:
        return [LogKind(entry[1]) for entry in self.log]


def planned(rows: list[PlanRow]) -> list[tuple[int, int]]:
    """(slot, tokens) of a plan."""
    return [(row.request.slot, row.q_len) for row in rows]
