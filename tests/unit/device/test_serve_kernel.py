"""The resident scheduler stays GPU source, and Python's records of it are the kernel's; no GPU needed."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np
from cuda.bindings import nvrtc

from blink_core.ops.cuda_sources import source
from blink_core.runtime import serve_abi
from blink_core.runtime.nvrtc import DEVICE, serve_options
from blink_core.runtime.redo import REDO, redo_parts


def compile_serve(architecture: str, **kinds: bool) -> tuple[str, str]:
    """The compiler's log, empty if it had nothing to say, and the PTX."""

    def value(result: tuple[Any, ...]) -> Any:
        assert int(result[0]) == 0, result[0]
        return result[1] if len(result) > 1 else None

    text = source("serve_kernel.cu", DEVICE).encode()
    flags = [f"--gpu-architecture={architecture}".encode(), *(f.encode() for f in serve_options(**kinds))]
    program = value(nvrtc.nvrtcCreateProgram(text, b"serve_kernel.cu", 0, [], []))
    (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    log = bytearray(value(nvrtc.nvrtcGetProgramLogSize(program)))
    value(nvrtc.nvrtcGetProgramLog(program, log))
    assert int(error) == 0, log.decode()
    ptx = bytearray(value(nvrtc.nvrtcGetPTXSize(program)))
    value(nvrtc.nvrtcGetPTX(program, ptx))
    return log.decode().strip("\0\n "), ptx.decode()


def test_resident_scheduler_compiles() -> None:
    """Catches: host-only C++ in what the resident scheduler includes, and a record whose size has changed."""
    # To PTX, of the oldest architecture of the design: machine code would take twice as long.
    log, ptx = compile_serve("compute_80")
    assert log == ""
    assert "cudaGraphLaunch" in ptx


def test_scheduler_of_a_loop_launches_nothing() -> None:
    """Catches: a device launch left in the scheduler of the host-launched loop, where the driver forbids it, and a loop
    that nothing ends or branches."""
    log, ptx = compile_serve("compute_80", switch=True)
    assert log == ""
    assert "cudaGraphLaunch" not in ptx
    assert ptx.count("cudaGraphSetConditional") >= 3


def test_records_are_the_kernels() -> None:
    """Catches: a field added on one side only, so that the kernel reads or writes beside its place."""
    text = (DEVICE / "serve_records.cuh").read_text()
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


def test_pass_is_the_kernels() -> None:
    """Catches: a field of a LongRoPE pass that Python and the kernels place differently."""
    text = re.sub(r"//.*", "", source("redo.cuh"))
    struct = re.search(r"struct Redo {(.*?)};", text, re.DOTALL)
    assert struct is not None
    fields = [re.sub(r"^.*[\s*]", "", n.strip()) for m in struct[1].split(";") if m.strip() for n in m.split(",")]
    assert fields == list(REDO.names or ())
    stated = re.search(r"sizeof\(Redo\) == (\d+)", text)
    assert stated is not None
    assert int(stated[1]) == REDO.itemsize


def test_rows_that_outgrow_are_computed_anew_in_parts() -> None:
    """Catches: a row computed anew too early, too late, twice or not to its end; one that began beyond; a fresh one."""
    rows = np.zeros(6, [("context_len", np.uint32), ("q_len", np.uint32)])
    #              outgrows, stays,    is beyond, fresh,      exactly at,  in a chunk
    rows["context_len"], rows["q_len"] = [33, 32, 34, 40, 33, 50], [1, 1, 1, 40, 33, 30]
    assert redo_parts(rows, 32, 15) == [(0, 0, 15), (0, 15, 15), (0, 30, 2), (5, 0, 15), (5, 15, 5)]
    assert redo_parts(rows, 0, 15) == []


def test_every_failure_has_its_words() -> None:
    """Catches: an engine that has failed for a reason that nobody can read."""
    text = (DEVICE / "serve_records.cuh").read_text()
    line = re.search(r"enum class Failure : uint64_t \{([^}]*)\}", text)
    assert line is not None
    stated = {name: int(value) for name, value in re.findall(r"(\w+) = (\d+)", line[1])}
    assert stated == {f.name: int(f) for f in serve_abi.Failure}
    assert set(serve_abi.FAILURE_TEXT) == set(serve_abi.Failure) - {serve_abi.Failure.NONE}
