"""The `fault` fixture: faults by name, under a test's own load or as whole scenarios."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

from hil_rigs.engine_memory import EngineUnreachable
from hil_rigs.local import RigFailure
from verification.certificate.outcomes import PropertyUnknown, PropertyViolation, RigBroken
from verification.faults.judge import PROPERTY, check
from verification.faults.model import Fault, Hit, Site, find, known_faults, live_requests
from verification.faults.scenario import FaultPlan, FaultRun, Scenario, draw_plan
from verification.judge import Judge
from verification.program import Shape
from verification.recording import recording
from verification.result import CheckResult, Verdict
from verification.run_context import RunContext
from verification.subject import EngineLost, Subject


class FaultBench:
    """Faults for one test. engine: the one under test, on first use. scenarios: an engine that a fault may break."""

    def __init__(
        self,
        run: RunContext,
        judge: Judge,
        test: str,
        engine: Callable[[], Subject],
        scenarios: Callable[[Fault], tuple[Scenario, Shape]],
    ) -> None:
        self._run, self._judge, self._test = run, judge, test
        self._engine, self._scenarios = engine, scenarios

    @property
    def names(self) -> tuple[str, ...]:
        """All faults that this run's rig has what they need for, sorted."""
        return tuple(name for name in known_faults() if set(find(name).needs) <= self._run.capabilities)

    def about(self, name: str) -> str:
        """What a fault does, whom it may touch, what is expected. Raises ValueError with the known names."""
        return find(name).about()

    @contextlib.contextmanager
    def __call__(self, name: str, on: Subject | None = None) -> Iterator[Hit]:
        """Injects a fault under the test's own load and heals it at the end of the `with`.

        on: the engine to strike, by default the one under test. It is held at a step boundary for the injection, and
        the requests that are live there stand in `hit.requests`. None, or no proof that the fault took effect, ends
        the test as undecided; what the engine did wrong meanwhile fails it. Raises ValueError for an unknown fault, or
        one that needs a scenario's own traffic.
        """
        fault = find(name)
        if not fault.alone:
            raise ValueError(f"fault {name!r} needs a scenario's own traffic: use fault.scenario({name!r})")
        subject = on or self._engine()
        site = Site(subject.rig, rng=random.Random(f"{self._run.seed}/{self._test}"))
        try:
            with subject.held() as state:
                site.hit = Hit(live_requests(state), int(state.header["log_tail"]))
                fault.inject(site)
        except EngineUnreachable as error:
            raise EngineLost(str(error)) from error
        try:
            yield site.hit
            proof, wrong = fault.proof(site), fault.wrong(site)
        finally:
            self._heal(fault, site, subject)
        if (void := fault.void(site)) is not None:
            raise PropertyUnknown(CheckResult(Verdict.UNKNOWN, PROPERTY, "hit", f"{name}: {void}"))
        if not site.hit.requests or not proof.holds:
            why = proof.evidence if site.hit.requests else "no request was live at the injection"
            raise PropertyUnknown(CheckResult(Verdict.UNKNOWN, PROPERTY, "hit", f"{name}: {why}"))
        if wrong is not None:
            raise PropertyViolation(CheckResult(Verdict.INVALID, PROPERTY, "meanwhile", f"{name}: {wrong}"))

    def _heal(self, fault: Fault, site: Site, subject: Subject) -> None:
        engine = subject.rig.pid("engine")
        try:
            fault.heal(site)
            if subject.rig.pid("engine") != engine:  # another process: the old ring is gone
                reason = subject.revived(subject.rig.ring())
                if reason is not None:  # what the test saw of the fault: later tests have an engine again
                    self._run.mend_rig(reason)
        except RigFailure as error:
            raise RigBroken(f"fault {fault.name} did not heal: {error}") from error

    def plan(self, name: str, seed: int | str | None = None) -> FaultPlan:
        """The scenario drawn for a fault by the test's own seed or by `seed`; the recorded one under `--replay`."""
        replay = self._run.replay
        if replay is not None and replay.plan is not None and replay.plan.get("fault") == name:
            self._run.replay_ran()
            return FaultPlan.from_json(replay.plan)
        _, shape = self._scenarios(find(name))
        drawn = self._run.derive_seed(self._test, name, seed if seed is not None else "")
        return draw_plan(name, drawn, shape)

    def scenario(self, name: str, seed: int | str | None = None) -> FaultRun:
        """Runs a fault's whole scenario: control run, victims, bystanders, injection, recovery."""
        scenario, _ = self._scenarios(find(name))
        self._judge.rig = scenario.rig
        try:
            return scenario.run(self.plan(name, seed))
        except RigFailure as error:
            raise RigBroken(f"fault {name}: the rig did not come back: {error}") from error

    def check(self, run: FaultRun) -> CheckResult:
        """Judges a scenario, and keeps one that fails for `--replay`. Raises PropertyViolation or PropertyUnknown."""
        result = check(run)
        self._judge.record.cases()
        if not result.ok():
            about = self._judge.about
            self._judge.scenario = {"plan": run.plan.to_json(), "observed": run.observed()}
            self._judge.keep_recording(recording(about, result, plan=run.plan.to_json(), observed=run.observed()))
        return self._judge(result)
