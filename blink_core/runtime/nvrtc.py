"""Compiles the scheduler for GPUs with NVRTC; needs no GPU, only the extra `gpu` (or `dev`)."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import Any

DEVICE = Path(__file__).parent.parent / "device"
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100")


class CompileError(RuntimeError):
    """NVRTC refused the source; the message is its log."""


def cccl_include() -> Path:
    """Folder of libcu++ headers: of the nvidia-cuda-cccl wheel, else of a CUDA toolkit. CompileError without both."""
    try:
        files = importlib.metadata.files("nvidia-cuda-cccl") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if str(file).endswith("cuda/atomic"):
            return Path(str(file.locate())).resolve().parent.parent
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    for folder in (Path(toolkit) / "include" / "cccl", Path(toolkit) / "include"):
        if (folder / "cuda" / "atomic").is_file():
            return folder
    raise CompileError("no libcu++ headers: neither nvidia-cuda-cccl nor a CUDA toolkit is installed")


def serve_options(*, switch: bool = False, phases: bool = False) -> tuple[str, ...]:
    """NVRTC's options for the scheduler that serves, which launches graphs and so links the device runtime; without the
    architecture. switch: it runs in a loop of the host's graph and launches nothing. phases: it takes the
    times of what a boundary consists of."""
    defines = (("-DBLINK_SWITCH",) if switch else ()) + (("-DBLINK_PHASES",) if phases else ())
    return ("--std=c++20", f"-I{DEVICE}", f"-I{cccl_include()}", "-dc", *defines)


def step_options() -> tuple[str, ...]:
    """NVRTC's options for the kernels that read the plan's records; without the architecture."""
    return ("--std=c++20", f"-I{cccl_include()}")


def compile_scheduler(architecture: str, options: tuple[str, ...] = ()) -> bytes:
    """PTX or cubin of `scheduler_kernel.cu` for e.g. 'sm_90a'. Raises CompileError with the compiler's log."""
    from cuda.bindings import nvrtc

    def check(result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise CompileError(f"NVRTC: {nvrtc.nvrtcGetErrorString(result[0])[1].decode()}")
        return result[1] if len(result) > 1 else None

    source = (DEVICE / "scheduler_kernel.cu").read_bytes()
    program = check(nvrtc.nvrtcCreateProgram(source, b"scheduler_kernel.cu", 0, [], []))
    flags = [f"--gpu-architecture={architecture}", "--std=c++20", f"-I{DEVICE}", f"-I{cccl_include()}"]
    flags += options
    (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])
    size = check(nvrtc.nvrtcGetProgramLogSize(program))
    log = bytearray(size)
    check(nvrtc.nvrtcGetProgramLog(program, log))
    if int(error) != 0:
        raise CompileError(f"{architecture}: {log.decode().rstrip(chr(0))}")
    size = check(nvrtc.nvrtcGetCUBINSize(program))
    cubin = bytearray(size)
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    return bytes(cubin)
