"""The times of a boundary's phases: names and room as the kernel has them, and what is made of them; no GPU needed."""

from __future__ import annotations

import re

import numpy as np
import pytest

from blink_core.runtime.nvrtc import DEVICE
from blink_core.runtime.serve_abi import NEXT_ROW_BYTES, PHASES, STEADY_ROWS
from hil_rigs.gpu.perf import WORK, phase_table, phase_times
from tests.unit.device.test_serve_kernel import compile_serve


def number(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, pattern
    return int(found[1])


def test_phases_are_the_kernels() -> None:
    """Catches: a phase added or moved on one side only, so that times are told under another's name."""
    text = re.sub(r"//.*", "", (DEVICE / "group.hpp").read_text())
    stated = re.search(r"enum class Phase : uint32_t \{([^}]*)\}", text)
    assert stated is not None
    assert [n.strip().lower() for n in stated[1].split(",") if n.strip()] == [*PHASES, "count"]
    assert list(WORK) == list(PHASES[1:])


def test_room_of_the_next_plan_is_the_kernels() -> None:
    """Catches: less shared memory than the rows of the next plan take, which then lie on top of something else."""
    text = (DEVICE / "next.hpp").read_text()
    assert number(text, r"sizeof\(NextRow\) == (\d+)") == NEXT_ROW_BYTES
    per_word, words = number(text, r"STEADY_ROWS = (\d+) \* STEADY_WORDS"), number(text, r"STEADY_WORDS = (\d+)")
    assert per_word * words == STEADY_ROWS


def test_build_with_phases_compiles() -> None:
    """Catches: a stamp that only the build that nobody compiles otherwise would refuse, or that takes no time."""
    log, ptx = compile_serve("compute_80", phases=True)
    assert log == ""
    assert ptx.count("%globaltimer") >= len(PHASES)


def test_phase_times_leave_other_boundaries_out() -> None:
    """Catches: times of a boundary that was not steady, whose stamps are partly those of an earlier one."""
    count = len(PHASES)
    stamps = np.zeros((8, count), np.uint64)
    stamps[1] = 1_000_000 + 2_000 * np.arange(count)
    stamps[2] = 2_000_000 + 4_000 * np.arange(count)
    stamps[3] = 3_000_000 + 2_000 * np.arange(count)
    stamps[3, 2:4] = stamps[2, 2:4]
    found = phase_times(stamps, 100)
    assert list(found) == list(PHASES[1:])
    assert all(values == pytest.approx([2.0, 4.0]) for values in found.values())
    assert phase_times(stamps, 2)["judged"] == pytest.approx([4.0])  # the last two, of which one is steady
    lines = phase_table(found)
    assert lines[0].startswith("phases of 2 steady boundaries")
    assert len(lines) == count
    assert "no boundary was steady" in phase_table(phase_times(stamps[4:], 100))[1]
