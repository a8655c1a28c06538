"""The launcher dies or is interrupted, while the model loads and while it serves: nothing of the rig is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from blink_core.transport.shm import SHM_DIR
from hil_rigs.description import RIGS_DIR, load_rig
from hil_rigs.local import LocalRig
from tests.waiting import DEADLINE_S, until

ROOT = Path(__file__).resolve().parents[2]

LAUNCHER = """
import sys
from pathlib import Path
from hil_rigs.description import load_rig
from hil_rigs.local import LocalRig
rig = LocalRig(load_rig(sys.argv[1]), Path(sys.argv[2]), name=sys.argv[3])
rig.start()
print(rig.pid("engine"), rig.pid("frontend"), flush=True)
sys.stdin.read()
"""

# The shipped engine, but for a model that takes for ever to load; says so in a file.
LOADS_FOR_EVER = """
import sys, threading
from pathlib import Path
from blink_core.runtime import engine_main
def load(*arguments, **options):
    Path({marker!r}).with_suffix(".new").write_text(str(__import__("os").getpid()))
    Path({marker!r}).with_suffix(".new").replace({marker!r})
    threading.Event().wait()
engine_main.load_model = load
sys.exit(engine_main.main(sys.argv[1:]))
"""


@pytest.fixture
def slow_rig(tmp_path: Path) -> Path:
    """A rig whose engine loads for ever and writes its pid to `marker`."""
    code = LOADS_FOR_EVER.format(marker=str(tmp_path / "marker"))
    rig = yaml.safe_load((RIGS_DIR / "local.yaml").read_text()) | {"engine_command": ["-c", code]}
    path = tmp_path / "slow.yaml"
    path.write_text(yaml.safe_dump(rig))
    return path


@pytest.fixture
def end_after() -> Iterator[Callable[[int], psutil.Process]]:
    """Registers a process that is killed after the test, should it still be there."""
    made: list[psutil.Process] = []

    def register(pid: int) -> psutil.Process:
        made.append(psutil.Process(pid))
        return made[-1]

    yield register
    for process in made:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(made, DEADLINE_S)


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


def launch(rig: str | Path, model: Path, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LAUNCHER, str(rig), str(model), name]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )


def loading_engine(marker: Path, launcher: subprocess.Popen[str]) -> int:
    """Pid of the engine process, once it loads its model."""

    def loading() -> bool:
        assert launcher.poll() is None, "the launcher ended"
        return marker.exists()

    until(loading, "the engine did not come to loading its model")
    return int(marker.read_text())


def assert_all_end(processes: list[psutil.Process]) -> None:
    assert psutil.wait_procs(processes, DEADLINE_S)[1] == []


def test_launcher_killed_while_it_serves(tiny_model: Path, end_after: Callable[[int], psutil.Process]) -> None:
    """Catches: an engine, a front end or shared memory that outlives a launcher which had no chance to stop them."""
    name = f"{os.getpid()}-serving"
    launcher = launch("local", tiny_model, name)
    end_after(launcher.pid)
    assert launcher.stdout is not None
    family = [end_after(int(pid)) for pid in launcher.stdout.readline().split()]
    assert len(family) == 2, launcher.communicate()
    assert (SHM_DIR / f"blink-{name}").exists()
    launcher.kill()
    launcher.communicate(timeout=DEADLINE_S)
    assert_all_end(family)
    assert not (SHM_DIR / f"blink-{name}").exists()


def test_memory_of_a_killed_engine_goes_with_the_next_start(
    tiny_model: Path, end_after: Callable[[int], psutil.Process]
) -> None:
    """Catches: shared memory and folders of killed engines and launchers that fill up until no engine can start; the
    next start that takes those of an engine which lives."""
    names = [f"{os.getpid()}-killed", f"{os.getpid()}-alive"]
    families, launchers = [], []
    for name in names:
        launchers.append(launcher := launch("local", tiny_model, name))
        end_after(launcher.pid)
        assert launcher.stdout is not None
        families.append([launcher.pid, *map(int, launcher.stdout.readline().split())])
        assert len(families[-1]) == 3, launcher.communicate()
    killed = [end_after(pid) for pid in families[0]]
    for process in killed[::-1]:
        process.kill()
    assert_all_end(killed[1:])  # whoever starts an engine on this machine next takes its memory away
    with LocalRig(load_rig("local"), None):
        assert not (SHM_DIR / f"blink-{names[0]}").exists()
        assert (SHM_DIR / f"blink-{names[1]}").exists()
        assert [len(list(Path(tempfile.gettempdir()).glob(f"blink-{name}-*"))) for name in names] == [0, 1]
    living = [end_after(pid) for pid in families[1]]
    living[0].kill()
    assert_all_end(living[1:])
    for launcher in launchers:
        launcher.communicate(timeout=DEADLINE_S)


def test_launcher_killed_while_the_model_loads(
    tiny_model: Path, slow_rig: Path, end_after: Callable[[int], psutil.Process]
) -> None:
    """Catches: the parent looked up only after the load, when it is somebody else already: an orphan for ever."""
    name = f"{os.getpid()}-loading"
    launcher = launch(slow_rig, tiny_model, name)
    end_after(launcher.pid)
    engine = end_after(loading_engine(slow_rig.with_name("marker"), launcher))
    launcher.kill()
    launcher.communicate(timeout=DEADLINE_S)
    assert_all_end([engine])
    assert not (SHM_DIR / f"blink-{name}").exists()


@pytest.mark.parametrize("module", ["blink_core.runtime.engine_main", "blink_core.frontend.main"])
def test_parent_gone_before_the_process_looked(module: str, tiny_model: Path, tmp_path: Path) -> None:
    """Catches: a launcher killed while the interpreter was still starting, whose successor is taken for it."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(DEADLINE_S)
    name = f"blink-{os.getpid()}-orphan"
    arguments = {
        "blink_core.runtime.engine_main": ["--run-dir", str(tmp_path), "--segment", name],
        "blink_core.frontend.main": [
            *("--engine", str(tmp_path / "engine.json"), "--model", str(tiny_model), "--served-name", "m"),
        ],
    }[module]
    # A pipe for a descriptor: the front end waits in its first read until it is ended.
    os.mkfifo(tmp_path / "engine.json")
    command = [sys.executable, "-m", module, *arguments, "--exit-with-parent", str(gone.pid)]
    process = subprocess.Popen(command, env=environment(), cwd=tmp_path)
    try:
        assert process.wait(DEADLINE_S) in (0, 3)
    finally:
        process.kill()
        process.wait(DEADLINE_S)
    assert not (SHM_DIR / name).exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_stopped_while_the_model_loads(
    tiny_model: Path, slow_rig: Path, number: signal.Signals, end_after: Callable[[int], psutil.Process]
) -> None:
    """Catches: Ctrl-C during the start that is only looked at when the model has loaded or the start has failed."""
    code = "from verification.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", "--model", str(tiny_model), "--rig", str(slow_rig), "--port", "0"]
    launcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
    end_after(launcher.pid)
    engine = end_after(loading_engine(slow_rig.with_name("marker"), launcher))
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=DEADLINE_S)  # the start itself would take three times as long to give up
    assert launcher.returncode == 0, errors
    assert "Traceback" not in errors
    assert "stopped before it was ready" in errors
    assert_all_end([engine])
    assert not list(SHM_DIR.glob(f"blink-{launcher.pid}-*"))
