"""Source text and compiler options of the model kernels; needs neither a GPU nor CuPy."""

from __future__ import annotations

import re
from pathlib import Path

KERNELS = Path(__file__).parent.parent / "device" / "kernels"
DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
_INCLUDE = re.compile(r'^#include "([^"]+)"\n', re.MULTILINE)


def source(name: str, folder: Path = KERNELS) -> str:
    """Text of a kernel file with its own headers put in, so that a compiler's cache key covers all of it."""
    seen: set[str] = set()

    def expand(file: str) -> str:
        if file in seen:
            return ""
        seen.add(file)
        text = (folder / file).read_text().replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda m: expand(m[1]), text)

    return expand(name)


def options(dtype: str, **defines: int) -> tuple[str, ...]:
    """NVRTC's options for an element type and macros; without the architecture."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    macros = {"DTYPE": DTYPES[dtype], **defines}
    return ("--std=c++17", "-default-device", *(f"-D{name}={value}" for name, value in macros.items()))
