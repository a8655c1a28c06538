"""Fault scenarios against an engine with one thing wrong: they must name what the fault brought to light."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil_rigs.description import load_rig
from hil_rigs.local import LocalRig
from tests.planted.build import Mutant, build_mutants
from tests.planted.engine import MUTANT_ID, MUTANT_MODULE
from verification.faults.judge import check
from verification.faults.scenario import Scenario, draw_plan
from verification.result import Verdict
from verification.serving import FAULT_SIZES, options_of, shape_of

ENGINE = Path(__file__).parents[1] / "planted" / "engine.py"


@pytest.mark.parametrize(
    ("mutant", "verdict"), [(Mutant.NONE, Verdict.VALID), (Mutant.LEAK_PAGE_ON_CANCEL, Verdict.INVALID)]
)
def test_leak_on_cancel_is_found(
    mutant: Mutant, verdict: Verdict, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: scenarios that pass an engine which leaks pages under a fault; ones that fail without any reason."""
    monkeypatch.setenv(MUTANT_MODULE, str(build_mutants()))
    monkeypatch.setenv(MUTANT_ID, str(int(mutant)))
    description = load_rig("local").model_copy(update={"engine_command": (str(ENGINE), "native-mutant")})
    options = options_of(FAULT_SIZES, None, capture=False, batch_invariant=True)
    with LocalRig(description, tiny_model, options=options) as rig:
        shape = shape_of(rig, requests=(3, 3), most_new=24)
        result = check(Scenario(rig).run(draw_plan("cancel-storm", 7, shape)))
    assert result.verdict is verdict, result
    if verdict is Verdict.INVALID:
        assert result.clause == "conservation"
