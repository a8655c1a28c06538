"""KV content of the running engine against HuggingFace's past_key_values."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from verification.certificate.recorder import Recorder
from verification.criterion import KVScores
from verification.fixtures import Judge, Subject
from verification.program import Program
from verification.properties import kv_content, kv_schedules
from verification.suite.observation import Observation
from verification.suite.pressure import CROWD, can_pace, crowd, long, neighbours, room_beyond
from verification.suite.running import serve
from verification.suite.situations import Lengths

pytestmark = [pytest.mark.blink_property("kv-content"), pytest.mark.capability("cpu", "shared-memory", "oracle")]

PROGRAMS = {"model": 1, "tiny": 4}
MOST_TIMES = 6  # so many times more programs are drawn when these give too few positions: a fast model is seldom caught
FEWEST_ROWS = 100
MOST_ROWS = 400  # positions of drawn programs compared with the oracle in one run; more would only cost time
LOOKS = 5  # events between two looks at a paced program


def _leading(subject: Subject, lengths: Lengths, seed: int) -> list[Program]:
    """A program in which looks meet a long request, where one is wanted and can be, whatever the engine's pace. The
    engine of the model under test has no masks to pace it with: its steps are so long that looks meet its requests
    anyway."""
    limits = [limit for limit in lengths.limits.values() if room_beyond(subject, limit)]
    return [long(subject, seed, max(limits))] if limits and can_pace(subject) else []


def _check(subject: Subject, record: Recorder, judge: Judge, seed: int, programs: int) -> None:
    parts: list[KVScores] = []
    positions = resumed = 0
    lengths = Lengths(subject)
    leading = _leading(subject, lengths, seed)
    for index, program in enumerate([*leading, *subject.draw(seed, MOST_TIMES * programs)], -len(leading)):
        if index >= programs and positions >= FEWEST_ROWS and lengths.reached:
            break
        observation, every = Observation(subject), LOOKS if index < 0 else max(8, subject.shape.most_new)
        history = serve(subject, program, judge, every=every, observe=observation, together=index < 0)
        for result in observation.results:
            judge(result, history)
        for rows in observation.rows:
            judge(kv_content.check_tokens(history, rows), history)
            # Outside the budget only rows of a resumed or of a long request, as long as none has been compared.
            chosen = rows
            if index < 0 or positions >= MOST_ROWS:
                chosen = [r for r in rows if (r.preemptions and not resumed) or not lengths.reached]
            if chosen:
                parts.append(kv_content.score(chosen, *subject.oracles))
                positions += sum(len(row.tokens) for row in chosen) if index >= 0 else 0
                resumed += sum(row.preemptions > 0 for row in chosen)
                lengths.add(max(len(row.tokens) for row in chosen))
    record.situation("kv-after-preemption", resumed > 0)
    if parts:
        scores = KVScores.concatenate(parts)
        record.series(
            f"{subject.name}: worst K row error by layer",
            range(scores.engine_rms.shape[1]),
            scores.engine_rms[0].max(axis=(1, 2)),
            "RMS",
            x_label="layer",
            kind="bars",
        )
    judge(kv_content.judge(parts, subject.thresholds.kv))
    judge(lengths.check(record, kv_content.PROPERTY))


def test_tiny_models(family: Subject, record: Recorder, judge: Judge, seed: int) -> None:
    """KV of each family's running requests, some of them resumed after preemption, in a pool poisoned with NaN.

    Catches: a foreign or stale row, a page in the wrong place, a rotary position off by one, exchanged heads.
    """
    _check(family, record, judge, seed, PROGRAMS["tiny"])


def test_model_under_test(engine: Subject, record: Recorder, judge: Judge, seed: int) -> None:
    """The same on the real model's weights.

    Catches: a loader that permutes or scales a projection wrongly, besides the above.
    """
    _check(engine, record, judge, seed, PROGRAMS["model"])


PAGE_SIZES = (4, 8, 16)
POOL = 256  # tokens of the pool, whatever the page size: a fraction of what a program asks for
SCHEDULES = {"model": (2, 10), "tiny": (2, 30)}  # fewest and most programs
SITUATIONS = {"preempted": "preemption", "prefix-hit": "prefix-hit", "odd-chunk": "odd-chunk", "cancel": "cancel"}


def _wanted(subject: Subject) -> tuple[str, ...]:
    """Marks that the requests of a model can have: where LongRoPE computes keys anew there is no prefix cache."""
    switch = subject.oracles[1].rope_switch
    shares = switch is None or subject.max_len <= switch
    return tuple(name for name in kv_schedules.MARKS if shares or name != "prefix-hit")


def _schedules(subject: Subject, record: Recorder, judge: Judge, seed: int, programs: tuple[int, int]) -> None:
    """Compares the KV of running requests that were preempted, hit a prefix, had odd chunks, lost a neighbour."""
    wanted, size = _wanted(subject), subject.rig.descriptor.config.page_size
    parts: list[KVScores] = []
    compared: dict[tuple[int, int, int], frozenset[str]] = {}
    positions = 0
    # These have all that is wanted, whatever the engine's pace; what is drawn has it in other mixtures.
    leading = [crowd(subject, seed, paced=True), neighbours(subject, seed)] if can_pace(subject, CROWD) else []
    for index, program in enumerate([*leading, *subject.draw(seed, programs[1])], -len(leading)):
        seen = frozenset[str]().union(*compared.values())
        if index >= programs[0] and positions >= FEWEST_ROWS and seen >= set(wanted):
            break
        observation, first = Observation(subject), subject.snapshot(log_from=2**63)
        history = serve(subject, program, judge, every=LOOKS, observe=observation, together=index < 0)
        log = subject.snapshot(log_from=int(first.header["log_tail"])).log
        for result in observation.results:
            judge(result, history)
        # Of each request the last look at it, with what it had been through by then.
        latest: dict[tuple[int, int], tuple[kv_content.Gathered, frozenset[str]]] = {}
        for rows, tail in zip(observation.rows, observation.tails, strict=True):
            judge(kv_content.check_tokens(history, rows), history)
            been = kv_schedules.marks(log[: tail - int(first.header["log_tail"])], size)
            for row in rows:
                known = latest.get((row.slot, row.generation))
                names = been.get((history.ring, row.slot, row.generation), frozenset())
                if known is None or len(names) >= len(known[1]):
                    latest[row.slot, row.generation] = row, names
        for (slot, generation), (row, names) in latest.items():
            if not names if index < 0 else positions >= MOST_ROWS and names <= seen:
                continue
            parts.append(kv_content.score([row], *subject.oracles))
            compared[index, slot, generation] = names
            seen, positions = seen | names, positions + (len(row.tokens) if index >= 0 else 0)
    for name, situation in SITUATIONS.items():
        record.situation(f"kv-after-{situation}", sum(name in names for names in compared.values()))
    judge(kv_content.judge(parts, subject.thresholds.kv))
    judge(kv_schedules.check_marks(compared.values(), wanted, kv_content.PROPERTY))


def test_random_schedules(family: Subject, record: Recorder, judge: Judge, seed: int) -> None:
    """KV under drawn schedules, on the engine as shipped: resumed requests, shared pages, chunks that are no multiple
    of a page (drawn too), cancelled neighbours; each of them must have been met by a row that was compared.

    Catches: rows that are right only on a straight path: a resume that begins a place off, a copy that a cancel took
    with it, a chunk that begins at the page's start, a page that was shared before it was full.
    """
    rng = random.Random(seed)
    size = rng.choice(PAGE_SIZES)
    budget = rng.choice([n for n in range(9, 30) if n % size])
    with family.start(page_size=size, pages=2 + POOL // size, token_budget=budget) as subject:
        _schedules(subject, record, judge, rng.getrandbits(63), SCHEDULES["tiny"])


@pytest.mark.blink_profile("nightly", "full")
def test_random_schedules_of_model_under_test(engine: Subject, record: Recorder, judge: Judge, seed: int) -> None:
    """The same on the real model's weights.

    Catches: what only shows with many layers and long steps.
    """
    rng = random.Random(seed)
    size = rng.choice(PAGE_SIZES)
    budget = rng.choice([n for n in range(17, 60) if n % size])
    sizes: dict[str, Any] = {
        "page_size": size,
        "pages": 2 + POOL // size,
        "token_budget": budget,
        "max_len": 256,
        "masks": 4,
    }
    with engine.start(**sizes) as started:
        subject = replace(started, shape=replace(started.shape, requests=(4, 8), most_new=24))
        _schedules(subject, record, judge, rng.getrandbits(63), SCHEDULES["model"])
