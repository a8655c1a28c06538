"""The scheduler among real threads under ThreadSanitizer: front ends, groups of 1, 3, 4, the model (section 4)."""

from __future__ import annotations

import re
import subprocess

import pytest

from blink_core.abi.enums import LogLevel
from tests.planted.build import build_program

CLEAN = {"TSAN_OPTIONS": "halt_on_error=0 exitcode=66"}
REPORT = "WARNING: ThreadSanitizer: data race"


def run(kind: str, group: int, requests: int, *more: int, nap_us: int = 0) -> subprocess.CompletedProcess[str]:
    command = [str(build_program(kind)), *map(str, (group, requests, *more))]
    environ = CLEAN | {"BLINK_NAP_US": str(nap_us)}
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=environ)


def counted(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    return {name: int(n) for name, n in re.findall(r"(\w+) (\d+)", done.stdout)}


@pytest.mark.parametrize(("group", "requests", "steps"), [(1, 4000, 4000), (3, 700, 700), (4, 700, 700)])
def test_no_race(group: int, requests: int, steps: int) -> None:
    """Catches: a word that orders nothing, a barrier that is missing in the group, memory written by two threads."""
    done = run("threads", group, requests)
    assert done.returncode == 0, done.stderr[-6000:]
    assert REPORT not in done.stderr
    counts = counted(done)
    assert counts["steps"] >= steps, f"no progress: {counts}"
    assert counts["finished"] >= requests, f"hardly any request finished: {counts}"
    assert min(counts["tokens"], counts["evictions"], counts["hits"], counts["preemptions"]) > 100, counts


def test_relaxed_publish_is_found() -> None:
    """Catches: a run under the sanitizer that would be clean whatever the memory order of a publish."""
    done = run("relaxed", 1, 50)
    assert done.returncode != 0
    assert REPORT in done.stderr
    assert "ring.hpp" in done.stderr


@pytest.mark.parametrize(
    ("group", "requests", "word"),
    [(0, 10, "no acknowledgement of an epoch"), (1, 10**6, "requests have not ended")],
)
def test_too_slow_is_no_objection(group: int, requests: int, word: str) -> None:
    """Catches: a machine that is too slow, reported as a fault of the scheduler; a wait without a deadline."""
    done = run("threads", group, requests, int(LogLevel.ALL), 4, 1)
    assert done.returncode == 4, done.stderr[-2000:]
    assert f"not in time: {word}" in done.stderr


def test_steady_boundaries_at_any_pace() -> None:
    """Catches: a run of many rows whose boundaries are steady only if its front end submits fast enough."""
    done = run("threads", 3, 70, int(LogLevel.DECISIONS), 70, nap_us=1000)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = counted(done)
    # 16 tokens of each in as many steps; the first admits all of them, and behind the last one all end.
    assert (counts["steps"], counts["steady"]) == (16, 14), counts
