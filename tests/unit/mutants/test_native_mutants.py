"""The mutant build: one plain request passes with every fault in it, and the matrix tells a kill from what is none."""

from __future__ import annotations

import faulthandler
import os
import pkgutil
import re
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from blink_core.abi.enums import EventKind, FinishReason
from tests.waiting import DEADLINE_S
from verification.mutants import matrix, native, weave, worker
from verification.mutants.checkers import every, find
from verification.mutants.checkers.base import Finding, Product
from verification.mutants.checkers.scopes import RULES
from verification.mutants.model import PRODUCT, Mutant, by_name, load
from verification.mutants.worker import CRASH, FOUND, NOTHING, TIMEOUT, Job, Outcome
from verification.scheduler.harness import Harness, next_token, small_config

NATIVE = [m for m in load() if m.where == "native"]


@pytest.fixture(scope="module")
def woven() -> weave.Woven:
    return weave.build()


@pytest.mark.parametrize("mutant", [m for m in NATIVE if not m.numeric], ids=lambda m: m.name)
def test_plain_request_passes(mutant: Mutant, woven: weave.Woven) -> None:
    """Catches: a seeded fault so coarse that any test would notice it, which says nothing about the suite."""
    module = native.read(woven.path)
    native.activate(module, woven.identities[mutant.name])
    h = Harness(small_config(), native=module, checks=())
    h.attach()
    asked = h.fronts[0].submit([5, 6, 7, 8, 9], 6, flags=1)
    assert asked is not None
    h.settle(100)
    known = asked.prompt.copy()
    for _ in range(6):
        known.append(next_token(known))
    assert asked.tokens == known[5:]
    assert asked.terminal == (EventKind.FINISH, FinishReason.LENGTH, 6)


def test_build_is_reused_and_tells_its_mutants(woven: weave.Woven) -> None:
    """Catches: a build for each caller; a number that means another fault in the module than in the registry."""
    before = woven.path.stat().st_mtime_ns
    again = weave.build()
    assert again == woven
    assert again.path.stat().st_mtime_ns == before
    assert sorted(again.identities.values()) == list(range(1, len(NATIVE) + 1))
    module = native.read(woven.path)
    assert module.mutants == len(NATIVE)
    with pytest.raises(native.NotInForce, match="not"):
        native.activate(module, len(NATIVE) + 1)


def test_scan_for_mutants_can_fail(woven: weave.Woven) -> None:
    """Catches: a scan of the release binary for literals that no build holds."""
    assert b"mutant" in woven.path.read_bytes()
    assert hasattr(native.read(woven.path), "activate_mutant")


def test_missing_module_is_refused(tmp_path: Path) -> None:
    """Catches: a mutant that is silently not in force because its build is gone."""
    with pytest.raises(native.NotInForce, match="is no module"):
        native.read(tmp_path / "none.so")


class Toy:
    """A checker that does as it is told."""

    name = "toy"
    where = frozenset({"native"})
    clauses: Mapping[str, frozenset[str]] = {"rule": frozenset("K")}
    functions = frozenset({"toy"})
    seconds = 0.5

    def __init__(self, act: Callable[[int], Finding | None]) -> None:
        self.act = act

    def run(self, product: Product, seed: int, deadline: float) -> Finding | None:
        return self.act(seed)


def hangs(seed: int) -> Finding | None:
    time.sleep(600)
    return None


def dies(seed: int) -> Finding | None:
    faulthandler.disable()  # pytest's would print a trace
    os.kill(os.getpid(), signal.SIGSEGV)
    return None


def raises(seed: int) -> Finding | None:
    raise RuntimeError("broken")


@pytest.mark.parametrize(
    ("act", "word", "witness"),
    [
        (lambda seed: Finding("rule", frozenset("K"), "seen"), FOUND, "seen"),
        (lambda seed: None, NOTHING, ""),
        (raises, CRASH, "RuntimeError: broken"),
        (dies, CRASH, "SIGSEGV"),
        (hangs, TIMEOUT, "not over"),
    ],
    ids=["found", "nothing", "raised", "crashed", "hung"],
)
def test_outcome_of_a_job(
    act: Callable[[int], Finding | None], word: str, witness: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a crash or a hang that counts as a kill, or that takes the worker with it."""
    monkeypatch.setattr("verification.mutants.checkers.find", lambda name: Toy(act))
    monkeypatch.setattr(worker, "GRACE_S", 0.5)
    outcome = worker._supervise(Job("toy", 1), 0.5 if word == TIMEOUT else DEADLINE_S)
    assert outcome.word == word
    assert witness in outcome.witness


def cell(*outcomes: tuple[str, str], seeds: int = 10) -> matrix.Cell:
    made = matrix.Cell("toy", seeds)
    for word, classes in outcomes:
        if not made.decided:
            made.add(Outcome(word, "rule", list(classes)), "K")
    return made


def test_kill_is_nine_of_ten_that_name_the_class() -> None:
    """Catches: a kill by a finding of another class, by a crash or a timeout, or in too few seeds."""
    assert cell(*[(FOUND, "K")] * 9, (NOTHING, "")).killed
    assert not cell(*[(FOUND, "K")] * 8, *[(NOTHING, "")] * 2).killed
    assert not cell(*[(FOUND, "QS")] * 10).killed
    assert not cell(*[(CRASH, "")] * 10).killed
    assert not cell(*[(TIMEOUT, "")] * 10).killed
    assert cell((NOTHING, ""), (NOTHING, ""), *[(FOUND, "K")] * 8).run == 2  # two misses decide it


def row(name: str, cls: str, *cells: matrix.Cell) -> matrix.Row:
    return matrix.Row(name, cls, "native", "", {c.checker: c for c in cells})


def test_verdict_needs_clean_controls_and_kills() -> None:
    """Catches: a matrix that passes with a survivor, or whose checkers object to the product as it is."""
    killed, alive = cell(*[(FOUND, "K")] * 10), cell((NOTHING, ""), (NOTHING, ""))
    clean = row("control-native", "", cell(*[(NOTHING, "")] * 10))
    assert matrix.judge([clean, row("a", "K", killed)]).problems == ()
    assert "survives" in matrix.judge([clean, row("a", "K", alive)]).problems[0]
    assert matrix.judge([clean, row("a", "K", alive)], excused={"a": "because"}).problems == ()
    for word, argument, wrong in (
        (FOUND, "because", True),
        (CRASH, "because", True),
        (TIMEOUT, "because", True),
        (TIMEOUT, "It only takes longer.", False),
    ):
        told = row("a", "K", cell((NOTHING, ""), (word, "K")))
        problems = matrix.judge([clean, told], excused={"a": argument}).problems
        assert [("argued equivalent, and is not" in one) for one in problems] == [True] * wrong
    noisy = row("control-native", "", cell((NOTHING, ""), (FOUND, "K")))
    assert "without any mutant" in matrix.judge([noisy, row("a", "K", killed)]).problems[0]
    assert "share no check function" in matrix.judge([clean, row("a", "K", killed)], whole=["K"]).problems[0]


def test_class_needs_two_checkers_that_share_nothing() -> None:
    """Catches: a pair that decides by one function counted as two, or kills of one mutant counted for another."""

    def named(name: str, kills: bool) -> matrix.Cell:
        made = matrix.Cell(name, 10)
        for _ in range(10):
            made.add(Outcome(FOUND if kills else NOTHING, "rule", ["K"] if kills else []), "K")
        return made

    def judged(*rows: matrix.Row) -> matrix.ClassResult:
        (result,) = matrix.by_class(rows, {"c": "because"})
        return result

    a = row("a", "K", named("lock-step", True), named("log-conformance", True), named("raw-memory", False))
    alone = judged(a)  # both of them ask the specification
    assert (alone.mutants, alone.killed, alone.twice, alone.pair) == (1, 1, 0, ())
    b = row("b", "K", named("raw-memory", True))
    both = judged(a, b, row("c", "K", named("raw-memory", False)))
    assert (both.mutants, both.killed, both.equivalent, both.twice) == (3, 2, 1, 0)
    assert {name for name, _ in both.pair} & {"lock-step", "log-conformance"}
    assert ("raw-memory", 1) in both.pair
    assert judged(row("d", "K", named("lock-step", True), named("raw-memory", True))).twice == 1


def test_class_without_a_pair_ends_in_time() -> None:
    """Catches: a class whose second checker went blind, which runs until its test's limit and is undecided."""
    killed = row("a", "K", cell(*[(FOUND, "K")] * 10))
    killed.cells = {"raw-memory": next(iter(killed.cells.values()))}
    now = iter(range(0, 1000, 10))
    rows, told = matrix.until_pair(lambda mutant: [killed], NATIVE[:50], 100.0, lambda: float(next(now)))
    assert len(rows) == 9
    assert "no two independent checkers in 100 s: 9 of 50 mutants were run" in told
    other = row("b", "K", cell(*[(FOUND, "K")] * 10))
    other.cells = {"lock-step": next(iter(other.cells.values()))}
    both = iter([killed, other])
    rows, told = matrix.until_pair(lambda mutant: [next(both)], NATIVE[:50], 100.0, lambda: 0.0)
    assert len(rows) == 2
    assert "no two" not in told


def test_functions_of_checkers_exist() -> None:
    """Catches: independence by names of functions that are not there, or not called so any more."""
    for checker in every():
        for dotted in checker.functions:
            if ".native." in dotted:  # C++: a class of a header
                *folder, file, name = dotted.split(".")
                header = PRODUCT.joinpath(*folder, f"{file}.hpp")
                assert re.search(rf"^(class|struct) {name}\b", header.read_text(encoding="utf-8"), re.MULTILINE), dotted
                continue
            pkgutil.resolve_name(dotted)


def test_explorer_names_no_rule_without_classes() -> None:
    """Catches: a clause of the explorer whose findings kill nothing because nobody says what it speaks of."""
    named: set[str] = set()
    for path in (PRODUCT / "blink_core" / "runtime" / "native").glob("explore*.hpp"):
        named |= set(re.findall(r'"([A-Z][0-9]+|liveness)"', path.read_text(encoding="utf-8")))
    assert named == RULES.keys()


def test_one_run_stands_for_all_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a search without chance that is run again for each seed, or counted once against nine of ten."""
    asked: list[Job] = []

    class Once:
        def get(self) -> Once:
            return self

        def run(self, job: Job) -> Outcome:
            asked.append(job)
            return Outcome(FOUND, "K1", ["K"], seconds=5.0)

    made = matrix.Matrix(tmp_path, matrix.seeds_of(1, 10))
    cell = made._cell(find("small-scopes"), Once(), NATIVE[0].model_copy(update={"cls": "K"}), 1)  # type: ignore[arg-type]
    assert (cell.killed, cell.run, cell.seconds, len(asked)) == (True, 9, 5.0, 1)


def test_matrix_runs_and_resumes(tmp_path: Path) -> None:
    """Catches: a matrix that kills nothing, or that runs again what it has run; a control that finds something."""
    chosen = [by_name(name) for name in ("leak-page-on-cancel", "urgent-goes-last", "nan-temperature")]
    names = ["lock-step", "raw-memory"]
    said: list[str] = []
    rows = matrix.Matrix(tmp_path, matrix.seeds_of(3, 2), checkers=names, say=said.append).rows(chosen)
    assert matrix.judge(rows).problems == ()
    assert len(said) == 4
    again = matrix.Matrix(tmp_path, matrix.seeds_of(3, 2), checkers=names, say=said.append).rows(chosen)
    assert len(said) == 4
    assert [r.to_json() for r in again] == [r.to_json() for r in rows]
    assert sorted(r.mutant for r in matrix.kept([tmp_path])) == sorted(r.mutant for r in rows)


def test_controls_apart_are_those_of_the_mutants(tmp_path: Path) -> None:
    """Catches: parts of a matrix that each run the product as it is again; controls apart that leave a checker out."""
    names, seeds = ["cache-recount", "lock-step", "raw-memory"], matrix.seeds_of(3, 1)
    mutant = by_name("leak-page-on-cancel")
    beside = matrix.Matrix(tmp_path / "beside", seeds, checkers=names).rows([mutant])
    assert [row.mutant for row in beside] == ["control-native", mutant.name]
    assert [
        row.mutant for row in matrix.Matrix(tmp_path / "none", seeds, checkers=names, controls=False).rows([mutant])
    ] == [mutant.name]
    apart = [matrix.Matrix(tmp_path / f"apart-{i}", seeds, checkers=names).control("native", (i, 2)) for i in (1, 2)]
    assert {name for row in apart for name in row.cells} == set(names) >= beside[0].cells.keys()
    assert all(cell.words == {"nothing": 1} for row in apart for cell in row.cells.values())
