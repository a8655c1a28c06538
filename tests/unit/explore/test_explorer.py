"""The explorer itself: it finds what is planted, finishes what is sound, and says so when it cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blink_core import _native
from verification.explore.encode import encode
from verification.explore.run import MAX_BYTES, MAX_STATES, Search, explore, same_verdict
from verification.explore.scope import Attach, Cancel, Host, Outcome, Plant, Request, Scope, Submit
from verification.explore.scopes import (
    DRAIN,
    DRAIN_THEN_STOP,
    EPOCH,
    RIVALS,
    SCOPES,
    STOP,
    SUPERSEDED,
    TWO_REQUESTS,
    TWO_RINGS,
    named,
    of_profile,
)
from verification.explore.witness import decode
from verification.result import Verdict

TINY = Scope(
    name="tiny",
    about="one request and its cancel",
    config={"pages": 5, "cq_entries": 8},
    requests=(Request(3, 3),),
    programs=((Submit(0), Cancel(0)),),
    claims=("cancel in step", "quarantine", "length reached"),
)
REUSE = replace(TINY, name="reuse", requests=(Request(3, 2), Request(1, 1)), programs=((Submit(0), Submit(1)),))
PRESSED = replace(TWO_REQUESTS, name="pressed", programs=((Submit(0), Submit(1)),))
# Rows that are paused for longer than one boundary can tell apart.
PATIENT = replace(TWO_RINGS, name="patient", config=TWO_RINGS.config | {"paused_limit": 3})
PATIENT = replace(PATIENT, programs=((Submit(0),), (Submit(1),)))

PLANTED = (
    (PRESSED, Plant.MISSTATED, "L1"),
    (PRESSED, Plant.KV_ELSEWHERE, "K1"),
    (REUSE, Plant.EARLY_REUSE, "R8"),
    (TINY, Plant.FREED_IN_STEP, "K4"),
    (TINY, Plant.LOST_EVENT, "R4"),
    (TINY, Plant.NO_BOUNDARY, "liveness"),
    (TINY, Plant.ENTRY_FIRST, "R8"),
    (PATIENT, Plant.BLIND, "reduction"),
    (TINY, Plant.READS_AGAIN, "liveness"),
    (TINY, Plant.DEAF, "R10"),
    (DRAIN_THEN_STOP, Plant.NEVER_STOPS, "L7"),
    (SUPERSEDED, Plant.ATTACH_ONCE, "L1"),
    (RIVALS, Plant.NO_LOOK, "L1"),
)
FIRST_MOVE = {
    Plant.NEVER_STOPS: "host asks to drain",
    Plant.ATTACH_ONCE: "front end gets a successor and lives on",
    Plant.NO_LOOK: "front end dies",
}  # of the counterexample, where it is another than a submission's payload


def test_every_plant_is_tried() -> None:
    """Catches: a planted fault that nothing looks for any more."""
    assert {plant for _, plant, _ in PLANTED} == set(Plant) - {Plant.NONE}


@pytest.mark.parametrize(("scope", "plant", "clause"), PLANTED, ids=[plant.name for _, plant, _ in PLANTED])
def test_planted_fault_is_found(scope: Scope, plant: Plant, clause: str) -> None:
    """Catches: an explorer whose clauses, content check, search for cycles or check of its own reduction does nothing;
    a counterexample that does not lead to what it claims. Without the plant the same scope holds."""
    assert explore(scope).holds
    search = explore(scope.planted(plant))
    assert (search.holds, search.clause) == (False, clause), search.message
    result = search.check()
    assert result.verdict is Verdict.INVALID
    assert result.clause == clause
    assert 0 < len(search.witness) <= 40
    assert len(search.records) == len(search.witness)  # the replay goes as far as the search went
    lines = list(decode(search))
    assert len(lines) == len(search.witness)
    assert FIRST_MOVE.get(plant, "NIC delivers payload of request 0") in lines[0]


def test_deadlock_and_livelock_are_told_apart() -> None:
    """Catches: a cycle without progress that is taken for work, or for a state that nothing leads out of."""
    assert "deadlock" in explore(TINY.planted(Plant.NO_BOUNDARY)).message
    assert "livelock" in explore(TINY.planted(Plant.READS_AGAIN)).message


def test_counterexample_is_a_shortest() -> None:
    """Catches: a search that is not breadth first, whose counterexamples are longer than they need be.

    Four words, a poll, a boundary, the cancel's entry and the poll that ends the request: none of them can be spared.
    """
    assert len(explore(TINY.planted(Plant.FREED_IN_STEP)).witness) == 8


@pytest.mark.parametrize("scope", [TINY, REUSE, PRESSED, STOP, DRAIN, DRAIN_THEN_STOP], ids=lambda s: s.name)
def test_same_with_and_without_symmetry(scope: Scope) -> None:
    """Catches: a renaming of pages or rows that hides states which behave differently; a search that is not the same
    twice."""
    reduced, plain, again = explore(scope), explore(scope, symmetry=False), explore(scope)
    assert reduced.holds
    assert plain.holds
    assert same_verdict(reduced, plain).verdict is Verdict.VALID
    assert plain.figures["states"] >= reduced.figures["states"] > 100
    assert reduced.figures == again.figures
    assert reduced.situations == again.situations


@pytest.mark.parametrize("plant", [Plant.KV_ELSEWHERE, Plant.MISSTATED])
def test_faults_are_found_without_symmetry_too(plant: Plant) -> None:
    """Catches: a clause that only holds its breath because pages were renamed."""
    reduced, plain = (explore(PRESSED.planted(plant), symmetry=on) for on in (True, False))
    assert same_verdict(reduced, plain).verdict is Verdict.VALID
    assert reduced.clause == plain.clause != ""
    assert len(reduced.witness) == len(plain.witness)


def test_different_verdicts_are_noticed() -> None:
    """Catches: a comparison of the two searches that cannot fail."""
    assert same_verdict(explore(TINY), explore(TINY.planted(Plant.LOST_EVENT))).verdict is Verdict.INVALID
    cut = explore(TINY, max_states=10)
    assert same_verdict(cut, cut).verdict is Verdict.UNKNOWN


def test_what_is_not_finished_is_unknown() -> None:
    """Catches: a search that ran out of time, states or memory and counts as having seen everything."""
    for search, by in (
        (explore(EPOCH, max_states=1000), "states"),
        (explore(EPOCH, max_bytes=1 << 20), "memory"),
        (explore(EPOCH, deadline_s=0.0), "deadline"),
    ):
        assert not search.finished
        assert not search.holds
        assert by in search.stopped_by
        result = search.check()
        assert result.verdict is Verdict.UNKNOWN
        assert by in result.message


def test_memory_limit_counts_samples_and_analysis() -> None:
    """Catches: a limit of memory that leaves out the sampled states or what the analysis of the graph takes."""
    figures = explore(STOP).figures
    states, bitmap = figures["states"], 8 * -(-figures["state_bytes"] // 512)
    hashes, parent, analysis = 16, 4 + 4 + 8, 3 * 4 + 4
    assert figures["reexpanded"] > states > 1000
    least = states * (hashes + parent + analysis) + figures["transitions"] * 4 + figures["reexpanded"] * bitmap
    assert figures["peak_bytes"] >= figures["bytes"] > least


def test_claims_must_occur() -> None:
    """Catches: a scope that passes although it never met what it was made for."""
    search = explore(replace(TINY, claims=("preemption",)))
    assert search.holds
    assert search.missing == ["preemption"]
    result = search.check()
    assert result.verdict is Verdict.INVALID
    assert "never met: preemption" in result.message


def test_omission_probability() -> None:
    """Catches: a bound that is not of pairs of states, or of fewer bits than the hash has."""
    search = explore(TINY)
    n = search.figures["states"]
    assert search.omission == n * (n - 1) / 2 / 2**128
    assert search.check().measurements["omission_probability"].value == search.omission


def test_named_scopes() -> None:
    """Catches: two scopes of a name; a claim that no search can meet; a profile that leaves out what a smaller one has;
    a scheduler state that is not small [4]."""
    smoke, nightly, full = ({s.name for s in of_profile(profile)} for profile in ("smoke", "nightly", "full"))
    assert smoke < nightly < full
    assert sorted(full) == sorted(scope.name for scope in SCOPES)  # none twice
    for scope in SCOPES:
        explorer = _native.Explorer(scope.engine().pack().tobytes(), encode(scope))
        assert explorer.figures()["state_bytes"] <= 4096
        assert set(scope.claims) <= set(explorer.situations()), scope.name
        assert named(scope.name) is scope
    with pytest.raises(KeyError, match="no scope 'x'; there are one-ring-"):
        named("x")


def test_scopes_of_the_issue() -> None:
    """Catches: a named scope of issue 4 that is no longer what its name says, or that smoke leaves out."""
    smoke = {scope.name: scope for scope in of_profile("smoke")}
    for name, rings, requests, pages in (
        ("one-ring-two-requests-three-pages", 1, 2, 3),
        ("two-rings-two-requests-four-pages", 2, 2, 4),
        ("one-ring-three-requests-cancel-and-preemption", 1, 3, 3),
    ):
        scope = smoke[name]
        found = len(scope.programs), len(scope.requests), scope.engine().pages - 2
        assert found == (rings, requests, pages)
    assert {"preemption", "cancel in step"} <= set(smoke["one-ring-three-requests-cancel-and-preemption"].claims)
    assert "epoch change in step" in smoke["epoch-change-in-step"].claims


def test_scopes_that_cannot_be() -> None:
    """Catches: a program that does something else than it says; an engine too large for bit sets, or with what is not
    modelled; each with a reason."""
    twice = replace(TINY, programs=((Submit(0), Submit(0)),))
    with pytest.raises(ValueError, match="request 0 cannot be submitted by ring 0"):
        encode(twice)
    with pytest.raises(ValueError, match="request 0 is never submitted"):
        encode(replace(TINY, programs=((),)))
    with pytest.raises(ValueError, match="request 0 is not of ring 1"):
        encode(replace(TINY, programs=((Submit(0),), (Cancel(0),))))
    with pytest.raises(IndexError, match="too large for a small scope"):
        explore(replace(TINY, config=TINY.config | {"pages": 40}))
    with pytest.raises(IndexError, match="are at most 64"):
        explore(replace(TINY, config=TINY.config | {"max_len": 65}))
    with pytest.raises(ValueError, match="request 0 is cancelled before it is submitted"):
        encode(replace(TINY, programs=((Cancel(0), Submit(0)),)))
    with pytest.raises(IndexError, match="grammar masks are not modelled"):
        explore(replace(TINY, config=TINY.config | {"masks": 1}))
    twice = replace(TINY, requests=(), programs=((Attach(2), Attach(3)),), unordered=True)
    with pytest.raises(ValueError, match="unordered words and 2 attaches of ring 0; at most 1"):
        encode(twice)
    assert encode(replace(twice, programs=((Attach(2),),)))
    with pytest.raises(ValueError, match="unordered words and an attach beside a living front end"):
        encode(replace(twice, programs=((Attach(2, beside=True),),)))
    for program in ((Attach(2, during=True),), (Attach(2), Attach(3, beside=True, during=True))):
        with pytest.raises(ValueError, match="an attach of ring 0 during none, or beside one as well"):
            encode(replace(twice, unordered=False, programs=(program,)))
    config, words = TINY.engine().pack().tobytes(), encode(TINY)
    with pytest.raises(IndexError, match="ends too early"):
        _native.Explorer(config, words[:-8])
    with pytest.raises(IndexError, match="goes on behind its end"):
        _native.Explorer(config, words + bytes(8))
    with pytest.raises(ValueError, match="whole 64-bit words"):
        _native.Explorer(config, words[:-1])
    with pytest.raises(ValueError, match="sizeof"):
        _native.Explorer(config[:-1], words)


def test_front_end_dies_while_it_attaches() -> None:
    """Catches: a death that is only tried of front ends at work: half an attach, or one that nobody acknowledged yet.

    Counted by hand. An attach has 13 words, of which the sixth is the fence: 6 states before the fence is there; 7 more
    times 2, for the scheduler may follow the fence or not; attached and not seen, by a scheduler behind the fence or
    before it; seen. That is 23. So without either death 1 at work and 2 x 23. One that dies before its fence is there
    gives 23 more; behind it, with a scheduler that follows its fence or not, 2 x 6 + 7 + 1 more, for the next fence
    makes the rest the same. One that dies before its epoch is seen: 2 x (6 + 7 + 1).
    """
    search = explore(replace(TINY, requests=(), programs=((Attach(2), Attach(3)),), claims=()))
    assert search.holds, search.message
    assert search.figures["states"] == (1 + 2 * 23) + 23 + (2 * 6 + 7 + 1) + 2 * (6 + 7 + 1)


@pytest.mark.parametrize(
    ("plant", "scopes"),
    [
        (Plant.NEVER_STOPS, [DRAIN_THEN_STOP]),
        (Plant.ATTACH_ONCE, [SUPERSEDED, RIVALS]),
        (Plant.NO_LOOK, [RIVALS]),
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_only_these_scopes_find_it(plant: Plant, scopes: list[Scope]) -> None:
    """Catches: a scope that shows nothing which smaller ones, or those without its move, do not show as well."""
    found = [s.name for s in of_profile("smoke") if explore(s.planted(plant)).clause]
    assert found == [scope.name for scope in scopes]


def test_two_attaches_are_told_apart() -> None:
    """Catches: a counterexample in which nobody can see which of two that attach at once wrote a word, or when the
    second began."""
    text = "\n".join(decode(explore(RIVALS.planted(Plant.NO_LOOK))))
    for words in (
        "another attach begins beside front end's",
        "NIC delivers a word of earlier front end's attach (2)",
        "NIC delivers a word of front end's attach (3)",
        "NIC delivers all of request 1",
    ):
        assert words in text
    assert "superseded" not in text


def test_words_of_two_attaches_meet_everywhere() -> None:
    """Catches: two attaches of which one waits for the other; one that nobody can go on with once both have begun.

    An attach has 13 words, of which the sixth is the fence. While nobody has written a fence the two can stand at any
    two of 6 places, and while one has, the other at any of 6 and that one at any of 7: these have no order of fences
    that could end one. So there are at least so many states more than where one follows the other.
    """
    one_by_one, at_once = (
        explore(replace(TINY, requests=(), programs=((Attach(2), Attach(3, during=during)),), claims=()))
        for during in (False, True)
    )
    assert at_once.holds, at_once.message
    assert at_once.figures["states"] >= one_by_one.figures["states"] + 6 * 6 + 2 * 6 * 7


def test_progress_is_told() -> None:
    """Catches: a search of minutes that says nothing, or one that does not stop when it is asked to."""
    lines: list[str] = []
    explorer = _native.Explorer(EPOCH.engine().pack().tobytes(), encode(EPOCH))
    assert explorer.run(0.0, MAX_STATES, MAX_BYTES) == 0  # a slice that is over at once goes on later
    search: Search = explore(EPOCH, deadline_s=0.05, progress=lines.append)
    assert search.stopped_by == "its deadline" or search.finished
    if not search.finished:
        assert lines
        assert "states" in lines[0]


def test_outcomes_hosts_and_attaches_are_decoded() -> None:
    """Catches: a counterexample whose lines name the wrong outcome, request or front end."""
    scope = replace(
        TINY,
        outcomes=Outcome.OK | Outcome.NAN_ROW | Outcome.STEP_FAILED,
        host=Host.DRAIN,
        programs=((Submit(0), Cancel(0), Attach(2)),),
        claims=(),
    )
    search = explore(scope)
    assert search.holds
    explorer = _native.Explorer(scope.engine().pack().tobytes(), encode(scope))
    payload, line, rest, entry = (5 | part << 16 for part in range(4))
    labels = [payload, line, rest, entry, 0, 1, 1 | 1 << 16, 0, 3, 4, 5]
    search.records = explorer.replay(labels)
    text = "\n".join(decode(search))
    for words in (
        "step ends (NAN_ROW), boundary", "ERROR 0 NAN_LOGITS", "host asks to drain", "front end dies",
        "NIC delivers a word of front end's attach (2)",
    ):  # fmt: skip
        assert words in text
