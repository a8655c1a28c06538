"""Reading the header of a GGUF file: metadata values and tensor extents, each checked against the size of the file.

Own code rather than ``gguf.GGUFReader`` because that one loops for ever on a damaged array length and takes seconds for
the vocabulary; only dequantisation is the ``gguf`` package's. Format: ggml's ``docs/gguf.md``, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from blink_core.models.errors import ModelError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_NESTING = 4  # arrays in arrays; the format sets no limit, no known file has two
STRING, ARRAY = 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}

Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class ArrayExtent:
    """An array among the metadata, left in the file: its element type, length and the offset of its first element."""

    element_type: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True)
class TensorExtent:
    """A tensor of the file; ``shape`` is outermost dimension first, ``offset`` in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (all elements of the innermost dimension)."""
        return self.nbytes // max(1, math.prod(self.shape[:-1]))


class GGUFFile:
    """A memory-mapped GGUF file: ``metadata`` and ``tensors``. Raises ModelError when damaged or truncated."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                if self.size < 24:
                    raise ModelError(f"{path}: not a GGUF file: {self.size} bytes, a header needs at least 24")
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
        self._at = 0
        if self._take(4, "the magic") != MAGIC:
            raise ModelError(f"{path}: not a GGUF file: starts with {self.data[:4]!r}, expected {MAGIC!r}")
        version = self._scalar("<I", "the version")
        if version not in SUPPORTED_VERSIONS:
            raise ModelError(f"{path}: GGUF version {version} is not supported (little-endian 2 and 3 are)")
        tensor_count = self._count("<Q", "tensor count", 24)  # a tensor's description takes at least 24 bytes
        metadata_count = self._count("<Q", "metadata count", 13)  # key length, type, one byte of value
        self.metadata: dict[str, Scalar | ArrayExtent] = {}
        for index in range(metadata_count):
            key = self._string(f"metadata key {index} of {metadata_count}")
            if key in self.metadata:
                raise ModelError(f"{path}: metadata key {key!r} appears twice")
            self.metadata[key] = self._value(self._scalar("<I", f"the type of {key!r}"), f"metadata {key!r}", 0)
        self.tensors = self._tensors(tensor_count)

    def _fail_short(self, needed: int, what: str) -> ModelError:
        return ModelError(
            f"{self.path}: truncated or damaged GGUF file: {self.size} bytes, but {what} needs bytes up to {needed}"
        )

    def _take(self, count: int, what: str) -> bytes:
        end = self._at + count
        if end > self.size:
            raise self._fail_short(end, what)
        start, self._at = self._at, end
        return self.data[start:end]

    def _scalar(self, layout: str, what: str) -> int:
        (value,) = struct.unpack(layout, self._take(struct.calcsize(layout), what))
        return int(value)

    def _count(self, layout: str, what: str, least: int) -> int:
        """A count whose items take at least ``least`` bytes each, so that a damaged one cannot cost time or memory."""
        value = self._scalar(layout, what)
        if value * least > self.size - self._at:
            raise self._fail_short(self._at + value * least, f"a {what} of {value}")
        return value

    def _skip(self, count: int) -> None:
        """Step over bytes that :meth:`_count` has found to be there."""
        self._at += count

    def _string(self, what: str) -> str:
        length = self._count("<Q", f"length of {what}", 1)
        raw = self._take(length, what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: damaged GGUF file: {what} is not UTF-8") from error

    def _value(self, kind: int, what: str, depth: int) -> Scalar | ArrayExtent:
        if kind == STRING:
            return self._string(what)
        if kind in SCALARS:
            layout = SCALARS[kind]
            (value,) = struct.unpack(layout, self._take(struct.calcsize(layout), what))
            result: Scalar = value
            return result
        if kind != ARRAY or depth >= MAX_NESTING:
            raise ModelError(f"{self.path}: damaged GGUF file: {what} has unknown type {kind} at nesting {depth}")
        element = self._scalar("<I", f"the element type of {what}")
        size = struct.calcsize(SCALARS[element]) if element in SCALARS else 8
        length = self._count("<Q", f"length of {what}", size)
        extent = ArrayExtent(element, length, self._at)
        if element in SCALARS:
            self._skip(length * size)
        elif element == STRING:
            for _ in range(length):
                self._skip(self._count("<Q", f"string length in {what}", 1))
        else:
            for _ in range(length):
                self._value(element, what, depth + 1)
        return extent

    def _tensors(self, count: int) -> dict[str, TensorExtent]:
        described = [self._tensor(f"tensor description {index} of {count}") for index in range(count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise ModelError(f"{self.path}: general.alignment is {alignment!r}, expected a power of two")
        base = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorExtent] = {}
        for name, shape, kind, relative in described:
            if name in tensors:
                raise ModelError(f"{self.path}: tensor {name!r} appears twice")
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if not shape or shape[-1] % block:
                raise ModelError(
                    f"{self.path}: tensor {name!r} of shape {list(shape)} is no multiple of its block {block}"
                )
            nbytes = math.prod(shape) // block * block_bytes
            if relative % alignment:
                raise ModelError(
                    f"{self.path}: tensor {name!r} at offset {relative} is not aligned to {alignment} bytes"
                )
            if base + relative + nbytes > self.size:
                raise self._fail_short(base + relative + nbytes, f"tensor {name!r}")
            tensors[name] = TensorExtent(name, shape, kind, base + relative, nbytes)
        return tensors

    def _tensor(self, what: str) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string(what)
        dimensions = self._scalar("<I", what)
        if dimensions > MAX_DIMENSIONS:
            raise ModelError(
                f"{self.path}: tensor {name!r} has {dimensions} dimensions, at most {MAX_DIMENSIONS} are known"
            )
        shape = tuple(self._scalar("<Q", what) for _ in range(dimensions))[::-1]
        raw = self._scalar("<I", what)
        try:
            kind = GGMLQuantizationType(raw)
        except ValueError as error:
            raise ModelError(f"{self.path}: tensor {name!r} has unknown ggml type {raw}") from error
        return name, shape, kind, self._scalar("<Q", what)
