"""Runs the failure corpus of a nightly before the night's own tests (design section 9)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from verification.certificate.collector import JOURNAL, read_journal
from verification.certificate.corpus import (
    PREFIX,
    Corpus,
    Entry,
    add,
    cases_by_property,
    cumulative,
    drawn,
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


def replay(
    corpus: Corpus,
    rig_kind: str,
    out: Path,
    run: RunEntry,
    say: Callable[[str], None],
    settled: Mapping[str, TestRecord] | None = None,
) -> list[TestRecord]:
    """Runs every failure of the corpus once, in its own folder under `out`/corpus; a record each, `corpus/<name>`.

    One that an interrupted session of a shard has run to its end is not run again, whatever its outcome; nor is one
    that is `settled`, by own id: the process crashed in it, or it was interrupted too often.

    One whose test is no longer there, or whose process died, is no pass: its record says so, and the file stays until
    somebody deletes it. The same holds for one that did not run because `run` had no time left.
    """
    records = []
    entries = corpus.entries(rig_kind)
    for number, entry in enumerate(entries, 1):
        known = (settled or {}).get(f"{PREFIX}{entry.name}")
        if known is not None:
            records.append(known)
            say(f"corpus [{number}/{len(entries)}]: {entry.test}: {known.message}")
            continue
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
    """What the corpus notes of a run, or of a shard of one."""
    return {
        "run": context.run_id,
        "started": started,
        "rig": context.rig,
        "profile": context.profile_name,
        "model": context.model,
        "seed": context.seed,
        "shard": None if context.shard is None else str(context.shard),
        "sources": sources_digest(),
        "engine": engine_modules(),
        "properties": cases_by_property(records),
    }


def summary(corpus: Corpus, line: dict[str, Any], replayed: int, added: int) -> dict[str, Any]:
    """The corpus as a report states it: what was replayed, and the cases of all nights, this one's among them.

    before: the cases of all other runs; own: this one's. `joined` makes the whole run's cases of them.
    """
    runs = corpus.runs()
    return {
        "folder": str(corpus.folder),
        "replayed": replayed,
        "added": added,
        "before": cumulative([run for run in runs if drawn(run) != drawn(line)]),
        "own": line["properties"],
        "cumulative": cumulative([*runs, line]),
    }


def joined(parts: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """The summaries of all shards of a run as one. parts: by machine; shards of one machine may share a folder."""
    everything = [one for own in parts.values() for one in own]
    before: dict[tuple[str, str], dict[str, Any]] = {}  # of one folder the latest: others ran beside these shards
    for machine, own in parts.items():
        for one in own:
            known = before.setdefault((machine, one["folder"]), one["before"])
            if one["before"]["runs"] > known["runs"]:
                before[machine, one["folder"]] = one["before"]
    others, own_cases = list(before.values()), add(one["own"] for one in everything)
    since = min((one["cumulative"]["since"] for one in everything), default="")
    together = add([*(one["properties"] for one in others), own_cases])
    return {
        "folder": ", ".join(dict.fromkeys(one["folder"] for one in everything)),
        "replayed": sum(one["replayed"] for one in everything),
        "added": sum(one["added"] for one in everything),
        "own": own_cases,
        "cumulative": {"runs": 1 + sum(one["runs"] for one in others), "since": since, "properties": together},
    }
