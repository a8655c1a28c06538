"""The doctor: each thing that can be missing is found, named, and given the line that mends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from blink_core.model_store import PINNED_MODELS
from hil_rigs import doctor
from hil_rigs.doctor import MISSING, OK, SKIPPED, Completed, Options, System
from hil_rigs.limits import MIB, SHM_MINIMUM_BYTES

ROOT = Path(doctor.__file__).parents[1]


class Machine(System):
    """A machine that has everything; each test takes one thing away."""

    python_version = (3, 11, 2)
    executable = "/usr/bin/python3"

    def __init__(self, **changes: object) -> None:
        self.commands: list[list[str]] = []
        self.answers: dict[str, Completed] = {"-dumpfullversion": Completed(0, "12.2.0")}
        self.absent: set[str] = set()
        self.space: Mapping[str, tuple[int, int]] = {}
        self.memory: int | None = 8 << 30
        self.variables: dict[str, str] = {"BLINK_HOME": "/nowhere"}
        self.programs = {"make", "apt-get"}
        self.root = True
        for name, value in changes.items():
            setattr(self, name, value)

    def run(self, command: Sequence[str], deadline_s: float, env: dict[str, str] | None = None) -> Completed:
        assert deadline_s > 0
        self.commands.append(list(command))
        for word, answer in self.answers.items():
            if word in command:
                return answer
        return Completed(0, "")

    def which(self, program: str) -> str | None:
        return f"/usr/bin/{program}" if program in self.programs else None

    def environ(self, name: str) -> str:
        return self.variables.get(name, "")

    def exists(self, path: str) -> bool:
        return not any(path.endswith(end) for end in self.absent)

    def include_dir(self) -> str:
        return "/usr/include/python3.11"

    def free_bytes(self, path: str) -> tuple[int, int]:
        return self.space.get(path, (1 << 40, 1 << 40))

    def available_memory(self) -> int | None:
        return self.memory

    def is_root(self) -> bool:
        return self.root

    def machine(self) -> str:
        return "test machine"


def options(tmp_path: Path, **changes: str) -> Options:
    return Options(venv="/repo/.venv", scratch=str(tmp_path))._replace(**changes)


def test_nothing_missing_exits_zero(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a doctor that fails a healthy machine, or forgets the download size."""
    assert doctor.main([], Machine()) == 0
    assert "To download: about" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "state"), [((3, 10, 14), MISSING), ((3, 11, 0), OK), ((4, 0, 0), OK), ((2, 7, 18), MISSING)]
)
def test_python_version(tmp_path: Path, version: tuple[int, ...], state: str) -> None:
    """Catches: the limit off by one, or versions compared as text."""
    check = doctor.check_python(Machine(python_version=version), options(tmp_path))
    assert check.state == state
    assert ".".join(map(str, version)) in check.detail
    assert ("python3.11-dev" in check.packages) == (state == MISSING)


@pytest.mark.parametrize(
    ("executable", "package"), [("/usr/bin/python3", "python3-dev"), ("/opt/python3.12", "python3.12-dev")]
)
def test_headers_missing(tmp_path: Path, executable: str, package: str) -> None:
    """Catches: a missing Python.h found only by the compiler; the wrong package for PYTHON=python3.12."""
    check = doctor.check_headers(Machine(absent={"Python.h"}, executable=executable), options(tmp_path))
    assert (check.state, check.packages) == (MISSING, (package,))


def test_venv_cannot_be_made(tmp_path: Path) -> None:
    """Catches: Debian's python3 without python3-venv, where `import venv` works and making one does not."""
    machine = Machine(
        absent={"/bin/python"},
        answers={"venv": Completed(1, "x\nensurepip is not available\nFailing")},
    )
    check = doctor.check_venv(machine, options(tmp_path))
    assert (check.state, check.packages) == (MISSING, ("python3-venv",))
    assert "ensurepip is not available" in check.detail


def test_venv_without_pip(tmp_path: Path) -> None:
    """Catches: a half-made environment taken for a good one."""
    check = doctor.check_venv(Machine(answers={"pip": Completed(1, "No module named pip")}), options(tmp_path))
    assert check.state == MISSING
    assert "rm -r /repo/.venv" in check.advice


def test_compiler_absent(tmp_path: Path) -> None:
    """Catches: no compiler reported as anything but g++ missing."""
    machine = Machine(answers={"-dumpfullversion": Completed(None, "g++: No such file or directory")})
    check = doctor.check_compiler(machine, options(tmp_path))
    assert (check.state, check.packages) == (MISSING, ("g++",))


@pytest.mark.parametrize(("version", "state"), [("11.4.0", MISSING), ("12.2.0", OK), ("9.4.0", MISSING), ("14", OK)])
def test_compiler_version(tmp_path: Path, version: str, state: str) -> None:
    """Catches: g++ 11 accepted, or 9 taken as newer than 12 (text order)."""
    check = doctor.check_compiler(Machine(answers={"-dumpfullversion": Completed(0, version)}), options(tmp_path))
    assert check.state == state
    assert check.packages == (() if state == OK else ("g++-12",))


def test_compiler_that_cannot_compile(tmp_path: Path) -> None:
    """Catches: a compiler without its library headers, which answers --version."""
    machine = Machine()
    machine.answers["-fsyntax-only"] = Completed(
        1, "In file included\nprobe.cpp:2: fatal error: concepts: No such file"
    )
    check = doctor.check_compiler(machine, options(tmp_path))
    assert check.state == MISSING
    assert "concepts" in check.detail


def test_compiler_from_environment(tmp_path: Path) -> None:
    """Catches: CXX ignored, so that another compiler is judged than CMake takes."""
    machine = Machine(variables={"CXX": "g++-13"})
    doctor.check_compiler(machine, options(tmp_path))
    assert machine.commands[0][0] == "g++-13"


def test_make_missing(tmp_path: Path) -> None:
    """Catches: make not looked for when the doctor is run by hand."""
    assert doctor.check_make(Machine(programs={"apt-get"}), options(tmp_path)).packages == ("make",)


@pytest.mark.parametrize(("free", "state"), [(SHM_MINIMUM_BYTES - 1, MISSING), (SHM_MINIMUM_BYTES, OK), (64 * MIB, OK)])
def test_shared_memory(tmp_path: Path, free: int, state: str) -> None:
    """Catches: too small a /dev/shm found only when the engine maps it."""
    check = doctor.check_shared_memory(Machine(space={"/dev/shm": (free, 64 * MIB)}), options(tmp_path))
    assert check.state == state
    assert ("remount,size=" in check.advice) == (state == MISSING)


def test_shared_memory_not_mounted(tmp_path: Path) -> None:
    """Catches: a machine without /dev/shm ending the doctor with a traceback."""

    class Unmounted(Machine):
        def free_bytes(self, path: str) -> tuple[int, int]:
            raise OSError(2, "No such file or directory")

    check = doctor.check_shared_memory(Unmounted(), options(tmp_path))
    assert (check.state, check.detail) == (MISSING, "No such file or directory")


@pytest.mark.parametrize(("memory", "state"), [(1 << 30, MISSING), (3 << 30, OK), (None, SKIPPED)])
def test_memory(tmp_path: Path, memory: int | None, state: str) -> None:
    """Catches: a small container in which the oracle is killed halfway."""
    assert doctor.check_memory(Machine(memory=memory), options(tmp_path)).state == state


@pytest.mark.parametrize(
    ("free", "installed", "state"),
    [
        (10**9, "", MISSING),
        (4 * 10**9, "", OK),
        (10**9, "/repo/.venv/.blink/certify", OK),
        (10**8, "/repo/.venv/x", MISSING),
    ],
)
def test_disk(tmp_path: Path, free: int, installed: str, state: str) -> None:
    """Catches: the disk filling during the install; asking for the whole again once installed."""
    machine = Machine(space={"/repo/.venv": (free, 10**12)})
    assert doctor.check_disk(machine, options(tmp_path, installed=installed)).state == state


def test_network_missing(tmp_path: Path) -> None:
    """Catches: pip without an index found only in the middle of the install."""
    machine = Machine(answers={"download": Completed(1, "WARNING: Retrying\nERROR: No matching distribution found")})
    check = doctor.check_network(machine, options(tmp_path))
    assert check.state == MISSING
    assert "No matching distribution" in check.detail
    assert "PIP_INDEX_URL" in check.advice


def test_network_no_answer(tmp_path: Path) -> None:
    """Catches: an index that never answers holding the doctor for ever."""
    machine = Machine(answers={"download": Completed(None, "no answer within 60 s")})
    assert "no answer" in doctor.check_network(machine, options(tmp_path)).detail


@pytest.mark.parametrize(
    ("absent", "model", "state"),
    [
        ({"SmolLM2-135M-Instruct.Q4_1.gguf"}, "", OK),
        ({"SmolLM2-135M-Instruct.Q4_1.gguf"}, "/disk/model.gguf", SKIPPED),
        ({"model.gguf"}, "/disk/model.gguf", OK),
        (set(), "", SKIPPED),
        ({"/.blink/certify"}, "/disk/model.gguf", OK),
    ],
)
def test_network_is_asked_only_when_needed(tmp_path: Path, absent: set[str], model: str, state: str) -> None:
    """Catches: MODEL=path failing without a network although nothing is to fetch; or the check skipped when it is."""
    machine = Machine(absent=absent)
    check = doctor.check_network(machine, options(tmp_path, installed="/repo/.venv/.blink/certify", model=model))
    assert check.state == state
    assert any("download" in command for command in machine.commands) == (state == OK)


def test_mending_line_is_one_apt_line() -> None:
    """Catches: packages listed twice, sudo for root, or an old Python's packages beside the new one's."""
    broken = Machine(absent={"Python.h", "/bin/python"}, programs={"apt-get"}, root=False)
    broken.answers = {"venv": Completed(1, "no ensurepip"), "-dumpfullversion": Completed(None, "g++: not found")}
    scratch = options(Path("/tmp"))
    checks = [check(broken, scratch) for check in doctor.CHECKS]
    assert doctor.mending_lines(broken, checks)[0] == (
        "sudo apt-get update && sudo apt-get install -y python3-dev python3-venv g++ make"
    )
    broken.python_version, broken.root = (3, 9, 2), True
    checks = [check(broken, scratch) for check in doctor.CHECKS]
    assert doctor.mending_lines(broken, checks)[0] == (
        "apt-get update && apt-get install -y python3.11 python3.11-venv python3.11-dev g++ make"
    )


def test_mending_without_apt() -> None:
    """Catches: an apt line on a machine that has no apt."""
    machine = Machine(programs=set())
    assert doctor.mending_lines(machine, [doctor.check_make(machine, Options())]) == ["install what Debian calls: make"]


def test_exit_code_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a failed check that leaves exit 0, or JSON that does not say what failed."""
    assert doctor.main(["--json", "--goal", "test"], Machine(memory=1 << 30)) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert [check["name"] for check in document["checks"] if check["state"] == MISSING] == ["memory"]
    assert document["mend"]


def test_download_size_follows_what_is_there(tmp_path: Path) -> None:
    """Catches: the size of the whole shown when the model, or all, is already here."""
    fresh = Machine(absent={".gguf", "/.blink/test"})
    everything = doctor.download_mb(fresh, options(tmp_path, goal="test", installed="/repo/.venv/.blink/test"))
    assert everything == doctor.DOWNLOAD_MB["test"] + doctor.MODEL_MB
    assert doctor.download_mb(Machine(), options(tmp_path, goal="test", installed="/repo/.venv/.blink/test")) == 0


def test_model_place_agrees_with_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: the doctor looking for the model elsewhere than `blink model fetch` puts it."""
    (model,) = PINNED_MODELS.values()
    assert f"models/{model.name}/{model.file_name}" == doctor.MODEL_FILE
    assert round(model.size / MIB) == pytest.approx(doctor.MODEL_MB, abs=2)


def test_runs_on_this_machine_before_install() -> None:
    """Catches: an import of a package that is not installed yet, or a real probe that raises."""
    command = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        "import sys; sys.path.insert(0, '.'); import hil_rigs.doctor as d; d.System().machine()",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    system = System()
    assert system.run([sys.executable, "-c", "print('x')"], 30) == Completed(0, "x")
    assert system.run(["/nonexistent/program"], 5).code is None
    assert system.run([sys.executable, "-c", "input()"], 30).code == 1
    assert system.free_bytes("/nonexistent/deep/folder")[1] > 0
    assert (system.available_memory() or 0) > 0
    assert os.path.exists(system.executable)


def test_deadline_of_a_command() -> None:
    """Catches: a probe that hangs; the command is ended at its deadline."""
    done = System().run([sys.executable, "-c", "import signal; signal.pause()"], 0.5)
    assert done.code is None
    assert "no answer" in done.output
