"""What the event log may show while a step runs, behind `kv_conservation.check_log` (clause quarantine)."""

from __future__ import annotations

import numpy as np

from blink_core.abi.dtypes import Array
from blink_core.abi.enums import ErrorReason, FinishReason, LogKind
from hil_rigs.engine_memory import StateSnapshot
from verification.properties.kv_recount import bad
from verification.result import CheckResult

# Entries that only the commit of a step writes, or what follows it.
_AFTER_COMMIT = (LogKind.PAGE_UNQUARANTINE, LogKind.RESULT, LogKind.TOKEN)
_OF_PLANNING = (
    LogKind.PAGE_ALLOC,
    LogKind.PAGE_SHARE,
    LogKind.PAGE_EVICT,
    LogKind.PREFIX_HIT,
    LogKind.ADMIT,
    LogKind.PREEMPT,
    LogKind.PLAN_ROW,
)
_RELEASES = (LogKind.PAGE_FREE, LogKind.PAGE_UNSHARE)


def _ends_at_boundary(kind: int, reason: int) -> bool:
    """Whether a request ends like this between steps only. Cancels, leases and deadlines are seen at any time."""
    if kind == LogKind.FINISH:
        return reason != FinishReason.CANCELLED
    return kind == LogKind.ERROR and reason not in (ErrorReason.LEASE_LOST, ErrorReason.DEADLINE)


def check_in_flight(log: Array, before: StateSnapshot) -> CheckResult | None:
    """Clause quarantine in the log: what happens from a STEP entry until the commit of that step.

    The commit has no entry of its own. Of a step that samples it always shows: in a result, an error, or, when all its
    rows were cancelled meanwhile, in their pages leaving the quarantine. A step that samples nothing may end without a
    trace, so nothing is claimed of it.
    """
    last = before.log[-1] if len(before.log) else None
    in_flight = (
        last is not None
        and int(before.header["in_flight"]) != 0
        and int(last["kind"]) == LogKind.STEP
        and int(last["c"]) > 0
    )
    held: set[int] = set(before.quarantine.tolist())
    names = ("kind", "a", "b", "c", "step")
    for i, (kind, a, b, c, step) in enumerate(zip(*(log[name].tolist() for name in names), strict=True)):
        if kind == LogKind.STEP:
            in_flight = c > 0
            if held:
                return bad("quarantine", f"{len(held)} pages were still quarantined when the next step began")
        elif kind in _AFTER_COMMIT or _ends_at_boundary(kind, a):
            in_flight = False
        elif in_flight and kind == LogKind.PAGE_FREE and not b:
            if _ends_at_boundary(*_closing(log, i)):  # of a failed step: its rows end in the commit
                in_flight = False
                continue
            return bad(
                "quarantine",
                f"page {a} was released as free while step {step}, which may still write it, ran",
                step=step,
                entry=i,
            )
        elif in_flight and kind in _OF_PLANNING:
            return bad(
                "quarantine",
                f"{LogKind(kind).name} was logged while step {step} ran: the next was planned before its end",
                step=step,
                entry=i,
            )
        if kind == LogKind.PAGE_FREE and b:
            held.add(a)
        elif kind == LogKind.PAGE_UNQUARANTINE:
            held.discard(a)
    return None


def _closing(log: Array, at: int) -> tuple[int, int]:
    """Kind and `a` of the first entry from `at` on that releases no page: why the pages before it were released."""
    rest = log[at:]
    others = rest[~np.isin(rest["kind"], _RELEASES)]
    return (int(others[0]["kind"]), int(others[0]["a"])) if len(others) else (-1, 0)
