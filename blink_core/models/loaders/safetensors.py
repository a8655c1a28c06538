"""Tensors of a HuggingFace directory with safetensors files, as float32 without torch."""

from __future__ import annotations

import json
import math
import mmap
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from blink_core.models.errors import ModelError
from blink_core.models.loaders.source import CHUNK_ELEMENTS, F32

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# NumPy has no bfloat16: read as its 16 bits and widened in `_to_float32`.
STORED_DTYPES: dict[str, type[np.generic]] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
# Rotary frequencies were once saved with the weights; transformers computes them and ignores the tensor, so does Blink.
IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


@dataclass(frozen=True, slots=True)
class _Extent:
    """Where a tensor lies: file, stored dtype, shape, byte offset in the file."""

    file: Path
    data: mmap.mmap
    dtype: str
    shape: tuple[int, ...]
    offset: int


class SafetensorsSource:
    """A :class:`~blink_core.models.loaders.source.TensorSource` over one safetensors file or its indexed shards."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._extents: dict[str, _Extent] = {}
        index, single = path / INDEX, path / SINGLE
        if index.is_file():
            weight_map = self._weight_map(index)
            for shard in sorted(set(weight_map.values())):
                self._add(path / shard)
            for name, shard in weight_map.items():
                if name not in self._extents or self._extents[name].file.name != shard:
                    raise ModelError(f"{index}: tensor {name!r} is not in {shard}, where the index places it")
        elif single.is_file():
            self._add(single)
        else:
            raise ModelError(f"{path}: neither {SINGLE} nor {INDEX} is there")

    @staticmethod
    def _weight_map(index: Path) -> dict[str, str]:
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{index}: not a safetensors index with a weight_map: {error}") from error
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise ModelError(f"{index}: weight_map must map tensor names to file names")
        for shard in weight_map.values():
            if Path(shard).name != shard:  # an index must not reach outside its directory
                raise ModelError(f"{index}: shard {shard!r} is not a plain file name")
        return weight_map

    def _add(self, file: Path) -> None:
        for name, extent in _open(file).items():
            if IGNORED.fullmatch(name):
                continue
            if name in self._extents:
                raise ModelError(f"{file}: tensor {name!r} is also in {self._extents[name].file.name}")
            if extent.dtype not in STORED_DTYPES:
                supported = ", ".join(STORED_DTYPES)
                raise ModelError(f"{file}: tensor {name!r} has dtype {extent.dtype}; supported are {supported}")
            self._extents[name] = extent

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by HuggingFace name."""
        return {name: extent.shape for name, extent in self._extents.items()}

    def chunks(self, name: str) -> Iterator[tuple[npt.NDArray[np.intp] | slice, F32]]:
        """Widen ``name`` to float32 a block of rows at a time."""
        extent = self._extents[name]
        dtype = np.dtype(STORED_DTYPES[extent.dtype])
        row = extent.shape[-1:] if len(extent.shape) > 1 else ()
        rows, columns = math.prod(extent.shape[: len(extent.shape) - len(row)]), math.prod(row)
        step = max(1, CHUNK_ELEMENTS // max(1, columns))
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            offset = extent.offset + start * columns * dtype.itemsize
            raw = np.frombuffer(extent.data, dtype.newbyteorder("<"), (stop - start) * columns, offset)
            yield slice(start, stop), _to_float32(raw, extent.dtype).reshape(stop - start, *row)


def _to_float32(raw: npt.NDArray[Any], dtype: str) -> F32:
    """Stored values as float32, exactly: a bfloat16 is the upper half of a float32."""
    if dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32, copy=False)


def _open(file: Path) -> dict[str, _Extent]:
    """Map ``file`` and read its header; ModelError when truncated, damaged or absent."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            if size < 8:
                raise ModelError(f"{file}: truncated safetensors file: {size} bytes, the header length alone takes 8")
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    start = 8 + int.from_bytes(data[:8], "little")
    if start > size:
        raise ModelError(f"{file}: truncated or damaged safetensors file: {size} bytes, the header needs {start}")
    try:
        header: dict[str, Any] = json.loads(data[8:start])
        header.pop("__metadata__", None)
        end = start + max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        if end > size:
            raise ModelError(f"{file}: truncated safetensors file: {size} bytes, the header describes {end}")
        # The package's own reader checks the rest: no gaps, no overlaps, sizes that agree with dtype and shape.
        with safe_open(str(file), framework="numpy"):
            pass
        return {
            name: _Extent(file, data, entry["dtype"], tuple(entry["shape"]), start + entry["data_offsets"][0])
            for name, entry in header.items()
        }
    except (SafetensorError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ModelError(f"{file}: damaged safetensors file ({size} bytes): {error}") from error
