"""Lock-step of the compiled scheduler with the specification: whole programs, every observable after every call."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings

from blink_core import _native
from tests.unit.spec.deviations import DEVIATIONS, Deviation
from verification.lockstep.programs import Program, execute, random_program
from verification.lockstep.run import Native, compare, first_difference, records
from verification.lockstep.shrink import shrink
from verification.lockstep.situations import REQUIRED, found
from verification.lockstep.strategy import programs
from verification.mutants import native, weave
from verification.thresholds import default_thresholds

FOUND_WITHIN = default_thresholds().tester.found_within  # random programs
SHRUNK_TO = default_thresholds().tester.shrunk_to  # operations


def differs(program: Program, native: Native = _native) -> bool:
    return compare(execute(program).d, native) is not None


@settings(
    max_examples=1200,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(programs())
def test_scheduler_follows_the_specification(program: Program) -> None:
    """Catches: any plan, event, counter, page or log entry that a clause of docs/rules.md does not give."""
    difference = compare(execute(program).d)
    assert difference is None, f"{difference}\n{program!r}"


def test_every_situation_is_reached_in_lock_step() -> None:
    """Catches: programs that have stopped reaching what they are for, and a difference in any of those situations."""
    reached: set[str] = set()
    for seed in range(500):
        program = random_program(random.Random(seed), 50)
        runner = execute(program, watch=True)
        difference = compare(runner.d)
        assert difference is None, f"{difference}\n{program!r}"
        reached |= found(runner)
    assert set(REQUIRED) <= reached, f"never reached: {sorted(set(REQUIRED) - reached)}"


@pytest.mark.parametrize("group", [3, 4])
def test_groups_of_threads_follow_the_specification(group: int) -> None:
    """Catches: work shared by several threads that has another result than that of one."""
    for seed in range(12):
        program = random_program(random.Random(seed), 25)
        assert compare(execute(program).d, group_size=group) is None, repr(program)


# Programs on which scheduler and rules differed once: a ring without requests that kept its deficit where rounds of
# turns are skipped (A2); a due reservation not enforced though the holder's cached pages were enough (A6); two rows
# without masks that gave way to each other for ever inside one boundary (A4).
REGRESSIONS = {
    "deficit of an idle ring": (
        "00da00ed000000930000000000000000",
        "6300005b00000000a6f800c600000000000000000000000070ee001400000000b7a1008b000000000000850000000000",
    ),
    "due holder with a prefix": (
        "da6a42cf550000a38185ac0000000051",
        "6d00002f0000f8006b3400fc0000f70000004a00000000009f0000dd000000009ed600500000000000000000000000000000910000000000",
    ),
    "rows that give way to each other": (
        "00000000000000000000000000000000",
        "4c000000050000004c0000000500000000000000000000000000000000000000",
    ),
}


@pytest.mark.parametrize("name", REGRESSIONS)
def test_once_found_differences_stay_mended(name: str) -> None:
    """Catches: the return of a fault that lock-step has found; the last one would not end."""
    shape, ops = (bytes.fromhex(text) for text in REGRESSIONS[name])
    assert compare(execute(Program.parse(shape, ops)).d) is None


def test_same_program_twice_is_the_same_words() -> None:
    """Catches: a driver that draws on anything but the program, so that a failure would not replay."""
    program = random_program(random.Random(1), 50)
    one, two = execute(program).d, execute(Program.parse(program.shape, b"".join(program.ops))).d
    assert (one.words, one.expected) == (two.words, two.expected)


def find(native: Native = _native) -> tuple[int, Program]:
    """The first random program that differs."""
    for seed in range(FOUND_WITHIN):
        program = random_program(random.Random(1000 + seed), 40)
        if differs(program, native):
            return seed, program
    pytest.fail(f"not found within {FOUND_WITHIN} programs")


@pytest.mark.parametrize("deviation", DEVIATIONS, ids=[d[0] for d in DEVIATIONS])
def test_deviation_of_the_specification_is_found(deviation: Deviation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a comparison or programs that have gone blind to a clause."""
    _, clause, module, function, other = deviation
    monkeypatch.setattr(module, function, other)
    small = shrink(find()[1], differs)
    assert len(small.ops) <= SHRUNK_TO, f"{clause}: {small!r}"
    text = str(compare(execute(small).d))
    assert text.startswith("step ")
    assert "in the specification and" in text


@pytest.mark.parametrize("mutant", ["admit-youngest-first", "token-twice", "leak-page-on-cancel"])
def test_mutant_of_the_scheduler_is_found(mutant: str) -> None:
    """Catches: lock-step that no longer sees an ordering, a delivery or a page-lifecycle fault."""
    woven = weave.build()
    module = native.read(woven.path)
    native.activate(module, woven.identities[mutant])
    try:
        program = find(module)[1]
        small = shrink(program, lambda p: differs(p, module))
        assert len(small.ops) <= SHRUNK_TO, repr(small)
    finally:
        native.activate(module, 0)
    assert not differs(small, module)


def test_difference_names_step_observable_and_both_values() -> None:
    """Catches: a report from which nobody sees what differed."""
    driver = execute(random_program(random.Random(3), 30)).d
    wrong = list(driver.expected)
    start = sum(1 + len(r) for r in records(wrong)[:4])
    wrong[start + 5] += 7  # header.clock of the fifth record
    difference = first_difference(driver.config, driver.expected, wrong)
    assert difference is not None
    assert (difference.step, difference.name) == (4, "header.clock")
    assert difference.scheduler == int(str(difference.specification)) + 7
    assert "clauses to read: T2" in str(difference)


@pytest.mark.parametrize(
    ("words", "message"), [([99], "unknown operation"), ([3, 0], "ends inside"), ([3, 9, 0, 1], "9")]
)
def test_bad_program_is_refused(words: list[int], message: str) -> None:
    """Catches: an executor that writes outside its engine when a program is wrong."""
    driver = execute(Program(bytes(16), ())).d
    driver.words = words
    with pytest.raises(IndexError, match=message):
        compare(driver)
