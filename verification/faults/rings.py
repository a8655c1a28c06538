"""Faults on a ring: credits that are kept, cancels in masses, and entries that no front end would write."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from blink_core.abi.dtypes import SLOT, Array
from blink_core.abi.enums import ErrorReason, EventKind, FinishReason, LogKind, Op
from hil_rigs.engine_memory import StateSnapshot
from verification.faults.model import SUITE_RING, Blast, End, Fault, Proof, Site, paused_rows, register
from verification.faults.traffic import Call, HttpLane, await_calls

EFFECT_WITHIN_S = 20.0
BESIDE_TOKENS = 4  # of the request that is served beside paused rows
UNKNOWN_OPS = (0, 3, 7, 15)


Entry = tuple[int, int]  # slot and generation


def wrong_answers(
    log: Array, events: Sequence[Mapping[str, int]], wanted: Sequence[Entry], reason: ErrorReason
) -> str | None:
    """What is wrong with how the ring's entries `wanted` were answered, each of which is to be refused by one ERROR.

    log: LogEntry[n], the engine's log since they were published. events: what the ring got since that is no request's
    of a client: slot, generation, kind and reason each. None if nothing is wrong.
    """
    due = Counter(wanted)
    told = Counter(
        (e["slot"], e["generation"]) for e in events if (e["kind"], e["reason"]) == (EventKind.ERROR, reason)
    )
    others = len(events) - told.total()
    if others or told != due:
        missing, more = (due - told).total(), (told - due).total()
        return (
            f"of {due.total()} entries to be refused {missing} got no ERROR {reason.name}, {more} came in excess, "
            f"and {others} other events"
        )
    rejects = log[(log["ring"] == SUITE_RING) & (log["kind"] == LogKind.REJECT)]
    logged = Counter((int(e["slot"]), int(e["generation"])) for e in rejects if e["a"] == reason)
    if logged != due or len(rejects) != due.total():
        return f"the log has {logged.total()} refusals for {reason.name} of {len(rejects)}, not the {due.total()} told"
    return None


def wrong_cancels(log: Array, live: Sequence[Entry], entries: int) -> str | None:
    """What is wrong with how `entries` cancels of the ring's requests `live` were taken; None if each ended once.

    log: LogEntry[n], the engine's log since they were published.
    """
    mine = log[log["ring"] == SUITE_RING]
    cancels = mine[mine["kind"] == LogKind.CANCEL]
    ended = mine[(mine["kind"] == LogKind.FINISH) & (mine["a"] == FinishReason.CANCELLED)]
    due, found = Counter(live), Counter((int(e["slot"]), int(e["generation"])) for e in cancels if e["a"])
    if len(cancels) != entries or found != due:
        return f"{len(cancels)} of {entries} cancels in the log, {found.total()} found one of {due.total()} requests"
    if Counter((int(e["slot"]), int(e["generation"])) for e in ended) != due:
        return f"{len(ended)} requests ended as cancelled, not the {due.total()} that were"
    return None


class RingFault(Fault):
    """A fault on the suite's own ring, by entries that it publishes; `notes["sq_tail"]` is the queue's tail then."""

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

    def proof(self, site: Site) -> Proof:
        """That the entries were taken. What the engine made of them is for `wrong`."""
        taken, tail = int(self.await_taken(site).rings[SUITE_RING]["sq_next"]), int(site.hit.notes["sq_tail"])
        return Proof(taken >= tail, f"the engine has taken {taken} of {tail} entries of the ring")

    def refused(self, site: Site, wanted: Sequence[Entry], reason: ErrorReason) -> str | None:
        """`wrong_answers`, once the client has as many events as are due, or the deadline is over."""
        deadline = time.monotonic() + EFFECT_WITHIN_S
        while True:
            state = self.await_taken(site)
            site.pump(0.05)  # all events of that boundary are published
            events = site.ring_lane().foreign[site.hit.notes["foreign"] :]
            if len(events) >= len(wanted) or time.monotonic() > deadline:
                return wrong_answers(state.log, events, wanted, reason)


@register
class WithheldCredits(Fault):
    """A front end that reads and gives no credits back."""

    name = "withheld-credits"
    summary = "The suite's front end goes on reading and gives no credits back, until its rows must pause."
    blast = Blast.RING
    ends = frozenset({End.FINISHED})
    expected = (
        "its rows pause; other rings finish, also beside them; with credits again its rows go on where they were."
    )
    ring = SUITE_RING
    alone = False
    recovery_s = 30.0

    def inject(self, site: Site) -> None:
        site.ring_lane().consume = False

    def proof(self, site: Site) -> Proof:
        deadline = time.monotonic() + EFFECT_WITHIN_S
        while True:
            site.pump(0.02)
            state = site.state()
            ring = state.rings[SUITE_RING]
            unread = int(ring["cq_tail"]) - int(ring["cq_head"])
            paused, rows = paused_rows(state, SUITE_RING)
            if 0 < rows == paused or time.monotonic() > deadline:
                said = f"{unread} events of {state.config.cq_entries} without a credit, {paused} of {rows} rows pause"
                return Proof(0 < rows == paused, said)

    def wrong(self, site: Site) -> str | None:
        """Whether another ring is served while the rows pause. The bystanders may have ended before they did."""
        spec = site.victims[0].spec
        short = replace(spec.params, max_tokens=BESIDE_TOKENS, min_tokens=0)
        call = Call("beside the pause", replace(spec, params=short))
        HttpLane(site.rig).start(call)
        if not await_calls([call], site.ring_lane(), time.monotonic() + EFFECT_WITHIN_S):
            return f"a request of another ring had not ended after {EFFECT_WITHIN_S:g} s, while the rows paused"
        if call.end is not End.FINISHED:
            return f"a request of another ring ended as {call.end} while the rows paused: {call.detail}"
        paused, rows = paused_rows(site.state(), SUITE_RING)
        return None if 0 < rows == paused else f"{paused} of {rows} rows pause, without any credits"

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

    def wrong(self, site: Site) -> str | None:
        live = [(request.slot, request.generation) for request in site.hit.requests]
        return wrong_cancels(self.await_taken(site).log, live, self.times * len(site.victims))


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
        site.hit.notes["garbage"] = [(slot, generation) for _, slot, generation in entries]
        site.hit.notes["sq_tail"] = lane.client.publish_entries(entries)

    def wrong(self, site: Site) -> str | None:
        return self.refused(site, site.hit.notes["garbage"], ErrorReason.BAD_ENTRY)


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
        site.hit.notes["foreign"] = len(lane.foreign)
        site.hit.notes["re-read"] = self._re_read(site)
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

    @staticmethod
    def _re_read(site: Site) -> int:
        """Entries that the engine has found torn and read again; inside a hold."""
        return int(site.rig.memory.snapshot(2**63).rings[SUITE_RING]["torn"])

    def wrong(self, site: Site) -> str | None:
        if (why := self.refused(site, site.hit.notes["torn"], ErrorReason.CHECKSUM)) is not None:
            return why
        again = int(site.state().rings[SUITE_RING]["torn"]) - int(site.hit.notes["re-read"])
        return None if again >= self.count else f"{again} of {self.count} torn descriptors were read again"


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

    def wrong(self, site: Site) -> str | None:
        counted = int(self.await_taken(site).rings[SUITE_RING]["stale_cancels"]) - int(site.hit.notes["stale"])
        wanted = self.times * len(site.victims)
        return None if counted == wanted else f"{counted} of {wanted} stale cancels were counted"
