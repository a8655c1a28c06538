"""Faults of leases: a front end without a sign of life for longer than its lease, and for less (design section 3)."""

from __future__ import annotations

import signal
import time

import psutil

from blink_core.abi.enums import ErrorReason, LogKind, RequestState
from hil_rigs.engine_memory import StateSnapshot
from verification.faults.model import Blast, End, Fault, Proof, Site, live_requests, register
from verification.faults.processes import ShortStop, await_stopped, killed, resume

LEASE_US = 2_500_000
FREED_WITHIN_S = 5.0  # after the lease: a step, a look at the clock, and a busy machine
BRIEF_S = 0.5


class LeaseFault(Fault):
    """A fault on an engine whose leases are short."""

    lease_us = LEASE_US
    alone = False
    recovery_s = 60.0

    def strike(self, site: Site, number: signal.Signals) -> None:
        """Signals the front end and notes when."""
        site.rig.send("frontend", number)
        site.hit.notes["struck"] = time.monotonic()

    def not_freed(self, site: Site) -> str | None:
        """Waits until no request of the ring lives; what is wrong with how they ended, None if nothing."""
        deadline = site.hit.notes["struck"] + self.lease_us / 1e6 + FREED_WITHIN_S
        while live := _of_ring(state := site.state(site.hit.log_from), self.ring):
            if time.monotonic() > deadline:
                return f"{live} requests still live {FREED_WITHIN_S:g} s after the lease of {self.lease_us} us"
            site.pump(0.02)
        mine = state.log[state.log["ring"] == self.ring]
        lapses = mine[(mine["kind"] == LogKind.LEASE) & (mine["a"] == 1)]
        lost = mine[(mine["kind"] == LogKind.ERROR) & (mine["a"] == ErrorReason.LEASE_LOST)]
        ended = {(int(e["slot"]), int(e["generation"])) for e in lost}
        missing = [r for r in site.hit.requests if (r.slot, r.generation) not in ended]
        if len(lapses) != 1 or missing:
            return f"{len(lapses)} leases lapsed, {len(missing)} of its requests did not end with LEASE_LOST"
        held = state.config.pages - 2 - int(state.header["free_pages"]) - int(state.header["idle_cached"])
        held -= int(state.header["quarantined"])
        others = int((state.requests["state"] == RequestState.RUNNING).sum())
        return None if others or held == 0 else f"{held} KV pages are still taken when nobody runs"


def _of_ring(state: StateSnapshot, ring: int) -> int:
    return int(state.rings[ring]["live"])


@register
class LeaseFrontEndKill(LeaseFault):
    """SIGKILL of the front end, and nobody comes in its place until its lease has lapsed."""

    name = "lease-frontend-kill"
    summary = "The front end gets SIGKILL, and none is started before its lease has lapsed."
    blast = Blast.RING
    ends = frozenset({End.DISCONNECTED})
    expected = "its requests end with LEASE_LOST and their KV pages are free soon after the lease; other rings go on."

    def inject(self, site: Site) -> None:
        self.strike(site, signal.SIGKILL)

    def proof(self, site: Site) -> Proof:
        return killed(site, "frontend")

    def wrong(self, site: Site) -> str | None:
        return self.not_freed(site)

    def heal(self, site: Site) -> None:
        site.rig.restart("frontend")


@register
class LeaseFrontEndStop(LeaseFault):
    """SIGSTOP of the front end for longer than its lease."""

    name = "lease-frontend-stop"
    summary = "The front end is stopped by SIGSTOP until its lease has lapsed, and continued."
    blast = Blast.RING
    ends = frozenset({End.ERROR})
    says = "lease_lost"
    told_after_heal = True
    expected = (
        "its KV pages are free soon after the lease; once it goes on its streams end with LEASE_LOST, and it serves."
    )

    def inject(self, site: Site) -> None:
        self.strike(site, signal.SIGSTOP)
        site.hit.notes["stopped"] = await_stopped(site.rig.pid("frontend"))

    def proof(self, site: Site) -> Proof:
        still = psutil.Process(site.rig.pid("frontend")).status() == psutil.STATUS_STOPPED
        holds = bool(site.hit.notes["stopped"]) and still
        return Proof(holds, "the front end stands still" if holds else "the front end was not stopped")

    def wrong(self, site: Site) -> str | None:
        return self.not_freed(site)

    def heal(self, site: Site) -> None:
        resume(site, "frontend")


@register
class LeaseFrontEndPause(ShortStop):
    """SIGSTOP of the front end for less than its lease."""

    name = "lease-frontend-pause"
    summary = f"The front end is stopped by SIGSTOP for {BRIEF_S:g} s, a fraction of its lease, and continued."
    blast = Blast.NONE
    ends = frozenset({End.FINISHED})
    expected = "nothing is lost: streams pause and go on, and requests sent meanwhile are served."
    stalls = True  # nobody is waited for: the lease must not lapse
    lease_us = LEASE_US
    alone = False
    recovery_s = 60.0

    def proof(self, site: Site) -> Proof:
        while time.monotonic() < site.hit.notes["struck"] + BRIEF_S:
            site.pump(0.02)
        live = live_requests(site.state(), self.ring)
        return Proof(bool(site.hit.notes["stopped"]) and len(live) > 0, f"{len(live)} of its requests live unread")
