"""`make doctor`: says, before anything is installed, whether this machine can build and run Blink, and what mends it.

Standard library only, and syntax that an old Python can read, so that it can say that the Python is too old.
Run from the repository: `python3 -m hil_rigs.doctor`. Exit 0: all there. Exit 1: something is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from typing import Callable, NamedTuple, Sequence

from hil_rigs.limits import GIB, MEMORY_MINIMUM_BYTES, MIB, SHM_MINIMUM_BYTES, SHM_SHARE

MINIMUM_PYTHON = (3, 11)
MINIMUM_GXX = 12
DOWNLOAD_MB = {"certify": 345, "test": 510}
"""Packages of the environment and of the build; measured with the CPU build of torch (190 MB)."""
INSTALLED_MB = {"certify": 1900, "test": 2300}
"""Disk that the environment, the model, pip's cache and a report take."""
MODEL_MB = 93
"""The model that `blink model fetch` brings."""
MODEL_FILE = "models/SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
"""Where it lies under Blink's home folder; a test holds this equal to the model store's own answer."""
PROBE_PACKAGE = "iniconfig"
"""A small package (7 KB) that Blink needs anyway: fetching it shows that pip reaches an index."""
NETWORK_DEADLINE_S = 60
VENV_DEADLINE_S = 180
COMPILE_DEADLINE_S = 60

OK, MISSING, SKIPPED = "ok", "missing", "not needed"

PYTHON_PROGRAM = "#include <Python.h>\n#include <concepts>\n#include <span>\nint main() { return 0; }\n"


class Check(NamedTuple):
    """One line of the table. `packages` are Debian names that mend it; `advice` is for what apt cannot mend."""

    name: str
    state: str
    detail: str
    packages: tuple[str, ...] = ()
    advice: str = ""


class Completed(NamedTuple):
    """What a command did: its exit code (None: not found, or over its deadline) and what it printed."""

    code: int | None
    output: str


class System:
    """The machine, as the checks see it; tests replace single answers."""

    python_version: tuple[int, ...] = tuple(sys.version_info[:3])
    executable = sys.executable

    def run(self, command: Sequence[str], deadline_s: float, env: dict[str, str] | None = None) -> Completed:
        """Run a command without standard input; never raises, never outlives its deadline."""
        try:
            done = subprocess.run(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=deadline_s,
                check=False,
                env=env,
            )
        except subprocess.TimeoutExpired:
            return Completed(None, "no answer within %d s" % deadline_s)
        except OSError as error:
            return Completed(None, "%s: %s" % (command[0], error.strerror))
        return Completed(done.returncode, done.stdout.decode("utf-8", "replace").strip())

    def which(self, program: str) -> str | None:
        return shutil.which(program)

    def environ(self, name: str) -> str:
        return os.environ.get(name, "")

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def include_dir(self) -> str:
        return sysconfig.get_paths()["include"]

    def free_bytes(self, path: str) -> tuple[int, int]:
        """Free and total bytes of the file system that holds `path`, or will hold it. Raises OSError."""
        while not os.path.exists(path):
            path = os.path.dirname(os.path.abspath(path))
        stat = os.statvfs(path)
        return stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize

    def available_memory(self) -> int | None:
        """Bytes that new processes can use, or None where the kernel does not say; a container's limit counts."""
        found = []
        for path, pattern, unit in (
            ("/proc/meminfo", r"MemAvailable:\s+(\d+) kB", 1024),
            ("/sys/fs/cgroup/memory.max", r"(\d+)", 1),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", r"(\d+)", 1),
        ):
            try:
                with open(path, encoding="utf-8") as stream:
                    match = re.search(pattern, stream.read())
            except OSError:
                continue
            if match:
                found.append(int(match.group(1)) * unit)
        return min(found) if found else None

    def is_root(self) -> bool:
        return os.geteuid() == 0

    def machine(self) -> str:
        return "%s, %d CPUs, %s" % (_os_name(), os.cpu_count() or 1, platform.machine())


class Options(NamedTuple):
    """What is about to be done, and with what."""

    goal: str = "certify"
    venv: str = ".venv"
    model: str = ""
    installed: str = ""
    shm: str = "/dev/shm"
    scratch: str = ""
    """A temporary folder that the checks share."""


def check_python(system: System, options: Options) -> Check:
    """The interpreter's version."""
    version = ".".join(map(str, system.python_version))
    detail = "%s (%s)" % (version, system.executable)
    if system.python_version[:2] >= MINIMUM_PYTHON:
        return Check("Python", OK, detail)
    return Check(
        "Python",
        MISSING,
        "%s is too old: %d.%d or newer is needed" % (detail, *MINIMUM_PYTHON),
        ("python3.11", "python3.11-venv", "python3.11-dev"),
        "then add PYTHON=python3.11 to the make command (Debian 12, Ubuntu 22.04 and newer have it)",
    )


def _python_package(system: System, suffix: str) -> str:
    """`python3-dev` for the system's python3, `python3.12-dev` for another version named with PYTHON=."""
    name = os.path.basename(system.executable)
    base = name if re.match(r"^python3\.\d+$", name) else "python3"
    return "%s-%s" % (base, suffix)


def check_headers(system: System, options: Options) -> Check:
    """Python.h, which the native module is compiled against."""
    header = os.path.join(system.include_dir(), "Python.h")
    if system.exists(header):
        return Check("Python headers", OK, header)
    return Check("Python headers", MISSING, "%s is not there" % header, (_python_package(system, "dev"),))


def check_venv(system: System, options: Options) -> Check:
    """That an environment with pip exists, or that one can be made (tried for real, in a temporary folder)."""
    package = _python_package(system, "venv")
    pip = os.path.join(options.venv, "bin", "python")
    if system.exists(pip):
        done = system.run([pip, "-m", "pip", "--version"], VENV_DEADLINE_S)
        if done.code == 0:
            return Check("venv", OK, "%s is there" % options.venv)
        advice = "%s is broken: remove it (rm -r %s) and run this again" % (options.venv, options.venv)
        return Check("venv", MISSING, "%s has no working pip" % options.venv, (), advice)
    done = system.run([system.executable, "-m", "venv", _trial_venv(options)], VENV_DEADLINE_S)
    if done.code == 0:
        return Check("venv", OK, "can be made")
    shutil.rmtree(_trial_venv(options), ignore_errors=True)
    reason = next((line for line in done.output.splitlines() if "ensurepip" in line), _last_line(done.output))
    return Check("venv", MISSING, "python -m venv failed: %s" % reason.strip()[:120], (package,))


def _trial_venv(options: Options) -> str:
    return os.path.join(options.scratch, "venv")


def compiler(system: System) -> str:
    """The C++ compiler that CMake will take: $CXX, else g++."""
    return system.environ("CXX") or "g++"


def check_compiler(system: System, options: Options) -> Check:
    """A C++20 compiler: its version, and that it compiles C++20 against Python.h."""
    name = compiler(system)
    done = system.run([*name.split(), "-dumpfullversion", "-dumpversion"], COMPILE_DEADLINE_S)
    if done.code is None:
        return Check("C++ compiler", MISSING, done.output, ("g++",))
    match = re.match(r"(\d+)", done.output)
    if done.code != 0 or not match:
        return Check("C++ compiler", MISSING, "%s does not run: %s" % (name, _last_line(done.output)), ("g++",))
    is_clang = "clang" in name
    if int(match.group(1)) < (14 if is_clang else MINIMUM_GXX):
        return Check(
            "C++ compiler",
            MISSING,
            "%s %s is too old: g++ %d or newer is needed for C++20" % (name, done.output, MINIMUM_GXX),
            ("g++-%d" % MINIMUM_GXX,),
            "then add CXX=g++-%d to the make command" % MINIMUM_GXX,
        )
    if system.exists(os.path.join(system.include_dir(), "Python.h")):
        source = os.path.join(options.scratch, "probe.cpp")
        with open(source, "w", encoding="ascii") as stream:
            stream.write(PYTHON_PROGRAM)
        flags = ["-std=c++20", "-fsyntax-only", "-I", system.include_dir(), source]
        compiled = system.run(name.split() + flags, COMPILE_DEADLINE_S)
        if compiled.code != 0:
            detail = "%s %s does not compile C++20: %s" % (name, done.output, _first_error(compiled.output))
            return Check("C++ compiler", MISSING, detail, ("g++",))
    return Check("C++ compiler", OK, "%s %s" % (name, done.output))


def check_make(system: System, options: Options) -> Check:
    """make, which runs the two set-up commands."""
    path = system.which("make")
    return Check("make", OK, path) if path else Check("make", MISSING, "not found", ("make",))


def check_spin(system: System, options: Options) -> Check:
    """spin, which checks the model of the ring protocol; `blink certify` does without it."""
    path = system.which("spin")
    if path:
        return Check("spin", OK, path)
    return Check("spin", SKIPPED, "not found; optional, for python -m verification.ring_model: apt-get install -y spin")


def check_shared_memory(system: System, options: Options) -> Check:
    """Free bytes of /dev/shm, and what an engine will take of them."""
    try:
        free, total = system.free_bytes(options.shm)
    except OSError as error:
        return Check(options.shm, MISSING, str(error.strerror), (), "mount a tmpfs there: mount -t tmpfs shm /dev/shm")
    if free < SHM_MINIMUM_BYTES:
        size = SHM_MINIMUM_BYTES // MIB * 8
        advice = "mount -o remount,size=%dM %s (in a container: --shm-size=%dm)" % (size, options.shm, size)
        detail = "%d of %d MiB free: at least %d MiB needed" % (free // MIB, total // MIB, SHM_MINIMUM_BYTES // MIB)
        return Check(options.shm, MISSING, detail, (), advice)
    share = free * SHM_SHARE / MIB
    detail = "%d of %d MiB free; rings are sized to fit %d MiB of it" % (free // MIB, total // MIB, share)
    return Check(options.shm, OK, detail)


def check_disk(system: System, options: Options) -> Check:
    """Free disk under the environment; much less is needed once it is installed."""
    needed = 300 if is_installed(system, options) else INSTALLED_MB[options.goal]
    free, _ = system.free_bytes(options.venv)
    detail = "%.1f GB free, %.1f GB needed" % (free / 1e9, needed / 1e3)
    if free >= needed * 1e6:
        return Check("disk", OK, detail)
    return Check("disk", MISSING, detail, (), "free some disk, or put the environment elsewhere: VENV=/other/disk/venv")


def check_memory(system: System, options: Options) -> Check:
    """Memory for the model, the oracle's copies in float32 and float64, and the compiler."""
    available = system.available_memory()
    if available is None:
        return Check("memory", SKIPPED, "this kernel does not say")
    detail = "%.1f GiB available, %.0f GiB needed" % (available / GIB, MEMORY_MINIMUM_BYTES / GIB)
    if available >= MEMORY_MINIMUM_BYTES:
        return Check("memory", OK, detail)
    return Check("memory", MISSING, detail, (), "close programs, or give the container more memory")


def is_installed(system: System, options: Options) -> bool:
    """Whether the stamp of a finished installation is there."""
    return bool(options.installed) and system.exists(options.installed)


def has_model(system: System, options: Options) -> bool:
    """Whether no model need be fetched: one was named that exists, or the default one is in Blink's home folder."""
    if options.model:
        return system.exists(options.model)
    home = system.environ("BLINK_HOME")
    if not home:
        cache = system.environ("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        home = os.path.join(cache, "blink")
    return system.exists(os.path.join(os.path.expanduser(home), MODEL_FILE))


def check_network(system: System, options: Options) -> Check:
    """That pip, as configured here (index, proxy, certificates), can fetch; skipped when nothing is to fetch."""
    if is_installed(system, options) and has_model(system, options):
        return Check("package index", SKIPPED, "environment and model are already here")
    python = os.path.join(options.venv, "bin", "python")
    if not system.exists(python):
        python = os.path.join(_trial_venv(options), "bin", "python")
        if not system.exists(python):
            return Check("package index", MISSING, "cannot be tried before venv works")
    command = [python, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--no-input", "--quiet"]
    command += ["--retries", "1", "--timeout", "20", "--dest", options.scratch, PROBE_PACKAGE]
    done = system.run(command, NETWORK_DEADLINE_S)
    if done.code == 0:
        return Check("package index", OK, "pip can download")
    advice = "pip needs an index: check the network, or name yours with PIP_INDEX_URL, PIP_PROXY and PIP_CERT"
    return Check("package index", MISSING, "pip cannot download: %s" % _first_error(done.output), (), advice)


CHECKS: tuple[Callable[[System, Options], Check], ...] = (
    check_python,
    check_headers,
    check_venv,
    check_compiler,
    check_make,
    check_spin,
    check_shared_memory,
    check_memory,
    check_disk,
    check_network,
)


def mending_lines(system: System, checks: Sequence[Check]) -> list[str]:
    """The exact commands and advice that mend what is missing, in the order to do them."""
    packages: list[str] = []
    for check in checks:
        packages += [package for package in check.packages if package not in packages]
    # A newer Python replaces the old one's headers and venv.
    if "python3.11" in packages:
        packages = [name for name in packages if name not in ("python3-dev", "python3-venv")]
    lines = []
    if packages:
        if system.which("apt-get"):
            sudo = "" if system.is_root() else "sudo "
            line = "%sapt-get update && %sapt-get install -y %s" % (sudo, sudo, " ".join(packages))
        else:
            line = "install what Debian calls: %s" % " ".join(packages)
        lines.append(line)
    lines += [check.advice for check in checks if check.advice]
    return lines


def render(system: System, options: Options, checks: Sequence[Check]) -> str:
    """The table, what mends it, and the download size, as text."""
    width = max(len(check.name) for check in checks)
    lines = ["Blink doctor: %s" % system.machine()]
    for check in checks:
        lines.append("  %-*s  %-10s  %s" % (width, check.name, check.state.upper(), check.detail))
    mending = mending_lines(system, checks)
    if any(check.state == MISSING for check in checks):
        lines.append("To mend:")
        lines += ["  " + line for line in mending]
    elif is_installed(system, options):
        lines.append("All there; the environment is installed. To download: %d MB." % download_mb(system, options))
    else:
        lines.append(
            "All there. To download: about %d MB with a CPU build of torch; a CUDA build, which some indexes give, "
            "adds several GB (choose with TORCH_INDEX_URL, see README)." % download_mb(system, options)
        )
    return "\n".join(lines)


def download_mb(system: System, options: Options) -> int:
    """What a run will download, MB."""
    environment = 0 if is_installed(system, options) else DOWNLOAD_MB[options.goal]
    return environment + (0 if has_model(system, options) else MODEL_MB)


def main(argv: Sequence[str] | None = None, system: System | None = None) -> int:
    """Run every check; print the table or JSON. Returns 0 when all is there, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="hil_rigs.doctor", description="Can this machine build and run Blink?")
    parser.add_argument("--goal", choices=sorted(DOWNLOAD_MB), default="certify", help="what is about to be run")
    parser.add_argument("--venv", default=".venv", help="the environment that is or will be used")
    parser.add_argument("--installed", default="", help="a file that exists once the environment is installed")
    parser.add_argument("--model", default="", help="a model on this disk, so that none is fetched")
    parser.add_argument("--json", action="store_true", help="print JSON, for machines")
    args = parser.parse_args(argv)
    system = system or System()
    with tempfile.TemporaryDirectory(prefix="blink-doctor-") as scratch:
        options = Options(args.goal, args.venv, args.model, args.installed, scratch=scratch)
        checks = [check(system, options) for check in CHECKS]
    failed = any(check.state == MISSING for check in checks)
    if args.json:
        document = {
            "machine": system.machine(),
            "ok": not failed,
            "checks": [check._asdict() for check in checks],
            "mend": mending_lines(system, checks),
            "download_mb": download_mb(system, options),
        }
        print(json.dumps(document, indent=2))
    else:
        print(render(system, options, checks))
    return 1 if failed else 0


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def _first_error(text: str) -> str:
    for line in text.splitlines():
        if "error" in line.lower():
            return line.strip()[:300]
    return _last_line(text)


def _os_name() -> str:
    try:
        with open("/etc/os-release", encoding="utf-8") as stream:
            match = re.search(r'^PRETTY_NAME="?([^"\n]*)', stream.read(), re.M)
    except OSError:
        match = None
    return match.group(1) if match else platform.system()


if __name__ == "__main__":
    sys.exit(main())
