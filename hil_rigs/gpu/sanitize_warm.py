"""Compiles the kernels of the sanitizer's parts once, whichever tool comes first: the others find them in CuPy's cache.

Four tools that start together would compile the same kernels four times, side by side, and under each tool a minute of
it is a minute of the tool's time.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from blink_core.ops.cuda_sources import KERNELS

LOOK_S = 0.2  # at a lock that another process holds


def cache_folder() -> Path:
    """CuPy's, of compiled kernels: what lies there is gone when they are."""
    return Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")


def state_of_kernels() -> str:
    """What a compiled kernel depends on, in a word."""
    found = hashlib.sha256()
    parts = (Path(__file__).with_name(f"sanitize_{name}.py") for name in ("serve", "kernels"))
    for path in (*sorted(KERNELS.iterdir()), *parts):
        found.update(path.name.encode() + b"\0" + (path.read_bytes() if path.is_file() else b""))
    for name in ("cupy-cuda13x", "cupy-cuda12x", "nvidia-cuda-nvrtc"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found.update(f"{name} {importlib.metadata.version(name)}".encode())
    return found.hexdigest()[:16]


def warm_cache(
    part: str, models: Path | None, run: Callable[[], tuple[str, int | None]], deadline: float
) -> tuple[str, int | None] | None:
    """Runs a part without a tool unless that was done with these kernels; another process at it is waited for.

    run: gives output and exit status, None at its deadline. Returns what it gave if it failed, None if all is there.
    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    named = hashlib.sha256(str(models.resolve()).encode()).hexdigest()[:8] if models is not None else ""
    mark = folder / f"blink-sanitize-{part}{named}-{state_of_kernels()}"
    with mark.with_suffix(".lock").open("w") as lock:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline:
                return "the kernels are still being compiled by another process", None
            time.sleep(LOOK_S)
        if mark.exists():
            return None
        text, code = run()
        if code != 0:
            return text, code
        mark.touch()
    return None
