"""The situations that are known by name: what each is, where it is seen, and what a rig must have to reach it.

A profile of `required/<rig>.yaml` lists those it expects. Nothing here is declared by a test: `observe.LogObserver`
reads them from the event logs of all engines that a run starts, and the few that a log cannot show are read from raw
memory, captured logits or answers by the test that compares those.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class Situation:
    """One situation. source: where it is seen. needs: capabilities of a rig that can reach it at all."""

    title: str
    source: str = "event log"
    needs: tuple[str, ...] = ()


_CAPTURE = "event log and captured tokens"
_RAW = "raw memory"

SITUATIONS: Final = MappingProxyType(
    {
        # rings
        "ring-wrap": Situation("a submission queue wrapped around"),
        "cq-wrap": Situation("a completion queue wrapped around", _RAW),
        "slot-reuse": Situation("a slot had a further owner in the same epoch"),
        "epoch-change": Situation("a front end attached anew"),
        "epoch-change-alive": Situation("a front end attached anew while requests of its ring lived"),
        "lease-lapse": Situation("a front end's lease lapsed and its requests ended"),
        "lease-renewed": Situation("a lapsed lease was renewed"),
        "credits-withheld": Situation("a running row was left out of a step for want of credits"),
        "mask-read": Situation("a grammar mask was taken in"),
        "mask-late": Situation("a masked row was left out of a step for want of its mask"),
        "refused": Situation("a request was refused"),
        "torn-entry": Situation("an entry was refused at its visibility deadline"),
        "stale-cancel": Situation("a cancel of a request that had ended"),
        "deadline-passed": Situation("a request's own deadline passed"),
        "several-rings": Situation("rows of several rings in one step"),
        # ends
        "cancel": Situation("a cancel ended a request"),
        "cancel-waiting": Situation("a cancel ended a request that did not run"),
        "cancel-in-flight": Situation("a cancel ended a request while a step with its row was running"),
        "cancel-at-eos-step": Situation("a cancel overtook the step that sampled its end-of-sequence id", _CAPTURE),
        "end-of-sequence": Situation("a request ended by an end-of-sequence id"),
        "eos-on-page-boundary": Situation("a request ended by end-of-sequence with its last page full"),
        "stop-token": Situation("a request ended by a stop id"),
        "context-full": Situation("a request ended at the longest sequence"),
        "stop-string-across-tokens": Situation(
            "a stop string began in one token and ended in another", "deltas of a stream"
        ),
        # scheduling
        "batch-full": Situation("a step with as many rows as the largest batch"),
        "batch-one-below": Situation("a step with one row less than the largest batch"),
        "chunked-prefill": Situation("a prompt was computed in several steps"),
        "chunk-inside-page": Situation("a chunk of a prompt ended inside a page"),
        "decode-with-prefill": Situation("decodes and a prompt's chunk in one step"),
        "preemption": Situation("a request was preempted"),
        "preempted-twice": Situation("a request was preempted more than once"),
        "resume": Situation("a preempted request was admitted again"),
        "reservation": Situation("a head that did not fit took the reservation"),
        "reservation-enforced": Situation("running requests gave way to a reservation that was due"),
        "launch-118": Situation(
            "a scheduler graph reached its last device launch and started itself again", needs=("gpu",)
        ),
        # pages
        "pool-exhausted": Situation("a request gave way because no page was left"),
        "page-reuse": Situation("a page had a further owner"),
        "quarantine": Situation("a page was freed while a step ran, and released after it"),
        "prefix-hit": Situation("a prompt's beginning was found in the prefix cache"),
        "prefix-hit-before-boundary": Situation("a hit of a prompt one token short of whole pages"),
        "prefix-hit-on-boundary": Situation("a hit of a prompt of whole pages"),
        "prefix-hit-past-boundary": Situation("a hit of a prompt one token longer than whole pages"),
        "prefix-hit-on-resume": Situation("a preempted request found its own pages again"),
        "prefix-eviction": Situation("a cached page was evicted"),
        "prefix-twin": Situation("a page gave way to an equal one that was cached meanwhile"),
        # content, seen by the tests that compare it
        "kv-after-preemption": Situation("KV of a resumed request was compared", _RAW),
        "kv-after-prefix-hit": Situation("KV of a request with shared pages was compared", _RAW),
        "kv-after-odd-chunk": Situation("KV of a request with a chunk that ended inside a page was compared", _RAW),
        "kv-after-cancel": Situation("KV of a request beside which another was cancelled was compared", _RAW),
        "beyond-window": Situation("a compared sequence was longer than the sliding window", _RAW),
        "beyond-rope-maximum": Situation(
            "a compared sequence was longer than its RoPE scaling's original length", _RAW
        ),
    }
)
"""Name -> situation."""


def reachable(name: str, capabilities: frozenset[str] | set[str]) -> bool:
    """Whether a rig with these capabilities can reach a registered situation; one that is not registered: yes."""
    known = SITUATIONS.get(name)
    return known is None or set(known.needs) <= set(capabilities)
