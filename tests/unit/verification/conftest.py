"""Models shared by the tests of the oracles and criteria: tiny ones built once, and the real one where it is there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.real_model import real_model
from verification.models.tiny import TinyModel, build_named
from verification.oracles.hf import HFOracle
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


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real model's file; skipped where nobody has fetched it."""
    return real_model()
