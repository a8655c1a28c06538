"""The fuzz and property tests of this folder once more, under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planted.build import ROOT, build
from verification.scheduler.programs import EXAMPLES

HERE = Path(__file__).parent
# What reaches every region and list; the scenarios left out check behaviour, which no sanitizer changes.
TESTS = (
    "test_fuzz.py",
    "test_programs.py",
    "test_prefix_cache.py",
    "test_masks_and_logprobs.py",
    "test_deadlines_and_leases.py",
    "test_submission_queue.py",
    "test_configuration.py",
)
TOO_SHORT = """
import sys
from pathlib import Path
from tests.planted.load import replace_native
replace_native(Path(sys.argv[1]))
from verification.scheduler import harness as h
import numpy as np
config = h.small_config()
real = config.layouts
short = real()
nbytes = short["State"].nbytes - 64
made = h.Harness(config, checks=False)
state = np.zeros(nbytes, np.uint8)
made.scheduler = h._native.Scheduler(
    made.shared.ctypes.data, state.ctypes.data, *(made.regions[n].ctypes.data for n in ("Log", "Plan"))
)
made.scheduler.init()
made.fronts[0].attach()
made.scheduler.poll(1)
for _ in range(config.slots):
    assert made.fronts[0].submit([1] * 23, 1) is not None
made.scheduler.poll(2)
"""


def sanitizer_runtime() -> str:
    """What LD_PRELOAD needs: libasan of the compiler that builds the module, and libstdc++ whose throw it wraps."""
    compiler = os.environ.get("CXX", "g++")
    found = []
    for library in ("libasan.so", "libstdc++.so"):
        command = [compiler, f"-print-file-name={library}"]
        found.append(subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout.strip())
    if not all(Path(path).is_absolute() for path in found):
        pytest.skip(f"{compiler} brings no {' or no '.join(found)}")
    return " ".join(found)


def run_sanitized(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) | {
        "LD_PRELOAD": sanitizer_runtime(),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter keeps much to its end
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(ROOT),
        EXAMPLES: "40",
    }
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, cwd=ROOT, env=environment)


def test_programs_and_fuzz_under_sanitizers() -> None:
    """Catches: an access beyond any region, undefined shifts, overflows and misaligned words in the scheduler."""
    module = str(build("sanitize"))
    chosen = [str(HERE / name) for name in TESTS]
    options = ("-q", "-k", "not same_hash and not torn", "-o", "cache_dir=build/pytest-cache-sanitize")
    done = run_sanitized("-m", "tests.planted.sanitized", module, *chosen, *options)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    assert f"native module: {module}" in output
    assert " passed" in output


def test_sanitizer_sees_a_step_beyond_a_region() -> None:
    """Catches: a sanitized run that would pass whatever the scheduler does."""
    done = run_sanitized("-c", TOO_SHORT, str(build("sanitize")))
    assert done.returncode != 0
    assert "AddressSanitizer" in done.stderr, done.stderr[-3000:]
