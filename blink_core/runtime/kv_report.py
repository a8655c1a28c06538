"""What the KV sanitizer reports, on host and GPU alike (design section 5)."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from blink_core.abi.enums import PageState

log = logging.getLogger("blink.kv_sanitizer")

MAX_REPORTS = 1000  # lines of the file and of the log; the counter goes on


class Mismatch(StrEnum):
    """What is wrong with a row, first match wins."""

    UNWRITTEN = "unwritten"  # nobody ever wrote it
    FOREIGN = "foreign"  # another request wrote it, for other tokens or another place
    NOT_SHARED = "not-shared"  # another request's row of equal tokens, but not by way of the prefix cache
    POSITION = "position"  # the reader's own row of another place
    TOKENS = "tokens"  # the reader's own place, for other tokens
    NOT_NOW = "not-now"  # a new token's row that this step did not write
    FREED = "freed"  # the tags are right, but the page is free: the next owner will overwrite it
    TAKEN = "taken"  # the tags are right, but the page belongs to another request
    LAYERS = "layers"  # differs from what the same place holds in the first layer's keys


# `Report` of device/kernels/kv_sanitizer.cu; `kind` is the index of a Mismatch.
REPORT_RECORD = np.dtype(
    [
        *((name, np.uint32) for name in ("kind", "layer", "values", "page", "offset", "table_index")),
        *((name, np.uint32) for name in ("reader", "reader_generation", "reader_position", "step")),
        *((name, np.uint32) for name in ("writer", "writer_generation", "writer_position", "writer_step")),
        *((name, np.uint32) for name in ("same_tokens", "page_state")),
        ("page_owner", np.int32),
        ("page_generation", np.uint32),
    ]
)


@dataclass(frozen=True, slots=True)
class Party:
    """A request and a place in its sequence; step: in which the row was written, of a reader the current one."""

    ring: int
    slot: int
    generation: int
    position: int
    step: int


@dataclass(frozen=True, slots=True)
class KvReport:
    """A row that is not the one its reader must find.

    kind: `Mismatch`. table_index: place of the page in the reader's block table. kv: 'k' or 'v'. writer: by the row's
    tag, None if nobody wrote it. same_tokens: the tag's tokens are the reader's, up to the reader's position.
    page_state: `PageState`'s name, or the number that the record holds in its place, and page_owner: (ring, slot,
    generation) by the scheduler's own record, None without an owner.
    """

    kind: Mismatch
    step: int
    layer: int
    kv: str
    page: int
    offset: int
    table_index: int
    reader: Party
    writer: Party | None
    same_tokens: bool
    page_state: str
    page_owner: tuple[int, int, int] | None

    @classmethod
    def from_record(cls, raw: Any, slots: int) -> KvReport:
        """From one `REPORT_RECORD`; slots: of a ring."""

        def party(who: str, request: int, step: int) -> Party:
            return Party(*divmod(request, slots), int(raw[f"{who}_generation"]), int(raw[f"{who}_position"]), step)

        owner = int(raw["page_owner"])
        return cls(
            kind=tuple(Mismatch)[int(raw["kind"])],
            step=int(raw["step"]),
            layer=int(raw["layer"]),
            kv="kv"[int(raw["values"])],
            page=int(raw["page"]),
            offset=int(raw["offset"]),
            table_index=int(raw["table_index"]),
            reader=party("reader", int(raw["reader"]), int(raw["step"])),
            writer=party("writer", int(raw["writer"]) - 1, int(raw["writer_step"])) if raw["writer"] else None,
            same_tokens=bool(raw["same_tokens"]),
            page_state=_state_name(int(raw["page_state"])),
            page_owner=None if owner < 0 else (*divmod(owner, slots), int(raw["page_generation"])),
        )

    def __str__(self) -> str:
        r, w = self.reader, self.writer
        wrote = "by nobody"
        if w is not None:
            wrote = f"by ring {w.ring} slot {w.slot} generation {w.generation} for its position {w.position}"
            wrote += f" in step {w.step}"
        owner = "nobody" if self.page_owner is None else "ring {} slot {} generation {}".format(*self.page_owner)
        return (
            f"{self.kind}: step {self.step}, layer {self.layer} {self.kv}: ring {r.ring} slot {r.slot} generation "
            f"{r.generation} reads its position {r.position} at page {self.page} offset {self.offset} (entry "
            f"{self.table_index} of its block table), written {wrote}; the page is {self.page_state} and belongs to "
            f"{owner}"
        )


class ReportFile:
    """Where the reports of one engine go: a file of JSON lines, and the log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None

    def add(self, report: KvReport, made: int, limit: int) -> None:
        """One more report; made: those before it. From ``limit`` on they are only counted, which the log says once."""
        if made < limit:
            log.error("KV sanitizer: %s", report)
            self._write(json.dumps(asdict(report)).encode() + b"\n")
        elif made == limit:
            log.error("KV sanitizer: %d reports; those to come are only counted", made)

    def _write(self, line: bytes) -> None:
        """One line of the file. A disk that is full must not end the requests of the whole step."""
        try:
            if self._file is None:
                self._file = self.path.open("ab", buffering=0)
            self._file.write(line)
        except OSError as e:
            log.error("KV sanitizer: no report can be written to %s: %s", self.path, e)

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _state_name(state: int) -> str:
    """A record that is broken is what the report is about: it must not keep it from being made."""
    try:
        return PageState(state).name
    except ValueError:
        return str(state)
