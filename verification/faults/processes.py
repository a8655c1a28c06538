"""Faults of processes: the engine or the front end killed, or stopped for a while."""

from __future__ import annotations

import signal
import time

import psutil

from hil_rigs.local import RigFailure
from verification.faults.model import HTTP_RING, Blast, End, Fault, Proof, Site, live_requests, register

STOPPED_WITHIN_S = 5.0


def await_stopped(pid: int) -> bool:
    """Whether a process that was sent SIGSTOP stands still, waiting up to `STOPPED_WITHIN_S` for it."""
    deadline = time.monotonic() + STOPPED_WITHIN_S
    while time.monotonic() < deadline:
        if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
            return True
        time.sleep(0.005)
    return False


def resume(site: Site, process: str) -> None:
    """SIGCONT, unless the process has ended."""
    if site.rig.exited(process) is None:
        site.rig.send(process, signal.SIGCONT)


def _epoch(site: Site) -> int:
    return int(site.rig.memory.snapshot(2**63).rings[HTTP_RING]["epoch"])


@register
class EngineKill(Fault):
    """SIGKILL of the engine."""

    name = "engine-kill"
    summary = "The engine process gets SIGKILL while it serves."
    blast = Blast.ENGINE
    ends = frozenset({End.ERROR})
    expected = "every HTTP client is told by an error, nobody hangs; a rig that is started again serves."
    recovery_s = 60.0
    stalls = True

    def inject(self, site: Site) -> None:
        site.rig.send("engine", signal.SIGKILL)

    def proof(self, site: Site) -> Proof:
        ended = site.rig.wait(STOPPED_WITHIN_S)
        return Proof(ended is not None and "status -9" in ended, (ended or "the engine still runs").splitlines()[0])

    def heal(self, site: Site) -> None:
        site.rig.stop()
        site.rig.start()
        if site.lane is not None:
            site.lane = type(site.lane)(site.rig.ring())


@register
class EngineStop(Fault):
    """SIGSTOP and SIGCONT of the engine, for less than the heartbeat limit."""

    name = "engine-stop"
    summary = "The engine process is stopped by SIGSTOP and continued, within the front end's heartbeat limit."
    blast = Blast.NONE
    ends = frozenset({End.FINISHED})
    expected = "streams pause and go on; requests sent meanwhile are served after it."
    recovery_s = 30.0
    stalls = True

    def inject(self, site: Site) -> None:
        site.rig.send("engine", signal.SIGSTOP)
        site.hit.notes["stopped"] = await_stopped(site.rig.pid("engine"))
        site.hit.notes["heartbeat"] = site.rig.memory.status("heartbeat")

    def proof(self, site: Site) -> Proof:
        beat = site.rig.memory.status("heartbeat")
        stood = bool(site.hit.notes["stopped"]) and beat == site.hit.notes["heartbeat"]
        return Proof(stood, f"heartbeat stood at {beat}" if stood else "the engine's heart beat while it was stopped")

    def heal(self, site: Site) -> None:
        resume(site, "engine")


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
        ended = site.rig.exited("frontend")
        return Proof(ended is not None and "status -9" in ended, (ended or "the front end still runs").splitlines()[0])

    def heal(self, site: Site) -> None:
        site.rig.restart("frontend")
        before, now = site.hit.notes.get("epoch"), _epoch(site)
        if before is not None and now <= before:
            raise RigFailure(f"the front end that came back has epoch {now}, its predecessor had {before}")


@register
class FrontEndStop(Fault):
    """SIGSTOP and SIGCONT of the front end."""

    name = "frontend-stop"
    summary = "The front end is stopped by SIGSTOP until its rows have used up their credits, and continued."
    blast = Blast.RING
    ends = frozenset({End.FINISHED})
    expected = "only its own rows pause, for want of credits; other rings finish; its streams go on afterwards."
    recovery_s = 30.0

    def inject(self, site: Site) -> None:
        site.rig.send("frontend", signal.SIGSTOP)
        site.hit.notes["stopped"] = await_stopped(site.rig.pid("frontend"))

    def proof(self, site: Site) -> Proof:
        state = site.state()
        live = live_requests(state, self.ring)
        still = psutil.Process(site.rig.pid("frontend")).status() == psutil.STATUS_STOPPED
        holds = bool(site.hit.notes["stopped"]) and still and len(live) > 0
        return Proof(holds, f"{len(live)} of its requests are live and unread while it is stopped")

    def heal(self, site: Site) -> None:
        resume(site, "frontend")
