"""The trace file, version 2, byte by byte in docs/trace.md. All numbers are little endian.

A file is a head (magic, version, JSON header) and chunks, each with its length and CRC-32, appended as they come: a
crash leaves a readable file that lacks its end record.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from blink_core.abi.config import ConfigError, EngineConfig
from blink_core.abi.definition import ABI_VERSION
from blink_core.abi.dtypes import LOG_ENTRY, Array
from blink_core.abi.enums import LogLevel
from verification.trace.submission import RECORD_BYTES, Submission

MAGIC = b"BLKTRACE"
VERSION = 2
HEAD = struct.Struct("<8sHHII")  # magic, version, 0, bytes of the header, CRC-32 of the header
CHUNK = struct.Struct("<4sII")  # kind, bytes of the body, CRC-32 of kind and body
LOG, SUBMISSION, SNAPSHOT, GAP, END = b"LOGE", b"SUBM", b"SNAP", b"GAPS", b"ENDR"
MAX_BODY = 1 << 28
ENTRIES_PER_CHUNK = 4096
UNENDED = "no end record: the recorder did not come to its end"
FIELDS = ("step", "kind", "ring", "slot", "generation", "a", "b", "c")

Entry = tuple[int, ...]
"""step, kind, ring, slot, generation, a, b, c: one LogEntry."""


class TraceError(ValueError):
    """The file is no trace, or one that this version cannot read; the message names file, place and limit."""


@dataclass(frozen=True, slots=True)
class Header:
    """What the file is about. clock_base: wall clock, seconds since 1970, when recording began.

    source: 'live' or 'drawn'. payloads: whether submissions hold prompts, bias and stop ids.
    """

    config: EngineConfig
    source: str
    created_by: str = "blink trace"
    abi_version: int = ABI_VERSION
    engine_digest: str = ""
    rig: str = ""
    model: str = ""
    seed: str = ""
    clock_base: float = 0.0
    payloads: bool = False
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Trace:
    """A file as read. entries begin at entry `first` of the engine's log and end at the first gap.

    submissions: by log index of the SQ_ENTRY. gap: (index of the first entry missing, how many); later entries are in
    `after_gap`. problem: why the file is not whole, None if it ends with its end record.
    """

    header: Header
    entries: list[Entry] = field(default_factory=list)
    first: int = 0
    submissions: dict[int, Submission] = field(default_factory=dict)
    snapshots: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    gap: tuple[int, int] | None = None
    gaps: int = 0
    after_gap: list[Entry] = field(default_factory=list)
    end: dict[str, Any] | None = None
    problem: str | None = None


class TraceWriter:
    """Appends to a new file, readable by its owner only: the log holds token ids, and payloads hold prompts."""

    def __init__(self, path: Path, header: Header) -> None:
        """Raises FileExistsError when `path` is there."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file: BinaryIO = os.fdopen(handle, "wb")
        fields = asdict(header) | {"config": header.config.pack().tobytes().hex()}
        text = json.dumps(fields, sort_keys=True).encode()
        self._file.write(HEAD.pack(MAGIC, VERSION, 0, len(text), zlib.crc32(text)) + text)
        self._file.flush()
        self.entries = self.lost = 0

    def log(self, first: int, records: Array) -> None:
        """records: LogEntry[n], the entries `first` to `first + n - 1` of the engine's log."""
        for at in range(0, len(records), ENTRIES_PER_CHUNK):
            part = np.ascontiguousarray(records[at : at + ENTRIES_PER_CHUNK], LOG_ENTRY)
            self._chunk(LOG, struct.pack("<Q", first + at) + part.tobytes())
        self.entries += len(records)

    def submission(self, made: Submission) -> None:
        self._chunk(SUBMISSION, made.pack())

    def snapshot(self, log_index: int, state: dict[str, Any]) -> None:
        """What `snapshot.summary` gives, taken while the engine was held before entry `log_index`."""
        self._chunk(SNAPSHOT, struct.pack("<Q", log_index) + zlib.compress(json.dumps(state).encode()))

    def gap(self, first: int, count: int) -> None:
        """`count` entries from `first` on were overwritten before they were read."""
        self._chunk(GAP, struct.pack("<QQ", first, count))
        self.lost += count

    def end(self, reason: str) -> None:
        """The end record: the file is whole."""
        self._chunk(END, json.dumps({"entries": self.entries, "lost": self.lost, "reason": reason}).encode())
        self.close()

    def close(self) -> None:
        self._file.close()

    def _chunk(self, kind: bytes, body: bytes) -> None:
        self._file.write(CHUNK.pack(kind, len(body), zlib.crc32(kind + body)) + body)
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def write(path: Path, trace: Trace) -> None:
    """A whole trace as a new file."""
    with TraceWriter(path, trace.header) as writer:
        writer.log(trace.first, to_records(trace.entries))
        for made in trace.submissions.values():
            writer.submission(made)
        for index, state in trace.snapshots:
            writer.snapshot(index, state)
        if trace.gap is not None:
            writer.gap(*trace.gap)
            writer.log(sum(trace.gap), to_records(trace.after_gap))
        writer.end("copied" if trace.end is None else str(trace.end["reason"]))


def to_records(entries: Sequence[Entry]) -> Array:
    """LogEntry[n]."""
    records = np.zeros(len(entries), LOG_ENTRY)
    if len(entries):
        columns = np.array(entries, np.uint64)
        for at, name in enumerate(FIELDS):
            records[name] = columns[:, at]
    return records


def to_entries(records: Array) -> list[Entry]:
    return list(zip(*(records[name].tolist() for name in FIELDS), strict=True))


def read(path: Path) -> Trace:
    """Reads what is whole. Raises TraceError for a file that is no trace of this version, or damaged in its head."""
    try:
        data = path.read_bytes()
    except OSError as e:
        raise TraceError(f"{path}: {e.strerror}") from e
    trace = Trace(_header(path, data))
    at = HEAD.size + HEAD.unpack_from(data)[3]
    later = False
    while at < len(data):
        if len(data) - at < CHUNK.size:
            trace.problem = f"cut short at byte {at}: {len(data) - at} of the {CHUNK.size} bytes of a chunk's head"
            break
        kind, size, crc = CHUNK.unpack_from(data, at)
        body = data[at + CHUNK.size : at + CHUNK.size + size]
        if size > MAX_BODY or len(body) < size:
            trace.problem = f"cut short at byte {at}: a chunk of {size} bytes has {len(body)}"
            break
        if zlib.crc32(kind + body) != crc:
            trace.problem = f"damaged at byte {at}: the CRC-32 of a chunk {kind!r} does not hold"
            break
        try:
            later = _take(trace, kind, body, later)
        except (ValueError, KeyError, struct.error, zlib.error) as e:
            trace.problem = f"damaged at byte {at}: chunk {kind!r}: {e}"
            break
        at += CHUNK.size + size
    if trace.problem is None and trace.end is None:
        trace.problem = UNENDED
    return trace


def _header(path: Path, data: bytes) -> Header:
    if len(data) < HEAD.size or data[: len(MAGIC)] != MAGIC:
        raise TraceError(f"{path}: begins with {data[:8]!r}, not {MAGIC!r}: no trace file")
    _, version, _, size, crc = HEAD.unpack_from(data)
    if version != VERSION:
        raise TraceError(f"{path}: version {version} of the format, this reader knows {VERSION}")
    text = data[HEAD.size : HEAD.size + size]
    if len(text) < size or zlib.crc32(text) != crc:
        raise TraceError(f"{path}: header of {size} bytes is cut short or damaged ({len(text)} bytes, CRC-32 {crc:#x})")
    try:
        fields = json.loads(text)
        if fields["abi_version"] != ABI_VERSION:
            raise TraceError(f"{path}: recorded with ABI {fields['abi_version']}, this code speaks {ABI_VERSION}")
        config = EngineConfig.unpack(bytes.fromhex(fields.pop("config")))
        return Header(config=config, **fields)
    except (KeyError, TypeError, ValueError, ConfigError) as e:
        raise e if isinstance(e, TraceError) else TraceError(f"{path}: header: {e}") from e


def _take(trace: Trace, kind: bytes, body: bytes, later: bool) -> bool:
    """Takes one chunk; returns whether a gap has been seen."""
    if kind == LOG:
        (first,) = struct.unpack_from("<Q", body)
        got = to_entries(np.frombuffer(body, LOG_ENTRY, offset=8))
        if later:
            trace.after_gap += got
            return True
        if not trace.entries:
            trace.first = first
        elif first != trace.first + len(trace.entries):
            raise ValueError(f"entry {first} follows entry {trace.first + len(trace.entries) - 1}")
        trace.entries += got
    elif kind == SUBMISSION:
        if len(body) < RECORD_BYTES:
            raise ValueError(f"{len(body)} bytes, at least {RECORD_BYTES}")
        made = Submission.unpack(body)
        trace.submissions[made.log_index] = made
    elif kind == GAP:
        first, count = struct.unpack("<QQ", body)
        trace.gaps += count
        if trace.gap is None:
            trace.gap = first, count
        return True
    elif kind == SNAPSHOT:
        trace.snapshots.append((struct.unpack_from("<Q", body)[0], json.loads(zlib.decompress(body[8:]))))
    elif kind == END:
        trace.end = json.loads(body)
    return later  # chunks of a kind that a later minor change adds are passed over


def why_not_conformance(trace: Trace) -> str | None:
    """Why the specification cannot be stepped over this trace from its first entry; None if it can."""
    level = trace.header.config.log_level
    if level != LogLevel.ALL:
        return f"the engine logged at level {LogLevel(level).name}; conformance needs {LogLevel.ALL.name} (log_level 2)"
    if trace.first:
        return f"the recording begins at entry {trace.first} of the log, not at the engine's first"
    if not trace.entries:
        return "the recording holds no log entry"
    return None
