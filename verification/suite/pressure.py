"""What presses on KV memory in a run, counted from the event log: a check of KV rows says nothing without it."""

from __future__ import annotations

from blink_core.abi.config import EngineConfig
from blink_core.abi.dtypes import Array
from blink_core.abi.enums import FinishReason, LogKind
from verification.result import CheckResult, Measurement, Verdict


def chunks_inside_page(log: Array, page_size: int) -> int:
    """Chunks of several tokens that began inside a page, where an earlier one of several had ended."""
    ended: dict[tuple[int, int, int], int] = {}
    count = 0
    for e in log[(log["kind"] == LogKind.PLAN_ROW) & (log["a"] > 1)]:
        key = (int(e["ring"]), int(e["slot"]), int(e["generation"]))
        start = int(e["b"]) - int(e["a"])
        count += start % page_size != 0 and ended.get(key) == start
        ended[key] = int(e["b"])
    return count


class KvPressure:
    """What a schedule must have held so that it says something about KV memory: by the event log, over several runs."""

    def __init__(self, config: EngineConfig) -> None:
        """config: of the engine; what cannot happen with pages of one token or without a prefix cache is not asked."""
        self._page_size = config.page_size
        self.counts = dict.fromkeys(("preemption", "cancel", "page-reuse"), 0)
        if config.prefix_cache:
            self.counts["prefix-hit"] = 0
        if config.page_size > 1:
            self.counts["chunk-inside-page"] = 0
        self._owners: dict[int, tuple[int, int, int]] = {}

    @property
    def complete(self) -> bool:
        return all(self.counts.values())

    def add(self, log: Array) -> None:
        """Counts what happened in the entries of one run."""
        kinds, counts = log["kind"], self.counts
        counts["preemption"] += int((kinds == LogKind.PREEMPT).sum())
        if "prefix-hit" in counts:
            counts["prefix-hit"] += int((log["b"][kinds == LogKind.PREFIX_HIT] > 0).sum())
        counts["cancel"] += int((log["a"][kinds == LogKind.FINISH] == FinishReason.CANCELLED).sum())
        if self._page_size > 1:
            counts["chunk-inside-page"] += chunks_inside_page(log, self._page_size)
        for e in log[kinds == LogKind.PAGE_ALLOC]:
            owner = (int(e["ring"]), int(e["slot"]), int(e["generation"]))
            counts["page-reuse"] += self._owners.get(int(e["a"]), owner) != owner
            self._owners[int(e["a"])] = owner

    def check(self, property_name: str) -> CheckResult:
        """Unknown when one of them did not happen."""
        missing = [name for name, count in self.counts.items() if not count]
        measured = {
            f"pressure: {name}": Measurement(count, "times", 1, limit_is="min") for name, count in self.counts.items()
        }
        message = f"what pressed on the KV pages: {', '.join(f'{n} {c}' for n, c in self.counts.items())}"
        verdict = Verdict.UNKNOWN if missing else Verdict.VALID
        return CheckResult(verdict, property_name, "pressure", message, {}, measured)
