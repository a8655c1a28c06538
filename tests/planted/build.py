"""Builds the native module under sanitizers: never installed, for tests only.

`python -m tests.planted.build sanitize` prints the path of the module, and `threads` or `relaxed` that of the program
`threads.cpp` under ThreadSanitizer. A build is reused until its sources change; two callers at once build once.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import ninja
from filelock import FileLock

from verification.mutants.model import by_name

ROOT = Path(__file__).parents[2]
BUILD_TIMEOUT_S = 600
OPTIONS = {"sanitize": "-DBLINK_SANITIZE=ON"}
FOLDERS = ("device", "runtime/native")
# Programs under ThreadSanitizer: as it ships, and with a mutant in a copy of its headers.
PROGRAMS: dict[str, str | None] = {"threads": None, "relaxed": "publish-without-release"}


class BuildFailed(RuntimeError):
    """CMake or the compiler failed; the message is the end of its output."""


def _digest(*more: Path, mutant: str | None = None) -> str:
    """Of everything that the module is made from, the interpreter included, of the files `more`, and of a mutant."""
    sources = [ROOT / "CMakeLists.txt", *more]
    for folder in FOLDERS:
        sources += sorted((ROOT / "blink_core" / folder).glob("*.[ch]pp"))
    total = hashlib.sha256(sys.version.encode())
    total.update(b"" if mutant is None else by_name(mutant).model_dump_json().encode())
    for path in sources:
        total.update(path.read_bytes())
    return total.hexdigest()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False, cwd=ROOT)
    if done.returncode:
        raise BuildFailed(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-4000:]}")


def _python(*module: str) -> None:
    _run(sys.executable, "-m", *module)


def build(kind: str) -> Path:
    """Path of the built module: kind 'sanitize'. Raises BuildFailed, or KeyError for another kind."""
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


def _mutated(name: str | None, folder: Path) -> Path:
    """Folder of the scheduler's headers, or of a copy of them with that mutant in it."""
    if name is None:
        return ROOT / "blink_core"
    mutant = by_name(name)
    for part in FOLDERS:
        shutil.copytree(ROOT / "blink_core" / part, folder / part, dirs_exist_ok=True)
    file = folder / Path(mutant.file).relative_to("blink_core")
    file.write_text(mutant.apply(mutant.path.read_text(encoding="utf-8")), encoding="utf-8")
    return folder


def build_program(kind: str) -> Path:
    """Path of `threads.cpp` under ThreadSanitizer: kind 'threads', or 'relaxed' with its publishes made so by a mutant.

    Raises BuildFailed, or KeyError for another kind.
    """
    return _threaded(kind, Path(__file__).parent / "threads.cpp", PROGRAMS[kind])


def build_litmus() -> Path:
    """Path of `tests/litmus/litmus.cpp` under ThreadSanitizer. Raises BuildFailed."""
    return _threaded("litmus", ROOT / "tests" / "litmus" / "litmus.cpp", None)


def _threaded(kind: str, source: Path, mutant: str | None) -> Path:
    folder = ROOT / "build" / kind
    folder.mkdir(parents=True, exist_ok=True)
    program, stamp, digest = folder / kind, folder / "digest", _digest(source, mutant=mutant)
    options = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fsanitize=thread", "-pthread"]
    with FileLock(folder / "lock", timeout=BUILD_TIMEOUT_S):
        if not (program.exists() and stamp.exists() and stamp.read_text() == digest):
            stamp.unlink(missing_ok=True)
            headers = _mutated(mutant, folder)  # in the lock: another caller may be compiling them
            includes = [f"-I{headers / part}" for part in FOLDERS]
            compiler = os.environ.get("CXX", "g++")
            command = [compiler, *options, *includes, "-isystem", str(_atomics())]
            _run(*command, str(source), "-o", str(program))
            stamp.write_text(digest)
    return program


if __name__ == "__main__":
    wanted = sys.argv[1] if len(sys.argv) > 1 else "sanitize"
    print(build_program(wanted) if wanted in PROGRAMS else build(wanted))
