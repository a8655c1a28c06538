"""Tensors of a GGUF file, or of the files it is split into, dequantised to float32 under HuggingFace names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from blink_core.models.errors import ModelError
from blink_core.models.loaders.gguf_file import GGUFFile, TensorExtent
from blink_core.models.loaders.gguf_split import open_split
from blink_core.models.loaders.source import CHUNK_ELEMENTS, F32

OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_LAYER = {
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
LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


# Tables of the rotary embedding, a part of the configuration (blink_core.models.rope_config).
CONFIGURATION = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}


def huggingface_name(name: str, names: Mapping[str, str]) -> str:
    """HuggingFace's name of a GGUF tensor; an unknown name stays as it is, to be reported as unexpected.

    ``names``: the family's own names in a layer, which go before the common ones.
    """
    if name in OUTSIDE_LAYERS:
        return OUTSIDE_LAYERS[name]
    match = LAYER_NAME.fullmatch(name)
    part = (names.get(match[2]) or IN_LAYER.get(match[2])) if match else None
    return f"model.layers.{match[1]}.{part}.{match[3]}" if match and part else name


def rotate_half_rows(rows: int, heads: int) -> npt.NDArray[np.intp]:
    """HuggingFace row of each row of a GGUF query or key projection, intp [rows].

    llama.cpp rotates neighbouring pairs (2i, 2i+1), HuggingFace halves (i, i + head_dim/2); its converter interleaves
    the rows of these projections, head by head. Undone here, so that keys in the pool have HuggingFace's layout.
    """
    half = rows // heads // 2
    return np.arange(rows).reshape(heads, 2, half).swapaxes(1, 2).reshape(-1)


class GGUFSource:
    """A :class:`~blink_core.models.loaders.source.TensorSource` over a GGUF file."""

    def __init__(self, path: Path, *, names: Mapping[str, str], interleaved: Mapping[str, int]) -> None:
        """``names``: as in :func:`huggingface_name`. ``interleaved``: heads by projection with such rows."""
        self.path = path
        self._heads = interleaved
        self._extents: dict[str, tuple[GGUFFile, TensorExtent]] = {}
        for file in open_split(path):
            for name, extent in file.tensors.items():
                if name in CONFIGURATION:
                    continue
                target = huggingface_name(name, names)
                if target in self._extents:
                    other = self._extents[target][0].path.name
                    raise ModelError(f"{file.path}: tensor {name!r} ({target}) is also in {other}")
                self._extents[target] = file, extent

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by HuggingFace name."""
        return {name: extent.shape for name, (_, extent) in self._extents.items()}

    def chunks(self, name: str) -> Iterator[tuple[npt.NDArray[np.intp] | slice, F32]]:
        """Dequantise ``name`` a block of rows at a time. Raises ModelError for a ggml type that cannot be decoded."""
        file, extent = self._extents[name]
        one = len(extent.shape) == 1
        rows = 1 if one else math.prod(extent.shape[:-1])
        projection, _, kind = name.rpartition(".")
        heads = self._heads.get(projection.rpartition(".")[2])
        count = extent.shape[0] if one else rows  # a bias is interleaved like the rows of its weight
        order = rotate_half_rows(count, heads) if heads and kind in ("weight", "bias") else None
        step = max(1, CHUNK_ELEMENTS // max(1, extent.shape[-1]))
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            block = _decode(file, extent, start, stop)
            if one:
                yield slice(0, count) if order is None else order, block.reshape(-1)
            else:
                yield slice(start, stop) if order is None else order[start:stop], block


def _decode(file: GGUFFile, extent: TensorExtent, start: int, stop: int) -> F32:
    size = extent.row_bytes if len(extent.shape) > 1 else extent.nbytes
    raw = np.frombuffer(file.data, np.uint8, (stop - start) * size, extent.offset + start * size)
    try:
        block = dequantize(raw.reshape(stop - start, size), extent.type)
    except NotImplementedError as error:
        known = ", ".join(t.name for t in GGMLQuantizationType if t.name.startswith(("F", "BF", "Q")))
        raise ModelError(
            f"{file.path}: tensor {extent.name!r} has ggml type {extent.type.name}, which cannot be decoded "
            f"(supported are types like {known})"
        ) from error
    return np.ascontiguousarray(block, dtype=np.float32)
