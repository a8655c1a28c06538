"""The named scopes. The sizes that a scope does not name are those of `Scope.engine`."""

from __future__ import annotations

from blink_core.abi.enums import Admission
from verification.explore.scope import Attach, Cancel, Host, Outcome, Request, Scope, Submit

_NIGHTLY = ("nightly", "full")
_FULL = ("full",)
# What happens wherever two requests want more than the pool holds, and either may be cancelled.
_PRESSURE = (
    "preemption", "pool exhausted", "page reuse", "quarantine", "cancel in step", "cancel while waiting",
    "stale cancel", "length reached", "resumed after preemption", "reservation", "decode and prefill in a step",
)  # fmt: skip
_EPOCH = ("epoch change in step", "epoch acknowledged late", "front end died at work")
_STALL = ("credit stall", "paused for long")

TWO_REQUESTS = Scope(
    name="one-ring-two-requests-three-pages",
    about="Both need most of the pool in the end. Either may be cancelled at any time, and end early.",
    config={"pages": 5, "cq_entries": 8},
    requests=(Request(3, 3, slot=0), Request(2, 3, slot=1)),
    programs=((Submit(0), Cancel(0), Submit(1), Cancel(0), Cancel(1)),),
    outcomes=Outcome.OK | Outcome.EOS,
    claims=(*_PRESSURE, *_STALL, "end of sequence", "submission queue wraps"),
)

TWO_RINGS = Scope(
    name="two-rings-two-requests-four-pages",
    about="Each ring has one request. Rings take turns, compete for pages, and may withhold credits for any time.",
    config={"pages": 6, "slots": 1, "cq_entries": 4, "sq_entries": 2, "max_len": 7},
    requests=(Request(3, 4, ring=0), Request(2, 4, ring=1)),
    programs=((Submit(0), Cancel(0)), (Submit(1),)),
    claims=(*_PRESSURE[:-1], *_STALL, "paused row gave way", "rings in a step", "completion queue wraps"),
)

CANCEL_AND_PREEMPTION = Scope(
    name="one-ring-three-requests-cancel-and-preemption",
    about="A pool too small for two, a slot that is reused, a cancel for each, and rows whose logits are NaN.",
    config={"pages": 5, "cq_entries": 8, "sq_entries": 8},
    requests=(Request(3, 3, slot=0), Request(2, 3, slot=1), Request(1, 2, slot=0)),
    programs=((Submit(0), Cancel(0), Submit(1), Cancel(1), Submit(2), Cancel(1), Cancel(2)),),
    outcomes=Outcome.OK | Outcome.NAN_ROW,
    claims=(*_PRESSURE, *_STALL, "slot reuse", "NaN row", "completion queue wraps"),
)

EPOCH = Scope(
    name="epoch-change-in-step",
    about="The front end dies at any word; its successor attaches, word by word, and submits in slots of its own.",
    config={"pages": 5, "cq_entries": 8},
    requests=(Request(3, 3, slot=0), Request(2, 2, slot=1), Request(2, 2, slot=0), Request(3, 2, slot=1)),
    programs=((Submit(0), Cancel(0), Submit(1), Cancel(1), Attach(2), Submit(2), Cancel(2), Submit(3)),),
    outcomes=Outcome.OK | Outcome.EOS,
    claims=(*_PRESSURE, *_EPOCH),
)

PREFIX = Scope(
    name="prefix-cache",
    about="Two prompts that begin alike, and a third that needs the pages of both.",
    config={"pages": 6, "cq_entries": 8, "prefix_cache": 1, "token_budget": 4, "max_len": 7},
    requests=(Request((2, 3, 4, 5, 6), 2, slot=0), Request((2, 3, 4, 6), 2, slot=1), Request((9, 8, 7, 6), 2, slot=0)),
    programs=((Submit(0), Cancel(0), Submit(1), Cancel(1), Submit(2)),),
    outcomes=Outcome.OK | Outcome.NAN_ROW,
    claims=(*_PRESSURE, *_STALL, "prefix hit", "page shared", "eviction", "NaN row", "slot reuse"),
)

TWINS = Scope(
    name="prefix-cache-small-pages",
    about="Pages of one token, computed twice at once, found, shared and evicted from chains of several.",
    config={"pages": 8, "cq_entries": 8, "prefix_cache": 1, "token_budget": 6, "page_size": 1},
    requests=(Request((2, 3, 4), 2, slot=0), Request((2, 3, 5), 2, slot=1), Request((9, 8, 7), 3, slot=0)),
    programs=((Submit(0), Submit(1), Cancel(1), Submit(2)),),
    claims=(*_PRESSURE, *_STALL, "prefix hit", "page shared", "eviction", "slot reuse", "completion queue wraps"),
)

CREDITS = Scope(
    name="entry-held-for-credits",
    about="A completion queue of two; the slot is reused before credits are returned, and old cancels come late.",
    config={"pages": 5, "slots": 1, "max_rows": 1, "cq_entries": 2},
    requests=(Request(3, 1), Request(2, 2), Request(1, 1)),
    programs=((Submit(0), Cancel(0), Submit(1), Cancel(0), Cancel(1), Submit(2), Cancel(1), Cancel(2)),),
    outcomes=Outcome.OK | Outcome.EOS | Outcome.NAN_ROW,
    claims=("entry held for credits", "credit stall", "slot reuse", "completion queue wraps", "stale cancel"),
)

TORN = Scope(
    name="words-in-any-order",
    about="Payload, lines of the descriptor and entry become visible in any order, in a reused slot too, or too late.",
    config={"pages": 5, "cq_entries": 8, "visibility_us": 2},
    requests=(Request(3, 2, slot=0), Request(2, 1, slot=1), Request(1, 1, slot=0)),
    programs=((Submit(0), Submit(1), Submit(2)),),
    unordered=True,
    ticks=3,
    claims=("torn entry", "torn entry accepted", "torn entry refused", "slot reuse", "pool exhausted", "page reuse"),
)

LEASE = Scope(
    name="lease-and-deadline",
    about="The front end may die for good, or be slow; the clock goes on for ever.",
    config={"pages": 5, "cq_entries": 8, "lease_us": 2},
    requests=(Request(3, 2, slot=0), Request(2, 3, slot=1, deadline_us=3)),
    programs=((Submit(0), Submit(1), Cancel(0)),),
    ticks=-1,
    may_die=(0,),
    claims=("lease lost", "deadline passed", "front end died at work", "quarantine", "cancel in step", "page reuse"),
)

CLASSES = Scope(
    name="classes-and-reserve",
    about="Requests of two classes, admitted only when the pool holds their longest end.",
    config={"pages": 6, "slots": 3, "sq_entries": 8, "cq_entries": 8, "admission": int(Admission.RESERVE)},
    requests=(Request(3, 2, slot=0), Request(2, 3, slot=1, priority=1), Request(2, 2, slot=2)),
    programs=((Submit(0), Submit(1), Cancel(0), Submit(2)),),
    claims=(*_STALL, "urgent class overtook", "rows exhausted", "chunked prefill", "cancel in step", "quarantine"),
)

STOP = Scope(
    name="stop",
    about="The host stops the engine at any moment; steps may fail.",
    config={"pages": 5, "cq_entries": 8},
    requests=(Request(3, 2, slot=0), Request(2, 2, slot=1), Request(1, 1, slot=0)),
    programs=((Submit(0), Submit(1), Cancel(1), Submit(2)),),
    host=Host.STOP,
    outcomes=Outcome.OK | Outcome.STEP_FAILED,
    claims=("stopped", "step failed", "cancel in step", "quarantine", "slot reuse", *_STALL),
)

DRAIN = Scope(
    name="drain",
    about="The host drains the engine at any moment; requests have up to five pages.",
    config={"pages": 8, "cq_entries": 8, "page_size": 1},
    requests=(Request(3, 3, slot=0), Request(2, 2, slot=1), Request(1, 1, slot=0)),
    programs=((Submit(0), Submit(1), Cancel(1), Submit(2)),),
    host=Host.DRAIN,
    claims=("drained", "cancel in step", "quarantine", "slot reuse", *_STALL),
)

DRAIN_THEN_STOP = Scope(
    name="drain-then-stop",
    about="The host drains the engine at any moment and stops it at any later one, drained or not; steps may fail.",
    config={"pages": 5, "cq_entries": 8},
    requests=(Request(3, 2, slot=0), Request(2, 2, slot=1), Request(1, 1, slot=0)),
    programs=((Submit(0), Submit(1), Cancel(1), Submit(2)),),
    host=Host.DRAIN_THEN_STOP,
    outcomes=Outcome.OK | Outcome.STEP_FAILED,
    claims=("drained", "stopped while draining", "stopped after draining", "step failed", "cancel in step", *_STALL),
)

SUPERSEDED = Scope(
    name="superseded-front-end",
    about="A successor attaches while the front end lives, reads and writes, or after its death at any word.",
    config={"pages": 5, "cq_entries": 8},
    requests=(Request(3, 2, slot=0), Request(2, 2, slot=1), Request(2, 3, slot=0)),
    programs=((Submit(0), Cancel(0), Submit(1), Attach(2, beside=True), Submit(2), Cancel(2)),),
    claims=(
        "two front ends at work",
        "entry written beside an attach",
        "page reuse",
        "quarantine",
        "cancel in step",
        "length reached",
        *_EPOCH,
    ),
)

RIVALS = Scope(
    name="superseded-during-attach",
    about="The front end dies at any word; while its successor attaches another one does, word by word beside it.",
    config={"pages": 5, "cq_entries": 8},
    requests=(Request(3, 2), Request(2, 2), Request(1, 3)),
    programs=((Submit(0), Attach(2), Submit(1), Cancel(1), Attach(3, during=True), Submit(2)),),
    claims=(
        "two attaches at once",
        "earlier attach has the last fence",
        "entry written beside an attach",
        "page reuse",
        "quarantine",
        "cancel in step",
        "length reached",
        *_EPOCH,
    ),
)

EPOCH_BESIDE = Scope(
    name="epoch-change-beside-another-ring",
    about="One ring's front end dies at any word, twice, while the other's request goes on.",
    config={"pages": 6, "slots": 1, "cq_entries": 4, "sq_entries": 2},
    requests=(Request(3, 3, ring=0), Request(2, 2, ring=0), Request(2, 3, ring=1)),
    programs=((Submit(0), Attach(2), Submit(1), Attach(3)), (Submit(2), Cancel(2))),
    claims=(*_PRESSURE, *_EPOCH, "rings in a step"),
    profiles=_NIGHTLY,
)

LEASE_TWO_RINGS = Scope(
    name="lease-of-two-rings",
    about="One front end may die for good, the other may be slow; the clock goes on for ever.",
    config={"pages": 6, "slots": 1, "cq_entries": 4, "sq_entries": 2, "lease_us": 2},
    requests=(Request(3, 2, ring=0), Request(2, 3, ring=1, deadline_us=3)),
    programs=((Submit(0),), (Submit(1),)),
    ticks=-1,
    may_die=(0,),
    claims=("lease lost", "deadline passed", "front end died at work", "quarantine", "rings in a step", "page reuse"),
    profiles=_NIGHTLY,
)

TWO_RINGS_CANCELS = Scope(
    name="two-rings-two-requests-four-pages-cancels",
    about="As two-rings-two-requests-four-pages, with a cancel and an early end for both.",
    config=TWO_RINGS.config,
    requests=TWO_RINGS.requests,
    programs=((Submit(0), Cancel(0)), (Submit(1), Cancel(1))),
    outcomes=Outcome.OK | Outcome.EOS,
    claims=(*TWO_RINGS.claims, "decode and prefill in a step", "end of sequence"),
    profiles=_NIGHTLY,
)

FOUR_REQUESTS = Scope(
    name="two-rings-four-requests-four-pages",
    about="Two requests on each ring, for two rows and four pages.",
    config={"pages": 6, "cq_entries": 8},
    requests=(
        Request(3, 3, ring=0),
        Request(2, 3, ring=1),
        Request(2, 1, ring=0, slot=1),
        Request(1, 2, ring=1, slot=1),
    ),
    programs=((Submit(0), Submit(2), Cancel(0)), (Submit(1), Submit(3))),
    consume_all=True,
    claims=(*_PRESSURE, "rings in a step", "rows exhausted"),
    profiles=_FULL,
)

PREFIX_TWO_RINGS = Scope(
    name="prefix-cache-of-two-rings",
    about="Equal beginnings on both rings, so that cancels and epochs of one meet pages that the other holds.",
    config={
        "pages": 6,
        "slots": 1,
        "cq_entries": 4,
        "sq_entries": 2,
        "prefix_cache": 1,
        "token_budget": 4,
        "max_len": 7,
    },
    requests=(Request((2, 3, 4, 5, 6), 2, ring=0), Request((2, 3, 4, 6), 2, ring=0), Request((2, 3, 4, 5), 2, ring=1)),
    programs=((Submit(0), Cancel(0), Attach(2), Submit(1)), (Submit(2), Cancel(2))),
    outcomes=Outcome.OK | Outcome.NAN_ROW,
    claims=(*_EPOCH, "prefix hit", "page shared", "NaN row", "quarantine", "cancel in step", "rings in a step"),
    profiles=_FULL,
)

SCOPES: tuple[Scope, ...] = (
    TWO_REQUESTS,
    TWO_RINGS,
    CANCEL_AND_PREEMPTION,
    EPOCH,
    PREFIX,
    TWINS,
    CREDITS,
    TORN,
    LEASE,
    CLASSES,
    STOP,
    DRAIN,
    DRAIN_THEN_STOP,
    SUPERSEDED,
    RIVALS,
    EPOCH_BESIDE,
    LEASE_TWO_RINGS,
    TWO_RINGS_CANCELS,
    FOUR_REQUESTS,
    PREFIX_TWO_RINGS,
)


def named(name: str) -> Scope:
    """Raises KeyError with the names there are."""
    for scope in SCOPES:
        if scope.name == name:
            return scope
    raise KeyError(f"no scope {name!r}; there are {', '.join(scope.name for scope in SCOPES)}")


def of_profile(profile: str) -> tuple[Scope, ...]:
    """The scopes that a profile of the suite must finish: smoke, nightly or full."""
    return tuple(scope for scope in SCOPES if profile in scope.profiles)
