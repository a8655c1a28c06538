"""Tensors of a llama-architecture GGUF file, dequantised to float32 under HuggingFace names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from blink_core.models.errors import ModelError
from blink_core.models.loaders.gguf_file import GGUFFile, TensorExtent
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


def huggingface_name(name: str) -> str:
    """HuggingFace's name of a GGUF tensor; an unknown name stays as it is, to be reported as unexpected."""
    if name in OUTSIDE_LAYERS:
        return OUTSIDE_LAYERS[name]
    match = LAYER_NAME.fullmatch(name)
    if match and match[2] in IN_LAYER:
        return f"model.layers.{match[1]}.{IN_LAYER[match[2]]}.{match[3]}"
    return name


def rotate_half_rows(rows: int, heads: int) -> npt.NDArray[np.intp]:
    """HuggingFace row of each row of a GGUF query or key projection, intp [rows].

    llama.cpp rotates neighbouring pairs (2i, 2i+1), HuggingFace halves (i, i + head_dim/2); its converter interleaves
    the rows of these projections, head by head. Undone here, so that keys in the pool have HuggingFace's layout.
    """
    half = rows // heads // 2
    return np.arange(rows).reshape(heads, 2, half).swapaxes(1, 2).reshape(-1)


class GGUFSource:
    """A :class:`~blink_core.models.loaders.source.TensorSource` over a GGUF file."""

    def __init__(self, path: Path, *, num_heads: int, num_kv_heads: int) -> None:
        self.path = path
        self._file = GGUFFile(path)
        self._heads = {"q_proj": num_heads, "k_proj": num_kv_heads}
        self._extents: dict[str, TensorExtent] = {huggingface_name(n): e for n, e in self._file.tensors.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by HuggingFace name."""
        return {name: extent.shape for name, extent in self._extents.items()}

    def chunks(self, name: str) -> Iterator[tuple[npt.NDArray[np.intp] | slice, F32]]:
        """Dequantise ``name`` a block of rows at a time. Raises ModelError for a ggml type that cannot be decoded."""
        extent = self._extents[name]
        if len(extent.shape) == 1:
            yield slice(0, extent.shape[0]), self._decode(extent, 0, 1).reshape(-1)
            return
        rows = extent.shape[0]
        projection = name.removesuffix(".weight").rpartition(".")[2]
        order = rotate_half_rows(rows, self._heads[projection]) if projection in self._heads else None
        step = max(1, CHUNK_ELEMENTS // extent.shape[1])
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            yield slice(start, stop) if order is None else order[start:stop], self._decode(extent, start, stop)

    def _decode(self, extent: TensorExtent, start: int, stop: int) -> F32:
        size = extent.row_bytes
        raw = np.frombuffer(self._file.data, np.uint8, (stop - start) * size, extent.offset + start * size)
        try:
            block = dequantize(raw.reshape(stop - start, size), extent.type)
        except NotImplementedError as error:
            known = ", ".join(t.name for t in GGMLQuantizationType if t.name.startswith(("F", "BF", "Q")))
            raise ModelError(
                f"{self.path}: tensor {extent.name!r} has ggml type {extent.type.name}, which cannot be decoded "
                f"(supported are types like {known})"
            ) from error
        return np.ascontiguousarray(block, dtype=np.float32)
