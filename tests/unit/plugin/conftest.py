"""Small suites for the plugin, run by a pytest of their own in a child process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from verification.certificate.supervise import plugin_arguments

ROOT = Path(__file__).resolve().parents[3]

# One test for each way to end. `verification.fixtures` is another's: the `rig` here stands before it, as any closer
# fixture does.
EVERY_OUTCOME = """
import hil_rigs.capabilities
import pytest
from verification.certificate.outcomes import InfrastructureError, PropertyViolation, RigBroken
from verification.result import CheckResult, Measurement, Verdict
from hypothesis import given, strategies as st

hil_rigs.capabilities.CAPABILITIES = {**hil_rigs.capabilities.CAPABILITIES, "gpu": "one of a later rig"}

def result(verdict, name, **values):
    return CheckResult(verdict, name, "K1", "page 3 leaked", {"page": 3}, values)

@pytest.mark.blink_property("queue-ordering")
@pytest.mark.parametrize("n", [1, 2])
def test_fifo(record, seed, n):
    record.situation("preemption", True)
    record.series("pages", [0, 1], [1, n], "pages")
    record.planted_fault("swapped entries", caught=3, planted=3)
    record.check(result(Verdict.VALID, "queue-ordering", wait=Measurement(3, "steps", 10, 100)))

@pytest.mark.blink_property("kv-conservation")
def test_leak(record):
    record.check(result(Verdict.INVALID, "kv-conservation", leaked=Measurement(1, "pages", 0, 10)))

@pytest.mark.blink_property("kv-content")
def test_gap(record):
    record.check(result(Verdict.UNKNOWN, "kv-content"))

@pytest.mark.blink_property("streaming", id="drawn")
@given(st.integers(0, 10**6))
def test_hypothesis(n):
    if n >= 1000:
        raise PropertyViolation(CheckResult(Verdict.INVALID, "streaming", "S1", "too long", {"n": n}))

@pytest.fixture
def rig():
    raise RigBroken("the engine died")

def test_rig_first(rig): pass
def test_rig_second(rig): pass

@pytest.fixture(scope="module")
def port():
    raise InfrastructureError("port taken")

def test_port_first(port): pass
def test_port_second(port): pass
def test_defect(): {}["x"]
def test_plain(): assert 1 == 2
def test_teardown(request): request.addfinalizer(lambda: 1 / 0)
@pytest.mark.capability("gpu")
def test_gpu(): pass
@pytest.mark.blink_profile("full")
def test_long(): pass
def test_skipped(): pytest.skip("not today")
@pytest.mark.xfail(reason="known", strict=False)
def test_expected(): assert False
def test_left_out(): pass
"""

# A test for each own id that rig `local` requires.
PASSING = """
import pytest
from verification.certificate.required import load

def make(name, short):
    @pytest.mark.blink_property(name, id=short)
    def test(record):
        record.cases(10)
    return test

for name, requirement in load("local").profile("smoke").properties.items():
    for number, one in enumerate(requirement.tests):
        globals()[f"test_{name}_{number}"] = make(name, one.partition("/")[2])
"""


@dataclass(frozen=True)
class Finished:
    """A pytest run that is over: exit code, what it printed, its output folder."""

    code: int
    text: str
    out: Path

    @property
    def report(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.out / "report.json").read_text(encoding="utf-8"))
        return values

    def outcome(self, test: str) -> str:
        return {str(entry["id"]): str(entry["outcome"]) for entry in self.report["tests"]}[test]


def environment(folder: Path) -> dict[str, str]:
    """The environment of a child: this tree's packages, no one's keys, none of the outer pytest's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BLINK_", "PYTEST_"))}
    return kept | {"PYTHONPATH": str(ROOT), "BLINK_HOME": str(folder / "home")}


class ForkServer:
    """Runs pytest in forks of one process that has the slow imports behind it; `fork_server.py` is its other half."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(ROOT),
        )

    def run(self, folder: Path, arguments: list[str], before: tuple[str, ...] = ()) -> tuple[int, str]:
        """Exit code and output of a pytest in `folder`; raises when it takes longer than the server's limit."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        log = folder / "fork.log"
        words = [*before, *plugin_arguments(), "-p", "no:cacheprovider", *arguments]
        request = {"folder": str(folder), "arguments": words, "environment": environment(folder), "log": str(log)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return code, log.read_text(encoding="utf-8")

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


def run_suite(
    server: ForkServer, folder: Path, text: str, *arguments: str, before: tuple[str, ...] = (), fresh: bool = False
) -> Finished:
    """Write `text` as a test file and run it; `before` goes ahead of the plugin, `fresh` starts an interpreter anew."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "test_mini.py").write_text(text, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n", encoding="utf-8")
    words = ["test_mini.py", *arguments]
    if not fresh:
        return Finished(*server.run(folder, words, before), folder / "out")
    command = [sys.executable, "-m", "pytest", *plugin_arguments(), "-p", "no:cacheprovider", *words]
    done = subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=400, check=False
    )
    return Finished(done.returncode, done.stdout + done.stderr, folder / "out")


@pytest.fixture
def suite(tmp_path: Path, fork_server: ForkServer) -> Callable[..., Finished]:
    """Run a test file's text under the plugin, with more arguments, in a fresh folder."""

    def run(text: str, *arguments: str, **options: Any) -> Finished:
        return run_suite(fork_server, tmp_path / "suite", text, *arguments, **options)

    return run


@pytest.fixture(scope="session")
def every_outcome(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Finished:
    """One run of the suite that has every outcome, with a report."""
    folder = tmp_path_factory.mktemp("every") / "suite"
    left_out = ("--deselect", "test_mini.py::test_left_out")
    options = ("--rig", "local", "--blink-required", "--out", "out", *left_out)
    return run_suite(fork_server, folder, EVERY_OUTCOME, *options)


@pytest.fixture
def passing() -> str:
    return PASSING


@pytest.fixture
def every_outcome_text() -> str:
    return EVERY_OUTCOME
