"""Whether the tests of this folder can run here."""

from __future__ import annotations

import importlib.util


def gpu_missing() -> str | None:
    """Why they cannot, None if they can."""
    for module in ("cupy", "nvmath"):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
    import cupy

    try:
        return None if cupy.cuda.runtime.getDeviceCount() else "there is no GPU"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"there is no usable GPU: {error}"


MISSING = gpu_missing()
