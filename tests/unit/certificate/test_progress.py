"""The journal as it is followed while a run writes it."""

from __future__ import annotations

from pathlib import Path

from verification.certificate.collector import Collector
from verification.certificate.progress import JournalReader


def nodes(reader: JournalReader) -> list[str]:
    return [event["nodeid"] for event in reader.events()]


def test_each_event_is_read_once_and_whole(tmp_path: Path) -> None:
    """Catches: an event that is read twice, or half of one that is still being written."""
    path = tmp_path / "journal.jsonl"
    reader = JournalReader(path)
    assert nodes(reader) == []
    journal = Collector(path)
    journal.started("a")
    journal.started("b")
    assert (nodes(reader), nodes(reader)) == (["a", "b"], [])
    with path.open("a", encoding="utf-8") as stream:
        stream.write('{"event": "start", ')
        stream.flush()
        assert nodes(reader) == []
        stream.write('"nodeid": "c"}\n')
        stream.flush()
        assert nodes(reader) == ["c"]


def test_journal_that_begins_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    """Catches: events of a journal that took another's place, or was emptied, left out up to the length of the old one;
    its first line read from its midst."""
    path = tmp_path / "journal.jsonl"
    first = Collector(path)
    for name in ("a", "b", "c"):
        first.started(name)
    reader = JournalReader(path)
    assert nodes(reader) == ["a", "b", "c"]
    emptied = Collector(path)  # the same file, opened anew
    emptied.started("d")
    assert nodes(reader) == ["d"]
    path.rename(tmp_path / "old")
    replaced = Collector(path)
    for name in ("e", "f", "g", "h"):
        replaced.started(name)
    assert nodes(reader) == ["e", "f", "g", "h"]
