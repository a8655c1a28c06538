"""Live progress of a run, read from its journal: a rich display on a terminal, one line a test elsewhere."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from verification.certificate.outcomes import Outcome

_QUIET_S = 15.0
_STYLES = {
    Outcome.PASSED: "green",
    Outcome.PRODUCT_FAILURE: "bold red",
    Outcome.FILTERED: "dim",
    Outcome.SKIPPED: "dim",
}


class JournalReader:
    """Reads the events that were appended to a journal since the last call; of another journal in its place, all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = self._offset = 0

    def events(self) -> list[dict[str, Any]]:
        """New whole lines as events; none while the file is not there."""
        try:
            with self._path.open("rb") as stream:
                found = os.fstat(stream.fileno())
                if found.st_ino != self._file or found.st_size < self._offset:  # replaced, or emptied and begun anew
                    self._file, self._offset = found.st_ino, 0
                stream.seek(self._offset)
                data = stream.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line.strip()]


class ProgressDisplay:
    """Shows property, tests done of all, and elapsed time. `update` takes journal events, `tick` only passes time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal
        self._total = 0
        self._done = 0
        self._left_out = 0
        self._names: dict[str, tuple[str, str]] = {}
        self._running: dict[str, float] = {}
        self._said = time.monotonic()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not self._live,
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> ProgressDisplay:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            match event["event"]:
                case "collected":
                    for item in event["items"]:
                        self._names[item["nodeid"]] = (item["property"] or "other", item["id"])
                    self._total = len(self._names)
                    self._bar.update(self._task, total=self._total)
                case "start":
                    self._running[event["nodeid"]] = time.monotonic()
                    name, test = self._names.get(event["nodeid"], ("other", event["nodeid"]))
                    self._bar.update(self._task, description=f"{name}: {test.partition('/')[2] or test}")
                case "finish":
                    self._finished(event["record"])
                case "error":
                    self._console.print(f"error: {event['message'].splitlines()[-1]}", style="red", markup=False)

    def _finished(self, record: dict[str, Any]) -> None:
        self._running.pop(record["nodeid"], None)
        outcome = Outcome(record["outcome"])
        if outcome is Outcome.MISSING and record["phase"] == "collection":  # left out: another shard's, or on request
            self._left_out += 1
            self._bar.update(self._task, total=self._total - self._left_out)
            return
        self._done += 1
        self._bar.update(self._task, completed=self._done)
        count = f"[{self._done}/{self._total - self._left_out}]"
        line = f"{count} {outcome.replace('_', ' '):<15} {record['duration_s']:7.1f} s  {record['id']}"
        if not self._live or outcome is not Outcome.PASSED:
            self._say(line, _STYLES.get(outcome, "yellow"))
        if outcome not in (Outcome.PASSED, Outcome.FILTERED) and record["message"]:
            self._say(f"    {record['message'].splitlines()[0][:300]}", "")

    def _say(self, text: str, style: str) -> None:
        self._said = time.monotonic()
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def tick(self) -> None:
        """Where there is no live display, say now and then what is still running."""
        now = time.monotonic()
        if self._live or now - self._said < _QUIET_S:
            return
        for nodeid, since in self._running.items():
            self._say(f"    still running after {now - since:.0f} s: {self._names.get(nodeid, ('', nodeid))[1]}", "dim")
        self._said = now
