"""Raw state of a held engine in a trace, and its comparison with what the specification knows at that entry.

The log is the engine's own testimony; a snapshot is its memory, recounted.
"""

from __future__ import annotations

from typing import Any

from blink_core.abi.enums import PageState
from hil_rigs.engine_memory import StateSnapshot
from verification.spec.machine import Machine

COUNTERS = {
    "step": "E1", "arrivals": "R10", "admissions": "A4", "preemptions": "L1", "tokens": "C3", "evictions": "K2",
}  # fmt: skip


def summary(state: StateSnapshot) -> dict[str, Any]:
    """What is kept: counters, and who holds which page. No tokens."""
    slots = state.config.slots
    return {
        **{name: int(state.header[name]) for name in COUNTERS},
        "running": [[int(r) // slots, int(r) % slots] for r in state.running],
        "free": state.free_list.tolist(),
        "quarantine": state.quarantine.tolist(),
        "pages": state.pages["state"].tolist(),
    }


def difference(m: Machine, kept: dict[str, Any]) -> tuple[str, str] | None:
    """(clause, in words) of the first thing that raw memory has otherwise; None if there is none."""
    for name, clause in COUNTERS.items():
        if getattr(m, name) != kept[name]:
            return clause, f"raw memory counts {kept[name]} {name}, the log says {getattr(m, name)}"
    ours: tuple[tuple[str, str, Any], ...] = (
        ("running", "L2", [[q.ring.index, q.slot] for q in m.running]),
        ("free", "K2", m.free),
        ("quarantine", "K4", m.quarantine),
        ("pages", "K1", [int(PageState(state)) for state in m.page_state]),
    )
    for name, clause, value in ours:
        if value != kept[name]:
            at = next((i for i, (x, y) in enumerate(zip(value, kept[name], strict=False)) if x != y), "the end")
            return clause, f"raw memory has other {name} than the log says, first at {at}"
    return None
