"""Corpus rows O: rotary embedding and positions, against transformers' own tables."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from blink_core.models import ModelError, load_config, load_model
from blink_core.ops.numpy_ops import NumpyOps
from blink_core.ops.rope import RotaryTable, inverse_frequencies
from tests.scenarios.models import PagedDriver, config_file
from tests.tiny_models import tiny_model

F32 = npt.NDArray[np.float32]
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}


def huggingface_table(config: dict[str, Any], positions: list[int]) -> tuple[F32, F32]:
    """Cosines and sines [positions, dim/2] of transformers' rotary module for a Llama configuration."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    known = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
    module = LlamaRotaryEmbedding(LlamaConfig(**known))
    cos, sin = module(torch.zeros(1), torch.tensor([positions]))
    half = cos.shape[-1] // 2
    return cos[0, :, :half].numpy(), sin[0, :, :half].numpy()


@pytest.mark.parametrize("factor", [8.0, 32.0], ids=["llama-3.1", "llama-3.2"])
def test_o01_o02_llama3_scaling_of_either_factor(factor: float, tmp_path: Path) -> None:
    """O01, O02. Catches: `rope_scaling` ignored, which short prompts hide; the factor of another family member.

    Condition: positions from 1,600 on, where some cosine and some sine of the scaled table is far from the plain one's.
    """
    scaling = {**LLAMA3, "factor": factor}
    raw = config_file(tmp_path, rope_scaling=scaling, rope_theta=5e5, max_position_embeddings=131072, head_dim=128)
    config = load_config(tmp_path)
    positions = [0, 1, 100, 1600, 4000]
    ours = RotaryTable(config.rope.frequencies(), config.rope.attention_factor)(np.array(positions, np.int32))
    plain = RotaryTable(load_config_of(tmp_path / "plain", head_dim=128, rope_theta=5e5).rope.frequencies())
    unscaled = plain(np.array(positions, np.int32))
    for got, want, other in zip(ours, huggingface_table(raw, positions), unscaled, strict=True):
        np.testing.assert_allclose(got[:, 0], want, rtol=0, atol=1e-3)
        assert np.abs(got[3:, 0] - other[3:, 0]).max() > 0.5, "the scaling makes no difference at these positions"
    other = load_config_of(tmp_path / "other", rope_scaling={**scaling, "factor": 40 - factor}, head_dim=128)
    assert (other.rope.frequencies() != config.rope.frequencies()).any()


def load_config_of(folder: Path, **changes: Any) -> Any:
    folder.mkdir()
    config_file(folder, max_position_embeddings=131072, **changes)
    return load_config(folder)


@pytest.mark.parametrize("kind", ["llama3", "linear"])
def test_o04_both_spellings_of_the_kind(kind: str, tmp_path: Path) -> None:
    """O04. Catches: `type` or `rope_type` read and the other ignored, which leaves the frequencies unscaled.

    Condition: each spelling alone, in `rope_scaling` and in `rope_parameters`; the table is not the plain one.
    """
    entries = {k: v for k, v in LLAMA3.items() if k != "rope_type"} if kind == "llama3" else {}
    entries["factor"] = 8.0
    tables = []
    for at, (place, spelling) in enumerate(
        itertools.product(("rope_scaling", "rope_parameters"), ("type", "rope_type"))
    ):
        config = load_config_of(tmp_path / str(at), **{place: {spelling: kind, **entries}})
        assert config.rope.kind == kind
        tables.append(config.rope.frequencies().tobytes())
    assert len(set(tables)) == 1
    assert tables[0] != load_config_of(tmp_path / "plain").rope.frequencies().tobytes()


@pytest.mark.parametrize("name", ["phi3-longrope", "phi4-longrope"])
def test_o05_o07_o08_the_table_is_chosen_by_the_length_of_the_sequence(name: str) -> None:
    """O05, O07, O08. Catches: LongRoPE's table chosen by what is cached, by the pool's size, or always the long one.

    Condition: a first prompt of one token more than the original maximum on an empty cache uses the long table, one of
    the maximum the short one, whatever the pool and the block table could hold; the two tables give other keys.
    """
    model = load_model(tiny_model(name).path, batch_invariant=True)
    original = model.config.rope.original_max
    assert original is not None
    ids = np.random.default_rng(1).integers(3, 512, original + 1).tolist()
    keys: dict[int, set[bytes]] = {}
    for length in (original, original + 1):
        for pages in (original // 16 + 2, 200):  # room for hardly more than the prompt, and for far more
            driver = PagedDriver(model, pages=pages, page_size=16)
            driver.step([("a", ids[:length])])
            keys.setdefault(length, set()).add(driver.kv("a")[0][:, :, :original].tobytes())
    assert [len(found) for found in keys.values()] == [1, 1], "the pool's size matters"
    assert keys[original] != keys[original + 1]
    table = RotaryTable(model.config.rope.frequencies(long=True)), RotaryTable(model.config.rope.frequencies())
    at = np.array([original - 1], np.int32)
    assert (table[0](at)[0] != table[1](at)[0]).any()


def test_o10_partial_rotary_with_a_longrope_table_of_its_size(tmp_path: Path) -> None:
    """O10. Catches: a factor for each pair of the head where only a part of it turns: partial rotary, tied, LongRoPE.

    Condition: the three together, as in Phi-4-mini; a table sized by the head is refused with both numbers.
    """
    model = load_model(tiny_model("phi4-longrope").path)
    config = model.config
    assert config.tie_word_embeddings
    assert config.rope.dim == 24 < config.head_dim == 32
    assert len(config.rope.long_factor) == config.rope.dim // 2
    raw = json.loads((tiny_model("phi4-longrope").path / "config.json").read_text())
    scope = raw["rope_parameters"] if "rope_parameters" in raw else raw["rope_scaling"]
    scope["long_factor"] = [2.0] * (config.head_dim // 2)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="16 values, expected 12"):
        load_config(tmp_path)


def test_o11_the_rotated_part_is_of_each_head() -> None:
    """O11. Catches: the first heads rotated where the first elements of each head should be.

    Condition: heads of 80 elements of which 32 turn, more heads than one; what turns has another value after it.
    """
    x = np.random.default_rng(0).standard_normal((3, 5, 80), dtype=np.float32)
    cos, sin = RotaryTable(inverse_frequencies(1e4, 32))(np.array([1, 7, 900], np.int32))
    got = NumpyOps().rotary(x, cos, sin)
    np.testing.assert_array_equal(got[..., 32:], x[..., 32:])
    for head in range(5):
        assert (got[:, head, :32] != x[:, head, :32]).mean() > 0.9
        alone = NumpyOps().rotary(np.ascontiguousarray(x[:, head : head + 1, :32]), cos, sin)
        np.testing.assert_array_equal(got[:, head : head + 1, :32], alone)
