"""Faults of processes: the engine or the front end killed, or stopped for a while."""

from __future__ import annotations

import math
import signal
import time
from typing import ClassVar

import psutil

from blink_core.frontend.epoch_word import number_of
from hil_rigs.description import RigDescription
from hil_rigs.local import RigFailure
from verification.faults.model import HTTP_RING, Blast, End, Fault, Proof, Site, live_requests, paused_rows, register

STOPPED_WITHIN_S = 5.0
PAUSED_WITHIN_S = 5.0
GOES_ON_WITHIN_S = 10.0  # a next token of every victim, on a machine that is busy with other things too
SAFE = 0.85  # of a limit: the last sign of life may lie a tenth of it, and a poll, before the stop


def await_stopped(pid: int) -> bool:
    """Whether a process that was sent SIGSTOP stands still, waiting up to `STOPPED_WITHIN_S` for it."""
    deadline = time.monotonic() + STOPPED_WITHIN_S
    while time.monotonic() < deadline:
        if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
            return True
        time.sleep(0.005)
    return False


def killed(site: Site, process: str) -> Proof:
    """That a process has ended by SIGKILL, waiting up to `STOPPED_WITHIN_S`: it dies a moment after the signal."""
    site.rig.wait(STOPPED_WITHIN_S)
    ended = site.rig.exited(process)
    return Proof(ended is not None and "status -9" in ended, (ended or f"{process} still runs").splitlines()[0])


def resume(site: Site, process: str) -> None:
    """SIGCONT, unless the process has ended."""
    if site.rig.exited(process) is None:
        site.rig.send(process, signal.SIGCONT)


class ShortStop(Fault):
    """SIGSTOP and SIGCONT of one process, before anybody takes it for lost: by default a front end within its lease."""

    process: ClassVar[str] = "frontend"

    def limit_s(self, site: Site) -> float:
        """Seconds after which the process is given up."""
        lease_us = site.rig.descriptor.config.lease_us
        return lease_us / 1e6 if lease_us else math.inf

    def inject(self, site: Site) -> None:
        site.hit.notes["limit"] = self.limit_s(site)
        site.hit.notes["struck"] = time.monotonic()
        site.rig.send(self.process, signal.SIGSTOP)
        site.hit.notes["stopped"] = await_stopped(site.rig.pid(self.process))

    def heal(self, site: Site) -> None:
        resume(site, self.process)
        if "struck" in site.hit.notes:
            site.hit.notes.setdefault("lasted", time.monotonic() - site.hit.notes["struck"])

    def void(self, site: Site) -> str | None:
        return too_long(site.hit.notes.get("lasted"), site.hit.notes["limit"])


def too_long(lasted: float | None, limit: float) -> str | None:
    """Why a stop of so many seconds is not one within the limit; None if it is. lasted: None if it was not measured."""
    if lasted is None:
        return "how long the process stood still was not measured"
    if lasted >= SAFE * limit:
        return f"the process stood still for {lasted:.2f} s, too near to the {limit:g} s after which it is given up"
    return None


def _epoch(site: Site) -> int:
    return number_of(int(site.rig.memory.snapshot(2**63).rings[HTTP_RING]["epoch"]))


@register
class EngineKill(Fault):
    """SIGKILL of the engine."""

    name = "engine-kill"
    summary = "The engine process gets SIGKILL while it serves."
    blast = Blast.ENGINE
    ends = frozenset({End.ERROR})
    expected = "every HTTP client is told by an error, nobody hangs; a rig that is started again serves."
    told_within_s = 1.0
    recovery_s = 60.0
    stalls = True

    def inject(self, site: Site) -> None:
        site.rig.send("engine", signal.SIGKILL)

    def proof(self, site: Site) -> Proof:
        return killed(site, "engine")

    def heal(self, site: Site) -> None:
        site.rig.stop()
        site.rig.start()
        if site.lane is not None:
            site.lane = type(site.lane)(site.rig.ring())


@register
class EngineStop(ShortStop):
    """SIGSTOP and SIGCONT of the engine's host process.

    What that does is the rig's to say (`when_host_stops` of its description). Where the scheduler is a thread of that
    process, all stands still, for less than the heartbeat limit. Where it runs on a device nothing may be noticed:
    bystanders finish while the process is stopped, however long that takes.
    """

    name = "engine-stop"
    summary = "The engine's host process is stopped by SIGSTOP and continued."
    blast = Blast.NONE
    ends = frozenset({End.FINISHED})
    expected = (
        "a scheduler within the process stands still for less than the front end's heartbeat limit, and streams and "
        "requests sent meanwhile go on after it; one on a device goes on all the while, as if nothing had been."
    )
    recovery_s = 30.0
    stalls = True
    process = "engine"

    def stalls_on(self, rig: RigDescription) -> bool:
        return rig.when_host_stops == "stands-still"

    def limit_s(self, site: Site) -> float:
        """The heartbeat limit; none where the heart goes on."""
        return site.rig.options.heartbeat_limit_s if self.stalls_on(site.rig.description) else math.inf

    def inject(self, site: Site) -> None:
        super().inject(site)
        site.hit.notes["heartbeat"] = site.rig.memory.status("heartbeat")
        site.hit.notes["steps"] = site.rig.memory.status("steps")
        site.hit.notes["delivered"] = {call.name: len(call.output) for call in site.victims}

    def proof(self, site: Site) -> Proof:
        stopped = bool(site.hit.notes["stopped"])
        if not self.stalls_on(site.rig.description):
            still = psutil.Process(site.rig.pid(self.process)).status() == psutil.STATUS_STOPPED
            return Proof(stopped and still, f"the engine process was {'' if stopped and still else 'not '}stopped")
        beat = site.rig.memory.status("heartbeat")
        stood = stopped and beat == site.hit.notes["heartbeat"]
        return Proof(stood, f"heartbeat stood at {beat}" if stood else "the engine's heart beat while it was stopped")

    def wrong(self, site: Site) -> str | None:
        """Where the engine must go on: a heart, steps or streams that stand still although the process is stopped."""
        if self.stalls_on(site.rig.description):
            return None
        deadline = time.monotonic() + GOES_ON_WITHIN_S
        while (standing := self._standing(site)) and time.monotonic() < deadline:
            site.pump(0.02)
            time.sleep(0.005)
        if standing:
            return f"{standing} stood still for {GOES_ON_WITHIN_S:g} s while the engine's host process was stopped"
        return None

    @staticmethod
    def _standing(site: Site) -> str:
        """What has not moved since the injection; empty if all has. Under a test's own load, which may be waiting for
        its test, the heart alone is looked at."""
        notes, memory = site.hit.notes, site.rig.memory
        looked_at = ("heartbeat", "steps") if site.victims else ("heartbeat",)
        standing = [name for name in looked_at if memory.status(name) == notes[name]]
        for call in site.victims:
            if call.end is End.OPEN and len(call.output) <= notes["delivered"].get(call.name, 0):
                standing.append(f"the stream of {call.name}")
        return ", ".join(standing)


@register
class FrontEndKill(Fault):
    """SIGKILL of the front end."""

    name = "frontend-kill"
    summary = "The front end gets SIGKILL with streams open, and is started again."
    blast = Blast.RING
    ends = frozenset({End.DISCONNECTED})
    expected = "its clients lose their connections; other rings go on; the next front end's epoch frees all KV pages."
    recovery_s = 60.0

    def inject(self, site: Site) -> None:
        site.hit.notes["epoch"] = _epoch(site)
        site.rig.send("frontend", signal.SIGKILL)

    def proof(self, site: Site) -> Proof:
        return killed(site, "frontend")

    def heal(self, site: Site) -> None:
        site.rig.restart("frontend")
        before, now = site.hit.notes.get("epoch"), _epoch(site)
        if before is not None and now <= before:
            raise RigFailure(f"the front end that came back has epoch {now}, its predecessor had {before}")


@register
class FrontEndStop(ShortStop):
    """SIGSTOP and SIGCONT of the front end."""

    name = "frontend-stop"
    summary = (
        "The front end is stopped by SIGSTOP, in a scenario until its rows have used up their credits, and continued."
    )
    blast = Blast.RING
    ends = frozenset({End.FINISHED})
    expected = "only its own rows pause, for want of credits; other rings finish; its streams go on afterwards."
    recovery_s = 30.0

    def proof(self, site: Site) -> Proof:
        deadline = time.monotonic() + PAUSED_WITHIN_S
        while True:
            state = site.state()
            live = live_requests(state, self.ring)
            paused, rows = paused_rows(state, self.ring)
            # Under a test's own load they may be too short, or the ring too long, for their credits to run out.
            if 0 < rows == paused or not live or site.lane is None or time.monotonic() > deadline:
                break
            site.pump(0.02)
        still = psutil.Process(site.rig.pid("frontend")).status() == psutil.STATUS_STOPPED
        holds = bool(site.hit.notes["stopped"]) and still and len(live) > 0
        holds = holds and (site.lane is None or 0 < rows == paused)
        said = f"{len(live)} of its requests are live and unread while it is stopped"
        return Proof(holds, f"{said}, {paused} of its {rows} rows pause")
