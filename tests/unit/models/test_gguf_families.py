"""GGUF files of every family against the HuggingFace directory that they were written from."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from safetensors.numpy import save_file

from blink_core.models import Model, ModelError, load_config, load_model
from blink_core.models.loaders.gguf import GGUFSource
from tests.gguf_models import read_directory, write_gguf_model
from tests.tiny_models import tiny_model
from verification.models.tiny import tiny_names

Drivers = Callable[..., Any]
# llama.cpp has no window for these: its converter writes none, and such a file is another model.
WITHOUT_GGUF = {"qwen2-window"}


def run(model: Model, make_driver: Drivers) -> npt.NDArray[np.float32]:
    """Logits of every decode step after a prefill, past every window and original maximum."""
    ids = np.random.default_rng(4).integers(3, 512, 104).tolist()
    driver = make_driver(model, pages=10, page_size=16)
    return np.concatenate([driver.step([("r", ids[:29])]), *(driver.step([("r", [t])]) for t in ids[29:])])


def comparable(model: Model) -> dict[str, Any]:
    """The configuration without what GGUF says in another way: llama3's scaling, unused numbers of RoPE."""
    values = dataclasses.asdict(model.config)
    values["windows"] = [w or 0 for w in values["windows"]] or [0] * model.config.num_layers
    rope = values.pop("rope")
    if rope["kind"] in ("llama3", "factors"):
        rope = {"theta": rope["theta"], "dim": rope["dim"]}
    else:
        for name in ("short_factor", "long_factor", "attention_factor"):
            rope[name] = np.float32(rope[name]).tolist()
        rope["factor"] = 0 if rope["kind"] == "longrope" else rope["factor"]
    values["architecture"] = {"mistral": "llama"}.get(model.config.architecture, model.config.architecture)
    values["rms_norm_eps"] = np.float32(values["rms_norm_eps"])
    return {**values, "rope": rope}


@pytest.mark.parametrize("name", sorted(set(tiny_names()) - WITHOUT_GGUF))
def test_same_as_the_directory(name: str, make_driver: Drivers, tmp_path: Path) -> None:
    """Catches: a tensor under another name, rows of q/k or a bias in llama.cpp's order (or put right where none
    is), a scaling, window or expert number that was not read, factors of the wrong length."""
    path = tiny_model(name).path
    write_gguf_model(path, tmp_path / "m.gguf")
    from_gguf, from_directory = load_model(tmp_path / "m.gguf"), load_model(path)
    assert comparable(from_gguf) == comparable(from_directory)
    got, want = run(from_gguf, make_driver), run(from_directory, make_driver)
    scale = np.abs(want).max()
    # Both round the frequencies of llama3 in their own way; all else is the same numbers.
    np.testing.assert_allclose(got, want, rtol=0, atol=(2e-3 if name == "llama-rope-llama3" else 1e-4) * scale)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0])
@pytest.mark.parametrize("name", ["qwen3-moe", "phi4-longrope"])
def test_stored_types_in_experts_and_fused_tensors(name: str, kind: Kind, make_driver: Drivers, tmp_path: Path) -> None:
    """Catches: a block format decoded across experts, or across the parts of a fused projection."""
    path = tiny_model(name).path
    write_gguf_model(path, tmp_path / "m.gguf", kind)
    _, tensors = read_directory(path)
    for key, value in tensors.items():
        if value.ndim > 1 and not key.endswith("mlp.gate.weight"):
            tensors[key] = dequantize(quantize(value, kind), kind).reshape(value.shape)
    copy = tmp_path / "hf"
    shutil.copytree(path, copy)
    save_file(tensors, copy / "model.safetensors")
    got, want = run(load_model(tmp_path / "m.gguf"), make_driver), run(load_model(copy), make_driver)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize(("kind", "halves"), [(Kind.Q4_K, (0, 2)), (Kind.Q5_K, (0, 2)), (Kind.Q6_K, (208,))])
def test_k_quants_as_the_package_decodes_them(tmp_path: Path, kind: Kind, halves: tuple[int, ...]) -> None:
    """Catches: super-blocks of 256 cut in the middle where a tensor is decoded in pieces, also of three axes."""
    draw = np.random.default_rng(0)
    size = GGML_QUANT_SIZES[kind][1]
    raw = draw.integers(0, 256, (3, 8, 2 * size), dtype=np.uint8)
    blocks = raw.reshape(-1, size)
    for at in halves:
        blocks[:, at : at + 2] = (draw.random(len(blocks)) * 0.01).astype("<f2").view(np.uint8).reshape(-1, 2)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3moe")
    writer.add_tensor("blk.0.ffn_up_exps.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = GGUFSource(tmp_path / "m.gguf", names={"ffn_up_exps": "mlp.experts.up_proj"}, interleaved={})
    name = "model.layers.0.mlp.experts.up_proj.weight"
    assert source.shapes() == {name: (3, 8, 512)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blink_core.models.loaders.gguf.CHUNK_ELEMENTS", 512 * 5)
        parts = [block for _, block in source.chunks(name)]
    assert [len(p) for p in parts] == [5, 5, 5, 5, 4]
    np.testing.assert_array_equal(np.concatenate(parts), dequantize(raw.reshape(24, -1), kind))


def split(tmp_path: Path, name: str = "qwen3-moe-mixed") -> list[Path]:
    write_gguf_model(tiny_model(name).path, tmp_path / "m.gguf", split_tensors=12)
    return sorted(tmp_path.glob("m-*.gguf"))


def test_split_files(make_driver: Drivers, tmp_path: Path) -> None:
    """Catches: tensors of a later file lost, or a configuration that looks for names in the first file only."""
    files = split(tmp_path)
    assert len(files) > 2
    whole = tmp_path / "whole.gguf"
    write_gguf_model(tiny_model("qwen3-moe-mixed").path, whole)
    assert run(load_model(files[0]), make_driver).tobytes() == run(load_model(whole), make_driver).tobytes()
    assert load_config(files[0]) == load_config(whole)


def test_bad_split_files(tmp_path: Path) -> None:
    """Catches: a missing, exchanged, truncated or misnamed file of a split model that loads, or is not named."""
    files = split(tmp_path)
    with pytest.raises(ModelError, match=rf"{files[1].name}: file 00002 of \d+; name the first one, m-00001-of"):
        load_model(files[1])
    other = tmp_path / "plain.gguf"
    shutil.copy(files[0], other)
    with pytest.raises(ModelError, match=r"plain\.gguf: one of \d+ files, but its name does not end in -00001-of-"):
        load_model(other)
    content = files[1].read_bytes()
    files[1].write_bytes(files[2].read_bytes())
    with pytest.raises(ModelError, match=rf"{files[1].name}: does not say that it is file 2 of"):
        load_model(files[0])
    files[1].write_bytes(content[:-100])
    with pytest.raises(ModelError, match=rf"{files[1].name}: truncated"):
        load_model(files[0])
    files[1].unlink()
    with pytest.raises(ModelError, match=rf"{files[1].name}: cannot be read: No such file"):
        load_model(files[0])


ONES = np.ones


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen2", {"metadata": {"qwen2.attention.sliding_window": 16}}, "qwen2.attention.sliding_window is 16"),
        ("qwen2", {"metadata": {"qwen2.rope.scaling.type": "longrope"}}, "'longrope' is not supported for qwen2"),
        ("qwen2", {"metadata": {"qwen2.rope.scaling.type": "ntk"}}, "RoPE scaling 'ntk' is not supported"),
        ("qwen2", {"tensors": {"blk.1.attn_k.bias": None}}, r"'model.layers.1.self_attn.k_proj.bias' is missing"),
        ("qwen3", {"tensors": {"blk.0.attn_q_norm.weight": None}}, r"self_attn.q_norm.weight' is missing"),
        (
            "qwen3",
            {"metadata": {"qwen3.rope.dimension_count": 64}},
            "rope.dimension_count is 64, only the head size 128",
        ),
        ("qwen3-moe", {"metadata": {"qwen3moe.expert_count": 7}}, r"got \[6, 96\], expected \[7, 96\]"),
        ("qwen3-moe", {"metadata": {"qwen3moe.expert_used_count": 7}}, "num_experts_per_tok is 7, expected 1 to the 6"),
        ("qwen3-moe", {"metadata": {"qwen3moe.expert_shared_count": 1}}, "expert_shared_count is 1"),
        (
            "qwen3-moe",
            {"metadata": {"qwen3moe.expert_feed_forward_length": None}},
            "expert_feed_forward_length' is missing",
        ),
        ("qwen3-moe", {"tensors": {"blk.1.ffn_gate_inp.weight": None}}, r"layers.1.mlp.gate_proj.weight' is missing"),
        ("phi3-longrope", {"tensors": {"rope_factors_long.weight": None}}, "'rope_factors_long.weight' is missing"),
        ("phi3-longrope", {"tensors": {"rope_factors_short.weight": ONES(5, np.float32)}}, "short_factor has 5 values"),
        (
            "phi3-longrope",
            {"tensors": {"rope_factors_short.weight": -ONES(16, np.float32)}},
            "short_factor has 16 values",
        ),
        ("phi3-longrope", {"tensors": {"rope_factors_short.weight": ONES((2, 8), np.float32)}}, r"is F32 \[2, 8\]"),
        ("phi4-longrope", {"metadata": {"phi3.rope.dimension_count": 26}}, "short_factor has 12 values, expected 13"),
        ("phi4-longrope", {"metadata": {"phi3.rope.dimension_count": 34}}, "34 rotated|expected 17"),
        ("llama-rope-llama3", {"tensors": {"rope_freqs.weight": ONES(8, np.float32)}}, "has 8 values, expected 32"),
        ("llama-rope-linear", {"metadata": {"llama.rope.scaling.factor": -2.0}}, "rope_factor is -2.0"),
        ("mistral-window", {"metadata": {"llama.attention.sliding_window": -1.0}}, "is -1.0, expected int"),
        ("llama-gqa3", {"metadata": {"llama.expert_count": 8}}, "llama.expert_count is 8"),
    ],
)
def test_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Catches: a variant that llama.cpp or HuggingFace would compute otherwise, or a table that does not fit."""
    write_gguf_model(tiny_model(name).path, tmp_path / "bad.gguf", **changes)
    with pytest.raises(ModelError, match=message) as raised:
        load_model(tmp_path / "bad.gguf")
    assert "bad.gguf" in str(raised.value)
