"""Real processes, a tiny real model: fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hil_rigs.description import load_rig
from hil_rigs.local import LocalOptions, LocalRig
from verification.models.tiny import build_named

SIZES = {"pages": 130, "max_rows": 8, "token_budget": 64, "max_len": 256, "slots": 64, "sq_entries": 256}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with tokeniser and chat template."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    build_named("llama-gqa3", folder, seed=1)
    return folder


@pytest.fixture(scope="module")
def tiny_rig(tiny_model: Path) -> Iterator[LocalRig]:
    """An engine and a front end that serve the tiny model."""
    with LocalRig(load_rig("local"), tiny_model, options=LocalOptions(engine=SIZES)) as rig:
        yield rig
