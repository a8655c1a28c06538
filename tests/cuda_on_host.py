"""Kernels compiled for the host, where no GPU is: what they compute, from their own source (tests/cuda_on_host.hpp).

Only kernels whose instructions of the GPU are all behind common.cuh's functions can be built.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from blink_core.ops.cuda_sources import KERNELS, source

HEADER = Path(__file__).with_name("cuda_on_host.hpp")
DYNAMIC = re.compile(r"extern __shared__ __align__\(16\) u8 memory\[\];")


def build(folder: Path, file: str, run: str, **defines: int) -> ctypes.CDLL:
    """``file`` of the model kernels with macros, and ``run``, a C function that launches it, as a library in
    ``folder``, made once. AssertionError with the compiler's words if it refuses the source."""
    name = "_".join((file.split(".")[0], *(f"{k}{v}" for k, v in sorted(defines.items()))))
    library = folder / f"{name}.so"
    if library.exists():
        return ctypes.CDLL(str(library))
    kernels = folder / "kernels"
    if not kernels.exists():
        shutil.copytree(KERNELS, kernels)
        (kernels / "common.cuh").write_text(HEADER.read_text())
    text = DYNAMIC.sub("u8* memory = dynamic_shared;", source(file, kernels)) + run
    (folder / f"{name}.cpp").write_text(text)
    macros = [f"-D{k}={v}" for k, v in defines.items()]
    command = ["c++", "-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-shared", "-fPIC"]
    command += [*macros, "-o", str(library), str(folder / f"{name}.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return ctypes.CDLL(str(library))


def set_late(library: ctypes.CDLL, written: list[tuple[Any, Any]]) -> None:
    """Arrays that a kernel ahead writes, with their values: NaN until a block has waited for it."""
    count = len(written)
    places = (ctypes.c_void_p * count)(*(to.ctypes.data for to, _ in written))
    values = (ctypes.c_void_p * count)(*(value.ctypes.data for _, value in written))
    sizes = (ctypes.c_ulonglong * count)(*(value.nbytes for _, value in written))
    library.set_late(count, places, values, sizes)
