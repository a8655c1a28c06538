"""The scheduler among real threads under ThreadSanitizer: front ends, groups of 1, 3, 4, the model (section 4)."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.planted.build import build_program

CLEAN = {"TSAN_OPTIONS": "halt_on_error=0 exitcode=66"}
REPORT = "WARNING: ThreadSanitizer: data race"


def run(kind: str, group: int, requests: int) -> subprocess.CompletedProcess[str]:
    command = [str(build_program(kind)), str(group), str(requests)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=CLEAN)


@pytest.mark.parametrize(("group", "requests", "steps"), [(1, 4000, 4000), (3, 700, 700), (4, 700, 700)])
def test_no_race(group: int, requests: int, steps: int) -> None:
    """Catches: a word that orders nothing, a barrier that is missing in the group, memory written by two threads."""
    done = run("threads", group, requests)
    assert done.returncode == 0, done.stderr[-6000:]
    assert REPORT not in done.stderr
    counts = {name: int(n) for name, n in re.findall(r"(\w+) (\d+)", done.stdout)}
    assert counts["steps"] >= steps, f"no progress: {counts}"
    assert counts["finished"] >= requests, f"hardly any request finished: {counts}"
    assert min(counts["tokens"], counts["evictions"], counts["hits"], counts["preemptions"]) > 100, counts


def test_relaxed_publish_is_found() -> None:
    """Catches: a run under the sanitizer that would be clean whatever the memory order of a publish."""
    done = run("relaxed", 1, 50)
    assert done.returncode != 0
    assert REPORT in done.stderr
    assert "ring.hpp" in done.stderr
