"""The same programs on engines that must answer alike: other sizes here, and another rig's recorded run."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from blink_core.abi.params import SamplingParams
from verification import agreement_record as recorded
from verification.canonical import answers
from verification.certificate.recorder import Recorder
from verification.fixtures import Judge, Subject
from verification.history import History
from verification.lockstep.programs import execute, random_program
from verification.lockstep.run import run_native
from verification.plugin_session import leave_out
from verification.program import Program, RequestSpec, Shape, draw_program
from verification.properties import agreement
from verification.properties.agreement import PROPERTY, Ran
from verification.result import CheckResult, Verdict
from verification.run_context import RunContext

pytestmark = [
    pytest.mark.blink_property("cross-rig-agreement"),
    pytest.mark.capability("cpu", "shared-memory", "oracle"),
]

GROUPS = (1, 3, 4)
LOCKSTEP = {"smoke": 8, "nightly": 100, "full": 400}
OPERATIONS = 30
LIVE = {"smoke": 2, "nightly": 8, "full": 24}
# The same on every rig, whatever its sizes: programs that two runs compare must not hang on what one of them has.
LONGEST, PAGE, NEW = 96, 16, 24
# Another engine of the same build: smaller pages and steps, fewer rows, no sharing, another number of BLAS threads.
OTHER: dict[str, Any] = {"page_size": 8, "pages": 34, "token_budget": 7, "max_rows": 3, "prefix_cache": 0, "threads": 2}


def draw(seed: int, count: int, vocab: int) -> list[Program]:
    """The programs that every rig runs for a seed."""
    rng = random.Random(seed)
    shape = Shape(vocab, PAGE, LONGEST, requests=(3, 8), most_new=NEW, sampled=0.4)
    return [draw_program(rng, shape) for _ in range(count)]


def run_all(subject: Subject, programs: list[Program], judge: Judge) -> tuple[list[Ran], list[History]]:
    histories = []
    for program in programs:
        judge.case(program)
        histories.append(subject.run(program))
        if histories[-1].died is not None:
            break
    return [Ran(h.program, tuple(answers(h))) for h in histories], histories


def test_groups_of_threads(blink_run: RunContext, record: Recorder, seed: int) -> None:
    """Drawn programs on the compiled scheduler, worked by groups of 1, 3 and 4 threads: every observable of every call.

    Catches: work shared by several threads that has another result than that of one.
    """
    rng = random.Random(seed)
    for number in range(LOCKSTEP[blink_run.profile_name]):
        program = random_program(rng, OPERATIONS)
        driver = execute(program).d
        record.cases()
        results = [run_native(driver, group_size=size) for size in GROUPS]
        apart = [size for size, result in zip(GROUPS, results, strict=True) if result != results[0]]
        record.check(
            CheckResult(
                Verdict.INVALID if apart else Verdict.VALID,
                PROPERTY,
                "groups",
                f"program {number}: groups of {apart} threads differ from one of {GROUPS[0]}"
                if apart
                else f"groups of {', '.join(map(str, GROUPS))} threads agree",
                {"program": repr(program)} if apart else {},
            )
        )


def test_other_sizes(tiny: Subject, blink_run: RunContext, judge: Judge, seed: int) -> None:
    """The same programs on two engines with other pages, batches, chunks and threads, in batch-invariant mode: every
    token is the same, without ties. What the first one answered is recorded for other rigs to compare with.

    Catches: an answer that hangs on the batch, the chunk, the page size or the machine.
    """
    programs = draw(seed, LIVE[blink_run.profile_name], tiny.shape.vocab)
    with tiny.start(batch_invariant=True) as one:
        ours, first = run_all(one, programs, judge)
    with tiny.start(batch_invariant=True, **OTHER) as other:
        theirs, second = run_all(other, programs, judge)
    judge(agreement.check(ours, theirs, names=("one engine", "the other")), *first, *second)
    if (folder := blink_run.evidence(judge.about["test"]["id"])) is not None:
        assert tiny.rig.model is not None
        recorded.write(folder / recorded.FILE, blink_run, seed, tiny.name, ours)


def with_witness(program: Program, seed: int, vocab: int) -> tuple[Program, int]:
    """The program without cancels, and with one request more: greedy and plain, so that nothing but its length ends it
    and the raw logits decide each of its tokens. Also that request's number.

    Of what was drawn alone, with many seeds, the last token may be a drawn one of which any other is as good, or a
    request may end as the planted end says: then nothing is planted."""
    prompt = tuple(random.Random(f"witness/{seed}").choices(range(vocab), k=PAGE + 1))
    own = RequestSpec(prompt, SamplingParams(NEW, ignore_eos=True, logprobs=2))
    return Program((*(replace(r, cancel_after=None) for r in program.requests), own)), len(program.requests)


def test_planted_disagreement(tiny: Subject, judge: Judge, record: Recorder, seed: int) -> None:
    """The answers of one run beside copies with one thing changed: another token, one less, another end, nobody,
    another alternative.

    Catches: a comparison that agrees with everything.
    """
    program, victim = with_witness(draw(seed, 1, tiny.shape.vocab)[0], seed, tiny.shape.vocab)
    ours, histories = run_all(tiny, [program], judge)
    whole = ours[0].answers
    answer = whole[victim]
    if len(answer.tokens) != NEW:  # nothing of the machine's: the request can end in no other way
        message = f"request {victim} got {len(answer.tokens)} of {NEW} tokens and ended {answer.outcome!r}"
        judge(CheckResult(Verdict.INVALID, PROPERTY, "outcome", message), *histories)
    context = [*program.requests[victim].prompt, *answer.tokens[:-1]]
    (logits,) = tiny.oracles[1].teacher_force(context, start=len(context) - 1)
    unlikely = int(logits.argmin())  # no tie, whatever the model's weights
    event, *others = answer.alternatives
    planted = {
        "another token": replace(answer, tokens=(*answer.tokens[:-1], unlikely)),
        "a token less": replace(answer, tokens=answer.tokens[:-1]),
        "another end": replace(answer, outcome="FINISH CONTEXT"),
        "no answer": replace(answer, tokens=(), outcome="open"),
        "an alternative twice": replace(answer, alternatives=((event[0],) * len(event), *others)),
    }
    missed = []
    for name, wrong in planted.items():
        theirs = [Ran(program, (*whole[:victim], wrong, *whole[victim + 1 :]))]
        found = agreement.check(ours, theirs, oracles=tiny.oracles, limits=tiny.thresholds)
        caught = found.verdict is Verdict.INVALID
        record.planted_fault(f"agreement: {name}", caught=int(caught), planted=1)
        missed += [] if caught else [name]
    agreed = agreement.check(ours, ours)
    judge(agreed, *histories)
    verdict = Verdict.UNKNOWN if missed else Verdict.VALID
    judge(CheckResult(verdict, PROPERTY, "power", f"planted disagreements that passed: {missed or 'none'}"))


def test_other_rig(request: pytest.FixtureRequest, tiny: Subject, blink_run: RunContext, judge: Judge) -> None:
    """The programs that another run recorded (`--agree-with DIR`), run here: its rig and this one answer alike, but for
    ties.

    Catches: whatever makes one rig answer otherwise than another.
    """
    folder = blink_run.agree_with
    if folder is None:
        leave_out(request.node, "no other run to agree with was given (--agree-with DIR)")
    other = recorded.read(folder)
    if other.subject != tiny.name:
        message = f"{folder} recorded model {other.subject}, this run has {tiny.name}"
        judge(CheckResult(Verdict.UNKNOWN, PROPERTY, "programs", message))
    if other.root_seed != blink_run.seed:
        message = (
            f"{folder} is of root seed {other.root_seed}, this run of {blink_run.seed}: the model has other weights"
        )
        judge(CheckResult(Verdict.UNKNOWN, PROPERTY, "programs", message))
    ours, histories = run_all(tiny, [ran.program for ran in other.ran], judge)
    result = agreement.check(
        ours,
        other.ran,
        oracles=tiny.oracles,
        limits=tiny.thresholds,
        names=(f"rig {blink_run.rig}", f"rig {other.rig} (run {other.run})"),
    )
    judge(result, *histories)
    judge.record.measure("programs compared with the other rig", len(ours), "programs")
