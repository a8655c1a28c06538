"""Situations read from event logs: each is seen where it happens, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest

from blink_core.abi.config import EngineConfig
from blink_core.abi.enums import ErrorReason, FinishReason, LogKind
from blink_core.frontend.epoch_word import FENCE
from verification.situations.observe import LogObserver
from verification.situations.registry import SITUATIONS, reachable

K = LogKind
PAGE, SQ = 16, 8


def config(**changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "vocab": 64, "eos_ids": (2,), "rings": 2, "slots": 4, "sq_entries": SQ, "cq_entries": 32, "arena_tokens": 1024,
        "max_len": 128, "page_size": PAGE, "pages": 18, "max_rows": 3, "token_budget": 16, "log_entries": 1024,
        "masks": 4,
    }  # fmt: skip
    return EngineConfig(**(values | changes))


def entry(kind: LogKind, slot: int = 0, a: int = 0, b: int = 0, c: int = 0, *, step: int = 1, ring: int = 1) -> Any:
    return (step, int(kind), ring, slot, 1, a, b, c)


def seen(*entries: Any, **changes: Any) -> dict[str, int]:
    observer = LogObserver(config(**changes))
    observer.feed(entries)
    return {name: count for name, count in observer.take().items() if count}


ACCEPT = entry(K.ACCEPT, a=30, b=10)
ADMIT = entry(K.ADMIT)
ROW = entry(K.PLAN_ROW, a=1, b=31)
STEP = entry(K.STEP, a=1, b=1)
FREED = entry(K.PAGE_FREE, a=5, b=1)
CANCELLED = entry(K.FINISH, a=FinishReason.CANCELLED, b=2)

CASES: dict[str, tuple[list[Any], list[Any]]] = {
    # name: (a log in which it happens, one like it in which it does not)
    "ring-wrap": ([entry(K.SQ_ENTRY, c=SQ)], [entry(K.SQ_ENTRY, c=SQ - 1), entry(K.SQ_ENTRY, c=0)]),
    "slot-reuse": ([ACCEPT, ACCEPT], [ACCEPT, entry(K.ACCEPT, slot=1), entry(K.EPOCH), ACCEPT]),
    "epoch-change": ([entry(K.EPOCH, a=1), entry(K.EPOCH, a=2)], [entry(K.EPOCH, a=1), entry(K.EPOCH, a=2, ring=0)]),
    "epoch-change-alive": (
        [entry(K.EPOCH, a=1), entry(K.EPOCH, a=2, b=1)],
        [entry(K.EPOCH, a=1), entry(K.EPOCH, a=2)],
    ),
    "lease-lapse": ([entry(K.LEASE, a=1)], [entry(K.LEASE, a=0)]),
    "lease-renewed": ([entry(K.LEASE, a=0)], [entry(K.LEASE, a=1)]),
    "torn-entry": ([entry(K.REJECT, a=ErrorReason.CHECKSUM)], [entry(K.REJECT, a=ErrorReason.BAD_PARAM)]),
    "stale-cancel": ([entry(K.CANCEL, a=0)], [entry(K.CANCEL, a=1)]),
    "deadline-passed": ([entry(K.ERROR, a=ErrorReason.DEADLINE)], [entry(K.ERROR, a=ErrorReason.LEASE_LOST)]),
    "cancel-waiting": ([ACCEPT, CANCELLED], [ACCEPT, ADMIT, CANCELLED]),
    "cancel-in-flight": (
        [ACCEPT, ADMIT, ROW, STEP, FREED, CANCELLED],
        [ACCEPT, ADMIT, ROW, STEP, entry(K.PAGE_FREE, a=5), CANCELLED],
    ),
    "eos-on-page-boundary": (
        [ACCEPT, entry(K.FINISH, a=FinishReason.EOS, b=2)],
        [ACCEPT, entry(K.FINISH, a=FinishReason.EOS, b=3)],
    ),
    "stop-token": ([entry(K.FINISH, a=FinishReason.STOP_TOKEN)], [entry(K.FINISH, a=FinishReason.LENGTH)]),
    "context-full": ([entry(K.FINISH, a=FinishReason.CONTEXT)], [entry(K.FINISH, a=FinishReason.LENGTH)]),
    "batch-full": ([entry(K.STEP, a=3)], [entry(K.STEP, a=2)]),
    "batch-one-below": ([entry(K.STEP, a=2)], [entry(K.STEP, a=3), entry(K.STEP, a=1)]),
    "several-rings": (
        [ROW, entry(K.PLAN_ROW, ring=0), entry(K.STEP, a=2)],
        [ROW, entry(K.STEP, a=1), entry(K.PLAN_ROW, ring=0, step=2), entry(K.STEP, a=1, step=2)],
    ),
    "chunked-prefill": ([ACCEPT, entry(K.PLAN_ROW, a=8, b=16), STEP], [ACCEPT, entry(K.PLAN_ROW, a=30, b=30), STEP]),
    "chunk-inside-page": ([ACCEPT, entry(K.PLAN_ROW, a=8, b=17), STEP], [ACCEPT, entry(K.PLAN_ROW, a=8, b=16), STEP]),
    "decode-with-prefill": (
        [ACCEPT, entry(K.ACCEPT, slot=1, a=9), ROW, entry(K.PLAN_ROW, slot=1, a=9, b=9), entry(K.STEP, a=2)],
        [ACCEPT, ROW, STEP],
    ),
    "resume": ([entry(K.ADMIT, c=1)], [entry(K.ADMIT, c=0)]),
    "preempted-twice": ([entry(K.ADMIT, c=2)], [entry(K.ADMIT, c=1)]),
    "reservation": ([entry(K.RESERVATION, a=1)], [entry(K.RESERVATION, a=0)]),
    "reservation-enforced": ([entry(K.RESERVATION, a=2)], [entry(K.RESERVATION, a=1)]),
    "launch-118": ([entry(K.STEP, a=1, step=118)], [entry(K.STEP, a=1, step=117)]),
    # Requests that gave way to a reservation precede its entry; any others made room for somebody's pages.
    "pool-exhausted": ([entry(K.PREEMPT), STEP], [entry(K.PREEMPT), entry(K.RESERVATION, a=2), STEP]),
    "page-reuse": (
        [entry(K.PAGE_ALLOC, a=5), entry(K.PAGE_ALLOC, slot=1, a=5)],
        [entry(K.PAGE_ALLOC, a=5), entry(K.PAGE_ALLOC, a=5), entry(K.PAGE_ALLOC, slot=1, a=6)],
    ),
    "quarantine": ([FREED, entry(K.PAGE_UNQUARANTINE, a=5)], [FREED, entry(K.PAGE_UNQUARANTINE, a=6)]),
    "prefix-hit": ([entry(K.PREFIX_HIT, a=1, b=16)], [entry(K.PREFIX_HIT)]),
    "prefix-hit-before-boundary": (
        [entry(K.ACCEPT, a=31), entry(K.PREFIX_HIT, a=1, b=16)],
        [entry(K.ACCEPT, a=30), entry(K.PREFIX_HIT, a=1, b=16)],
    ),
    "prefix-hit-on-boundary": (
        [entry(K.ACCEPT, a=32), entry(K.PREFIX_HIT, a=1, b=16)],
        [entry(K.ACCEPT, a=34), entry(K.PREFIX_HIT, a=2, b=32)],
    ),
    "prefix-hit-past-boundary": (
        [entry(K.ACCEPT, a=33), entry(K.PREFIX_HIT, a=2, b=32)],
        [entry(K.ACCEPT, a=33), entry(K.PREFIX_HIT)],
    ),
    "prefix-hit-on-resume": (
        [ACCEPT, entry(K.TOKEN), entry(K.PREFIX_HIT, a=1, b=16)],
        [ACCEPT, entry(K.PREFIX_HIT, a=1, b=16)],
    ),
    "prefix-eviction": ([entry(K.PAGE_EVICT)], [entry(K.PAGE_FREE)]),
    "prefix-twin": (
        [entry(K.PAGE_SHARE, a=7), entry(K.PAGE_FREE, a=5)],
        [entry(K.PAGE_SHARE, slot=1, a=7), entry(K.PAGE_FREE, a=5)],
    ),
    # A row that runs and is not in the step: its ring owes 27 of 32 events and has 4 slots, or its mask is not there.
    "credits-withheld": (
        [ADMIT, *[entry(K.TOKEN)] * 27, entry(K.PLAN_ROW, slot=1, a=1, b=1), STEP],
        [ADMIT, *[entry(K.TOKEN)] * 27, entry(K.CREDITS, a=20), entry(K.PLAN_ROW, slot=1, a=1, b=1), STEP],
    ),
    "mask-late": (
        [ADMIT, entry(K.MASK, a=0), entry(K.TOKEN), entry(K.PLAN_ROW, slot=1, a=1, b=1), STEP],
        [ADMIT, entry(K.MASK, a=0), entry(K.TOKEN), entry(K.MASK, a=1), entry(K.PLAN_ROW, slot=1, a=1, b=1), STEP],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_situation_is_seen_where_it_happens_only(name: str) -> None:
    """Catches: a situation that is reported though it did not happen, or missed where it did."""
    happens, does_not = CASES[name]
    assert name in seen(*happens)
    assert name not in seen(*does_not)


def test_decode_that_waits_for_credits_though_the_log_shows_none_owed() -> None:
    """Catches: withheld credits missed where alternatives, which no log shows, have filled the completion queue; taken
    for a mask that is late; or seen in a request that has more than a token to compute, and so may lack the budget."""
    prompt = entry(K.PLAN_ROW, a=30, b=30)
    other = [entry(K.PLAN_ROW, slot=1, a=1, b=1, step=2), entry(K.STEP, a=1, step=2)]
    assert seen(ACCEPT, ADMIT, prompt, STEP, entry(K.TOKEN), *other)["credits-withheld"] == 1
    assert "mask-late" not in seen(ACCEPT, ADMIT, prompt, STEP, entry(K.TOKEN), *other)
    late = seen(ACCEPT, ADMIT, entry(K.MASK, a=0), prompt, STEP, entry(K.TOKEN), *other)
    assert (late["mask-late"], "credits-withheld" in late) == (1, False)
    again = [entry(K.PREEMPT), entry(K.ADMIT, c=1)]
    assert "credits-withheld" not in seen(ACCEPT, ADMIT, prompt, STEP, entry(K.TOKEN), *again, *other)


def test_registry_and_observer_know_the_same_names() -> None:
    """Catches: a situation that nothing can ever observe, or one that is observed under a name that nobody expects."""
    plain = {"mask-read", "cancel", "preemption", "refused", "end-of-sequence"}
    elsewhere = {name for name, one in SITUATIONS.items() if one.source != "event log"}
    assert set(CASES) | plain | elsewhere == set(SITUATIONS)


def test_nothing_is_concluded_across_a_gap() -> None:
    """Catches: a page that seems to change hands because entries between were lost."""
    observer = LogObserver(config())
    observer.feed([entry(K.PAGE_ALLOC, a=5), ACCEPT])
    observer.gap()
    observer.feed([entry(K.PAGE_ALLOC, slot=1, a=5), ACCEPT])
    assert not +observer.take()


def test_cancel_in_flight_names_the_token_that_its_step_computed() -> None:
    """Catches: a cancel at the end of a sequence that is looked up at another position."""
    observer = LogObserver(config())
    observer.feed([ACCEPT, ADMIT, ROW, STEP, FREED, CANCELLED])
    assert observer.cancelled == {(1, 0, 1): 32}


def test_fence_and_epoch_are_one_change() -> None:
    """Catches: a first attach counted as a change because its fence was followed; one change behind a fence counted
    twice, or the requests that its fence dropped forgotten."""
    first = [entry(K.EPOCH, a=FENCE | 1), entry(K.EPOCH, a=1)]
    assert seen(*first) == {}
    fence = entry(K.EPOCH, a=FENCE | 2, b=1)
    assert seen(*first, fence, entry(K.EPOCH, a=2)) == {"epoch-change": 1, "epoch-change-alive": 1}


def test_what_a_rig_lacks_is_out_of_its_reach() -> None:
    """Catches: a warning on a laptop about device launches."""
    assert not reachable("launch-118", {"cpu"})
    assert reachable("launch-118", {"gpu"})
    assert reachable("preemption", frozenset())
    assert reachable("one of a user's own", frozenset())
