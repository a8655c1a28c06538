"""Litmus tests of the ring's memory order: the real scheduler and one front end under ThreadSanitizer.

Each has a twin in which one word of the front end is published or read without order: ThreadSanitizer must report it,
at memory that this word orders. The scheduler's own publishes are made relaxed by `tests/unit/device/test_threads.py`.
ThreadSanitizer sees happens-before between accesses; it does not execute reorderings (docs/ring_model.md).
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.planted.build import build_litmus

REPORT = "WARNING: ThreadSanitizer: data race"
# Name -> clause of docs/rules.md, and who is at the memory that a race of the twin is at: scheduler or front end.
# ThreadSanitizer restores the stack of a past access only while its thread's history still holds it, so one may lack.
TESTS = {
    "submission": ("R5", "snapshot_slot|submit"),
    "completion": ("R9", "emit|consume"),
    "credits": ("R4", "emit|consume"),
    "reuse": ("R6", "snapshot_slot|submit"),
    "epoch": ("R2", "snapshot_slot|submit"),
    "mask": ("R11", "poll_mask|post_mask"),
}


@pytest.fixture(scope="session")
def litmus() -> Path:
    return build_litmus()


def run(program: Path, name: str, order: str) -> subprocess.CompletedProcess[str]:
    environment = {"TSAN_OPTIONS": "halt_on_error=0 exitcode=66 history_size=7"}
    command = [str(program), name, order]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, env=environment)


@pytest.mark.parametrize("name", TESTS)
def test_exchange_is_ordered(litmus: Path, name: str) -> None:
    """Catches: memory that one side writes and the other reads without the word between them that orders it."""
    done = run(litmus, name, "release")
    assert (done.returncode, done.stdout) == (0, f"{name} ok\n"), done.stderr[-4000:]
    assert REPORT not in done.stderr


@pytest.mark.parametrize("name", TESTS)
def test_relaxed_twin_is_found(litmus: Path, name: str) -> None:
    """Catches: a litmus test that passes whatever the order of the word that it is about."""
    done = run(litmus, name, "relaxed")
    assert done.returncode == 66, f"{done.returncode}: {done.stderr[-2000:]}"
    assert REPORT in done.stderr
    assert re.search(rf"#\d+ .*\b({TESTS[name][1]})\b", done.stderr), done.stderr[-4000:]
