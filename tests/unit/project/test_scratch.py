"""Folders of a run's own files: gone after it, also where it was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

import hil_rigs
from hil_rigs.scratch import MARK, Scratch, remove_dead_folders
from tests.waiting import DEADLINE_S

ROOT = Path(hil_rigs.__file__).parents[1]
# Makes a folder, starts a process that has its lock too, and waits.
MAKER = """
import subprocess, sys
from hil_rigs.scratch import Scratch
scratch = Scratch("killed")
waiting = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(waiting, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(scratch.fd,))
print(scratch.path, child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder that nobody else clears up."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_folder_is_gone_after_its_use(own_folder: Path) -> None:
    """Catches: a folder that stays after an orderly end, or after an error in it; one that others cannot tell apart."""
    with pytest.raises(ValueError, match="in it"), Scratch("a") as scratch:
        assert scratch.path.parent == own_folder
        assert scratch.path.name.startswith("blink-a-")
        (scratch.path / "file").touch()
        raise ValueError("in it")
    scratch.close()
    assert list(own_folder.iterdir()) == []


def test_folder_of_a_killed_process_goes_when_nobody_uses_it(own_folder: Path) -> None:
    """Catches: files of killed runs that fill the disk; a folder taken from a process that lives, be it only a child of
    the one that made it; a folder of somebody else that begins like one of ours."""
    foreign = own_folder / "blink-notes"
    foreign.mkdir()
    with Scratch("mine") as mine:
        maker = subprocess.Popen(
            [sys.executable, "-c", MAKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(own_folder)},
        )
        child: psutil.Process | None = None
        try:
            assert maker.stdout is not None
            place, _, pid = maker.stdout.readline().strip().rpartition(" ")
            child = psutil.Process(int(pid))
            path = Path(place)
            assert (path / MARK).is_file()
            assert remove_dead_folders() == []
            maker.kill()
            maker.communicate(timeout=DEADLINE_S)
            assert remove_dead_folders() == []
        finally:
            maker.kill()
            if child is not None:
                child.kill()
                psutil.wait_procs([child], DEADLINE_S)
            maker.communicate(timeout=DEADLINE_S)
        with Scratch("next"):  # whoever makes one next removes it
            assert not path.exists()
        assert mine.path.exists()
    assert list(own_folder.iterdir()) == [foreign]
