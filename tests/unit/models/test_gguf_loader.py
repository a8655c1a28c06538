"""GGUF files: every stored type that a test can write, the row order of q/k, and damaged input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blink_core.models import ModelError, load_config, load_model

F32 = npt.NDArray[np.float32]

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name == "lm_head.weight":
        return "output.weight"
    if not name.startswith("model.layers."):
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def write_gguf(path: Path, tiny: Any, kind: Kind = Kind.F32, **changes: Any) -> dict[str, F32]:
    """Write ``tiny`` as a GGUF file, as llama.cpp's converter would; returns the float32 tensors that it stands for.

    ``changes``: ``metadata`` (dict, None removes a key), ``tensors`` (dict by GGUF name, None removes one, an array
    replaces it).
    """
    c = tiny.config
    metadata: dict[str, Any] = {
        "llama.block_count": c["num_hidden_layers"],
        "llama.context_length": c["max_position_embeddings"],
        "llama.embedding_length": c["hidden_size"],
        "llama.feed_forward_length": c["intermediate_size"],
        "llama.attention.head_count": c["num_attention_heads"],
        "llama.attention.head_count_kv": c["num_key_value_heads"],
        "llama.attention.key_length": c["head_dim"],
        "llama.attention.value_length": c["head_dim"],
        "llama.rope.dimension_count": c["head_dim"],
        "llama.rope.freq_base": c["rope_theta"],
        "llama.attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "llama.vocab_size": c["vocab_size"],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.bos_token_id": 1,
    } | changes.get("metadata", {})
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(c["vocab_size"])])
    writer.add_array("tokenizer.ggml.token_type", [1] * c["vocab_size"])
    effective: dict[str, F32] = {}
    out: dict[str, tuple[npt.NDArray[Any], Kind]] = {}
    for name, value in tiny.tensors.items():
        stored, used = value, kind if value.ndim > 1 else Kind.F32
        for projection, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if projection in name:  # llama.cpp's permute: halves to neighbouring pairs within each head
                n = c[heads]
                stored = value.reshape(n, 2, len(value) // n // 2, -1).swapaxes(1, 2).reshape(value.shape)
        out[gguf_name(name)] = (quantize(stored, used), used)
        effective[name] = dequantize(quantize(value, used), used).reshape(value.shape)
    for name, replacement in changes.get("tensors", {}).items():
        if replacement is None:
            del out[name]
        else:
            out[name] = (replacement, Kind.F32)
    for name, (data, used) in out.items():
        writer.add_tensor(name, data, raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return effective


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1])
def test_same_as_safetensors(
    make_tiny: Callable[..., Any], make_driver: Callable[..., Any], tmp_path: Path, kind: Kind
) -> None:
    """Catches: a block decoded wrongly, rows of q/k left in llama.cpp's order, a tensor under the wrong name."""
    from safetensors.numpy import save_file

    tiny = make_tiny(**SIZES)
    effective = write_gguf(tmp_path / "m.gguf", tiny, kind)
    save_file(effective, tiny.path / "model.safetensors")
    from_gguf, from_safetensors = load_model(tmp_path / "m.gguf"), load_model(tiny.path)
    assert from_gguf.config.eos_token_ids == (2, 5)
    tokens = np.random.default_rng(0).integers(0, 101, 20).tolist()
    logits = [make_driver(m, pages=8, page_size=4).step([("r", tokens)]) for m in (from_gguf, from_safetensors)]
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-5, atol=1e-5)  # rms_norm_eps passes through float32


def test_rows_decoded_in_chunks(make_tiny: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a chunk put into the wrong rows, also of the reordered projections."""
    tiny = make_tiny(**SIZES)
    write_gguf(tmp_path / "m.gguf", tiny)
    whole = load_model(tmp_path / "m.gguf")
    for module in ("gguf", "safetensors"):
        monkeypatch.setattr(f"blink_core.models.loaders.{module}.CHUNK_ELEMENTS", 300)
    network: Any = whole.network
    for path in (tmp_path / "m.gguf", tiny.path):
        chunked: Any = load_model(path).network
        np.testing.assert_array_equal(chunked._head.kn, network._head.kn)
        for a, b in zip(chunked._layers, network._layers, strict=True):
            np.testing.assert_array_equal(a.attention.qkv.kn, b.attention.qkv.kn)
            np.testing.assert_array_equal(a.mlp.down.kn, b.mlp.down.kn)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory, write_tiny_model: Callable[..., Any]) -> bytes:
    """The bytes of a valid tiny file."""
    directory = tmp_path_factory.mktemp("gguf")
    tiny = write_tiny_model(directory / "hf", **(SIZES | {"num_hidden_layers": 1, "vocab_size": 40}))
    write_gguf(directory / "m.gguf", tiny, Kind.Q8_0)
    return (directory / "m.gguf").read_bytes()


FUZZ = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(data=st.data())
def test_truncated_anywhere(valid: bytes, tmp_path: Path, data: st.DataObject) -> None:
    """Catches: a truncated file that loads, hangs, or fails without saying which file and what size was expected."""
    size = data.draw(st.one_of(st.integers(0, 4000), st.integers(0, len(valid) - 1)))
    path = tmp_path / "cut.gguf"
    path.write_bytes(valid[:size])
    with pytest.raises(ModelError, match=rf"cut\.gguf: .*\b{size} bytes, .*\d"):
        load_model(path)


@FUZZ
@given(
    offset=st.integers(0, 3500),
    value=st.binary(min_size=1, max_size=8),
)
def test_damaged_header(valid: bytes, tmp_path: Path, offset: int, value: bytes) -> None:
    """Catches: a damaged length, count, type or name that hangs, exhausts memory or escapes as another exception."""
    path = tmp_path / "damaged.gguf"
    path.write_bytes(valid[:offset] + value + valid[offset + len(value) :])
    message = ""
    try:
        load_model(path)
    except ModelError as error:
        message = str(error)
    assert not message or "damaged.gguf" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gpt2"}, "architecture 'gpt2' is not supported; supported are: llama"),
        ({"metadata": {"llama.rope.scaling.type": "longrope"}}, "RoPE scaling 'longrope' is not supported for llama"),
        ({"metadata": {"llama.rope.scaling.factor": -4.0}}, "rope_factor is -4.0"),
        ({"tensors": {"rope_freqs.weight": np.ones(7, np.float32)}}, "RoPE short_factor has 7 values, expected 8"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "rope.dimension_count is 8, only the head size 16"),
        ({"metadata": {"llama.expert_count": 8}}, "expert_count is 8"),
        ({"metadata": {"llama.attention.sliding_window": "all"}}, "sliding_window' is 'all', expected int"),
        ({"metadata": {"llama.embedding_length": None}}, "'llama.embedding_length' is missing"),
        ({"metadata": {"llama.embedding_length": "64"}}, "'llama.embedding_length' is '64', expected int"),
        ({"metadata": {"llama.attention.head_count": 0}}, "head_count is 0"),
        ({"metadata": {"llama.attention.head_count_kv": 4}}, "num_heads 6 is no multiple of num_kv_heads 4"),
        ({"metadata": {"llama.block_count": 0}}, "num_layers is 0"),
        ({"metadata": {"llama.vocab_size": 50}}, "the tokenizer has 101 tokens, the model's vocabulary 50"),
        ({"metadata": {"tokenizer.ggml.eos_token_id": 101}}, "special token id 101 is outside the vocabulary of 101"),
        ({"metadata": {"llama.attention.layer_norm_rms_epsilon": 0.0}}, "rms_norm_eps is 0.0"),
        ({"tensors": {"blk.1.ffn_up.weight": None}}, "'model.layers.1.mlp.up_proj.weight' is missing"),
        (
            {"tensors": {"blk.0.attn_k.weight": np.ones((96, 64), np.float32)}},
            r"'model.layers.0.self_attn.k_proj.weight' has the wrong shape: got \[96, 64\], expected \[32, 64\]",
        ),
        ({"tensors": {"blk.0.attn_q.bias": np.ones(96, np.float32)}}, r"self_attn.k_proj.bias' is missing"),
        ({"tensors": {"mystery": np.ones(3, np.float32)}}, r"1 unexpected tensor.*mystery \[3\]"),
        ({"metadata": {"llama.block_count": 3}}, "'model.layers.2.input_layernorm.weight' is missing"),
        ({"metadata": {"llama.block_count": 1}}, "9 unexpected tensor"),
    ],
)
def test_refused(make_tiny: Callable[..., Any], tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """Catches: a model computed wrongly because a variant, a tensor or a size was ignored."""
    write_gguf(tmp_path / "bad.gguf", make_tiny(**SIZES), **changes)
    with pytest.raises(ModelError, match=message) as raised:
        load_model(tmp_path / "bad.gguf")
    assert "bad.gguf" in str(raised.value)


def test_not_gguf(tmp_path: Path) -> None:
    """Catches: another kind of file, or none, reported as something else."""
    path = tmp_path / "m.gguf"
    with pytest.raises(ModelError, match="no such file"):
        load_config(path)
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match=r"not a GGUF file: starts with b'PK"):
        load_config(path)
    path.write_bytes(b"GGUF" + (9).to_bytes(4, "little") + bytes(100))
    with pytest.raises(ModelError, match="GGUF version 9 is not supported"):
        load_config(path)
    other = tmp_path / "m.bin"
    other.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"expected a \.gguf file or a HuggingFace directory"):
        load_config(other)
