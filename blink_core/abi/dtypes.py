"""NumPy dtypes and region layouts derived from `definition`."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from blink_core.abi.definition import REGIONS, STRUCTS
from blink_core.abi.records import SECTION_ALIGN, Region, Struct

_SCALARS: dict[str, np.dtype[Any]] = {
    "u8": np.dtype("<u1"),
    "u16": np.dtype("<u2"),
    "u32": np.dtype("<u4"),
    "u64": np.dtype("<u8"),
    "i32": np.dtype("<i4"),
    "i64": np.dtype("<i8"),
    "f32": np.dtype("<f4"),
}


def _struct_dtype(struct: Struct) -> np.dtype[Any]:
    offsets = struct.offsets()
    formats = [_SCALARS[f.type] if f.count == 1 else np.dtype((_SCALARS[f.type], (f.count,))) for f in struct.fields]
    return np.dtype(
        {
            "names": [f.name for f in struct.fields],
            "formats": formats,
            "offsets": [offsets[f.name] for f in struct.fields],
            "itemsize": struct.size,
        }
    )


DTYPES: Mapping[str, np.dtype[Any]] = {**_SCALARS, **{s.name: _struct_dtype(s) for s in STRUCTS}}

CONFIG = DTYPES["Config"]
SLOT = DTYPES["Slot"]
BIAS_PAIR = DTYPES["BiasPair"]
EVENT = DTYPES["Event"]
LOGPROBS_EVENT = DTYPES["LogprobsEvent"]
REQUEST = DTYPES["Request"]
SAMPLING = DTYPES["Sampling"]
LOG_ENTRY = DTYPES["LogEntry"]
PLAN_ROW = DTYPES["PlanRow"]
STEP_RESULT = DTYPES["StepResult"]

Buffer = bytes | bytearray | memoryview | mmap.mmap
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class SectionLayout:
    """Byte offset, element dtype and count of one section."""

    offset: int
    dtype: np.dtype[Any]
    count: int

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * self.count


@dataclass(frozen=True, slots=True)
class RegionLayout:
    """Layout of a region for one configuration; `nbytes` is a multiple of `SECTION_ALIGN`."""

    name: str
    sections: Mapping[str, SectionLayout]
    nbytes: int

    def view(self, buffer: Buffer, section: str, base: int = 0) -> Array:
        """Zero-copy array over one section of `buffer`, whose region starts at byte `base`."""
        at = self.sections[section]
        return np.frombuffer(buffer, dtype=at.dtype, count=at.count, offset=base + at.offset)

    def views(self, buffer: Buffer, base: int = 0) -> dict[str, Array]:
        """Zero-copy arrays over all sections."""
        return {name: self.view(buffer, name, base) for name in self.sections}


def align(nbytes: int) -> int:
    return -(-nbytes // SECTION_ALIGN) * SECTION_ALIGN


def region_layout(region: Region, config: Mapping[str, int]) -> RegionLayout:
    """Layout of `region` for the integer fields of `config`."""
    at = 0
    sections: dict[str, SectionLayout] = {}
    for section in region.sections:
        count = 1
        for factor in section.count.split("*"):
            factor = factor.strip()
            count *= int(factor) if factor.isdigit() else int(config[factor])
        layout = SectionLayout(at, DTYPES[section.element], count)
        sections[section.name] = layout
        at = align(at + layout.nbytes)
    return RegionLayout(region.name, sections, at)


def layouts(config: Mapping[str, int]) -> dict[str, RegionLayout]:
    """Layouts of every region, by name."""
    return {region.name: region_layout(region, config) for region in REGIONS}
