"""Recorded event logs of the engines as they run, against the executable specification."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blink_core.abi.enums import Admission
from verification.fixtures import Judge, Subject
from verification.program import Program
from verification.properties import conformance, queue_ordering
from verification.run_context import RunContext
from verification.trace.format import Header, read
from verification.trace.record import Recorder

pytestmark = [
    pytest.mark.blink_property(conformance.PROPERTY),
    pytest.mark.capability("cpu", "shared-memory", "oracle"),
]

PROGRAMS = {"smoke": 3, "nightly": 30, "full": 100}  # of each engine
ON_MODEL = {"smoke": 1, "nightly": 6, "full": 20}
# Few pages in each case, so that preemption, eviction and reservations are in the logs.
ENGINES: dict[str, dict[str, Any]] = {
    "optimistic": {},
    "reserve": {"admission": int(Admission.RESERVE)},
    "no-prefix-cache": {"prefix_cache": 0},
    "patient": {"reservation_steps": 2, "paused_limit": 2, "token_budget": 8},
}


def record_and_check(
    subject: Subject, like: Subject, programs: list[Program], judge: Judge, folder: Path, model: str
) -> None:
    """Runs programs on an engine that was just started, and checks its whole log. like: whose oracle knows the ids."""
    path = folder / "run.trace"
    header = Header(subject.rig.memory.config, "live", rig=subject.rig.description.name, model=model, payloads=True)
    try:
        with Recorder(subject.rig.memory, path, header) as recorder:
            for program in programs:
                judge.case(program)
                history = subject.run(program)
                judge(queue_ordering.check_history(history, eos_ids=like.eos_ids, max_len=like.max_len), history)
                recorder.settle()  # before another program takes the slots again
        trace = read(path)
    finally:
        path.unlink(missing_ok=True)  # it holds prompts
    judge(conformance.check_trace(trace), *subject.recent)


@pytest.mark.parametrize("name", ENGINES)
def test_drawn_programs(
    tiny: Subject, blink_run: RunContext, judge: Judge, seed: int, tmp_path: Path, name: str
) -> None:
    """Drawn programs on a small engine of its own, its whole event log checked.

    Catches: a decision of the running engine that no clause gives: order, pages, credits, events, counts or times.
    """
    programs = tiny.draw(seed, PROGRAMS[blink_run.profile_name])
    with tiny.start(capture=False, **ENGINES[name]) as subject:
        record_and_check(subject, tiny, programs, judge, tmp_path, name)


def test_model_under_test(engine: Subject, blink_run: RunContext, judge: Judge, seed: int, tmp_path: Path) -> None:
    """The same with the real model, where many polls fall into a step.

    Catches: what only shows when submissions, cancels and credits are taken while a step runs.
    """
    programs = engine.draw(seed, ON_MODEL[blink_run.profile_name])
    with engine.start(capture=False) as subject:
        record_and_check(subject, engine, programs, judge, tmp_path, engine.rig.model_name)
