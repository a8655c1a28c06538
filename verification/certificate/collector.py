"""Gathers the records of one run and journals them, so that a run that dies still leaves what it had found."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from verification.certificate.outcomes import Outcome
from verification.certificate.records import TestRecord

JOURNAL = "journal.jsonl"
DESELECTED = "deselected on the command line"


class Collector:
    """Records by own id, in the order in which they came, with everything that was collected and never ran.

    With `journal` every event is also appended to that file, one JSON object a line, flushed at once.
    """

    def __init__(self, journal: Path | None = None) -> None:
        self.records: dict[str, TestRecord] = {}
        self.errors: list[str] = []
        self.facts: dict[str, Any] = {}
        self.ended = False
        self._collected: dict[str, dict[str, Any]] = {}
        self._running: dict[str, None] = {}
        self._stream: TextIO | None = journal.open("w", encoding="utf-8") if journal is not None else None

    def _write(self, event: str, **values: Any) -> None:
        if self._stream is not None:
            self._stream.write(json.dumps({"event": event, **values}, allow_nan=False) + "\n")
            self._stream.flush()

    def session(self, values: dict[str, Any]) -> None:
        """Note what the run is: run id, rig, profile, seed, model, start."""
        self._write("session", values=values)

    def collected(self, items: Iterable[dict[str, Any]]) -> None:
        """Note collected tests, each as {"nodeid", "id", "property"}.

        What is known already is kept, except an id that was only the node id, for want of a better one.
        """
        new = []
        for item in items:
            known = self._collected.get(item["nodeid"])
            if known is None or (known["id"] == known["nodeid"] and known != item):
                new.append(item)
        self._collected.update({item["nodeid"]: item for item in new})
        if new:
            self._write("collected", items=new)

    def started(self, nodeid: str) -> None:
        """Note that a test began."""
        self._running[nodeid] = None
        self._write("start", nodeid=nodeid)

    def finished(self, record: TestRecord) -> None:
        """Note a test's record."""
        self._running.pop(record.nodeid, None)
        self.records[record.id] = record
        self._write("finish", record=json.loads(record.to_json()))

    def crashed(self, nodeid: str, reason: str) -> None:
        """Note that the process that ran a test died in it: `infrastructure`, because nobody knows yet what died."""
        item = self._collected.get(nodeid, {"nodeid": nodeid, "id": nodeid, "property": None})
        self.finished(
            TestRecord(item["id"], nodeid, item["property"], Outcome.INFRASTRUCTURE, message=reason, phase="call")
        )

    def deselected(self, item: dict[str, Any], reason: str) -> None:
        """Note a test that was collected and left out on request."""
        self.collected([item])
        if item["id"] not in self.records:
            self.finished(
                TestRecord(
                    item["id"], item["nodeid"], item["property"], Outcome.MISSING, message=reason, phase="collection"
                )
            )

    def error(self, message: str) -> None:
        """Note an error of the session itself."""
        self.errors.append(message)
        self._write("error", message=message)

    def fact(self, name: str, value: Any) -> None:
        """Note a fact about the run (engine, model, options)."""
        if self.facts.get(name) != value:
            self.facts[name] = value
            self._write("fact", name=name, value=value)

    def end(self) -> None:
        """Note that the session came to its end in good order."""
        self.ended = True
        self._write("end")

    def running(self) -> list[dict[str, Any]]:
        """Tests that began and did not end, each as {"nodeid", "id", "property"}."""
        return [
            self._collected.get(nodeid, {"nodeid": nodeid, "id": nodeid, "property": None}) for nodeid in self._running
        ]

    def close(self, crash: str | None = None) -> list[TestRecord]:
        """End the run and return all records, with what never ran as `missing`.

        Tests that were running when the process died, for the reason `crash`, become `infrastructure`.
        """
        for nodeid in list(self._running):
            self.crashed(nodeid, crash or "the process that ran it died")
        known = {record.nodeid for record in self.records.values()}
        for nodeid, item in self._collected.items():
            if nodeid not in known:
                self.records[item["id"]] = TestRecord(
                    item["id"],
                    nodeid,
                    item["property"],
                    Outcome.MISSING,
                    message=f"collected and never run{f': {crash}' if crash else ''}",
                    phase="collection",
                )
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        return list(self.records.values())


def read_journal(path: Path) -> tuple[Collector, dict[str, Any]]:
    """Rebuild a collector from a journal; a last line cut short by the death of its writer is ignored.

    Returns the collector (still open, without a journal of its own) and the values of the session event.
    """
    collector = Collector()
    session: dict[str, Any] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            break
        match event["event"]:
            case "session":
                session = event["values"]
            case "collected":
                collector.collected(event["items"])
            case "start":
                collector.started(event["nodeid"])
            case "finish":
                collector.finished(TestRecord.from_json(json.dumps(event["record"])))
            case "error":
                collector.error(event["message"])
            case "fact":
                collector.fact(event["name"], event["value"])
            case "end":
                collector.end()
    return collector, session
