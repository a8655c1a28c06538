"""Each planted fault is found by the checks of this folder: a checker that cannot fail says nothing."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from blink_core import _native
from tests.planted.build import Mutant, build
from tests.planted.load import load_native
from tests.unit.device.harness import Harness, small_config
from tests.unit.device.test_native_module import TRACES


@pytest.fixture(scope="module")
def planted() -> ModuleType:
    return load_native(build("mutants"))


def scenario(native: ModuleType, mutant: Mutant) -> Harness:
    """Three requests at a time, cancels in flight, small pool; raises AssertionError where a check fails."""
    native.activate_mutant(mutant)
    try:
        h = Harness(small_config(slots=6, sq_entries=32, pages=2 + 8), native=native)
        h.attach()
        for round_ in range(6):
            made = [h.fronts[0].submit([1 + i, 2, 3 + round_], 8, flags=1) for i in range(5)]
            for _ in range(4):
                h.tick()
            for x in made[1:3]:
                assert x is not None
                h.fronts[0].cancel(x)
            h.settle()
        return h
    finally:
        native.activate_mutant(Mutant.NONE)


def test_clean_build_passes(planted: ModuleType) -> None:
    """Catches: a scenario that fails without a fault, which would make every kill below meaningless."""
    assert planted.mutants is True
    scenario(planted, Mutant.NONE)


@pytest.mark.parametrize(
    ("mutant", "finding"),
    [
        (Mutant.ADMIT_YOUNGEST_FIRST, r"ring 0: \[.*\] before \[|waits out of order"),
        (Mutant.TOKEN_TWICE, r"has index \d+, expected \d+"),
        (Mutant.LEAK_PAGE_ON_CANCEL, "pages not in exactly one place"),
    ],
)
def test_planted_fault_is_found(planted: ModuleType, mutant: Mutant, finding: str) -> None:
    """Catches: checks that have gone blind to an ordering, a delivery or a page-lifecycle fault."""
    with pytest.raises(AssertionError, match=finding):
        scenario(planted, mutant)


def test_scan_for_mutants_can_fail(planted: ModuleType) -> None:
    """Catches: a scan of the release binary for literals that no build holds."""
    binary = Path(str(planted.__file__)).read_bytes()
    assert any(t in binary for t in TRACES)
    assert _native.mutants is False
