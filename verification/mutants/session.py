"""A worker process and its jobs, from the side of the matrix: started with a mutant in force, ended in any case."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from verification.mutants.checkers import find
from verification.mutants.worker import GRACE_S, Job, Outcome

START_LIMIT_S = 120.0
PREPARE_LIMIT_S = 600.0
SLACK_S = 20.0  # beyond a job's deadline, for a busy machine


class WorkerLost(RuntimeError):
    """The worker ended, or did not answer; the message says what it printed last."""


class Session:
    """One worker. environ: its environment, with a mutant in force or not: see `native` and `hook`."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "verification.mutants.worker"]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=dict(environ)
        )
        self._buffer = b""
        self._fresh = True

    def prepare(self, checkers: Sequence[str], seeds: Sequence[int]) -> None:
        """Draws what the checkers will run, once for all jobs that follow. Raises WorkerLost."""
        self._ask({"prepare": {"checkers": list(checkers), "seeds": list(seeds)}}, PREPARE_LIMIT_S)

    def run(self, job: Job) -> Outcome:
        """The outcome of one job. Raises WorkerLost; the job itself ends by its deadline."""
        seconds = job.seconds or find(job.checker).seconds
        return Outcome(**self._ask(asdict(job), seconds + GRACE_S + SLACK_S))

    def _ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        deadline = time.monotonic() + seconds + (START_LIMIT_S if self._fresh else 0.0)
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerLost(self._last_words()) from error
        answer: dict[str, Any] = json.loads(self._line(deadline))
        self._fresh = False
        return answer

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
            if not chunk:
                raise WorkerLost(self._last_words() if ready else "the worker did not answer in time")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _last_words(self) -> str:
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip()
        return f"the worker ended: {text[-1500:] or 'it said nothing'}"

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
