"""What a request's KV rows have been through, by the event log: schedules under which `kv-content` compares them.

A comparison of KV rows says little about a schedule that did nothing to them. Marks of a request at a step boundary:

  preempted     it was preempted and runs again: its rows were computed anew, in other pages
  prefix-hit    at some admission it took pages that were in the prefix cache
  odd-chunk     a chunk of several tokens ended inside a page, and another of several began there
  cancel        a request that had a row in one of its steps was cancelled, while it went on in a later one
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from blink_core.abi.dtypes import Array
from blink_core.abi.enums import FinishReason, LogKind
from verification.result import CheckResult, Measurement, Verdict

MARKS = ("preempted", "prefix-hit", "odd-chunk", "cancel")

Key = tuple[int, int, int]  # ring, slot, generation


def marks(log: Array, page_size: int) -> dict[Key, frozenset[str]]:
    """Marks of each request that `log` (all entries from its acceptance on, level ALL) speaks of, as of its end."""
    found: dict[Key, set[str]] = defaultdict(set)
    preempted: set[Key] = set()
    odd: set[Key] = set()
    together: dict[Key, set[Key]] = defaultdict(set)  # who had a row in a step of each request
    widowed: set[Key] = set()  # since whose last row a neighbour was cancelled
    step, rows = -1, set[Key]()
    for e in log:
        key = (int(e["ring"]), int(e["slot"]), int(e["generation"]))
        kind = int(e["kind"])
        if kind == LogKind.PREEMPT:
            preempted.add(key)
            odd.discard(key)
        elif kind == LogKind.PREFIX_HIT and int(e["b"]) > 0:
            found[key].add("prefix-hit")
        elif kind == LogKind.FINISH and int(e["a"]) == FinishReason.CANCELLED:
            widowed |= together.pop(key, set())
        elif kind == LogKind.PLAN_ROW:
            if int(e["step"]) != step:
                step, rows = int(e["step"]), set()
            for other in rows:
                together[other].add(key)
                together[key].add(other)
            rows.add(key)
            for name, before in (("preempted", preempted), ("cancel", widowed)):
                if key in before:
                    found[key].add(name)
            several = int(e["a"]) > 1  # one token behind a prompt is a decode, which says nothing of chunks
            if several and key in odd:
                found[key].add("odd-chunk")
            odd.discard(key)
            if several and int(e["b"]) % page_size:
                odd.add(key)
    return {key: frozenset(names) for key, names in found.items()}


def check_marks(compared: Iterable[frozenset[str]], wanted: Sequence[str], property_name: str) -> CheckResult:
    """Clause schedules: rows with each of the wanted marks were compared; else unknown."""
    counts: Mapping[str, int] = dict.fromkeys(wanted, 0)
    requests = 0
    for names in compared:
        requests += 1
        counts = {name: count + (name in names) for name, count in counts.items()}
    missing = [name for name, count in counts.items() if not count]
    told = ", ".join(f"{name} {count}" for name, count in counts.items())
    measured = {
        f"compared after {name}": Measurement(count, "requests", 1, limit_is="min") for name, count in counts.items()
    }
    verdict = Verdict.UNKNOWN if missing else Verdict.VALID
    message = f"KV of {requests} requests compared; of them had {told}"
    return CheckResult(verdict, property_name, "schedules", message, {}, measured)
