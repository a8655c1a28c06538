"""Log entries in words."""

from __future__ import annotations

from collections.abc import Sequence

from blink_core.abi.enums import LogKind
from verification.failures.engine_log import LOG_FIELDS, OF_ENGINE, OF_RING
from verification.history import enum_name
from verification.trace.format import Entry

AROUND = 6  # entries of an excerpt before the one in question, and half as many behind


def kind_name(entry: Entry) -> str:
    return enum_name(LogKind, entry[1])


def values_of(entry: Entry) -> dict[str, str | int]:
    """What a, b and c of the entry say, by name; enumerations by their names."""
    kind = kind_name(entry)
    fields = LOG_FIELDS.get(kind)
    if fields is None:
        return dict(zip("abc", entry[5:8], strict=True))
    call: dict[str, str | int] = {"call": "boundary" if entry[3] else "poll"} if kind == LogKind.CLOCK.name else {}
    return call | {
        name: value if enumeration is None else enum_name(enumeration, value)
        for (name, enumeration), value in zip(fields, entry[5:8], strict=False)
    }


def in_words(entry: Entry) -> str:
    """One entry, e.g. `step 4  FINISH of 0:1 g7: reason LENGTH, emitted 3, released_pages 2`."""
    kind = kind_name(entry)
    if kind in OF_RING:
        who = f" of ring {entry[2]}"
    else:
        who = "" if kind in OF_ENGINE else f" of {entry[2]}:{entry[3]} g{entry[4]}"
    said = ", ".join(f"{name} {value}" for name, value in values_of(entry).items())
    return f"step {entry[0]}  {kind}{who}: {said}"


def excerpt(log: Sequence[Entry], at: int, first: int) -> str:
    """The entries around one, marked `>`; `first`: index of the log's first entry."""
    lines = []
    for j in range(max(0, at - AROUND), min(len(log), at + AROUND // 2 + 1)):
        lines.append(f"  {'>' if j == at else ' '} {first + j:>7}  {in_words(log[j])}")
    return "\n".join(lines)
