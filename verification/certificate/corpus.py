"""The failure corpus of nightly runs: what failed once is run again first, and cases are counted over all nights.

A folder with one file a failure, `<digest>.json`: test, profile, model and root seed, with which that test draws the
same programs again; nobody's prompts. Where the failing programs themselves were kept (`--bundle-prompts`) the
recording lies beside it. `runs.jsonl` has a line for each run or shard: its seed, sources, and cases by property. A
failure that is mended stays until somebody deletes its file: it is a regression test.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
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
                _replace(path.with_suffix(".recording"), recording.read_bytes())
            _replace(path, json.dumps(entry.to_json(), indent=1).encode())
        except OSError as error:
            raise CorpusError(f"cannot keep a failure in {self.folder}: {error.strerror or error}") from error
        return True

    # ---- cases over all runs

    def runs(self) -> list[dict[str, Any]]:
        """The ledger, oldest first; a line cut short by the death of its writer is ignored."""
        path = self.folder / LEDGER
        if not path.is_file():
            return []
        found = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return found

    def note(self, run: dict[str, Any]) -> None:
        """Appends a run, or a shard of one, to the ledger; shards that run side by side may do so at once."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / LEDGER).open("a+b", buffering=0) as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(max(0, size - 1))
                torn = size > 0 and stream.read(1) != b"\n"  # somebody died in the midst of a line
                stream.write(b"\n" * torn + json.dumps(run, sort_keys=True).encode() + b"\n")
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
    once: of a run that was repeated, or divided into other shards, by property the one with the most."""
    draws: dict[str, dict[str, Counts]] = {}  # draws -> shard, or "1/1" -> counts
    for run in runs:
        parts = draws.setdefault(drawn(run), {})
        shard = str(run.get("shard") or "1/1")
        parts[shard] = _most([parts.get(shard, {}), run["properties"]])
    total: Counts = {}
    for parts in draws.values():
        divided: dict[str, list[Counts]] = {}  # number of shards -> counts of each
        for shard, counts in parts.items():
            divided.setdefault(shard.partition("/")[2], []).append(counts)
        total = add([total, _most([add(one) for one in divided.values()])])
    since = min((str(run["started"]) for run in runs), default="")
    return {"runs": len(draws), "since": since, "properties": total}


Counts = dict[str, dict[str, int]]  # by property: "cases", "failures"


def drawn(run: Mapping[str, Any]) -> str:
    """What decides which cases a run of a ledger draws."""
    return json.dumps([run["seed"], run["profile"], run["model"], run["sources"]])


def add(parts: Iterable[Counts]) -> Counts:
    """Counts of different cases together."""
    return _merged(parts, int.__add__)


def _most(parts: Iterable[Counts]) -> Counts:
    """Counts of the same cases, of which a run that was cut short has fewer."""
    return _merged(parts, max)


def _merged(parts: Iterable[Counts], join: Callable[[int, int], int]) -> Counts:
    total: Counts = {}
    for part in parts:
        for name, counts in part.items():
            known = total.setdefault(name, {"cases": 0, "failures": 0})
            for key in known:
                known[key] = join(known[key], int(counts[key]))
    return total


def _replace(path: Path, data: bytes) -> None:
    """Writes a file that a run beside this one sees whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(data)
    part.replace(path)
