"""`blink trace replay`: recorded inputs on the compiled scheduler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from blink_core.abi.enums import LogKind
from tests.unit.spec.test_lockstep import REGRESSIONS
from tests.unit.trace.mutations import places
from tests.unit.trace.runs import drawn, with_log
from verification.lockstep.programs import Program
from verification.trace.drawn import logged, trace_of
from verification.trace.format import read
from verification.trace.monitor import VALID, check
from verification.trace.replay import replay

TRACES = Path(__file__).parents[3] / "traces"


@pytest.mark.parametrize("seed", range(25))
def test_replayed_program_writes_the_same_log(seed: int) -> None:
    """Catches: an input that the log does not hold and nobody infers, so that a recording does not replay."""
    done = replay(drawn(seed))
    assert (done.same, done.whole) == (True, True), done.message
    assert done.compared == len(drawn(seed).entries)


def test_scheduler_that_decides_otherwise_is_found() -> None:
    """Catches: a comparison that does not look at the entries."""
    trace = drawn(0)
    at = places(trace.entries, LogKind.PAGE_ALLOC)[2]
    log = list(trace.entries)
    log[at] = (*log[at][:5], log[at][5] ^ 1, *log[at][6:])
    done = replay(with_log(trace, log))
    assert done.whole
    assert not done.same
    assert done.compared == at
    assert done.message.startswith(f"entry {at}: recorded")


def test_without_payloads_it_says_what_it_needs() -> None:
    """Catches: a replay with made-up prompts."""
    done = replay(drawn(0, payloads=False))
    assert not done.whole
    assert "--payloads" in done.message


def test_cut_recording_is_replayed_as_far_as_it_goes() -> None:
    """Catches: a replay that claims the end of a log of which a part is missing."""
    trace = drawn(0)
    done = replay(replace(trace, submissions={}))
    assert not done.whole
    assert done.compared < len(trace.entries)


def test_every_once_found_difference_has_its_trace() -> None:
    """Catches: a regression of lock-step that the one command over traces/ leaves out."""
    there = {read(path).header.notes["program"]["ops"] for path in TRACES.glob("lockstep-*.trace")}
    assert there == {ops for _, ops in REGRESSIONS.values()}


@pytest.mark.parametrize("path", sorted(TRACES.glob("*.trace")), ids=lambda path: path.stem)
def test_recorded_regressions_stay_mended(path: Path) -> None:
    """Catches: a fault that was found once and is back: its recorded run is replayed and checked."""
    trace = read(path)
    done = replay(trace)
    assert (done.same, done.whole) == (True, True), done.message
    assert check(trace).word == VALID
    if "program" in trace.header.notes:
        kept = trace.header.notes["program"]
        again = trace_of(logged(Program.parse(bytes.fromhex(kept["shape"]), bytes.fromhex(kept["ops"]))))
        assert again.entries == trace.entries
