"""The failure corpus of nightly runs: what failed once is run again first, and cases are counted over all nights.

A folder with one file a failure, `<digest>.json`: test, profile, model and root seed, with which that test draws the
same programs again; nobody's prompts. Where the failing programs themselves were kept (`--bundle-prompts`) the
recording lies beside it. `runs.jsonl` has a line for each run: its seed, sources, and cases by property. A failure
that is mended stays until somebody deletes its file: it is a regression test.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blink_core.model_store import blink_home
from verification.canonical import digest
from verification.certificate.outcomes import Outcome
from verification.certificate.records import TestRecord

FORMAT = "blink-corpus"
LEDGER = "runs.jsonl"
PREFIX = "corpus/"
REPLAYING = ("nightly", "full")  # the profiles that run it first


class CorpusError(ValueError):
    """A corpus that cannot be read or written."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One failure. nodeid: relative to the suite's root. model: name or path as it was given, None for the default."""

    name: str
    test: str
    nodeid: str
    property: str | None
    rig_kind: str
    profile: str
    model: str | None
    seed: int
    recording: Path | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "test": self.test,
            "nodeid": self.nodeid,
            "property": self.property,
            "rig_kind": self.rig_kind,
            "profile": self.profile,
            "model": self.model,
            "seed": self.seed,
        }


class Corpus:
    """A corpus folder; one that is not there is empty."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def default(cls, rig_kind: str) -> Corpus:
        """Where a user's nightly runs keep it: beside the models."""
        return cls(blink_home() / "corpus" / rig_kind)

    def entries(self, rig_kind: str) -> list[Entry]:
        """All failures of this kind of rig, in a fixed order. Raises CorpusError for a damaged file."""
        return [e for e in map(self._read, sorted(self.folder.glob("*.json"))) if e.rig_kind == rig_kind]

    def _read(self, path: Path) -> Entry:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values["format"] != FORMAT:
                raise ValueError(f"its format is {values['format']!r}, expected {FORMAT!r}")
            recording = path.with_suffix(".recording")
            return Entry(
                name=path.stem,
                test=str(values["test"]),
                nodeid=str(values["nodeid"]),
                property=values["property"],
                rig_kind=str(values["rig_kind"]),
                profile=str(values["profile"]),
                model=values["model"],
                seed=int(values["seed"]),
                recording=recording if recording.is_file() else None,
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorpusError(f"{path} is no entry of a failure corpus: {type(error).__name__}: {error}") from error

    def add(self, entry: Entry, recording: Path | None) -> bool:
        """Keeps a failure, with the recording of its program where there is one; False if it is known."""
        path = self.folder / f"{entry.name}.json"
        if path.exists():
            return False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if recording is not None:
                shutil.copyfile(recording, path.with_suffix(".recording"))
            path.write_text(json.dumps(entry.to_json(), indent=1), encoding="utf-8")
        except OSError as error:
            raise CorpusError(f"cannot keep a failure in {self.folder}: {error.strerror or error}") from error
        return True

    # ---- cases over all runs

    def runs(self) -> list[dict[str, Any]]:
        """The ledger, oldest first; a last line cut short is ignored."""
        path = self.folder / LEDGER
        if not path.is_file():
            return []
        found = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return found

    def note(self, run: dict[str, Any]) -> None:
        """Appends a run to the ledger."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / LEDGER).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(run, sort_keys=True) + "\n")
        except OSError as error:
            raise CorpusError(f"cannot note the run in {self.folder}: {error.strerror or error}") from error


def entry_of(record: TestRecord, rig_kind: str, profile: str, model: str | None, seed: int) -> Entry:
    """The corpus entry of a failed test."""
    entry = Entry("", record.id, record.nodeid, record.property, rig_kind, profile, model, seed)
    return Entry(digest(entry.to_json())[:16], *[getattr(entry, name) for name in Entry.__slots__[1:]])


def failures(records: Iterable[TestRecord]) -> list[TestRecord]:
    """What belongs into a corpus: tests, not replays, in which the product broke a property."""
    return [r for r in records if r.outcome is Outcome.PRODUCT_FAILURE and r.nodeid and not r.id.startswith(PREFIX)]


def cases_by_property(records: Iterable[TestRecord]) -> dict[str, dict[str, int]]:
    """Cases that were decided, and failed tests, by property; replays do not count, they are the same cases again."""
    found: dict[str, dict[str, int]] = {}
    for record in records:
        if record.property is None or record.id.startswith(PREFIX):
            continue
        if record.outcome in (Outcome.PASSED, Outcome.PRODUCT_FAILURE):
            counts = found.setdefault(record.property, {"cases": 0, "failures": 0})
            counts["cases"] += max(1, record.cases)
            counts["failures"] += record.outcome is Outcome.PRODUCT_FAILURE
    return found


def cumulative(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Cases over all runs of a ledger by property. Runs that drew the same (seed, profile, model and sources) count
    once."""
    distinct = {json.dumps([r["seed"], r["profile"], r["model"], r["sources"]]): r for r in runs}
    total: dict[str, dict[str, int]] = {}
    for run in distinct.values():
        for name, counts in run["properties"].items():
            sums = total.setdefault(name, {"cases": 0, "failures": 0})
            for key in sums:
                sums[key] += int(counts[key])
    since = min((str(run["started"]) for run in runs), default="")
    return {"runs": len(distinct), "since": since, "properties": total}
