"""Runs the failure corpus of a nightly before the night's own tests (design section 9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from verification.certificate.collector import JOURNAL, read_journal
from verification.certificate.corpus import (
    PREFIX,
    Corpus,
    Entry,
    cases_by_property,
    cumulative,
    entry_of,
    failures,
)
from verification.certificate.outcomes import Outcome
from verification.certificate.output import CORPUS, EVIDENCE
from verification.certificate.provenance import engine_modules, sources_digest
from verification.certificate.records import TestRecord
from verification.run_context import RunContext

# Runs pytest on one entry, with the output folder given; returns what went wrong with the process, if anything did.
RunEntry = Callable[[Entry, Path], str | None]


def replay(corpus: Corpus, rig_kind: str, out: Path, run: RunEntry, say: Callable[[str], None]) -> list[TestRecord]:
    """Runs every failure of the corpus once, in its own folder under `out`/corpus; a record each, `corpus/<name>`.

    One that an interrupted session of a shard has run to its end is not run again, whatever its outcome.

    One whose test is no longer there, or whose process died, is no pass: its record says so, and the file stays until
    somebody deletes it.
    """
    records = []
    entries = corpus.entries(rig_kind)
    for number, entry in enumerate(entries, 1):
        folder = out / CORPUS / entry.name
        folder.parent.mkdir(parents=True, exist_ok=True)
        say(f"corpus [{number}/{len(entries)}]: {entry.test}, seed {entry.seed}")
        found, trouble = _replayed(folder, entry), None
        if found is None:
            trouble = run(entry, folder)
            found = _replayed(folder, entry, trouble, ended=True)
        if found is None:
            message = (
                f"{corpus.folder / entry.name}.json: test {entry.test} did not run: {trouble or 'it is not there'}"
            )
            found = TestRecord(entry.test, entry.nodeid, entry.property, Outcome.MISSING, message=message)
        bundle = found.bundle and f"{CORPUS}/{entry.name}/{found.bundle}"
        records.append(replace(found, id=f"{PREFIX}{entry.name}", nodeid=entry.nodeid, bundle=bundle))
        say(f"corpus [{number}/{len(entries)}]: {found.outcome.replace('_', ' ')}")
    return records


def _replayed(folder: Path, entry: Entry, trouble: str | None = None, *, ended: bool = False) -> TestRecord | None:
    """The record of an entry's test: once its run has ended any, before that one that an interrupted shard finished."""
    if not (folder / JOURNAL).is_file():
        return None
    collector = read_journal(folder / JOURNAL)[0]
    records = collector.close(trouble) if ended else collector.records.values()
    return next((record for record in records if record.id == entry.test), None)


def keep_failures(corpus: Corpus, context: RunContext, records: Sequence[TestRecord]) -> int:
    """Puts what failed into the corpus, with the recorded program where one was kept; how many were new."""
    added = 0
    for record in failures(records):
        entry = entry_of(record, context.rig_kind, context.profile_name, context.model, context.seed)
        recording = None
        if context.out is not None:
            folder = context.out / EVIDENCE / RunContext.file_name(record.id)
            recording = next(iter(sorted(folder.glob("failure-*.json"))), None)
        added += corpus.add(entry, recording)
    return added


def ledger_line(context: RunContext, started: str, records: Sequence[TestRecord]) -> dict[str, Any]:
    """What the corpus notes of a run."""
    return {
        "run": context.run_id,
        "started": started,
        "rig": context.rig,
        "profile": context.profile_name,
        "model": context.model,
        "seed": context.seed,
        "sources": sources_digest(),
        "engine": engine_modules(),
        "properties": cases_by_property(records),
    }


def summary(corpus: Corpus, line: dict[str, Any], replayed: int, added: int) -> dict[str, Any]:
    """The corpus as a report states it: what was replayed, and the cases of all nights, this one's among them."""
    return {
        "folder": str(corpus.folder),
        "replayed": replayed,
        "added": added,
        "cumulative": cumulative([*corpus.runs(), line]),
    }
