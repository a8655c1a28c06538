"""The model of the ring in Spin: what its runner concludes, and that every variant and clause is real."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from verification.certificate.outcomes import PropertyUnknown, PropertyViolation
from verification.certificate.recorder import Recorder
from verification.ring_model import spin
from verification.ring_model.variants import CORRECT, DEADLOCK, LARGE, PROGRESS, VARIANTS, Search
from verification.suite import test_ring_model as suite

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "verification/ring_model"
CLAUSES = set(re.findall(r"\*\*([A-Z]\d+)\*\*", (ROOT / "docs/rules.md").read_text()))
GOOD, WRONG = Search("ring", "good"), Search("ring", "wrong", ("X",), ("R9", PROGRESS))
HEAD = "(Spin Version 6.5.2)\n\nFull statespace search for:\n"
END = "State-vector 140 byte, depth reached 17, errors: {}\n     95 states, stored\n"


@pytest.mark.parametrize(
    ("search", "text", "clause", "complete", "ok"),
    [
        (GOOD, HEAD + END.format(0), "", True, True),
        (GOOD, "error: max search depth too small\n" + HEAD + END.format(0), "", False, False),
        (GOOD, "pan: reached -DMEMLIM bound: out of memory\n" + HEAD + END.format(0), "", False, False),
        (GOOD, "Bit statespace search for:\n" + END.format(0), "", False, False),
        (GOOD, "Hash-Compact 4 search for:\n" + END.format(0), "", False, False),
        (GOOD, "pan:1: assertion violated (clause_R9||(x)) (at depth 3)\n" + HEAD + END.format(1), "R9", True, False),
        (GOOD, "pan:1: invalid end state (at depth 9)\n" + HEAD + END.format(1), DEADLOCK, True, False),
        (WRONG, "pan:1: invalid end state (at depth 9)\n" + HEAD + END.format(1), DEADLOCK, True, False),
        (GOOD, "Segmentation fault", "", False, False),
        (
            WRONG,
            "pan:1: assertion violated ((clause_R9||x)||y) (at depth 3)\n" + HEAD + END.format(1),
            "R9",
            True,
            True,
        ),
        (WRONG, "pan:1: acceptance cycle (at depth 3)\n" + HEAD + END.format(1), PROGRESS, True, True),
        (WRONG, "pan:1: assertion violated (clause_R8||x) (at depth 3)\n" + HEAD + END.format(1), "R8", True, False),
        (WRONG, HEAD + END.format(0), "", True, False),
    ],
)
def test_what_the_checker_prints_is_understood(
    search: Search, text: str, clause: str, complete: bool, ok: bool
) -> None:
    """Catches: a search that was cut short or failed otherwise, taken for one that holds; a variant that holds."""
    outcome = spin.parse(search, text, 1.0)
    assert (outcome.clause, outcome.complete, outcome.ok) == (clause, complete, ok)
    assert outcome.line().startswith("ok" if ok else "FAIL")


def test_trouble_of_the_checker_is_no_fault_of_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a search of a variant that did not end, told as a broken property; a variant that holds and passes."""
    for trouble, expected in (("not finished in 5 s", PropertyUnknown), ("", PropertyViolation)):
        outcome = spin.Outcome(WRONG, "", 10, 5, not trouble, 1.0, trouble)
        monkeypatch.setattr(spin, "run", lambda search, outcome=outcome: outcome)
        with pytest.raises(expected):
            suite._check(WRONG, Recorder())


DEADLOCKING = """byte taken;
active proctype front_end() { do :: taken == 0 -> taken = 1 :: taken == 1 -> taken = 2; break od }
active proctype scheduler() { taken == 1; taken == 3 }
"""


@pytest.mark.skipif(shutil.which("spin") is None, reason=f"Spin is not installed: {spin.APT}")
def test_deadlock_of_the_protocol_is_a_violation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches: a state in which a correct model is stuck, told as a search without a result; a missing trail."""
    (tmp_path / "ring.pml").write_text(DEADLOCKING)
    monkeypatch.setattr(spin, "FOLDER", tmp_path)
    outcome = spin.run(GOOD, timeout_s=60)
    assert (outcome.clause, outcome.trouble, outcome.ok) == (DEADLOCK, "", False)
    assert any("taken = 1" in line for line in outcome.trail)
    monkeypatch.setattr(spin, "run", lambda search: outcome)
    with pytest.raises(PropertyViolation, match=DEADLOCK) as caught:
        suite._check(GOOD, Recorder())
    assert "taken = 1" in str(caught.value.result.witness["trail"])


def test_every_clause_and_define_is_real() -> None:
    """Catches: a variant that no model reads, a clause that the rules do not have, an assertion without a name."""
    for search in (*CORRECT, *LARGE, *VARIANTS):
        text = (FOLDER / f"{search.model}.pml").read_text()
        for define in search.defines:
            assert re.search(rf"\b{define.partition('=')[0]}\b", text), (str(search), define)
        for clause in search.fails:
            assert clause == PROGRESS or f"clause_{clause} " in text, (str(search), clause)
    for path in FOLDER.glob("*.pml"):
        text = path.read_text()
        assert set(re.findall(r"clause_([A-Z]\d+)", text)) <= CLAUSES
        assert text.count("assert(") == text.count("assert(clause_")
        used = set(re.findall(r"assert\(clause_([A-Z]\d+)", text))
        assert set(re.findall(r"clause_([A-Z]\d+)[,;]", text)) == used, f"{path.name}: a clause that nothing asserts"


def test_every_variant_of_a_model_is_in_the_table() -> None:
    """Catches: a wrong variant in a model that is never run."""
    other = {"PROGRESS", "LAPSE", "SLOTS", "REQS", "SQ", "CQ", "TOKENS"}
    for path in FOLDER.glob("*.pml"):
        known = {define for search in VARIANTS if search.model == path.stem for define in search.defines}
        found = set(re.findall(r"^#ifn?def (\w+)", path.read_text(), re.M)) - other
        assert found <= known, path.name


def test_without_spin_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a machine without Spin on which the check fails, or counts as passed."""
    monkeypatch.setenv("PATH", "")
    with pytest.raises(spin.SpinMissing, match="apt-get install -y spin"):
        spin.tools()
    done = subprocess.run(
        [sys.executable, "-m", "verification.ring_model"],
        cwd=ROOT, env={"PATH": "", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "skipped" in done.stderr


@pytest.mark.skipif(shutil.which("spin") is None, reason=f"Spin is not installed: {spin.APT}")
@pytest.mark.parametrize(
    "search",
    [one for one in (*CORRECT, *VARIANTS) if str(one) in ("epoch/takeover", "epoch/no-clear", "mask/no-index")],
    ids=str,
)
def test_searches_end_as_they_should(search: Search) -> None:
    """Catches: a model that Spin does not read, a runner that never sees a failure. All searches: nightly."""
    outcome = spin.run(search, timeout_s=100)
    assert outcome.ok, outcome.line()
    assert outcome.states > 10


@pytest.mark.skipif(shutil.which("spin") is None, reason=f"Spin is not installed: {spin.APT}")
def test_deadline_of_a_search_leaves_it_undecided() -> None:
    """Catches: a search that was stopped and counts as finished."""
    outcome = spin.run(next(one for one in CORRECT if one.model == "mask"), timeout_s=1e-4)
    assert not outcome.ok
    assert "not finished" in outcome.trouble
