"""Situations that lock-step programs must reach, read from what the specification did (design section 9)."""

from __future__ import annotations

from collections.abc import Iterable

from blink_core.abi.enums import ErrorReason, FinishReason, LogKind
from verification.lockstep.programs import Runner

RING_COUNTERS = ("torn", "duplicates", "stale_cancels", "bad_heads", "bad_masks", "lapses")
REFUSALS = tuple(
    f"refused: {reason.name}"
    for reason in ErrorReason
    if reason <= ErrorReason.NEVER_FITS or reason == ErrorReason.DRAINING
)
ENDS = (
    *(f"finished: {reason.name}" for reason in FinishReason),
    *(
        f"ended: {reason.name}"
        for reason in (
            ErrorReason.NAN_LOGITS,
            ErrorReason.NO_TOKEN,
            ErrorReason.MODEL_ERROR,
            ErrorReason.DRAINING,
            ErrorReason.DEADLINE,
            ErrorReason.LEASE_LOST,
        )
    ),
)
REQUIRED = (
    *REFUSALS,
    *ENDS,
    *(f"ring counter: {name}" for name in RING_COUNTERS),
    "preempted",
    "preempted twice",
    "admitted again after preemption",
    "reservation taken",
    "reservation enforced",
    "reservation given up when due",
    "prefix hit",
    "prefix page evicted",
    "own page gave way to an equal one",
    "page freed while a step runs",
    "epoch change with requests alive",
    "epoch change while a step runs",
    "lease renewed after a lapse",
    "row paused",
    "row paused for long",
    "request asleep",
    "request woken by its mask",
    "request admitted past one asleep",
    "chunked prefill",
    "step of a decode and a prefill",
    "several rings in one step",
    "several classes in one step",
    "log-probability events",
    "mask read",
    "submission queue wrapped",
    "completion queue wrapped",
    "slot used again",
    "24-bit generation wrapped",
    "no row free",
    "no page free",
    "drained",
    "stopped",
    "torn entry accepted in the end",
    "turn passed with a deficit left",
)


def found(runner: Runner) -> set[str]:
    """The situations of one executed program. Those that the log shows need log level ALL."""
    m, log, config = runner.d.machine, runner.d.log, runner.config
    out = set(runner.d.seen) | set(_from_log(log, config.reservation_steps))
    for ring in m.rings:
        out |= {f"ring counter: {name}" for name in RING_COUNTERS if getattr(ring, name)}
        if ring.sq_next > config.sq_entries:
            out.add("submission queue wrapped")
        if ring.cq_tail > config.cq_entries:
            out.add("completion queue wrapped")
    return out


def _from_log(log: list[tuple[int, ...]], reservation_steps: int) -> Iterable[str]:
    admitted: set[tuple[int, ...]] = set()
    slots: set[tuple[int, ...]] = set()
    newest: dict[tuple[int, ...], int] = {}
    before: tuple[int, ...] = (0,) * 8
    for entry in log:
        _, kind, ring, slot, generation, a, b, c = entry
        who = (ring, slot, generation)
        if kind == LogKind.REJECT:
            yield f"refused: {ErrorReason(a).name}"
        elif kind == LogKind.FINISH:
            yield f"finished: {FinishReason(a).name}"
        elif kind == LogKind.ERROR:
            yield f"ended: {ErrorReason(a).name}"
        elif kind == LogKind.PREEMPT:
            yield "preempted"
        elif kind == LogKind.ADMIT:
            if c > 1:
                yield "preempted twice"
            yield "admitted again after preemption" if who in admitted else "admitted"
            admitted.add(who)
        elif kind == LogKind.RESERVATION:
            yield ("reservation given up", "reservation taken", "reservation enforced")[a]
            if a == 0 and b >= reservation_steps:
                yield "reservation given up when due"
        elif kind == LogKind.PREFIX_HIT:
            yield "prefix hit"
        elif kind == LogKind.PAGE_EVICT:
            yield "prefix page evicted"
        elif kind == LogKind.PAGE_FREE:
            if b:
                yield "page freed while a step runs"
            elif before[1] == LogKind.PAGE_SHARE and before[2:5] == who:
                yield "own page gave way to an equal one"
        elif kind == LogKind.EPOCH:
            newest = {slot: generation for slot, generation in newest.items() if slot[0] != ring}
            if b:
                yield "epoch change with requests alive"
        elif kind == LogKind.LEASE and not a:
            yield "lease renewed after a lapse"
        elif kind == LogKind.MASK:
            yield "mask read"
        elif kind == LogKind.ACCEPT:
            if (ring, slot) in slots:
                yield "slot used again"
            if generation < newest.get((ring, slot), 0):
                yield "24-bit generation wrapped"
            slots.add((ring, slot))
            newest[ring, slot] = generation
        before = entry
