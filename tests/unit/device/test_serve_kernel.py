"""The resident scheduler stays GPU source, and Python's records of it are the kernel's; no GPU needed."""

from __future__ import annotations

import ctypes
import re
from typing import Any

from cuda.bindings import nvrtc

from blink_core.ops.cuda_sources import source
from blink_core.runtime import serve_abi
from blink_core.runtime.nvrtc import DEVICE, serve_options


def compile_serve(architecture: str) -> str:
    """The compiler's log, empty if it had nothing to say."""

    def value(result: tuple[Any, ...]) -> Any:
        assert int(result[0]) == 0, result[0]
        return result[1] if len(result) > 1 else None

    text = source("serve_kernel.cu", DEVICE).encode()
    flags = [f"--gpu-architecture={architecture}".encode(), *(f.encode() for f in serve_options())]
    program = value(nvrtc.nvrtcCreateProgram(text, b"serve_kernel.cu", 0, [], []))
    (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    log = bytearray(value(nvrtc.nvrtcGetProgramLogSize(program)))
    value(nvrtc.nvrtcGetProgramLog(program, log))
    assert int(error) == 0, log.decode()
    return log.decode().strip("\0\n ")


def test_resident_scheduler_compiles() -> None:
    """Catches: host-only C++ in what the resident scheduler includes, and a record whose size has changed."""
    assert compile_serve("compute_80") == ""  # to PTX, the oldest of the design: machine code would take twice as long


def test_records_are_the_kernels() -> None:
    """Catches: a field added on one side only, so that the kernel reads or writes beside its place."""
    text = (DEVICE / "serve_kernel.cu").read_text()
    stated = {name: int(size) for name, size in re.findall(r"sizeof\((\w+)\) == (\d+)", text)}
    assert stated == {
        "Bucket": serve_abi.BUCKET.itemsize,
        "Mirror": serve_abi.MIRROR.itemsize,
        "Sample": serve_abi.SAMPLE.itemsize,
        "Report": serve_abi.REPORT.itemsize,
        "Serve": serve_abi.SERVE_BYTES,
        "ServeParams": ctypes.sizeof(serve_abi.ServeParams),
    }
    limits = {name: int(value) for name, value in re.findall(r"constexpr uint32_t (\w+) = (\d+);", text)}
    assert (limits["MAX_BUCKETS"], limits["MOST_LAUNCHES"]) == (serve_abi.MAX_BUCKETS, serve_abi.MOST_LAUNCHES)


def test_every_failure_has_its_words() -> None:
    """Catches: an engine that has failed for a reason that nobody can read."""
    text = (DEVICE / "serve_kernel.cu").read_text()
    line = re.search(r"enum class Failure : uint64_t \{([^}]*)\}", text)
    assert line is not None
    stated = {name: int(value) for name, value in re.findall(r"(\w+) = (\d+)", line[1])}
    assert stated == {f.name: int(f) for f in serve_abi.Failure}
    assert set(serve_abi.FAILURE_TEXT) == set(serve_abi.Failure) - {serve_abi.Failure.NONE}
