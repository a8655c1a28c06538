"""What the suite looks at between steps of a running engine."""

from __future__ import annotations

from hil_rigs.engine_memory import EngineUnreachable
from verification.fixtures import RING, EngineLost, Subject
from verification.properties import kv_conservation, kv_content
from verification.result import CheckResult


class Observation:
    """At each observed boundary recounts all pages, and gathers KV where they can be told apart.

    results: one recount a boundary. rows: KV of the running requests, by boundary at which somebody ran. tails: entries
    that the event log had at each of these.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.results: list[CheckResult] = []
        self.rows: list[list[kv_content.Gathered]] = []
        self.tails: list[int] = []

    def __call__(self) -> None:
        memory = self.subject.rig.memory
        try:
            with memory.hold():
                snapshot = memory.snapshot(log_from=2**63)  # no entries
                result = kv_conservation.check_snapshot(snapshot)
                rows = kv_content.gather(memory, snapshot, RING) if result.ok() else []
        except EngineUnreachable as e:
            raise EngineLost(str(e)) from e
        self.results.append(result)
        if rows:  # else nobody was running
            self.rows.append(rows)
            self.tails.append(int(snapshot.header["log_tail"]))
