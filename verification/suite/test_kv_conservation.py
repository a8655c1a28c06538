"""KV conservation at step boundaries of the running engine."""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from blink_core.abi.dtypes import Array
from blink_core.abi.enums import LogKind
from verification.certificate.recorder import Recorder
from verification.fixtures import Judge, Subject
from verification.program import Program, draw_program
from verification.properties import kv_conservation
from verification.result import CheckResult
from verification.suite.running import serve

pytestmark = [pytest.mark.blink_property("kv-conservation"), pytest.mark.capability("cpu", "shared-memory", "oracle")]


class Observation:
    """Recounts all pages at each observed boundary; keeps the previous snapshot only."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.last = subject.snapshot()
        self.results: list[CheckResult] = [kv_conservation.check_snapshot(self.last)]
        self.log: list[Array] = []
        self.used: list[int] = []
        self.busy = 0

    def __call__(self) -> None:
        before, self.last = self.last, self.subject.snapshot(log_from=int(self.last.header["log_tail"]))
        self.results.append(kv_conservation.check_snapshot(self.last))
        self.results.append(kv_conservation.check_log(before, self.last))
        self.log.append(self.last.log)
        self.used.append(self.last.config.pages - kv_conservation.RESERVED - len(self.last.free_list))
        self.busy += len(self.last.running) > 0

    @property
    def allocations(self) -> int:
        return sum(int((part["kind"] == LogKind.PAGE_ALLOC).sum()) for part in self.log)


def check_run(subject: Subject, program: Program, judge: Judge, every: int) -> Observation:
    """Runs a program, recounting all pages at a boundary after each `every` events and once idle."""
    observation = Observation(subject)
    history = serve(subject, program, judge, every=every, observe=observation)
    observation()
    for result in observation.results:
        judge(result, history)
    return observation


def test_drawn_programs(tiny: Subject, judge: Judge) -> None:
    """Drawn programs on a pool of a few pages: preemption, reuse and cancels at any step.

    Catches: a leaked or doubly owned page, a release on one path only, reuse before the step in flight has ended.
    """
    seen: list[Observation] = []

    @settings(phases=(Phase.explicit, Phase.generate))
    @given(st.integers(0, 2**63 - 1))
    def programs(seed: int) -> None:
        rng = random.Random(seed)
        seen.append(check_run(tiny, draw_program(rng, tiny.shape), judge, every=rng.randint(1, 12)))

    programs()
    judge(kv_conservation.check_observed(sum(o.busy for o in seen), sum(o.allocations for o in seen)))


def test_model_under_test(engine: Subject, record: Recorder, judge: Judge, seed: int) -> None:
    """The same on the real model; the pages in use over the run are plotted.

    Catches: what only shows when cancels fall into a long step.
    """
    seen = [check_run(engine, program, judge, every=4) for program in engine.draw(seed, 2)]
    used = [pages for observation in seen for pages in observation.used]
    record.series(
        "pages in use at sampled step boundaries", range(len(used)), used, "pages", x_label="sample", kind="steps"
    )
    judge(kv_conservation.check_observed(sum(o.busy for o in seen), sum(o.allocations for o in seen)))
