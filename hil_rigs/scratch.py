"""Folders for a run's own files, gone after it, also where it was killed: whoever makes the next one removes them.

Whoever makes a folder holds a file lock on it for as long as it lives, as do the processes that it hands `fd` to, so
that no process id is trusted (as `blink_core.transport.shm` does with segments).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

MARK = ".blink-scratch"  # in every such folder, written once it is locked: nobody else's folder is removed


def remove_dead_folders() -> list[Path]:
    """Removes the folders of processes that have ended, with all that is in them, and returns where they were."""
    removed = []
    for path in sorted(Path(tempfile.gettempdir()).glob("blink-*")):
        with contextlib.suppress(OSError):  # locked: in use; or another user's; or just gone
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                if not (path / MARK).is_file() or os.fstat(fd).st_uid != os.getuid():
                    continue
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.stat(path)):
                    shutil.rmtree(path, ignore_errors=True)
                    removed.append(path)
            finally:
                os.close(fd)
    return removed


class Scratch:
    """A fresh folder `<temporary folder>/blink-<name>-...`, removed by `close` or at the end of a `with`."""

    def __init__(self, name: str) -> None:
        """Makes it, and removes those of processes that have ended. Raises OSError."""
        remove_dead_folders()
        self.path = Path(tempfile.mkdtemp(prefix=f"blink-{name}-"))
        # The lock is its: a process that has it too (`subprocess.Popen(pass_fds=...)`) keeps the folder while it lives.
        self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (self.path / MARK).touch()

    def close(self) -> None:
        """Removes the folder, whoever else still has it. Idempotent."""
        if self.fd < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
