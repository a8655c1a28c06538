"""Models shared by the tests of the oracles and criteria: tiny ones built once, and the real one where it is there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.real_model import real_model
from verification.models.tiny import TinyModel, build_named
from verification.oracles.hf import HFOracle
from verification.result import CheckResult, Measurement
from verification.thresholds import Thresholds, default_thresholds


@dataclass(frozen=True)
class Rig:
    """A tiny model with its oracles, and sequences of it that continue greedily after a drawn prompt."""

    model: TinyModel
    hf64: HFOracle
    hf32: HFOracle
    sequences: list[list[int]]
    prompt: int


PROMPT, STEPS = 43, 24


def _rig(path: Path, name: str) -> Rig:
    model = build_named(name, path)
    hf64, hf32 = HFOracle.load_pair(path, threads=1)
    draw = np.random.default_rng(7)
    prompts = [draw.integers(3, hf32.vocab_size, PROMPT).tolist() for _ in range(6)]
    return Rig(model, hf64, hf32, [p + hf32.generate(p, STEPS, ignore_eos=True) for p in prompts], PROMPT)


@pytest.fixture(scope="session")
def tiny3(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """Llama, ratio 3:1."""
    return _rig(tmp_path_factory.mktemp("tiny3"), "llama-gqa3")


@pytest.fixture(scope="session")
def tiny7(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """Llama, ratio 7:1."""
    return _rig(tmp_path_factory.mktemp("tiny7"), "llama-gqa7")


@pytest.fixture(scope="session")
def limits() -> Thresholds:
    """The registered thresholds."""
    return default_thresholds()


SUITE = Path(__file__).parents[3] / "verification" / "suite"
REGISTERED = {  # properties that the suite's tests report under
    name
    for path in SUITE.glob("test_*.py")
    for name in re.findall(r'blink_property\("([a-z-]+)"', path.read_text(encoding="utf-8"))
}


@pytest.fixture
def well_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every result that is made meanwhile is one that a report can show: a property of the suite, a clause, a sentence
    without a value that was lost, and measurements that are numbers with units."""
    construct = CheckResult.__post_init__

    def judged(result: CheckResult) -> None:
        construct(result)
        assert result.property in REGISTERED, result
        assert re.fullmatch(r"[a-z0-9-]+", result.clause), result
        assert not re.search(r"\bNone\b", result.message), result
        for name, measurement in result.measurements.items():
            _judge_measurement(name, measurement)

    monkeypatch.setattr(CheckResult, "__post_init__", judged)


def _judge_measurement(name: str, m: Measurement) -> None:
    numbers: list[object] = [m.value, *(number for number in (m.limit, m.n) if number is not None)]
    assert all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers), (name, m)
    assert m.n is None or isinstance(m.n, int), (name, m)
    assert isinstance(m.unit, str), (name, m)
    assert re.match(r"[a-zA-Z]", m.unit), (name, m)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real model's file; skipped where nobody has fetched it."""
    return real_model()
