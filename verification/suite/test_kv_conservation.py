"""KV conservation at step boundaries of the running engine."""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from hil_rigs.engine_memory import StateSnapshot
from verification.certificate.recorder import Recorder
from verification.fixtures import Subject
from verification.program import Program, draw_program
from verification.properties import kv_conservation
from verification.result import CheckResult
from verification.suite.situations import record_situations

pytestmark = [pytest.mark.blink_property("kv-conservation"), pytest.mark.capability("cpu", "shared-memory")]


def check_run(subject: Subject, program: Program, record: Recorder, every: int) -> list[StateSnapshot]:
    """Runs a program, recounting all pages at a boundary after each `every` events and once idle."""
    snapshots = [subject.snapshot()]
    results: list[CheckResult] = []

    def observe() -> None:
        snapshots.append(subject.snapshot())
        results.append(kv_conservation.check_snapshot(snapshots[-1]))
        results.append(kv_conservation.check_log(snapshots[-2], snapshots[-1]))

    observe()
    subject.run(program, every=every, observe=observe)
    observe()
    for result in results:
        record.check(result)
    record_situations(record, snapshots[-1])
    return snapshots


def test_drawn_programs(tiny: Subject, record: Recorder) -> None:
    """Drawn programs on a pool of a few pages: preemption, reuse and cancels at any step.

    Catches: a leaked or doubly owned page, a release on one path only, reuse before the step in flight has ended.
    """

    @settings(phases=(Phase.explicit, Phase.generate))
    @given(st.randoms(use_true_random=False))
    def programs(rng: random.Random) -> None:
        check_run(tiny, draw_program(rng, tiny.shape), record, every=rng.randint(1, 12))

    programs()


def test_model_under_test(engine: Subject, record: Recorder, seed: int) -> None:
    """The same on the real model; the pages in use over the run are plotted.

    Catches: what only shows when cancels fall into a long step.
    """
    used: list[int] = []
    for program in engine.draw(seed, 2):
        for snapshot in check_run(engine, program, record, every=4):
            used.append(snapshot.config.pages - 2 - len(snapshot.free_list))
    record.series(
        "pages in use at sampled step boundaries", range(len(used)), used, "pages", x_label="sample", kind="steps"
    )
