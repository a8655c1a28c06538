"""The scheduler stays GPU source: NVRTC compiles it for every architecture of the design, without a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from blink_core.runtime.nvrtc import ARCHITECTURES, CompileError, compile_scheduler

ELF = b"\x7fELF"
KERNELS = (b"blink_init", b"blink_boundary", b"blink_poll")


def test_scheduler_compiles_for_gpus() -> None:
    """Catches: host-only C++ in the shared headers, or a kernel that is missing from the module."""
    assert ARCHITECTURES == ("sm_80", "sm_90a", "sm_100")
    with ThreadPoolExecutor(2) as pool:
        for architecture, cubin in zip(ARCHITECTURES, pool.map(compile_scheduler, ARCHITECTURES), strict=True):
            assert cubin.startswith(ELF), architecture
            assert [k for k in KERNELS if k not in cubin] == [], architecture


def test_compiler_errors_are_reported() -> None:
    """Catches: a compile error that is swallowed, so that the test above would pass on broken source."""
    with pytest.raises(CompileError, match="sm_80.*error"):
        compile_scheduler("sm_80", ("-Dstep_boundary=+",))
