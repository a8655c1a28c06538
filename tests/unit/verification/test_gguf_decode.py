"""The second GGUF decoder, against the ``gguf`` package (which only this test uses)."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.gguf_models import write_gguf_model
from tests.tiny_models import tiny_model, tiny_oracles
from verification.oracles.gguf_decode import (
    GGUFDecodeError,
    check_weights,
    read_header,
    read_tensor,
    to_huggingface_rows,
)
from verification.result import Verdict

TYPES = {
    "Q4_0": gguf.GGMLQuantizationType.Q4_0,
    "Q4_1": gguf.GGMLQuantizationType.Q4_1,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
    "BF16": gguf.GGMLQuantizationType.BF16,
    "F16": gguf.GGMLQuantizationType.F16,
    "F32": gguf.GGMLQuantizationType.F32,
}
HEADS, KV_HEADS, DIM, HIDDEN = 4, 2, 8, 32


def _write(path: Path, tensors: dict[str, tuple[NDArray[np.float32], str]]) -> dict[str, NDArray[np.float32]]:
    """Write a file with the ``gguf`` package; returns what that package dequantises each tensor to."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_array("test.strings", ["a", "ß", ""])
    writer.add_array("test.numbers", [1, -2, 3])
    writer.add_float32("test.half", 0.5)
    writer.add_bool("test.yes", True)
    decoded = {}
    for name, (values, kind) in tensors.items():
        raw = gguf.quants.quantize(values, TYPES[kind])
        writer.add_tensor(name, raw, raw_dtype=TYPES[kind])
        decoded[name] = gguf.quants.dequantize(raw, TYPES[kind]).astype(np.float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return decoded


def _random(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("kind", list(TYPES))
def test_agrees_with_the_gguf_package_bit_for_bit(tmp_path: Path, kind: str) -> None:
    """Catches: nibbles in the wrong order, a wrong zero point, scale and minimum exchanged, a wrong alignment."""
    path = tmp_path / "t.gguf"
    shapes = {"a": (5, 64), "b": (3, 96), "c": (2, 3, 32)}
    want = _write(path, {name: (3 * _random(shape, i), kind) for i, (name, shape) in enumerate(shapes.items())})
    header = read_header(path)
    assert set(header.tensors) == set(shapes)
    for name, shape in shapes.items():
        got = read_tensor(path, header.tensors[name])
        assert got.dtype == np.float32
        assert got.shape == shape
        assert np.array_equal(got, want[name])
        if kind not in ("F16", "BF16", "F32"):
            assert np.unique(got).size > 16


def test_metadata_of_every_kind(tmp_path: Path) -> None:
    """Catches: a value whose size is wrong, so that all later keys are read from the wrong place."""
    path = tmp_path / "t.gguf"
    _write(path, {"a": (_random((2, 32)), "F32")})
    metadata = read_header(path).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.attention.head_count"] == HEADS
    assert metadata["test.strings"] == ["a", "ß", ""]
    assert metadata["test.numbers"] == [1, -2, 3]
    assert (metadata["test.half"], metadata["test.yes"]) == (0.5, True)


def test_every_truncation_is_named(tmp_path: Path) -> None:
    """Catches: a cut file that decodes to zeros, or a struct.error without place."""
    path = tmp_path / "t.gguf"
    _write(path, {"a": (_random((4, 32)), "Q4_1")})
    info = read_header(path).tensors["a"]
    whole = path.read_bytes()[: info.offset + info.nbytes]  # what follows is padding
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(GGUFDecodeError, match=r"truncated|begins with|not UTF-8"):
            read_header(path)


@pytest.mark.parametrize(
    ("at", "data", "named"),
    [
        (0, b"GGML", "GGML"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack(">I", 3), "version 50331648"),
        (8, struct.pack("<Q", 1 << 60), "count of 1152921504606846976"),
        (16, struct.pack("<Q", 1 << 40), "count of 1099511627776"),
        (24, struct.pack("<Q", 1 << 62), "count of"),
    ],
)
def test_bad_headers_are_refused_with_the_value(tmp_path: Path, at: int, data: bytes, named: str) -> None:
    """Catches: a hostile count that allocates all memory, or a foreign byte order read as sizes."""
    path = tmp_path / "t.gguf"
    _write(path, {"a": (_random((4, 32)), "F32")})
    whole = bytearray(path.read_bytes())
    whole[at : at + len(data)] = data
    path.write_bytes(whole)
    with pytest.raises(GGUFDecodeError, match=named):
        read_header(path)


def test_a_type_it_does_not_know_is_refused(tmp_path: Path) -> None:
    """Catches: a tensor of another quantisation decoded as one of these."""
    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    raw = gguf.quants.quantize(_random((2, 32)), gguf.GGMLQuantizationType.Q5_0)
    writer.add_tensor("a", raw, raw_dtype=gguf.GGMLQuantizationType.Q5_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(GGUFDecodeError, match="tensor a: type 6"):
        read_header(path)


# -- comparison with an oracle


class _Loaded:
    """Parameters as an oracle gives them."""

    def __init__(self, parameters: dict[str, NDArray[Any]]) -> None:
        self._parameters = parameters

    def parameters(self) -> dict[str, NDArray[Any]]:
        return self._parameters


def _interleaved(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Row order of llama.cpp from HuggingFace's, one row at a time."""
    size = len(weights) // heads
    rows = [h * size + p * size // 2 + j for h in range(heads) for j in range(size // 2) for p in range(2)]
    return weights[rows]


def _model(path: Path) -> dict[str, NDArray[np.float32]]:
    """A one-layer file in Q8_0, and its parameters in HuggingFace's names and order."""
    q, k = _random((HEADS * DIM, HIDDEN), 1), _random((KV_HEADS * DIM, HIDDEN), 2)
    tensors = {
        "token_embd.weight": (_random((10, HIDDEN), 3), "Q8_0"),
        "output_norm.weight": (_random((HIDDEN,), 4), "F32"),
        "blk.0.attn_q.weight": (_interleaved(q, HEADS), "Q8_0"),
        "blk.0.attn_k.weight": (_interleaved(k, KV_HEADS), "Q8_0"),
        "blk.0.attn_v.weight": (_random((KV_HEADS * DIM, HIDDEN), 5), "Q4_1"),
        "blk.0.ffn_down.weight": (_random((HIDDEN, 64), 6), "Q4_0"),
    }
    decoded = _write(path, tensors)
    layer = "model.layers.0."
    back_q = np.argsort(_interleaved(np.arange(HEADS * DIM, dtype=np.float32)[:, None], HEADS)[:, 0])
    back_k = np.argsort(_interleaved(np.arange(KV_HEADS * DIM, dtype=np.float32)[:, None], KV_HEADS)[:, 0])
    return {
        "model.embed_tokens.weight": decoded["token_embd.weight"],
        "model.norm.weight": decoded["output_norm.weight"],
        layer + "self_attn.q_proj.weight": decoded["blk.0.attn_q.weight"][back_q],
        layer + "self_attn.k_proj.weight": decoded["blk.0.attn_k.weight"][back_k],
        layer + "self_attn.v_proj.weight": decoded["blk.0.attn_v.weight"],
        layer + "mlp.down_proj.weight": decoded["blk.0.ffn_down.weight"],
    }


def test_rotary_rows_are_put_back() -> None:
    """Catches: query and key rows in the file's order, or un-permuted with the wrong number of heads."""
    weights = _random((HEADS * DIM, HIDDEN))
    assert np.array_equal(to_huggingface_rows(_interleaved(weights, HEADS), HEADS), weights)
    assert not np.array_equal(to_huggingface_rows(_interleaved(weights, HEADS), KV_HEADS), weights)
    with pytest.raises(GGUFDecodeError, match="32 rows"):
        to_huggingface_rows(weights, 5)


def test_equal_weights_pass_and_every_difference_is_named(tmp_path: Path) -> None:
    """Catches: one changed weight, a tensor left out on either side, or keys left in the file's row order."""
    path = tmp_path / "m.gguf"
    parameters = _model(path)
    for dtype in (np.float32, np.float64):
        result = check_weights(path, _Loaded({n: a.astype(dtype) for n, a in parameters.items()}))
        assert result.ok(), result
        assert result.measurements["weights"].value == sum(a.size for a in parameters.values())

    key = "model.layers.0.self_attn.k_proj.weight"
    nudged = {n: a.copy() for n, a in parameters.items()}
    nudged["model.embed_tokens.weight"][3, 7] = np.nextafter(nudged["model.embed_tokens.weight"][3, 7], np.float32(9))
    permuted = {**parameters, key: _interleaved(parameters[key], KV_HEADS)}
    without = {n: a for n, a in parameters.items() if n != key}
    extra = {**parameters, "lm_head.weight": _random((10, HIDDEN))}
    reshaped = {**parameters, key: parameters[key].T}
    for loaded, named in (
        (nudged, {"parameter": "model.embed_tokens.weight", "differ": 1, "first": [3, 7]}),
        (permuted, {"parameter": key}),
        (without, {"parameter": key, "loaded_shape": None}),
        (extra, {"parameter": "lm_head.weight", "missing": "file"}),
        (reshaped, {"parameter": key, "loaded_shape": [HIDDEN, KV_HEADS * DIM]}),
    ):
        result = check_weights(path, _Loaded(loaded))
        witness: Any = result.witness
        assert (result.verdict, witness["count"]) == (Verdict.INVALID, 1)
        assert witness["tensors"][0] | named == witness["tensors"][0]


@pytest.mark.parametrize(
    "name", ["llama-bias", "mistral-window", "qwen2", "qwen3", "phi4-longrope", "qwen3-moe-mixed", "llama-rope-llama3"]
)
def test_families(tmp_path: Path, name: str) -> None:
    """Catches: a family whose weights are not compared, or compared in another order of rows, parts or experts."""
    path = tmp_path / "m.gguf"
    write_gguf_model(tiny_model(name).path, path)
    oracle = tiny_oracles(name)[1]
    result = check_weights(path, oracle)
    assert result.ok(), result
    assert result.measurements["weights"].value == sum(a.size for a in oracle.parameters().values())
    parameters = dict(oracle.parameters())
    for part in ("k_proj.bias", "qkv_proj", "q_norm", "experts.gate_up_proj", "mlp.gate.weight", "k_proj.weight"):
        for changed in [n for n in parameters if part in n][:1]:
            nudged = {**parameters, changed: parameters[changed].copy()}
            nudged[changed][..., -1] += 1
            assert check_weights(path, _Loaded(nudged)).verdict is Verdict.INVALID
