"""The KV sanitizer: quiet on an engine under pressure, and naming both owners of every fault that is planted."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from blink_core.abi.dtypes import Array
from blink_core.abi.params import SamplingParams
from hil_rigs.kv_reports import KvReports
from verification.certificate.recorder import Recorder
from verification.faults.wrong_plans import FAULTS, FILE, command, seed_of
from verification.fixtures import Judge, Subject
from verification.program import Program, RequestSpec
from verification.properties import kv_sanitizer
from verification.suite.pressure import NEIGHBOURS, KvPressure, can_pace, crowd, neighbours
from verification.suite.running import serve

NEEDS = ("cpu", "shared-memory", "oracle", "kv-sanitizer")
pytestmark = [pytest.mark.blink_property("kv-sanitizer"), pytest.mark.capability(*NEEDS)]

POOL = 256  # tokens of the pool, whatever the page size: a fraction of what a program asks for
BUDGET = 23  # tokens of a step: chunks are no multiple of any page
PROGRAMS, MOST_PROGRAMS = 3, 24
STRIKES, MOST_STRIKES = 3, 12  # times that each fault is planted, and programs drawn for it at most


def _run(subject: Subject, programs: list[Program], fewest: int, judge: Judge, seed: int) -> None:
    """Runs programs until the pressure was there; every one must leave the sanitizer quiet."""
    leading = [crowd(subject, seed)]
    if can_pace(subject, NEIGHBOURS):  # then there is all pressure in them; the rest is drawn
        leading.append(neighbours(subject, seed))
    kv, pressure = KvReports(subject.rig.descriptor), KvPressure(subject.rig.descriptor.config)
    start = kv.counters()
    for index, program in enumerate([*leading, *programs]):
        if index >= len(leading) + fewest and pressure.complete:
            break
        before = subject.snapshot(log_from=2**63)
        history = serve(subject, program, judge, together=index < len(leading))
        after = subject.snapshot(log_from=int(before.header["log_tail"]))
        pressure.add(after.log)
        judge(kv_sanitizer.check_quiet(start, kv.counters(), kv.reports()), history)
    judge(pressure.check(kv_sanitizer.PROPERTY))


@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
def test_drawn_programs(page_size: int, tiny: Subject, judge: Judge, seed: int) -> None:
    """Drawn programs on few pages of each size: preemption and resume, prefix hits, cancels, reuse, odd chunks.

    Catches: a row that attention reads and that its request, place and tokens do not explain; a false alarm.
    """
    pages = 2 + POOL // page_size
    with tiny.start(kv_sanitizer=True, page_size=page_size, pages=pages, token_budget=BUDGET) as subject:
        _run(subject, subject.draw(seed, MOST_PROGRAMS), PROGRAMS, judge, seed)


@pytest.mark.blink_profile("nightly", "full")
def test_families(family: Subject, judge: Judge, seed: int) -> None:
    """The same for each model family: windows, keys that LongRoPE computes anew, experts.

    Catches: a window that reads beyond the row's own pages; recomputed keys that land elsewhere.
    """
    with family.start(kv_sanitizer=True, token_budget=BUDGET) as subject:
        _run(subject, subject.draw(seed, MOST_PROGRAMS), PROGRAMS, judge, seed)


@pytest.mark.blink_profile("nightly", "full")
def test_model_under_test(engine: Subject, judge: Judge, seed: int) -> None:
    """The same on the real model.

    Catches: what only shows with many layers, and when cancels fall into a long step.
    """
    sizes: dict[str, Any] = {"pages": 2 + 20, "token_budget": BUDGET, "max_len": 256, "masks": 4}
    with engine.start(kv_sanitizer=True, capture=False, **sizes) as subject:
        shape = replace(subject.shape, requests=(4, 8), most_new=24)
        _run(replace(subject, shape=shape), replace(subject, shape=shape).draw(seed, 12), 2, judge, seed)


def struck_program(rng: random.Random, vocab: int, page_size: int, fault: str) -> Program:
    """A request that leaves cached pages, then one that soon frees its own, a bystander, and the one that is struck."""

    def request(tokens: int, new: int, *, seed: int = 0, after: int = 5, cache: bool = True) -> RequestSpec:
        prompt = tuple(rng.randrange(vocab) for _ in range(tokens))
        params = SamplingParams(new, temperature=0.0, seed=seed, ignore_eos=True, prefix_cache=cache)
        return RequestSpec(prompt, params, after=after)

    length = 2 * page_size + rng.randint(1, page_size)
    cached = request(length, 4, after=0)
    freed = request(length, 4, cache=False)
    other = request(length, 3 * page_size // 2)
    struck = request(2 * page_size + rng.randint(1, page_size - 2), page_size, seed=seed_of(fault))
    return Program((cached, freed, other, struck))


def test_wrong_plans_are_named(tiny: Subject, record: Recorder, judge: Judge, seed: int) -> None:
    """An engine whose steps are given wrong plans: foreign, swapped, freed and stale pages, wrong places.

    Catches: a sanitizer that is blind to a kind of fault, names the wrong owner, or breaks off anyone else.
    """
    rng, judged = random.Random(seed), Judge(record, judge.folder, judge.about, judge.prompts)
    found = dict.fromkeys(FAULTS, 0)
    everything: list[dict[str, Any]] = []
    engine = command(tiny.rig.description.engine_command)
    with tiny.start(
        kv_sanitizer=True, kv_reports_expected=True, engine_command=engine, pages=40, token_budget=BUDGET
    ) as subject:
        kv, folder = KvReports(subject.rig.descriptor), subject.rig.run_dir
        assert folder is not None
        for fault in FAULTS:
            for _ in range(MOST_STRIKES):
                if sum(p["fault"] == fault for p in everything) >= STRIKES:
                    break
                program = struck_program(rng, subject.shape.vocab, subject.shape.page_size, fault)
                judged.case(program)
                reported = len(kv.reports())
                history = subject.run(program)
                planted = [json.loads(line) for line in (folder / FILE).read_text(encoding="utf-8").splitlines()]
                planted, everything = planted[len(everything) :], planted
                reports = kv.reports()[reported:]
                judge(kv_sanitizer.check_alone(history, planted, reports), history)
                found[fault] += sum(kv_sanitizer.fault_found(p, reports) is None for p in planted)
        for fault, count in found.items():
            if times := sum(p["fault"] == fault for p in everything):
                record.planted_fault(f"wrong plan: {fault}, named by the KV sanitizer", caught=count, planted=times)
        judge(kv_sanitizer.check_named(everything, kv.reports()))


def test_pool_starts_poisoned(tiny: Subject, judge: Judge) -> None:
    """The KV pool of a fresh engine holds NaN in every row, and after a run in every row that nobody wrote.

    Catches: a pool that starts from zeros, where a row that nobody wrote reads as a plausible one.
    """
    with tiny.start(pages=40) as subject:
        judge(kv_sanitizer.check_poison(_poisoned(subject), np.ones(40, dtype=bool), fresh=True))
        prompt = tuple(range(3, 3 + subject.shape.page_size))
        history = subject.run(Program((RequestSpec(prompt, SamplingParams(4, temperature=0.0, ignore_eos=True)),)))
        untouched = np.arange(40) >= 2 + 2  # pages are given out from 2 on, and it needs two
        judge(kv_sanitizer.check_poison(_poisoned(subject), untouched, fresh=False), history)


def _poisoned(subject: Subject) -> Array:
    """By page of the pool: whether all of it is NaN."""
    memory = subject.rig.memory
    with memory.hold():
        return memory.poisoned_pages()
