"""Tests that a session of a shard began and did not end. They run again when the shard goes on, but not for ever, and
whoever reads the report is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verification.certificate.collector import JOURNAL, read_journal
from verification.certificate.corpus import PREFIX
from verification.certificate.outcomes import Outcome
from verification.certificate.records import TestRecord

MOST = 3  # interruptions of one test, whatever their cause; then it is taken for one that fits no session
DIED = "the session died"  # and nobody lived to say why


@dataclass(frozen=True, slots=True)
class Interruption:
    """A test that was running when a session ended. run: id of that session, so that none is counted twice."""

    run: str
    id: str
    nodeid: str
    property: str | None
    reason: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def interrupted_in(folder: Path, why: Mapping[str, str]) -> list[Interruption]:
    """What the journals of an output folder, its replays' among them, say began and did not end.

    why: reasons by own id; for others the session has died.
    """
    found = []
    for journal in (folder / JOURNAL, *sorted(folder.glob(f"{PREFIX}*/{JOURNAL}"))):
        if not journal.is_file():
            continue
        collector, session = read_journal(journal)
        replay = None if journal.parent == folder else f"{PREFIX}{journal.parent.name}"
        for item in collector.running():
            test = replay or str(item["id"])
            run, reason = str(session.get("run_id", "")), why.get(test, DIED)
            found.append(Interruption(run, test, item["nodeid"], item["property"], reason))
    return found


def given_up(interrupted: Sequence[Interruption]) -> list[TestRecord]:
    """Records of the tests that were interrupted so often that they are not run again: nobody knows whose fault it is.

    They are `infrastructure`, so that the run cannot pass.
    """
    records = []
    for test, own in _by_test(interrupted).items():
        if len(own) >= MOST:
            reasons = "; ".join(dict.fromkeys(one.reason for one in own))
            message = f"interrupted {len(own)} times and not run again, it never came to its end: {reasons}"
            last = own[-1]
            records.append(TestRecord(test, last.nodeid, last.property, Outcome.INFRASTRUCTURE, message=message))
    return records


def summary(interrupted: Sequence[Interruption]) -> list[dict[str, Any]]:
    """How often each test was interrupted, and why: a fact of the report."""
    return [
        {"test": test, "times": len(own), "reasons": list(dict.fromkeys(one.reason for one in own))}
        for test, own in sorted(_by_test(interrupted).items())
    ]


def warnings(told: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a report warns of, from its fact."""
    return [
        f"test {one['test']} was interrupted {one['times']} times, "
        + ("and is not run again" if one["times"] >= MOST else "and begun anew each time")
        + f": {'; '.join(one['reasons'])}"
        for one in told
    ]


def _by_test(interrupted: Sequence[Interruption]) -> dict[str, list[Interruption]]:
    by_test: dict[str, list[Interruption]] = {}
    for one in interrupted:
        by_test.setdefault(one.id, []).append(one)
    return by_test
