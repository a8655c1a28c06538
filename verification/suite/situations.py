"""Situations that a run must reach, read from snapshots and event logs (design section 9)."""

from __future__ import annotations

import numpy as np

from blink_core.abi.dtypes import Array
from blink_core.abi.enums import FinishReason, LogKind
from hil_rigs.engine_memory import StateSnapshot
from verification.certificate.recorder import Recorder


def record_situations(record: Recorder, before: StateSnapshot, after: StateSnapshot, log: Array) -> None:
    """Records what one run shows to have happened. log: its own entries, from `before` to `after`."""
    kinds = log["kind"]
    preempted = bool((kinds == LogKind.PREEMPT).any())
    hit = log[kinds == LogKind.PREFIX_HIT]
    owners: dict[int, tuple[int, int, int]] = {}
    reused = False
    for e in log[kinds == LogKind.PAGE_ALLOC]:
        owner = (int(e["ring"]), int(e["slot"]), int(e["generation"]))
        reused |= owners.setdefault(int(e["a"]), owner) != owner
        owners[int(e["a"])] = owner
    finishes = log[kinds == LogKind.FINISH]
    record.situation("preemption", preempted)
    record.situation("pool-exhausted", pool_exhausted(log))
    record.situation("prefix-hit", bool((hit["b"] > 0).any()))
    record.situation("prefix-eviction", bool((kinds == LogKind.PAGE_EVICT).any()))
    record.situation("reservation", bool(((kinds == LogKind.RESERVATION) & (log["a"] == 1)).any()))
    record.situation("page-reuse", reused)
    record.situation("cancel", bool((finishes["a"] == FinishReason.CANCELLED).any()))
    lap = after.config.sq_entries
    laps = [
        int(b["sq_next"]) // lap - int(a["sq_next"]) // lap
        for a, b in zip(before.rings, after.rings, strict=True)
        if a["epoch"] == b["epoch"]
    ]
    record.situation("ring-wrap", any(n > 0 for n in laps))
    ended = finishes[finishes["a"] == FinishReason.EOS]
    accepted = {
        (int(e["ring"]), int(e["slot"]), int(e["generation"])): int(e["a"]) for e in log[kinds == LogKind.ACCEPT]
    }
    lengths = [
        accepted[key] + int(e["b"])
        for e in ended
        if (key := (int(e["ring"]), int(e["slot"]), int(e["generation"]))) in accepted
    ]
    record.situation("eos-on-page-boundary", any(n % after.config.page_size == 0 for n in lengths))


def pool_exhausted(log: Array) -> bool:
    """Whether a request gave way because no page was left; those that give way to a reservation precede its entry."""
    forced = False
    for e in log[np.isin(log["kind"], (LogKind.PREEMPT, LogKind.RESERVATION, LogKind.STEP))][::-1]:
        if e["kind"] != LogKind.PREEMPT:
            forced = e["kind"] == LogKind.RESERVATION and int(e["a"]) == 2
        elif not forced:
            return True
    return False
