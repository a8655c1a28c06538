"""A second reader of GGUF files, written from the format's description: header, tensor table, block formats.

It shares no code with the engine's loader, the ``gguf`` package or transformers, so that an error in one of them shows
as a difference (design section 9). Blocks hold 32 weights along a row:

* ``Q4_0`` 18 bytes: half d; 16 bytes, weight i in the low nibble of byte i, i + 16 in the high one; w = d (q - 8)
* ``Q4_1`` 20 bytes: half d, half m, nibbles as above; w = d q + m
* ``Q8_0`` 34 bytes: half d, 32 signed bytes; w = d q

all in float32 arithmetic. Llama files (Mistral's too) keep the rows of the query and key weights and biases with the
two halves of each rotary pair side by side; HuggingFace, and files of other architectures, keep the halves apart.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from verification.result import JSON, CheckResult, Measurement, Verdict

PROPERTY = "token-equivalence"
CLAUSE = "weights"
_MAX_COUNT = 1 << 24  # entries of a table or array: far above any real file, far below what exhausts memory
_MAX_STRING = 1 << 26
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

F32Array = NDArray[np.float32]


class HasParameters(Protocol):
    """What the comparison needs of an oracle: parameters by HuggingFace name (``HFOracle`` has them)."""

    def parameters(self) -> Mapping[str, NDArray[np.floating[Any]]]: ...


class GGUFDecodeError(ValueError):
    """The file is not GGUF, is truncated, or uses something outside this reader's formats."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. shape: as NumPy has it (rows first). offset: bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int

    @property
    def format(self) -> BlockFormat:
        try:
            return FORMATS[self.type_id]
        except KeyError:
            known = ", ".join(f"{f.name} ({i})" for i, f in FORMATS.items())
            raise GGUFDecodeError(f"tensor {self.name}: type {self.type_id} is none of {known}") from None

    @property
    def nbytes(self) -> int:
        count, block = math.prod(self.shape), self.format
        if self.shape[-1] % block.weights:
            raise GGUFDecodeError(
                f"tensor {self.name}: rows of {self.shape[-1]} weights are not whole {block.name} blocks"
            )
        return count // block.weights * block.nbytes


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """version, metadata by key (scalars, strings, lists), and tensors by name."""

    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


@dataclass(frozen=True, slots=True)
class BlockFormat:
    name: str
    weights: int
    nbytes: int
    decode: Callable[[NDArray[np.uint8]], F32Array]  # uint8 [blocks, nbytes] -> float32 [blocks, weights]


def read_header(path: str | Path) -> GGUFHeader:
    """Parse the header of a little-endian GGUF file, version 2 or 3. ``GGUFDecodeError`` names place and value."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        reader = _Reader(file, size, Path(path))
        if (magic := reader.take(4)) != b"GGUF":
            raise GGUFDecodeError(f"{path}: begins with {magic!r}, not b'GGUF'")
        version = reader.scalar("I")
        if version not in (2, 3):
            raise GGUFDecodeError(f"{path}: GGUF version {version}; this reader knows 2 and 3 (little-endian)")
        tensor_count, pair_count = reader.count("Q"), reader.count("Q")
        metadata = {}
        for _ in range(pair_count):
            key = reader.string()
            metadata[key] = reader.value(reader.scalar("I"))
        entries = [_tensor_entry(reader) for _ in range(tensor_count)]
        alignment = int(metadata.get("general.alignment", 32))
        if alignment < 1:
            raise GGUFDecodeError(f"{path}: alignment {alignment}")
        start = -(-file.tell() // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, type_id, offset in entries:
        if name in tensors:
            raise GGUFDecodeError(f"{path}: two tensors are called {name}")
        info = TensorInfo(name, shape, type_id, start + offset)
        if info.offset + info.nbytes > size:
            raise GGUFDecodeError(
                f"{path}: tensor {name} ends at byte {info.offset + info.nbytes}, the file has {size}: truncated"
            )
        tensors[name] = info
    return GGUFHeader(version, metadata, tensors)


def read_tensor(path: str | Path, info: TensorInfo) -> F32Array:
    """Decode one tensor to float32 in its NumPy shape, in the file's own row order."""
    block = info.format
    raw = np.fromfile(path, dtype=np.uint8, count=info.nbytes, offset=info.offset)
    if raw.size != info.nbytes:
        raise GGUFDecodeError(f"{path}: tensor {info.name} has {raw.size} of {info.nbytes} bytes: truncated")
    return block.decode(raw.reshape(-1, block.nbytes)).reshape(info.shape)


def huggingface_name(name: str, architecture: str = "llama") -> str:
    """Name of a tensor in HuggingFace's model. Raises ``GGUFDecodeError`` for one that the architecture lacks."""
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    part = {**_LAYER, **_ARCHITECTURES[architecture]}.get(match[2], "") if match else ""
    if match is None or not part:
        raise GGUFDecodeError(f"tensor {name} is not part of a model of architecture {architecture!r}")
    stacked = part.startswith("mlp.experts.")  # HuggingFace's parameters of experts have no such suffix
    return f"model.layers.{match[1]}.{part}" + ("" if stacked else f".{match[3]}")


def to_huggingface_rows(weights: F32Array, heads: int) -> F32Array:
    """Reorder the rows of a query or key weight from interleaved rotary pairs to HuggingFace's two halves.

    weights: [heads * head_dim, inputs], or a bias [heads * head_dim]. Row 2 j + p of a head goes to row
    p * head_dim / 2 + j.
    """
    rows = weights.shape[0]
    if heads < 1 or rows % (2 * heads):
        raise GGUFDecodeError(f"{rows} rows are not {heads} heads of an even size")
    pairs = weights.reshape(heads, rows // heads // 2, 2, -1)
    return np.ascontiguousarray(np.moveaxis(pairs, 2, 1)).reshape(weights.shape)


def check_weights(path: str | Path, oracle: HasParameters) -> CheckResult:
    """Compare every tensor of a GGUF file with what transformers loaded, bit for bit.

    oracle: of the same file, in float32 or float64 (each float32 weight is exact in float64). ``invalid`` names the
    tensors that differ, are missing on either side, or have another shape.
    """
    header = read_header(path)
    architecture = str(header.metadata.get("general.architecture"))
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise GGUFDecodeError(f"{path}: architecture {architecture!r}; tensor names are known for {known}")
    heads: dict[str, int] = {}
    if architecture == "llama":
        query_heads = int(header.metadata["llama.attention.head_count"])
        key_heads = int(header.metadata.get("llama.attention.head_count_kv", query_heads))
        heads = {"attn_q": query_heads, "attn_k": key_heads}
    loaded = _unfused(oracle.parameters())
    faults: list[JSON] = []
    seen: set[str] = set()
    weights, worst = 0, 0.0
    for name, info in header.tensors.items():
        if name.startswith("rope_f"):  # tables of factors, which transformers has in its configuration
            continue
        target = huggingface_name(name, architecture)
        decoded = read_tensor(path, info)
        part = name.split(".")[-2]
        if part in heads:
            decoded = to_huggingface_rows(decoded, heads[part])
        seen.add(target)
        weights += decoded.size
        found = loaded.get(target)
        if found is None or found.shape != decoded.shape:
            shape: JSON = None if found is None else [int(n) for n in found.shape]
            faults.append({"tensor": name, "parameter": target, "shape": list(decoded.shape), "loaded_shape": shape})
            continue
        differing = decoded != found
        if differing.any():
            error = np.abs(decoded.astype(np.float64) - found)
            worst = max(worst, float(np.nanmax(error)))
            at: list[JSON] = [int(i) for i in np.argwhere(differing)[0]]
            count = int(differing.sum())
            faults.append({"tensor": name, "parameter": target, "differ": count, "of": decoded.size, "first": at})
    faults.extend({"parameter": name, "missing": "file"} for name in sorted(set(loaded) - seen))
    tensors = len(header.tensors)
    return CheckResult(
        Verdict.INVALID if faults else Verdict.VALID,
        PROPERTY,
        CLAUSE,
        f"{len(faults)} of {tensors} tensors ({weights} weights) differ between this decoder and transformers",
        {"count": len(faults), "tensors": faults[:8]} if faults else {},
        {
            "tensors": Measurement(tensors, "tensors"),
            "weights": Measurement(weights, "weights"),
            "tensors_differing": Measurement(len(faults), "tensors", 0, tensors),
            "worst_weight_error": Measurement(worst, "weight", 0.0, weights),
        },
    )


_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
# Names by architecture, beyond or instead of those of Llama.
_ARCHITECTURES: Mapping[str, Mapping[str, str]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": _NORMS,
    "qwen3moe": {
        **_NORMS,
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.gate_proj",
        "ffn_up_exps": "mlp.experts.up_proj",
        "ffn_down_exps": "mlp.experts.down_proj",
    },
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}


def _unfused(parameters: Mapping[str, NDArray[np.floating[Any]]]) -> dict[str, NDArray[np.floating[Any]]]:
    """HuggingFace's parameters, with the experts' gate and up [experts, 2 * out, in] as the two that files have."""
    found = dict(parameters)
    for name in parameters:
        if name.endswith(".experts.gate_up_proj"):
            fused = found.pop(name)
            stem, half = name.removesuffix("gate_up_proj"), fused.shape[1] // 2
            found[f"{stem}gate_proj"], found[f"{stem}up_proj"] = fused[:, :half], fused[:, half:]
    return found


def _half(blocks: NDArray[np.uint8], at: int) -> F32Array:
    """The half at byte ``at`` of each block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(blocks: NDArray[np.uint8], at: int) -> F32Array:
    packed = blocks[:, at : at + 16]
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


def _q8_0(blocks: NDArray[np.uint8]) -> F32Array:
    return _half(blocks, 0) * np.ascontiguousarray(blocks[:, 2:34]).view(np.int8).astype(np.float32)


def _bf16(blocks: NDArray[np.uint8]) -> F32Array:
    return (np.ascontiguousarray(blocks).view("<u2").astype(np.uint32) << 16).view(np.float32)


FORMATS: Mapping[int, BlockFormat] = {
    0: BlockFormat("F32", 1, 4, lambda b: np.ascontiguousarray(b).view("<f4").astype(np.float32)),
    1: BlockFormat("F16", 1, 2, lambda b: _half(b, 0)),
    2: BlockFormat("Q4_0", 32, 18, lambda b: _half(b, 0) * (_nibbles(b, 2) - np.float32(8))),
    3: BlockFormat("Q4_1", 32, 20, lambda b: _half(b, 0) * _nibbles(b, 4) + _half(b, 2)),
    8: BlockFormat("Q8_0", 32, 34, _q8_0),
    30: BlockFormat("BF16", 1, 2, _bf16),
}


class _Reader:
    """Little-endian values from a file, each read checked against the file's end."""

    def __init__(self, file: BinaryIO, size: int, path: Path) -> None:
        self._file, self._size, self._path = file, size, path

    def take(self, n: int) -> bytes:
        at = self._file.tell()
        data = self._file.read(n) if at + n <= self._size else b""
        if len(data) != n:
            raise GGUFDecodeError(f"{self._path}: {n} bytes at {at}, but the file has {self._size}: truncated")
        return data

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def count(self, code: str, limit: int = _MAX_COUNT) -> int:
        at = self._file.tell()
        value = int(self.scalar(code))
        if value > limit:
            raise GGUFDecodeError(f"{self._path}: a count of {value} at byte {at}, more than {limit}")
        return value

    def string(self) -> str:
        at = self._file.tell()
        data = self.take(self.count("Q", _MAX_STRING))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise GGUFDecodeError(f"{self._path}: the string at byte {at} is not UTF-8: {error}") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY and depth < 4:
            item = int(self.scalar("I"))
            count = self.count("Q")
            if item in _SCALARS:
                size = struct.calcsize(f"<{_SCALARS[item]}")
                return list(struct.unpack(f"<{count}{_SCALARS[item]}", self.take(count * size)))
            return [self.value(item, depth + 1) for _ in range(count)]
        raise GGUFDecodeError(f"{self._path}: metadata value of type {kind} at byte {self._file.tell()}")


def _tensor_entry(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.string()
    dimensions = reader.count("I", 8)
    if dimensions == 0:
        raise GGUFDecodeError(f"tensor {name} has no dimension")
    shape = tuple(reader.scalar("Q") for _ in range(dimensions))[::-1]  # the file has the fastest dimension first
    return name, shape, reader.scalar("I"), reader.scalar("Q")
