"""`blink trace check`: the specification as monitor of recorded runs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blink_core.abi.enums import LogKind, LogLevel
from tests.unit.trace.mutations import LATE, MUTATIONS, places
from tests.unit.trace.runs import at_one_clock, drawn, with_log
from verification.lockstep.programs import random_program
from verification.lockstep.strategy import programs
from verification.mutants import native, weave
from verification.trace import snapshot
from verification.trace.drawn import logged, trace_of
from verification.trace.follower import Follower
from verification.trace.format import Trace
from verification.trace.monitor import UNKNOWN, VALID, VIOLATED, check

SEEDS = range(200)
FOUND_WITHIN = 100  # random programs


@settings(
    max_examples=120,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(programs(), st.booleans())
def test_run_of_any_program_is_valid(program: object, payloads: bool) -> None:
    """Catches: a monitor that rejects what the scheduler may do, with prompts in the file or without."""
    verdict = check(trace_of(logged(program), payloads=payloads))  # type: ignore[arg-type]
    assert verdict.word == VALID, f"{verdict}\n{program!r}"
    assert verdict.checked == verdict.total


@pytest.mark.parametrize("seed", [1, 12, 119, *range(40, 60)])
def test_boundaries_that_share_one_clock_are_told_apart(seed: int) -> None:
    """Catches: a false `violated` where many boundaries that wrote nothing stand at one reading of the clock (E2).

    Of these, 1, 12 and 119 had one while CLOCK was logged only when the clock had changed.
    """
    verdict = check(trace_of(logged(at_one_clock(random_program(random.Random(seed), 40)))))
    assert verdict.word == VALID, str(verdict)


@pytest.mark.parametrize("name", MUTATIONS)
def test_one_fault_of_a_log_is_found(name: str) -> None:
    """Catches: a clause that the monitor is blind to, or that it gives another name."""
    mutate, clauses = MUTATIONS[name]
    judged = late = 0
    for seed in SEEDS:
        trace = drawn(seed)
        log = mutate(list(trace.entries))
        if log is None or log == trace.entries:
            continue
        verdict = check(with_log(trace, log))
        if verdict.word == VALID and name in LATE:
            late += 1
            continue
        judged += 1
        assert verdict.word == VIOLATED, f"seed {seed}: {verdict}"
        assert verdict.clause in clauses, f"seed {seed}: {verdict}"
        assert verdict.excerpt.count(">") == 1
        if judged == 3:
            break
    assert judged > late, f"only {judged} programs have a place for it"


@pytest.mark.parametrize(
    ("mutant", "clauses"),
    [
        ("admit-youngest-first", {"L2", "A2"}),
        ("token-twice", {"P2", "P3", "R4", "R5", "A5"}),  # shows in credits only: the log has its token once
        ("leak-page-on-cancel", {"K4"}),
    ],
)
def test_mutant_of_the_scheduler_is_found(mutant: str, clauses: set[str]) -> None:
    """Catches: a monitor that follows the log of a scheduler with a wrong order, delivery or page life."""
    woven = weave.build()
    planted = native.read(woven.path)
    native.activate(planted, woven.identities[mutant])
    try:
        for seed in range(FOUND_WITHIN):
            program = logged(random_program(random.Random(1000 + seed), 40))
            verdict = check(trace_of(program, planted))
            if verdict.word == VIOLATED:
                assert verdict.clause in clauses, str(verdict)
                break
        else:
            pytest.fail(f"not found within {FOUND_WITHIN} programs")
    finally:
        native.activate(planted, 0)
    assert check(trace_of(program, planted)).word == VALID


def cut(trace: Trace, at: int) -> Trace:
    """Ten entries from `at` on are lost."""
    return replace(trace, entries=trace.entries[:at], gap=(at, 10), gaps=10, after_gap=trace.entries[at + 10 :])


def test_gap_leaves_it_unknown() -> None:
    """Catches: a run of which entries are missing that counts as valid."""
    verdict = check(cut(drawn(0), 40))
    assert verdict.word == UNKNOWN
    assert verdict.checked == 40
    assert "10 entries from entry 40 on were overwritten" in str(verdict)


def test_violation_before_a_gap_is_one() -> None:
    """Catches: a gap that hides what was seen before it."""
    trace = drawn(0)
    at = places(trace.entries, LogKind.PAGE_ALLOC)[0]
    log = list(trace.entries)
    log[at] = (*log[at][:5], log[at][5] ^ 1, *log[at][6:])
    assert check(cut(with_log(trace, log), at + 5)).clause == "K2"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"first": 7}, "begins at entry 7"),
        ({"entries": []}, "no log entry"),
        ({"problem": "cut short at byte 9"}, "cut short at byte 9"),
    ],
)
def test_incomplete_recording_is_unknown(change: dict[str, object], reason: str) -> None:
    """Catches: a verdict on what was not recorded from the first entry to the end."""
    verdict = check(replace(drawn(1), **change))  # type: ignore[arg-type]
    assert verdict.word == UNKNOWN
    assert reason in str(verdict)


def test_level_decisions_is_unknown_and_says_what_it_needs() -> None:
    """Catches: a log without its inputs that is judged all the same."""
    trace = drawn(1)
    config = replace(trace.header.config, log_level=LogLevel.DECISIONS)
    verdict = check(replace(trace, header=replace(trace.header, config=config)))
    assert verdict.word == UNKNOWN
    assert "DECISIONS; conformance needs ALL" in str(verdict)


def test_descriptor_that_was_not_recorded_is_named() -> None:
    """Catches: a monitor that makes up the parameters of an accepted request."""
    trace = drawn(0)
    accepted = places(trace.entries, LogKind.ACCEPT)[0]
    kept = {i: made for i, made in trace.submissions.items() if i != accepted - 1}
    verdict = check(replace(trace, submissions=kept))
    assert verdict.word == UNKNOWN
    assert "descriptor of" in str(verdict)
    assert "was not recorded" in str(verdict)


def test_clauses_that_a_recording_cannot_show_are_listed() -> None:
    """Catches: a verdict that claims more than it has seen."""
    whole, redacted = check(drawn(0)), check(drawn(0, payloads=False))
    assert {"L4", "R8", "R9"} <= set(whole.unknown)
    assert set(redacted.unknown) > set(whole.unknown)
    assert "K6, K7" in redacted.unknown


def test_raw_memory_that_contradicts_the_log_is_found() -> None:
    """Catches: pages that leak although the log tells of their release."""
    trace = drawn(2)
    at = Follower.start(trace.header.config)
    state = {name: getattr(at.machine, name) for name in snapshot.COUNTERS}
    state |= {"running": [], "free": at.machine.free[1:], "quarantine": [], "pages": list(at.machine.page_state)}
    verdict = check(replace(trace, snapshots=[(1, state)]))
    assert (verdict.word, verdict.clause) == (VIOLATED, "K2")
    state["free"] = list(at.machine.free)
    assert check(replace(trace, snapshots=[(1, state)])).word == VALID
