"""The trace file: what is written is read, and what is damaged is named."""

from __future__ import annotations

import json
import stat
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from blink_core.abi.dtypes import LOG_ENTRY, SLOT
from tests.unit.trace.runs import drawn
from verification.trace.format import CHUNK, HEAD, MAGIC, TraceError, TraceWriter, read, to_records, write
from verification.trace.submission import PAYLOAD, RECORD_BYTES


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.trace"
    write(path, drawn(0))
    return path


def test_what_is_written_is_read(file: Path) -> None:
    """Catches: a field of an entry, a descriptor or the header that does not survive the file."""
    trace, back = drawn(0), read(file)
    assert back.header == trace.header
    assert back.entries == trace.entries
    assert back.submissions == trace.submissions
    assert (back.problem, back.gap) == (None, None)
    assert back.end == {"entries": len(trace.entries), "lost": 0, "reason": "the program ended"}


def test_file_is_its_owners_only(file: Path) -> None:
    """Catches: prompts and tokens that every user of the machine can read."""
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_bytes_are_as_documented(file: Path) -> None:
    """Catches: a format that changes without its version; offsets are docs/trace.md's."""
    data = file.read_bytes()
    assert data[:8] == b"BLKTRACE"
    version, zero, size, crc = struct.unpack_from("<HHII", data, 8)
    assert (version, zero) == (2, 0)
    text = data[20 : 20 + size]
    assert zlib.crc32(text) == crc
    assert json.loads(text)["abi_version"] == 2
    kind, length, crc = struct.unpack_from("<4sII", data, 20 + size)
    body = data[32 + size : 32 + size + length]
    assert (kind, crc) == (b"LOGE", zlib.crc32(kind + body))
    assert struct.unpack_from("<Q", body)[0] == 0
    assert (LOG_ENTRY.itemsize, SLOT.itemsize, RECORD_BYTES) == (32, 256, 276)
    assert struct.unpack_from("<QHHIIIII", body, 8) == drawn(0).entries[0]


def test_payloads_are_off_unless_asked(tmp_path: Path) -> None:
    """Catches: prompts, bias or stop ids in a file that was not to hold them."""
    write(tmp_path / "a.trace", drawn(0, payloads=False))
    made = read(tmp_path / "a.trace").submissions.values()
    assert made
    assert all(not s.flags & PAYLOAD and not s.payload for s in made)
    assert all(not np.frombuffer(s.slot, SLOT)["stop_ids"].any() for s in made)


def test_every_cut_leaves_what_is_whole(file: Path) -> None:
    """Catches: a crash of the recorder that takes what it had written."""
    data = file.read_bytes()
    head = HEAD.size + HEAD.unpack_from(data)[3]
    seen = []
    for size in range(head, len(data), 97):
        file.write_bytes(data[:size])
        trace = read(file)
        assert trace.problem is not None
        assert trace.entries == drawn(0).entries[: len(trace.entries)]
        seen.append(len(trace.entries) + len(trace.submissions))
    assert seen == sorted(seen)
    assert seen[-1] > len(drawn(0).entries)


def test_flipped_bit_is_found_by_its_crc(file: Path) -> None:
    """Catches: a damaged entry that is taken for the engine's."""
    data = bytearray(file.read_bytes())
    at = HEAD.size + HEAD.unpack_from(data)[3] + CHUNK.size + 100
    data[at] ^= 4
    file.write_bytes(data)
    trace = read(file)
    assert trace.entries == []
    assert "CRC-32" in str(trace.problem)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"X", "no trace file"),
        (8, b"\x01", "version 1 of the format, this reader knows 2"),
        (25, b"~", "header of .* is cut short or damaged"),
    ],
)
def test_foreign_head_is_refused(file: Path, at: int, value: bytes, message: str) -> None:
    """Catches: a reader that makes something of a file that it does not know."""
    data = bytearray(file.read_bytes())
    data[at : at + len(value)] = value
    file.write_bytes(data)
    with pytest.raises(TraceError, match=message):
        read(file)


@pytest.mark.parametrize("data", [b"", b"BLK", MAGIC, b"{}\n"])
def test_no_trace_is_refused(tmp_path: Path, data: bytes) -> None:
    """Catches: an exception without the file's name for an empty or a foreign file."""
    path = tmp_path / "x.trace"
    path.write_bytes(data)
    with pytest.raises(TraceError, match="x.trace"):
        read(path)


def test_foreign_abi_is_refused(tmp_path: Path) -> None:
    """Catches: entries that are decoded with another version's meanings."""
    path = tmp_path / "x.trace"
    write(path, replace(drawn(0), header=replace(drawn(0).header, abi_version=1)))
    with pytest.raises(TraceError, match="recorded with ABI 1, this code speaks 2"):
        read(path)


def test_gap_is_kept_apart(tmp_path: Path) -> None:
    """Catches: entries behind a gap that are read as if they followed those before it."""
    entries, path = drawn(0).entries, tmp_path / "x.trace"
    with TraceWriter(path, drawn(0).header) as writer:
        writer.log(0, to_records(entries[:20]))
        writer.gap(20, 5)
        writer.log(25, to_records(entries[25:]))
        writer.end("stopped")
    trace = read(path)
    assert (trace.entries, trace.gap, trace.after_gap) == (entries[:20], (20, 5), entries[25:])
    assert trace.end is not None
    assert trace.end["lost"] == 5


def test_unmarked_gap_is_damage(tmp_path: Path) -> None:
    """Catches: missing entries that no gap record tells of."""
    entries, path = drawn(0).entries, tmp_path / "x.trace"
    with TraceWriter(path, drawn(0).header) as writer:
        writer.log(0, to_records(entries[:20]))
        writer.log(25, to_records(entries[25:]))
        writer.end("stopped")
    assert "entry 25 follows entry 19" in str(read(path).problem)


def test_file_that_is_there_is_kept(file: Path) -> None:
    """Catches: a recording that overwrites another."""
    with pytest.raises(FileExistsError):
        TraceWriter(file, drawn(0).header)
