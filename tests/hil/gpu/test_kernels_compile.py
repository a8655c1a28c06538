"""The model kernels stay GPU source: NVRTC compiles them for every architecture of the design, without a GPU."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cuda.bindings import nvrtc

from blink_core.ops.cuda_sources import KERNELS, options, source
from blink_core.runtime import serve_abi
from blink_core.runtime.nvrtc import ARCHITECTURES, step_options

HEAD = {"HEAD_DIM": 128, "PAGE_SIZE": 16}
# Every file for the architecture developed on; on the others those with instructions of their own: each takes seconds.
ELSEWHERE = ("elementwise.cu", "attention_decode.cu", "sampler.cu")
PLAIN = (
    "elementwise.cu", "attention_plan.cu", "gemm_fixed.cu", "gemm_skinny.cu", "gemm_tile.cu", "moe.cu", "moe_one.cu",
    "sampler.cu",
    "resident_stand_in.cu",
)  # fmt: skip
HEADS = ("rope_kv.cu", "attention_decode.cu", "attention_prefill.cu", "attention_strict.cu")
STEP = ("step_view.cu", "step_end.cu", "kv_sanitizer.cu")  # compiled with the ABI's header, see below
VARIANTS: tuple[tuple[str, str, dict[str, int]], ...] = (
    ("gemm_tile.cu", "float32", {}),
    ("gemm_fixed.cu", "float16", {}),
    ("moe_one.cu", "float16", {}),
    ("attention_strict.cu", "float32", HEAD),
    ("rope_kv.cu", "float32", {"HEAD_DIM": 96}),
    ("attention_decode.cu", "float16", {"HEAD_DIM": 96, "PAGE_SIZE": 8}),
    ("attention_decode.cu", "bfloat16", {**HEAD, "STAGES": 2, "LEAVE": 1, "JOINED": 1}),  # ops/cuda_variants.py
    ("attention_decode.cu", "float16", {"HEAD_DIM": 96, "PAGE_SIZE": 8, "JOINED": 1}),
    ("attention_decode.cu", "bfloat16", {**HEAD, "STAGES": 4, "JOINED": 1}),
    ("gemm_skinny.cu", "bfloat16", {"RING": 15, "NORM_RING": 21}),
    ("sampler.cu", "float32", {"PARTS": 8}),
    ("sampler.cu", "float32", {"PARTS": 2}),
    ("moe_one.cu", "bfloat16", {"GATE_UP_RING": 11}),
    ("attention_prefill.cu", "bfloat16", {"HEAD_DIM": 64, "PAGE_SIZE": 8}),
    ("attention_prefill.cu", "bfloat16", {**HEAD, "KEY_PIECE": 512}),  # batch-invariant mode
    ("attention_prefill.cu", "float16", {"HEAD_DIM": 96, "PAGE_SIZE": 16, "KEY_PIECE": 512}),
)


def compile_kernels(text: str, flags: tuple[str, ...]) -> str:
    """The compiler's log, empty if it had nothing to say. Raises AssertionError with it if it refused."""

    def value(result: tuple[Any, ...]) -> Any:
        assert int(result[0]) == 0, result[0]
        return result[1] if len(result) > 1 else None

    program = value(nvrtc.nvrtcCreateProgram(text.encode(), b"kernels.cu", 0, [], []))
    (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])
    log = bytearray(value(nvrtc.nvrtcGetProgramLogSize(program)))
    value(nvrtc.nvrtcGetProgramLog(program, log))
    message = log.decode().strip("\0\n ")
    assert int(error) == 0, message
    return message


def test_every_kernel_compiles() -> None:
    """Catches: a kernel that one of the architectures, element types or head dims refuses, and a file left out here."""
    assert {f.name for f in KERNELS.glob("*.cu")} == {*PLAIN, *HEADS, *STEP}
    todo: list[tuple[str, str, str, dict[str, int]]] = [
        (f, "bfloat16", a, HEAD if f in HEADS else {})
        for a in ARCHITECTURES
        for f in (*PLAIN, *HEADS)
        if a == "sm_90a" or f in ELSEWHERE
    ]
    todo += [(f, dtype, "sm_90a", defines) for f, dtype, defines in VARIANTS]

    def build(job: tuple[str, str, str, dict[str, int]]) -> str:
        file, dtype, architecture, defines = job
        return compile_kernels(source(file), (f"--gpu-architecture={architecture}", *options(dtype, **defines)))

    with ThreadPoolExecutor(2) as pool:
        assert [log for log in pool.map(build, todo) if log] == []


@pytest.mark.parametrize("file", STEP)
def test_step_kernels_compile(file: str) -> None:
    """Catches: a first or last kernel of a step that no longer fits the plan's records."""
    compile_kernels(source(file), ("--gpu-architecture=sm_90a", *step_options()))


def test_parameters_of_the_ends_agree() -> None:
    """Catches: a parameter of a step's first or last kernel added on one side only."""
    for file, structs in (
        ("step_view.cu", (serve_abi.StepViewParams,)),
        ("step_end.cu", (serve_abi.StepEndParams, serve_abi.NoopParams, serve_abi.CaptureParams)),
    ):
        facts = [f"static_assert(sizeof({s.__name__}) == {ctypes.sizeof(s)});" for s in structs]
        text = "\n".join([source(file), *facts, ""])
        assert compile_kernels(text, ("--gpu-architecture=sm_90a", *step_options())) == ""


def test_compiler_errors_are_reported() -> None:
    """Catches: a compile error that is swallowed, so that the tests above would pass on broken source."""
    with pytest.raises(AssertionError, match="error"):
        compile_kernels("__global__ void broken() { undefined(); }", ("--gpu-architecture=sm_90a",))


def test_unknown_dtype_is_refused() -> None:
    """Catches: a misspelt element type that compiles as another one."""
    with pytest.raises(ValueError, match="bf16"):
        options("bf16")
