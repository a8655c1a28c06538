"""HuggingFace directories: config.json, special tokens, safetensors files, shards, and damaged input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from blink_core.models import ModelError, load_config, load_model

FUZZ = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory, write_tiny_model: Callable[..., Any]) -> Any:
    """A valid tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("hf"), num_hidden_layers=1)


def damaged(valid: Any, directory: Path, content: bytes) -> Path:
    """A copy of ``valid`` with other bytes as model.safetensors."""
    shutil.copy(valid.path / "config.json", directory)
    (directory / "model.safetensors").write_bytes(content)
    return directory


@FUZZ
@given(data=st.data())
def test_truncated_anywhere(valid: Any, tmp_path: Path, data: st.DataObject) -> None:
    """Catches: a truncated file that loads, or fails without saying which file and what size was expected."""
    content = (valid.path / "model.safetensors").read_bytes()
    size = data.draw(st.one_of(st.integers(0, 2000), st.integers(0, len(content) - 1)))
    with pytest.raises(ModelError, match=rf"model\.safetensors: truncated.*: {size} bytes, .*\d"):
        load_model(damaged(valid, tmp_path, content[:size]))


@FUZZ
@given(offset=st.integers(0, 1500), value=st.binary(min_size=1, max_size=8))
def test_damaged_header(valid: Any, tmp_path: Path, offset: int, value: bytes) -> None:
    """Catches: a damaged header that hangs, reads out of bounds or escapes as another exception."""
    content = (valid.path / "model.safetensors").read_bytes()
    message = ""
    try:
        load_model(damaged(valid, tmp_path, content[:offset] + value + content[offset + len(value) :]))
    except ModelError as error:
        message = str(error)
    assert not message or str(tmp_path) in message


def write_shards(tiny: Any, parts: int = 3) -> dict[str, str]:
    """Replace the single file of ``tiny`` by an index and shards; returns the index's weight_map."""
    (tiny.path / "model.safetensors").unlink()
    names = sorted(tiny.tensors)
    weight_map = {name: f"model-{i % parts + 1:05}-of-{parts:05}.safetensors" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({n: tiny.tensors[n] for n in names if weight_map[n] == shard}, tiny.path / shard)
    write_index(tiny, weight_map)
    return weight_map


def write_index(tiny: Any, weight_map: Any) -> None:
    (tiny.path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards(make_tiny: Callable[..., Any], make_driver: Callable[..., Any]) -> None:
    """Catches: tensors of a shard lost or read from another one."""
    single, sharded = make_tiny(), make_tiny()
    write_shards(sharded)
    logits = [
        make_driver(load_model(t.path), pages=4, page_size=4).step([("r", [1, 2, 3, 4])]) for t in (single, sharded)
    ]
    assert logits[0].tobytes() == logits[1].tobytes()


def test_bad_shards(make_tiny: Callable[..., Any]) -> None:
    """Catches: an index that disagrees with its shards, or reaches outside its directory."""
    tiny = make_tiny()
    weight_map = write_shards(tiny)
    name = "model.norm.weight"
    write_index(tiny, weight_map | {name: "model-00009-of-00003.safetensors"})
    with pytest.raises(ModelError, match=r"model-00009-of-00003\.safetensors: cannot be read: No such file"):
        load_model(tiny.path)
    other = next(s for s in sorted(set(weight_map.values())) if s != weight_map[name])
    write_index(tiny, weight_map | {name: other})
    with pytest.raises(ModelError, match=rf"tensor '{name}' is not in {other}"):
        load_model(tiny.path)
    write_index(tiny, weight_map | {name: "../model.safetensors"})
    with pytest.raises(ModelError, match="is not a plain file name"):
        load_model(tiny.path)
    for broken in (["a"], {"a": 1}, None):
        write_index(tiny, broken)
        with pytest.raises(ModelError, match=r"weight_map"):
            load_model(tiny.path)
    write_index(tiny, weight_map)
    save_file({n: tiny.tensors[n] for n in weight_map if weight_map[n] == other or n == name}, tiny.path / other)
    with pytest.raises(ModelError, match=rf"tensor '{name}' is also in"):
        load_model(tiny.path)


def test_tensor_errors(make_tiny: Callable[..., Any]) -> None:
    """Catches: missing, unexpected, misshapen or unreadable tensors that pass, or errors that do not name them."""
    tiny = make_tiny()

    def refused(message: str, **changes: Any) -> None:
        tensors = {k: v for k, v in (tiny.tensors | changes).items() if v is not None}
        save_file(tensors, tiny.path / "model.safetensors")
        with pytest.raises(ModelError, match=message):
            load_model(tiny.path)

    norm, down = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"
    refused(rf"tensor '{norm}' is missing \(expected shape \[48\]\)", **{norm: None})
    refused(rf"'{norm}' has the wrong shape: got \[49\], expected \[48\]", **{norm: np.ones(49, np.float32)})
    refused(
        rf"'{down}' has the wrong shape: got \[80, 48\], expected \[48, 80\]", **{down: np.ones((80, 48), np.float32)}
    )
    extra = {"model.layers.0.extra": np.ones((2, 2), np.float32)}
    refused(r"1 unexpected tensor.*model\.layers\.0\.extra \[2, 2\]", **extra)
    refused(rf"'{norm}' has dtype F64; supported are F32, F16, BF16", **{norm: np.ones(48)})
    # Old checkpoints carry the rotary frequencies; transformers ignores them too.
    save_file(
        tiny.tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)},
        tiny.path / "model.safetensors",
    )
    load_model(tiny.path)


def test_tied_head_stored_twice(make_tiny: Callable[..., Any]) -> None:
    """Catches: a stored head that differs from the tied embedding and is silently dropped."""
    tiny = make_tiny(tie_word_embeddings=True)
    embedding = tiny.tensors["model.embed_tokens.weight"]
    save_file(tiny.tensors | {"lm_head.weight": embedding}, tiny.path / "model.safetensors")
    load_model(tiny.path)
    other = embedding.copy()
    other[100, 47] += 1
    save_file(tiny.tensors | {"lm_head.weight": other}, tiny.path / "model.safetensors")
    with pytest.raises(ModelError, match=r"ties the word embeddings, but tensor 'lm_head\.weight' differs"):
        load_model(tiny.path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "architecture 'gpt2'.*supported are: llama"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification.*not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'low_freq_factor' is missing"),
        ({"rope_scaling": {"type": "linear"}}, "RoPE scaling 'linear' has no 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_factor is 0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling asks for RoPE scaling 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters asks for RoPE scaling 'longrope'.*for llama"),
        ({"rope_parameters": {"rope_type": "yarn", "mscale": 1.0}}, r"unsupported entries \['mscale'\]"),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 1}}, "embeddings 1"),
        ({"rope_parameters": {"rope_theta": 1e4, "factor": 2.0}}, r"unsupported entries \['factor'\]"),
        ({"rope_parameters": {"rope_theta": "x"}}, "'rope_theta' is 'x', expected float"),
        ({"rope_scaling": "llama3"}, "'rope_scaling' is 'llama3', expected an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"attention_bias": "yes"}, "'attention_bias' is 'yes', expected bool"),
        ({"mlp_bias": 1}, "'mlp_bias' is 1, expected bool"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised safetensors are not supported"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "48"}, "'hidden_size' is '48', expected int"),
        ({"num_hidden_layers": True}, "'num_hidden_layers' is True, expected int"),
        ({"hidden_size": -1}, "hidden_size is -1"),
        ({"vocab_size": 1 << 40}, "vocab_size is 1099511627776"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 4}, "num_heads 6 is no multiple of num_kv_heads 4"),
        ({"head_dim": 7}, "7 rotated elements a head"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"eos_token_id": 101}, "special token id 101 is outside the vocabulary of 101"),
        ({"eos_token_id": "</s>"}, "'eos_token_id' is '</s>'"),
    ],
)
def test_refused_configuration(make_tiny: Callable[..., Any], changes: dict[str, Any], message: str) -> None:
    """Catches: a variant that the engine would ignore and compute wrongly, or a value used out of range."""
    tiny = make_tiny()
    (tiny.path / "config.json").write_text(json.dumps(tiny.config | changes))
    with pytest.raises(ModelError, match=message) as raised:
        load_config(tiny.path)
    assert str(tiny.path) in str(raised.value)


def test_defaults_and_new_rope_spelling(make_tiny: Callable[..., Any]) -> None:
    """Catches: a rotary base left at its default because transformers 5 writes it elsewhere."""
    tiny = make_tiny()
    config = tiny.config | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    del config["rope_theta"], config["head_dim"], config["num_key_value_heads"]
    (tiny.path / "config.json").write_text(json.dumps(config))
    loaded = load_config(tiny.path)
    assert (loaded.rope_theta, loaded.head_dim, loaded.num_kv_heads) == (5e5, 8, 6)


def test_eos_is_the_union(make_tiny: Callable[..., Any]) -> None:
    """Catches: a stop token that only one of the three files names, as in chat models."""
    tiny = make_tiny()
    (tiny.path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert load_config(tiny.path).eos_token_ids == (2, 7)
    settings_file, tokenizer = tiny.path / "tokenizer_config.json", tiny.path / "tokenizer.json"
    settings_file.write_text(
        json.dumps({"eos_token": {"content": "<e>"}, "added_tokens_decoder": {"9": {"content": "<e>"}}})
    )
    assert load_config(tiny.path).eos_token_ids == (2, 7, 9)
    settings_file.write_text(json.dumps({"eos_token": "<e>"}))
    assert load_config(tiny.path).eos_token_ids == (2, 7)
    tokenizer.write_text(json.dumps({"added_tokens": [{"id": 11, "content": "<e>"}], "model": {"vocab": {}}}))
    assert load_config(tiny.path).eos_token_ids == (2, 7, 11)
    tokenizer.write_text(json.dumps({"added_tokens": [], "model": {"vocab": {"<e>": 12}}}))
    assert load_config(tiny.path).eos_token_ids == (2, 7, 12)
    tokenizer.write_text(json.dumps({"model": {"vocab": {}}}))
    with pytest.raises(ModelError, match="eos_token '<e>' is not in its vocabulary"):
        load_config(tiny.path)


def test_bad_directories(make_tiny: Callable[..., Any], tmp_path: Path) -> None:
    """Catches: a directory without a model, or JSON that is none, reported as something else."""
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_config(tmp_path)
    tiny = make_tiny()
    (tiny.path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_model(tiny.path)
    for content, message in (("{", "cannot be read as JSON"), ("[]", "expected a JSON object, got list")):
        (tiny.path / "config.json").write_text(content)
        with pytest.raises(ModelError, match=message):
            load_config(tiny.path)
    (tiny.path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        load_config(tiny.path)
