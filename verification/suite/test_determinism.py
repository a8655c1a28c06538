"""The tester is tested: a seed decides what is drawn, and the same program gives the same history and verdict."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from verification.canonical import digest, history_digest
from verification.certificate.recorder import Recorder
from verification.determinism import changed_tokens_noticed, draws, draws_elsewhere
from verification.fixtures import Judge, Subject
from verification.history import History
from verification.lockstep.programs import execute, random_program
from verification.lockstep.run import run_native
from verification.program import draw_program
from verification.properties import queue_ordering
from verification.result import CheckResult, Verdict
from verification.run_context import RunContext

PROPERTY = "tester-determinism"
pytestmark = [
    pytest.mark.blink_property("tester-determinism"),
    pytest.mark.capability("cpu", "shared-memory", "oracle"),
]

LIVE = {"smoke": 2, "nightly": 10, "full": 40}
LOCKSTEP = {"smoke": 10, "nightly": 100, "full": 400}


def _same(clause: str, what: str, one: object, other: object) -> CheckResult:
    verdict = Verdict.VALID if one == other else Verdict.INVALID
    message = f"{what}: {'the same' if one == other else 'not the same'} twice"
    return CheckResult(
        verdict, PROPERTY, clause, message, {} if one == other else {"one": str(one), "other": str(other)}
    )


def test_same_draws(record: Recorder, seed: int, tmp_path: Path) -> None:
    """Programs, fault plans and lock-step programs of a seed, drawn here twice and in a fresh process with another hash
    seed, in another folder; and other ones of the next seed.

    Catches: a draw that hangs on the order of a set, on time, or on what was drawn before: a failure that no seed
    repeats.
    """
    here, again, there, next_seed = draws(seed), draws(seed), draws_elsewhere(seed, tmp_path), draws(seed ^ 1)
    for kind, found in here.items():
        record.cases()
        record.check(_same("draws", f"{kind} of seed {seed}", found, again[kind]))
        record.check(_same("draws", f"{kind} of seed {seed}, in another process", found, there[kind]))
        distinct = found != next_seed[kind]
        verdict = Verdict.VALID if distinct else Verdict.INVALID
        record.check(
            CheckResult(verdict, PROPERTY, "seed", f"{kind} of two seeds: {'differ' if distinct else 'equal'}")
        )


def _verdict(subject: Subject, history: History) -> list[str]:
    result = queue_ordering.check_history(history, eos_ids=subject.eos_ids, max_len=subject.max_len)
    return [str(result.verdict), result.clause]


def test_same_history(tiny: Subject, blink_run: RunContext, judge: Judge, record: Recorder, seed: int) -> None:
    """Drawn programs, each run twice on one engine in batch-invariant mode: the canonical histories have one digest and
    one verdict, whatever times, slots and batches were; a history with one token changed has another digest.

    Catches: an answer, or a verdict, that hangs on timing: a failure that does not replay, or a pass that was luck.
    """
    rng = random.Random(seed)
    planted = caught = 0
    with tiny.start(batch_invariant=True) as exact:
        for _ in range(LIVE[blink_run.profile_name]):
            program = draw_program(rng, exact.shape)
            judge.case(program)
            one, other = exact.run(program), exact.run(program)
            judge(_same("history", "answers", history_digest(one), history_digest(other)), one, other)
            judge(_same("verdict", "verdict", _verdict(tiny, one), _verdict(tiny, other)), one, other)
            noticed = changed_tokens_noticed(one)
            planted += len(noticed)
            caught += sum(noticed)
    if planted:
        record.planted_fault("determinism: a token changed in a history", caught=caught, planted=planted)
    verdict = Verdict.UNKNOWN if not planted else Verdict.VALID if planted == caught else Verdict.INVALID
    judge(CheckResult(verdict, PROPERTY, "power", f"{caught} of {planted} changed histories have another digest"))


def test_same_schedule(blink_run: RunContext, record: Recorder, seed: int) -> None:
    """Lock-step programs, each executed twice by specification and compiled scheduler: words and records are the same.

    Catches: a driver, a specification or a scheduler that remembers something between programs.
    """
    rng = random.Random(seed)
    for number in range(LOCKSTEP[blink_run.profile_name]):
        program = random_program(rng, 40)
        one, other = execute(program).d, execute(program).d
        record.cases()
        record.check(
            _same(
                "words", f"program {number}", digest([one.words, one.expected]), digest([other.words, other.expected])
            )
        )
        record.check(_same("records", f"program {number} on the scheduler", run_native(one), run_native(other)))
