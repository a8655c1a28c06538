"""Builds the native module with planted faults, or under sanitizers: never installed, for tests only.

`python -m tests.planted.build [mutants|sanitize]` prints the path of the module. A build is reused until its sources
change; two callers at once build once.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
from enum import IntEnum
from pathlib import Path

import ninja
from filelock import FileLock

ROOT = Path(__file__).parents[2]
BUILD_TIMEOUT_S = 600
OPTIONS = {"mutants": "-DBLINK_MUTANTS=ON", "sanitize": "-DBLINK_SANITIZE=ON"}


class Mutant(IntEnum):
    """Faults of `blink_core/device/mutant.hpp`; pass one to `activate_mutant` of the built module."""

    NONE = 0
    ADMIT_YOUNGEST_FIRST = 1
    TOKEN_TWICE = 2
    LEAK_PAGE_ON_CANCEL = 3


class BuildFailed(RuntimeError):
    """CMake or the compiler failed; the message is the end of its output."""


def _digest() -> str:
    """Of everything that the module is made from, the interpreter included."""
    sources = [ROOT / "CMakeLists.txt"]
    for folder in ("device", "runtime/native"):
        sources += sorted((ROOT / "blink_core" / folder).glob("*.[ch]pp"))
    total = hashlib.sha256(sys.version.encode())
    for path in sources:
        total.update(path.read_bytes())
    return total.hexdigest()


def _run(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False, cwd=ROOT
    )
    if done.returncode:
        raise BuildFailed(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-4000:]}")


def build(kind: str = "mutants") -> Path:
    """Path of the built module: kind 'mutants' or 'sanitize'. Raises BuildFailed, or KeyError for another kind."""
    folder = ROOT / "build" / kind
    folder.mkdir(parents=True, exist_ok=True)
    module = folder / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    stamp, digest = folder / "digest", _digest()
    with FileLock(folder / "lock", timeout=BUILD_TIMEOUT_S):
        if not (module.exists() and stamp.exists() and stamp.read_text() == digest):
            stamp.unlink(missing_ok=True)
            configure = ("-S", str(ROOT), "-B", str(folder), "-G", "Ninja", OPTIONS[kind])
            tool = f"-DCMAKE_MAKE_PROGRAM={Path(ninja.BIN_DIR) / 'ninja'}"
            _run("cmake", *configure, tool, f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Release")
            _run("cmake", "--build", str(folder))
            stamp.write_text(digest)
    return module


def build_mutants() -> Path:
    """Path of the native module with its planted faults, none of them active until `activate_mutant`."""
    return build("mutants")


if __name__ == "__main__":
    print(build(*sys.argv[1:]))
