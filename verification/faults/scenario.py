"""A fault scenario: drawn whole, run once without and once with the fault, and observed (design section 9).

Order: the control run; the victims; at a step boundary, where they are seen to be live, the injection; the bystanders;
the fault's own proof; the heal; everyone's end; one probe in each lane; the engine's state when it is idle.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from blink_core.frontend.ring_client import ProtocolError, RingFull
from blink_core.transport.interface import TransportError
from hil_rigs.engine_memory import EngineUnreachable, StateSnapshot
from hil_rigs.local import LocalRig, RigFailure
from verification.faults.model import SUITE_RING, Blast, End, Fault, Hit, LiveRequest, Proof, Site, find, live_requests
from verification.faults.traffic import Call, HttpLane, RingLane, await_calls
from verification.program import Program, RequestSpec, Shape, draw_program
from verification.properties.kv_conservation import check_snapshot
from verification.result import CheckResult
from verification.stalls import Stalls

END_WITHIN_S = 60.0
VICTIMS, BYSTANDERS, ATTEMPTS = 2, 3, 3
HTTP_SEED_BITS = 31


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What is drawn: the fault, its victims, the bystanders of both lanes. seed: what the fault itself draws from."""

    fault: str
    seed: int
    victims: tuple[RequestSpec, ...]
    bystanders: tuple[RequestSpec, ...]
    subject: str = "fault-engine"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> FaultPlan:
        """The plan that `to_json` gave; raises KeyError, TypeError or ValueError for anything else."""
        groups = {name: Program.from_json({"requests": data[name]}).requests for name in ("victims", "bystanders")}
        return cls(str(data["fault"]), int(data["seed"]), groups["victims"], groups["bystanders"], str(data["subject"]))


def draw_plan(fault: str, seed: int, shape: Shape) -> FaultPlan:
    """Draws a scenario: victims that stream for long, bystanders of any shape that end soon; nobody is cancelled."""
    rng = random.Random(seed)
    most = shape.longest - shape.page_size * 4
    small = replace(shape, requests=(BYSTANDERS, BYSTANDERS), cancels=0.0, masks=0, longest=shape.longest // 2)
    victims = []
    for spec in draw_program(rng, replace(small, requests=(VICTIMS, VICTIMS), longest=shape.page_size * 4)).requests:
        long = replace(spec.params, max_tokens=rng.randint(most * 3 // 4, most), stop_token_ids=())
        victims.append(replace(spec, params=long))
    drawn = draw_program(rng, small).requests
    return FaultPlan(fault, rng.getrandbits(32), _portable(victims), _portable(drawn))


def _portable(specs: Sequence[RequestSpec]) -> tuple[RequestSpec, ...]:
    """The same requests for ring and HTTP: seeds that both take, and no deadline that a fault may let pass."""
    return tuple(
        replace(
            spec, after=0, params=replace(spec.params, seed=spec.params.seed % (1 << HTTP_SEED_BITS), deadline_us=0)
        )
        for spec in specs
    )


@dataclass
class FaultRun:
    """What a scenario showed. Calls by name: "victim-0", "http-1" (bystander), "ring-1", "probe-http" ...

    wrong: what the engine did wrong while the fault lasted, by the fault's own look, else None.
    void: why all this decides nothing, by the fault's own look after the heal, else None.
    trouble: what kept the scenario from its end (an engine out of reach, a rig that did not heal), else None.
    told_s: seconds from injection to the last victim's end; None where victims are to finish or are told after the
    heal, or one of them was told nothing. stalled_s: of these, seconds for which the machine ran nobody.
    recovered_s: seconds from the heal until everyone was served.
    """

    plan: FaultPlan
    fault: Fault
    control: dict[str, Call] = field(default_factory=dict)
    faulted: dict[str, Call] = field(default_factory=dict)
    hit: Hit = field(default_factory=Hit)
    proof: Proof | None = None
    idle: CheckResult | None = None
    live_at_end: int | None = None
    wrong: str | None = None
    void: str | None = None
    trouble: str | None = None
    told_s: float | None = None
    stalled_s: float = 0.0
    recovered_s: float = 0.0

    def observed(self) -> dict[str, Any]:
        """What was seen, as JSON values."""
        return {
            "hit": [asdict(request) for request in self.hit.requests],
            "proof": None if self.proof is None else asdict(self.proof),
            "calls": {name: [str(c.end), c.detail, c.seen()] for name, c in self.faulted.items()},
            "control": {name: [str(c.end), c.detail, c.seen()] for name, c in self.control.items()},
            "wrong": self.wrong,
            "void": self.void,
            "trouble": self.trouble,
            "told_s": self.told_s,
            "stalled_s": self.stalled_s,
            "recovered_s": self.recovered_s,
        }


class Scenario:
    """Runs plans on one rig that nobody else uses: an engine with two rings, batch-invariant, and its front end."""

    def __init__(self, rig: LocalRig) -> None:
        self.rig = rig
        self.http = HttpLane(rig)
        self.ring = RingLane(rig.ring(SUITE_RING))

    def run(self, plan: FaultPlan) -> FaultRun:
        """Runs a plan. What the engine does wrong stands in the result; RigFailure when the rig does not heal."""
        fault = find(plan.fault)
        run = FaultRun(plan, fault)
        site = Site(self.rig, lane=self.ring, rng=random.Random(plan.seed), pump=self.ring.pump)
        try:
            self._control(run)
            with Stalls() as stalls:
                self._faulted(run, site, stalls)
        except (EngineUnreachable, ProtocolError, RingFull, TransportError, RigFailure) as error:
            run.trouble = f"{type(error).__name__}: {error}"
        finally:
            self._leave_healthy(run, site)
        return run

    def _lane(self, fault: Fault) -> HttpLane | RingLane:
        return self.ring if fault.ring == SUITE_RING else self.http

    def _control(self, run: FaultRun) -> None:
        victims = [Call(f"victim-{i}", spec) for i, spec in enumerate(run.plan.victims)]
        others = self._bystanders(run, ("http", "ring"))
        run.control = {call.name: call for call in [*victims, *(call for calls in others.values() for call in calls)]}
        deadline = time.monotonic() + END_WITHIN_S
        lane = self._lane(run.fault)
        for call in victims:
            lane.start(call)
        for name, calls in others.items():
            for call in calls:
                (self.ring if name == "ring" else self.http).start(call)
        await_calls(list(run.control.values()), self.ring, deadline)

    def _bystanders(self, run: FaultRun, lanes: Sequence[str]) -> dict[str, list[Call]]:
        return {lane: [Call(f"{lane}-{i}", s) for i, s in enumerate(run.plan.bystanders)] for lane in lanes}

    def _faulted(self, run: FaultRun, site: Site, stalls: Stalls) -> None:
        fault = run.fault
        victims, struck = self._strike(run, site)
        others = self._bystanders(run, _untouched(fault))
        calls = [call for group in others.values() for call in group]
        run.faulted |= {call.name: call for call in calls}
        for name, group in others.items():
            for call in group:
                (self.ring if name == "ring" else self.http).start(call)
        late = False
        if not fault.stalls_on(self.rig.description):
            late = not await_calls(calls, self.ring, struck + END_WITHIN_S)
        waiting = [call.name for call in calls if late and call.end is End.OPEN]
        run.proof = fault.proof(site)
        run.wrong = fault.wrong(site)
        if waiting and run.wrong is None:  # after the heal they may finish as if nothing had been
            run.wrong = f"{', '.join(waiting)} had not ended {END_WITHIN_S:g} s after the injection, while it lasted"
        told_before = End.FINISHED not in fault.ends and not fault.told_after_heal
        if told_before and await_calls(victims, self.ring, struck + END_WITHIN_S):
            told = max(call.ended_at for call in victims)
            run.told_s, run.stalled_s = told - struck, stalls.between(struck, told)  # later ones are no excuse
        healed = time.monotonic()
        fault.heal(site)
        run.void = fault.void(site)
        if site.lane is not None and site.lane is not self.ring:
            self.ring = site.lane
        await_calls([*victims, *calls], self.ring, healed + END_WITHIN_S)
        self._probe(run, healed)
        self._idle(run)

    def _strike(self, run: FaultRun, site: Site) -> tuple[list[Call], float]:
        """Starts the victims and injects the fault at a step boundary where one of them is live. The victims, and when.

        A busy machine may be so late that they have ended before the hold: then others are started, a few times.
        """
        fault, lane = run.fault, self._lane(run.fault)
        for attempt in range(ATTEMPTS):
            victims = [Call(f"victim-{i}", spec) for i, spec in enumerate(run.plan.victims)]
            site.victims = tuple(victims)
            run.faulted = {call.name: call for call in victims}
            for call in victims:
                lane.start(call)
            await_calls(victims, self.ring, time.monotonic() + END_WITHIN_S, started=True)
            memory = self.rig.memory
            with memory.hold():
                state = memory.snapshot(2**63)
                live = _of_victims(live_requests(state, fault.ring), victims)
                if len(live) == len(victims) or attempt == ATTEMPTS - 1:
                    site.hit = run.hit = Hit(live, int(state.header["log_tail"]))
                    struck = time.monotonic()
                    fault.inject(site)
                    break
            await_calls(victims, self.ring, time.monotonic() + END_WITHIN_S)
        return victims, struck

    def _probe(self, run: FaultRun, healed: float) -> None:
        probes = [Call("probe-http", run.plan.bystanders[0]), Call("probe-ring", run.plan.bystanders[0])]
        run.faulted |= {call.name: call for call in probes}
        self.http.start(probes[0])
        self.ring.start(probes[1])
        await_calls(probes, self.ring, healed + END_WITHIN_S)
        run.recovered_s = time.monotonic() - healed

    def _idle(self, run: FaultRun) -> None:
        deadline = time.monotonic() + END_WITHIN_S
        while True:  # a request that a client left ends a moment after it was told
            state = self._state()
            if int(state.header["live"]) == 0 or time.monotonic() > deadline:
                run.live_at_end, run.idle = int(state.header["live"]), check_snapshot(state)
                return
            self.ring.pump(0.02)

    def _state(self) -> StateSnapshot:
        memory = self.rig.memory
        with memory.hold():
            return memory.snapshot(2**63)

    def _leave_healthy(self, run: FaultRun, site: Site) -> None:
        """After a scenario that did not come to its end: the next one must find a rig that serves."""
        if run.trouble is None and all(call.end is not End.OPEN for call in run.faulted.values()):
            return
        try:
            run.fault.heal(site)
        except (RigFailure, ProtocolError, TransportError, EngineUnreachable, ValueError) as error:
            run.trouble = f"{run.trouble or 'requests are open'}; heal: {error}"
        self.rig.stop()
        self.rig.start()
        self.ring = RingLane(self.rig.ring(SUITE_RING))


def _untouched(fault: Fault) -> tuple[str, ...]:
    """Lanes whose bystanders lie outside the blast radius."""
    if fault.blast is Blast.ENGINE:
        return ()
    if fault.blast is Blast.RING:
        return ("http",) if fault.ring == SUITE_RING else ("ring",)
    return ("http", "ring")


def _of_victims(live: Sequence[LiveRequest], victims: Sequence[Call]) -> tuple[LiveRequest, ...]:
    """Of the live requests those that are victims; over HTTP the ring holds nobody else then."""
    keys = {(call.handle.slot, call.handle.generation) for call in victims if call.handle is not None}
    return tuple(request for request in live if not keys or (request.slot, request.generation) in keys)
