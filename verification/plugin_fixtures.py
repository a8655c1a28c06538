"""Fixtures of the plugin that belong to no rig; registered only when the plugin is in use."""

from __future__ import annotations

import pytest

from verification.certificate.identity import own_id
from verification.certificate.recorder import Recorder
from verification.plugin import context_of
from verification.plugin_session import RECORDER
from verification.run_context import RunContext


@pytest.fixture(scope="session")
def blink_run(request: pytest.FixtureRequest) -> RunContext:
    """The run: id, rig, profile, model, root seed, output, `derive_seed`, `resource_name`, `fact`, `break_rig`."""
    context = context_of(request.config)
    assert context is not None  # this module is registered only where there is one
    return context


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Recorder:
    """A `Recorder`: measure, series, situation, planted_fault, cases, check; all of it goes into the report."""
    recorder = Recorder()
    request.node.stash[RECORDER] = recorder
    return recorder


@pytest.fixture
def seed(request: pytest.FixtureRequest, blink_run: RunContext) -> int:
    """The test's own seed (63 bits), from the root seed and its own id: the same in any order and on any worker."""
    return blink_run.derive_seed(own_id(request.node))
