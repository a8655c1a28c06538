"""What `definition` is written in: records of fields, and regions of sections.

A `Struct` is a packed little-endian record whose fields are naturally aligned by construction (checked).
A `Region` is a run of 64-byte aligned sections whose element counts are expressions over `Config`, so the
layout is computed at run time by Python and by C++ from the same text.
"""

from dataclasses import dataclass

SECTION_ALIGN = 64
SIZES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "i32": 4, "i64": 8, "f32": 4}


@dataclass(frozen=True, slots=True)
class Field:
    """One field: scalar type name of `SIZES`, optional array length, one-line meaning."""

    name: str
    type: str
    doc: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True)
class Struct:
    """A record of exactly `size` bytes; fields are laid out in order without implicit padding."""

    name: str
    size: int
    doc: str
    fields: tuple[Field, ...]

    def offsets(self) -> dict[str, int]:
        """Byte offset of each field. Raises ValueError on misalignment or a size that does not match."""
        at, result = 0, {}
        for field in self.fields:
            width = SIZES[field.type]
            if at % width:
                raise ValueError(f"{self.name}.{field.name}: offset {at} is not a multiple of {width}")
            result[field.name] = at
            at += width * field.count
        if at > self.size:
            raise ValueError(f"{self.name}: fields take {at} bytes, declared size is {self.size}")
        return result


@dataclass(frozen=True, slots=True)
class Section:
    """`count` (expression over Config fields) elements of a struct or scalar."""

    name: str
    element: str
    count: str
    doc: str = ""


@dataclass(frozen=True, slots=True)
class Region:
    """Named sections, each aligned to `SECTION_ALIGN` bytes."""

    name: str
    doc: str
    sections: tuple[Section, ...]
