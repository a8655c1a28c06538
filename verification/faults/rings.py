"""Faults on a ring: credits that are kept, cancels in masses, and entries that no front end would write."""

from __future__ import annotations

import time

import numpy as np

from blink_core.abi.dtypes import SLOT
from blink_core.abi.enums import ErrorReason, EventKind, FinishReason, LogKind, Op
from hil_rigs.engine_memory import StateSnapshot
from verification.faults.model import SUITE_RING, Blast, End, Fault, Proof, Site, register

EFFECT_WITHIN_S = 20.0
UNKNOWN_OPS = (0, 3, 7, 15)


class RingFault(Fault):
    """A fault on the suite's own ring."""

    ring = SUITE_RING
    alone = False
    recovery_s = 30.0

    def await_taken(self, site: Site) -> StateSnapshot:
        """The state once the engine has taken every entry that was published by the injection."""
        deadline = time.monotonic() + EFFECT_WITHIN_S
        while True:
            state = site.state(site.hit.log_from)
            taken = int(state.rings[SUITE_RING]["sq_next"])
            if taken >= site.hit.notes["sq_tail"] or time.monotonic() > deadline:
                return state
            site.pump(0.02)


@register
class WithheldCredits(RingFault):
    """A front end that reads and gives no credits back."""

    name = "withheld-credits"
    summary = "The suite's front end goes on reading and gives no credits back, until its rows must pause."
    blast = Blast.RING
    ends = frozenset({End.FINISHED})
    expected = "its rows pause; other rings finish; with credits again its rows go on where they were."

    def inject(self, site: Site) -> None:
        site.ring_lane().consume = False

    def proof(self, site: Site) -> Proof:
        deadline = time.monotonic() + EFFECT_WITHIN_S
        while True:
            site.pump(0.02)
            state = site.state()
            ring = state.rings[SUITE_RING]
            unread = int(ring["cq_tail"]) - int(ring["cq_head"])
            if ring["live"] and unread + 1 + state.config.slots > state.config.cq_entries:
                return Proof(True, f"{unread} events without a credit, {int(ring['live'])} requests paused")
            if time.monotonic() > deadline:
                return Proof(False, f"{unread} events without a credit of {state.config.cq_entries}: nobody paused")

    def heal(self, site: Site) -> None:
        lane = site.ring_lane()
        lane.consume = True
        lane.client.release_credits()


@register
class CancelStorm(RingFault):
    """Every victim cancelled many times over."""

    name = "cancel-storm"
    summary = "Each victim is cancelled 25 times over in one burst of entries."
    blast = Blast.REQUESTS
    ends = frozenset({End.CANCELLED})
    expected = "each victim ends once, as cancelled; nobody else notices."
    times = 25

    def inject(self, site: Site) -> None:
        entries = [(Op.CANCEL, c.handle.slot, c.handle.generation) for c in site.victims if c.handle] * self.times
        site.hit.notes["sq_tail"] = site.ring_lane().client.publish_entries(entries)

    def proof(self, site: Site) -> Proof:
        state = self.await_taken(site)
        mine = state.log[(state.log["ring"] == SUITE_RING)]
        cancels = mine[mine["kind"] == LogKind.CANCEL]
        ended = mine[(mine["kind"] == LogKind.FINISH) & (mine["a"] == FinishReason.CANCELLED)]
        wanted = self.times * len(site.victims)
        live = int(cancels["a"].sum())
        holds = len(cancels) == wanted and live == len(ended) == len(site.victims)
        return Proof(holds, f"{len(cancels)} of {wanted} cancels were taken, {live} of them found a live request")


@register
class GarbageEntries(RingFault):
    """Submission entries with operations and slots that do not exist."""

    name = "garbage-entries"
    summary = "Twenty submission entries with unknown operations, slots and generations."
    blast = Blast.NONE
    ends = frozenset({End.FINISHED})
    expected = "each is refused by one ERROR BAD_ENTRY; nobody else notices."
    count = 20

    def inject(self, site: Site) -> None:
        lane, rng = site.ring_lane(), site.rng
        used = {call.handle.generation for call in site.victims if call.handle}
        most = lane.client.config.slots * 2
        entries: list[tuple[int, int, int]] = []
        while len(entries) < self.count:
            generation = rng.randrange(1, 1 << 16)
            if generation not in used:
                entries.append((rng.choice(UNKNOWN_OPS), rng.randrange(most), generation))
        site.hit.notes["foreign"] = len(lane.foreign)
        site.hit.notes["sq_tail"] = lane.client.publish_entries(entries)

    def proof(self, site: Site) -> Proof:
        state = self.await_taken(site)
        site.pump(0.05)
        refused = state.log[(state.log["ring"] == SUITE_RING) & (state.log["kind"] == LogKind.REJECT)]
        events = site.ring_lane().foreign[site.hit.notes["foreign"] :]
        told = [e for e in events if (e["kind"], e["reason"]) == (EventKind.ERROR, ErrorReason.BAD_ENTRY)]
        holds = len(refused) == len(told) == len(events) == self.count
        return Proof(holds, f"{len(refused)} of {self.count} entries were refused, {len(told)} with ERROR BAD_ENTRY")


@register
class TornDescriptors(RingFault):
    """Descriptors whose checksum never matches."""

    name = "torn-descriptors"
    summary = "Two submissions whose descriptors never agree with their checksums."
    blast = Blast.NONE
    ends = frozenset({End.FINISHED})
    expected = "each is re-read until the visibility deadline and refused by one ERROR CHECKSUM; nobody else notices."
    count = 2

    def inject(self, site: Site) -> None:
        lane = site.ring_lane()
        prompt = np.array([1, 2, 3], "<i4")
        torn = []
        for _ in range(self.count):
            slot = np.zeros(1, SLOT)
            slot["prompt_len"], slot["max_tokens"], slot["top_p"] = prompt.size, 4, 1.0
            slot["checksum"] = site.rng.getrandbits(64)
            handle = lane.client.submit_slot(slot, prompt, seal=False)
            torn.append((handle.slot, handle.generation))
        site.hit.notes["torn"] = torn
        site.hit.notes["sq_tail"] = handle.sq_index + 1

    def proof(self, site: Site) -> Proof:
        state = self.await_taken(site)
        site.pump(0.05)
        wanted = [
            (slot, generation, int(EventKind.ERROR), int(ErrorReason.CHECKSUM))
            for slot, generation in site.hit.notes["torn"]
        ]
        found = [(e["slot"], e["generation"], e["kind"], e["reason"]) for e in site.ring_lane().foreign]
        told = [entry for entry in found if entry in wanted]
        again = int(state.rings[SUITE_RING]["torn"])
        return Proof(
            sorted(told) == sorted(wanted) and again > 0, f"{again} re-reads, {len(told)} of {self.count} refused"
        )


@register
class StaleCancels(RingFault):
    """Cancels that name a former owner of a live slot."""

    name = "stale-cancels"
    summary = "Cancels of the victims' slots with the generations of former owners."
    blast = Blast.NONE
    ends = frozenset({End.FINISHED})
    expected = "they are counted and change nothing."
    times = 10

    def inject(self, site: Site) -> None:
        handles = [call.handle for call in site.victims if call.handle]
        entries = [(Op.CANCEL, h.slot, max(0, h.generation - 1)) for h in handles] * self.times
        site.hit.notes["stale"] = int(site.rig.memory.snapshot(2**63).rings[SUITE_RING]["stale_cancels"])
        site.hit.notes["sq_tail"] = site.ring_lane().client.publish_entries(entries)

    def proof(self, site: Site) -> Proof:
        state = self.await_taken(site)
        counted = int(state.rings[SUITE_RING]["stale_cancels"]) - int(site.hit.notes["stale"])
        wanted = self.times * len(site.victims)
        return Proof(counted == wanted, f"{counted} of {wanted} stale cancels were counted")
