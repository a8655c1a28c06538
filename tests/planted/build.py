"""Builds the native module with planted faults, or under sanitizers: never installed, for tests only.

`python -m tests.planted.build [mutants|sanitize]` prints the path of the module, and `threads` or `relaxed` that of the
program `threads.cpp` under ThreadSanitizer. A build is reused until its sources change; two callers at once build once.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
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
# Programs under ThreadSanitizer: as it ships, and with release stores made relaxed.
PROGRAMS: dict[str, tuple[str, ...]] = {"threads": (), "relaxed": ("-DBLINK_MUTANT_RELAXED_PUBLISH=1",)}


class Mutant(IntEnum):
    """Faults of `blink_core/device/mutant.hpp`; pass one to `activate_mutant` of the built module."""

    NONE = 0
    ADMIT_YOUNGEST_FIRST = 1
    TOKEN_TWICE = 2
    LEAK_PAGE_ON_CANCEL = 3


class BuildFailed(RuntimeError):
    """CMake or the compiler failed; the message is the end of its output."""


def _digest(*more: Path) -> str:
    """Of everything that the module is made from, the interpreter included, and of the files `more`."""
    sources = [ROOT / "CMakeLists.txt", *more]
    for folder in ("device", "runtime/native"):
        sources += sorted((ROOT / "blink_core" / folder).glob("*.[ch]pp"))
    total = hashlib.sha256(sys.version.encode())
    for path in sources:
        total.update(path.read_bytes())
    return total.hexdigest()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False, cwd=ROOT)
    if done.returncode:
        raise BuildFailed(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-4000:]}")


def _python(*module: str) -> None:
    _run(sys.executable, "-m", *module)


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
            _python("cmake", *configure, tool, f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Release")
            _python("cmake", "--build", str(folder))
            stamp.write_text(digest)
    return module


def _atomics() -> Path:
    """Folder of libcu++'s headers: the nvidia-cuda-cccl wheel, as CMakeLists.txt finds them."""
    for file in importlib.metadata.files("nvidia-cuda-cccl") or ():
        if str(file).endswith(("include/cccl/cuda/atomic", "include/cuda/atomic")):
            return Path(str(file.locate())).resolve().parent.parent
    raise BuildFailed("the nvidia-cuda-cccl wheel has no cuda/atomic")


def build_program(kind: str) -> Path:
    """Path of `threads.cpp` built under ThreadSanitizer: kind 'threads', or 'relaxed' with its publishes planted so.

    Raises BuildFailed, or KeyError for another kind.
    """
    source, folder = Path(__file__).parent / "threads.cpp", ROOT / "build" / kind
    folder.mkdir(parents=True, exist_ok=True)
    program, stamp, digest = folder / kind, folder / "digest", _digest(source)
    includes = [f"-I{ROOT / 'blink_core' / part}" for part in ("device", "runtime/native")]
    options = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fsanitize=thread", "-pthread"]
    with FileLock(folder / "lock", timeout=BUILD_TIMEOUT_S):
        if not (program.exists() and stamp.exists() and stamp.read_text() == digest):
            stamp.unlink(missing_ok=True)
            compiler = os.environ.get("CXX", "g++")
            command = [compiler, *options, *PROGRAMS[kind], *includes, "-isystem", str(_atomics())]
            _run(*command, str(source), "-o", str(program))
            stamp.write_text(digest)
    return program


def build_mutants() -> Path:
    """Path of the native module with its planted faults, none of them active until `activate_mutant`."""
    return build("mutants")


if __name__ == "__main__":
    wanted = sys.argv[1] if len(sys.argv) > 1 else "mutants"
    print(build_program(wanted) if wanted in PROGRAMS else build(wanted))
