"""Records and enforces results for one test, and keeps the programs of one that fails so that they replay."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verification.certificate.recorder import Recorder
from verification.history import History
from verification.program import Program
from verification.recording import recording
from verification.result import CheckResult

if TYPE_CHECKING:
    from hil_rigs.local import LocalRig

MAX_EVIDENCE = 5  # failing programs kept for one test


@dataclass
class Judge:
    """Records and enforces results for one test, and keeps the program and history of one that fails.

    folder: where its evidence goes, None when no output was asked for. about: run and test, for the recording. prompts:
    recordings, which hold prompts, were asked for.
    """

    record: Recorder
    folder: Callable[[], Path | None]
    about: dict[str, Any] = field(default_factory=dict)
    prompts: bool = True
    kept: list[Path] = field(default_factory=list)
    failing: list[tuple[CheckResult, History]] = field(default_factory=list)  # for the bundle of a failure
    scenario: dict[str, Any] | None = None  # plan and observations of a fault scenario that failed
    rig: LocalRig | None = None  # that the scenario ran on
    _seen: set[Program] = field(default_factory=set)

    def __call__(self, result: CheckResult, *histories: History) -> CheckResult:
        """Raises PropertyViolation or PropertyUnknown for a result that is not valid. histories: what it is about."""
        if not result.ok():
            for history in histories:
                self.keep(result, history)
            self.failing = [*self.failing, *((result, history) for history in histories)][-MAX_EVIDENCE:]
        return self.record.check(result)

    def case(self, program: Program) -> None:
        """Counts a program that is run, once however often it is drawn."""
        if program not in self._seen:
            self._seen.add(program)
            self.record.cases()

    def keep(self, result: CheckResult | None, history: History) -> None:
        """Writes `failure-N.json`: a recording of the history, which `--replay` takes, and the result."""
        self.keep_recording(recording(self.about, result, history=history))

    def keep_recording(self, content: dict[str, Any]) -> None:
        """Writes a recording made by `recording` if they were asked for, at most `MAX_EVIDENCE` for one test."""
        folder = self.folder() if self.prompts and len(self.kept) < MAX_EVIDENCE else None
        if folder is not None:
            path = folder / f"failure-{len(self.kept)}.json"
            path.write_text(json.dumps(content), encoding="utf-8")
            self.kept.append(path)
