"""Locks by owner and process: exclusive while the owner lives, taken over when it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hil_rigs.description import load_rig
from hil_rigs.locks import Holder, LockError, LockTimeout, OwnedLock, clean_stale, is_stale, lock_directory, rig_lock

ROOT = Path(__file__).resolve().parents[3]


def holder_of(folder: Path, name: str) -> Holder:
    found = OwnedLock(name, owner="reader", directory=folder).holder()
    assert found is not None
    return found


def plant(folder: Path, name: str, holder: Holder) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(asdict(holder)), encoding="utf-8")


@pytest.fixture
def mine(tmp_path: Path) -> Holder:
    """A true holder: this process."""
    with OwnedLock("probe", owner="me", directory=tmp_path / "probe"):
        return holder_of(tmp_path / "probe", "probe")


def test_lock_is_exclusive_names_its_owner_and_is_freed(tmp_path: Path) -> None:
    """Catches: two runs on one rig, or a refusal that does not say who has it."""
    first = OwnedLock("rig-a", owner="run-1", directory=tmp_path)
    second = OwnedLock("rig-a", owner="run-2", directory=tmp_path)
    assert first.acquire() is None
    with pytest.raises(LockTimeout, match=r"rig-a is in use by run-1 \(pid"):
        second.acquire(timeout_s=0.0)
    OwnedLock("rig-b", owner="run-2", directory=tmp_path).acquire()  # another rig is free
    first.release()
    assert second.acquire() is None
    assert second.held
    assert not first.held


def test_lock_of_another_process_holds_until_that_process_dies(tmp_path: Path) -> None:
    """Catches: a lock that only excludes within a process; a dead owner's lock that needs an administrator."""
    code = (
        "import sys; from pathlib import Path; from hil_rigs.locks import OwnedLock\n"
        "OwnedLock('rig-a', owner='other', directory=Path(sys.argv[1])).acquire(); print('held', flush=True)\n"
        "sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        lock = OwnedLock("rig-a", owner="me", directory=tmp_path)
        with pytest.raises(LockTimeout, match="other"):
            lock.acquire(timeout_s=0.0)
    finally:
        child.kill()
        child.communicate(timeout=60)
    removed = lock.acquire(timeout_s=0.0)
    assert removed is not None
    assert (removed.owner, removed.pid) == ("other", child.pid)
    lock.release()


def test_reused_pid_and_reboot_are_stale_and_another_host_is_not(mine: Holder) -> None:
    """Catches: a lock kept for ever because its pid was given to another process; a remote lock stolen."""
    assert not is_stale(mine)
    assert is_stale(replace(mine, started=mine.started - 1000))
    assert is_stale(replace(mine, boot="another-boot"))
    assert not is_stale(replace(mine, host="elsewhere", pid=2**30))


def test_clean_removes_stale_locks_only(tmp_path: Path, mine: Holder) -> None:
    """Catches: a cleaning that frees a rig in use."""
    folder = tmp_path / "locks"
    plant(folder, "live", mine)
    plant(folder, "dead", replace(mine, started=1.0, owner="gone"))
    assert [holder.owner for holder in clean_stale(folder)] == ["gone"]
    assert sorted(path.name for path in folder.glob("*.json")) == ["live.json"]


def test_half_written_lock_holds_nothing(tmp_path: Path) -> None:
    """Catches: a rig locked for ever by a file that a full disk cut short."""
    (tmp_path / "rig-a.json").write_text('{"owner": "x', encoding="utf-8")
    with OwnedLock("rig-a", owner="me", directory=tmp_path) as lock:
        assert lock.held


def test_release_never_frees_what_another_took(tmp_path: Path, mine: Holder) -> None:
    """Catches: a slow owner that removes the lock of the one who took over from it."""
    lock = OwnedLock("rig-a", owner="me", directory=tmp_path)
    lock.acquire()
    plant(tmp_path, "rig-a", replace(mine, owner="next"))
    lock.release()
    assert holder_of(tmp_path, "rig-a").owner == "next"


def test_bad_use_is_refused(tmp_path: Path) -> None:
    """Catches: a lock name that leaves the folder; a second acquire that succeeds by accident."""
    with pytest.raises(LockError, match=r"\.\./x"):
        OwnedLock("../x", owner="me", directory=tmp_path)
    with OwnedLock("rig-a", owner="me", directory=tmp_path) as lock, pytest.raises(LockError, match="already held"):
        lock.acquire()
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(LockError, match="lock folder"):
        OwnedLock("rig-a", owner="me", directory=tmp_path / "file").acquire()


def test_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: users of a shared rig who lock in different places."""
    monkeypatch.setenv("BLINK_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("BLINK_LOCK_DIR", raising=False)
    assert lock_directory() == tmp_path / "home" / "locks"
    monkeypatch.setenv("BLINK_LOCK_DIR", str(tmp_path / "shared"))
    assert lock_directory() == tmp_path / "shared"


RIG_HOLDER = """
import sys
from pathlib import Path
from hil_rigs.description import load_rig
from hil_rigs.locks import rig_lock
with rig_lock(load_rig("local").model_copy(update={"exclusive": True}), "other", directory=Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_exclusive_rig_is_one_runs_until_its_process_dies(tmp_path: Path) -> None:
    """Catches: two runs on one exclusive rig; a dead run's lock that nobody takes over; a second engine of the same run
    shut out by its own lock, or the rig freed while one of them is still there."""
    rig = load_rig("local").model_copy(update={"exclusive": True})
    child = subprocess.Popen(
        [sys.executable, "-c", RIG_HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(LockTimeout, match="rig-local is in use by other"), rig_lock(rig, "me", directory=tmp_path):
            pass
    finally:
        child.kill()
        child.communicate(timeout=60)
    with rig_lock(rig, "me", directory=tmp_path):
        with rig_lock(rig, "me", directory=tmp_path):
            pass
        assert holder_of(tmp_path, "rig-local").owner == "me"
        with pytest.raises(LockTimeout, match="in use by me"), rig_lock(rig, "another run", directory=tmp_path):
            pass
    assert OwnedLock("rig-local", owner="reader", directory=tmp_path).holder() is None


def test_workers_of_one_run_take_turns(tmp_path: Path) -> None:
    """Catches: a worker of `-n 2` that fails because its sibling has the exclusive rig; one that waits for a stranger,
    or for ever."""
    rig = load_rig("local").model_copy(update={"exclusive": True})
    command = [sys.executable, "-c", RIG_HOLDER, str(tmp_path)]  # its owner, the run, is "other"
    sibling = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True)
    try:
        assert sibling.stdout is not None
        assert sibling.stdout.readline() == "held\n"
        with pytest.raises(LockTimeout), rig_lock(rig, "stranger", directory=tmp_path, sibling_s=60.0):
            pass
        with pytest.raises(LockTimeout), rig_lock(rig, "other", directory=tmp_path, sibling_s=0.1):
            pass
        leave = threading.Timer(0.2, sibling.communicate)
        leave.start()
        with rig_lock(rig, "other", directory=tmp_path, sibling_s=60.0):
            assert holder_of(tmp_path, "rig-local").pid == os.getpid()
        leave.join(30)
    finally:
        sibling.kill()
        sibling.wait(30)


def test_rig_that_is_not_exclusive_is_shared_and_leaves_nothing(tmp_path: Path) -> None:
    """Catches: runs on the local rig that wait for each other, and lock files that pile up with every run."""
    rig = load_rig("local")
    assert not rig.exclusive
    with rig_lock(rig, "one", directory=tmp_path), rig_lock(rig, "two", directory=tmp_path):
        assert list(tmp_path.iterdir()) == []
    assert list(tmp_path.iterdir()) == []
