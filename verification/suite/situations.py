"""Situations that a run must reach, read from snapshots and event logs (design section 9)."""

from __future__ import annotations

import numpy as np

from blink_core.abi.dtypes import Array
from blink_core.abi.enums import FinishReason, LogKind
from hil_rigs.engine_memory import StateSnapshot
from verification.certificate.recorder import Recorder
from verification.fixtures import Subject
from verification.models.sensitivity import windowed_layers
from verification.result import CheckResult, Measurement, Verdict


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


class Lengths:
    """Whether sequences went beyond the lengths at which a model changes what it does, by HuggingFace's configuration:
    its sliding window, and the length that its RoPE scaling starts from. Lengths that no program can have are left out.
    """

    def __init__(self, subject: Subject) -> None:
        config = subject.oracles[1].config
        window = int(config.sliding_window) if windowed_layers(config) else 0
        original = int((config.rope_parameters or {}).get("original_max_position_embeddings") or 0)
        limits = {"beyond-window": window, "beyond-rope-maximum": original}
        most = subject.shape.longest - 1 if subject.replayed is None else 0  # what is replayed is as long as it is
        self.limits = {name: limit for name, limit in limits.items() if 0 < limit < most}
        self.longest = 0

    @property
    def reached(self) -> bool:
        return all(self.longest > limit for limit in self.limits.values())

    def add(self, length: int) -> None:
        self.longest = max(self.longest, length)

    def check(self, record: Recorder, property_name: str) -> CheckResult:
        """Records the situations; unknown when one was not reached."""
        for name, limit in self.limits.items():
            record.situation(name, self.longest > limit)
        verdict = Verdict.VALID if self.reached else Verdict.UNKNOWN
        measured = {name: Measurement(self.longest, "tokens", limit + 1) for name, limit in self.limits.items()}
        message = f"the longest sequence compared has {self.longest} tokens; {self.limits or 'no length'} to go beyond"
        return CheckResult(verdict, property_name, "lengths", message, {}, measured)
