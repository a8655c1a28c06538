"""Tiny models: sensitive, reproducible, complete; and a build that refuses what is not sensitive."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny_models import tiny_model, tiny_oracles
from verification.models import tiny
from verification.models.sensitivity import (
    CACHED,
    FAULTS,
    Sensitivity,
    draw_rows,
    faults_of,
    with_wrong_experts,
    with_wrong_heads,
    with_wrong_rope,
    without_window,
)
from verification.models.tiny import NotSensitiveError, build_named, tiny_names
from verification.models.tiny_tokenizer import train_tokenizer
from verification.models.variants import variant
from verification.thresholds import Thresholds, TinyModelThresholds

Rig = Any  # conftest.Rig; conftest modules cannot be imported


def _digests(path: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(path.iterdir())}


@pytest.mark.parametrize("name", ["tiny3", "tiny7"])
def test_built_models_are_sensitive(name: str, request: pytest.FixtureRequest, limits: Thresholds) -> None:
    """Catches: a model whose tokens hang on nothing that the suite is there to test."""
    rig = request.getfixturevalue(name)
    shown = rig.model.sensitivity
    assert shown.margin_ratio > limits.tiny_models.margin_factor
    assert dict(shown.killed) == dict.fromkeys(FAULTS, shown.probes)
    assert shown.shortfalls(limits.tiny_models) == []
    manifest = json.loads((rig.model.path / tiny.MANIFEST).read_text(encoding="utf-8"))
    assert manifest["seed"] == rig.model.seed
    assert manifest["sensitivity"]["killed"] == dict(shown.killed)


def test_the_same_arguments_give_the_same_bytes(tiny3: Rig, tmp_path: Path) -> None:
    """Catches: a model digest in a certificate that nobody can reproduce."""
    again = build_named("llama-gqa3", tmp_path / "again")
    assert _digests(again.path) == _digests(tiny3.model.path)
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    } < set(_digests(again.path))


@pytest.mark.parametrize("name", tiny_names())
def test_shapes(name: str) -> None:
    """Catches: a ratio for which a wrong head mapping happens to be the right one."""
    config = variant(name).config()
    heads = config.num_attention_heads
    group = heads // config.num_key_value_heads
    assert group in (3, 5, 7)
    right = [h // group for h in range(heads)]
    assert right != [h % config.num_key_value_heads for h in range(heads)]
    assert right != [h // config.num_key_value_heads for h in range(heads)]


@pytest.mark.parametrize("name", ["tiny3", "tiny7"])
def test_wrong_heads_are_exactly_a_wrong_mapping(name: str, request: pytest.FixtureRequest) -> None:
    """Catches: a planted head fault that scrambles the model instead, and so proves nothing about head mapping."""
    rig = request.getfixturevalue(name)
    model, ids = rig.hf32.model, torch.tensor(rig.sequences)
    wrong = with_wrong_heads(model)
    attention = wrong.model.layers[0].self_attn
    x = torch.randn(1, 5, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    with torch.inference_mode():
        position = torch.arange(5)[None]
        rotary = model.model.rotary_emb(x, position)
        mask = torch.full((5, 5), float("-inf")).triu(1)[None, None]
        got = attention(x, position_embeddings=rotary, attention_mask=mask)[0]
        # The same mapping by repeating KV heads in the wrong order in the unchanged model.
        right = model.model.layers[0].self_attn
        cos: torch.Tensor = rotary[0][0][:, None]
        sin: torch.Tensor = rotary[1][0][:, None]
        q = right.q_proj(x)[0].view(5, heads, -1)
        k, v = (p(x)[0].view(5, kv_heads, -1) for p in (right.k_proj, right.v_proj))

        def turn(t: torch.Tensor) -> torch.Tensor:
            first, second = t.chunk(2, dim=-1)
            return t * cos + torch.cat((-second, first), dim=-1) * sin

        order = torch.arange(heads) % kv_heads
        scores = torch.einsum("qhd,khd->hqk", turn(q), turn(k)[:, order]) * right.scaling + mask[0]
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v[:, order]).reshape(1, 5, -1)
        torch.testing.assert_close(got, right.o_proj(mixed), rtol=0, atol=1e-4)
        assert not torch.allclose(wrong(ids[:, :30]).logits, model(ids[:, :30]).logits, atol=0.1)


def test_a_model_that_is_not_sensitive_is_refused(
    tmp_path: Path, limits: Thresholds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: assertions at build that cannot fail; the usual initialisation of 0.02 must not get through."""
    monkeypatch.setattr(tiny, "moments", lambda name, shape, config: (1.0, 0.0) if "norm" in name else (0.0, 0.02))
    few = limits.tiny_models.model_copy(update={"max_seeds": 2})
    with pytest.raises(NotSensitiveError, match=r"llama-gqa3 in seeds 5 to 6 .*(margin|changed a greedy token)"):
        build_named("llama-gqa3", tmp_path / "flat", seed=5, thresholds=few)
    assert not (tmp_path / "flat").exists()


def test_each_shortfall_is_told(limits: Thresholds) -> None:
    """Catches: a fault that is probed but whose result decides nothing."""
    limit: TinyModelThresholds = limits.tiny_models
    good = Sensitivity(1.0, 1e-3, 100, 6, dict.fromkeys(FAULTS, 6))
    assert good.shortfalls(limit) == []
    for fault in FAULTS:
        short = Sensitivity(1.0, 1e-3, 100, 6, {**good.killed, fault: 5})
        assert [fault in line for line in short.shortfalls(limit)] == [True]
    assert "margin" in Sensitivity(0.1, 1e-3, 100, 6, good.killed).shortfalls(limit)[0]


def test_tokenizer_round_trips_any_text() -> None:
    """Catches: text that cannot be served, a vocabulary larger than the model's, or a special token without its id."""
    tokenizer = train_tokenizer(512)
    for text in ("hello world", "Grüße 🙂 日本", "\x00\t\r\n  x", "def f():\n    return 1"):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert max(ids) < 512
    assert tokenizer.encode("<|im_start|>a<|im_end|>").ids[::2] == [1, 2]
    with pytest.raises(ValueError, match="not 100000"):
        train_tokenizer(100_000)


@pytest.mark.parametrize("name", tiny_names())
def test_every_family_notices_the_faults_that_it_can_have(name: str, limits: Thresholds) -> None:
    """Catches: a window, RoPE scaling or router that no token hangs on, and a probe of it that is left out."""
    shown, config = tiny_model(name).sensitivity, tiny_oracles(name)[1].config
    own = {"window": "ignored-window", "rope": "wrong-rope", "yarn": "wrong-rope", "moe": "wrong-expert"}
    extra = [fault for part, fault in own.items() if part in name] + ["ignored-window"] * (name == "phi3")
    faults = faults_of(config)
    assert faults == (*FAULTS, *extra)
    assert dict(shown.killed) == dict.fromkeys(faults, shown.probes)
    assert shown.margin_ratio > limits.tiny_models.margin_factor
    with pytest.raises(ValueError, match="'gpt2': known are llama-gqa3, "):
        variant("gpt2")


def test_planted_model_faults_are_what_they_say() -> None:
    """Catches: a fault that scrambles the model, or one that leaves it as it is."""
    ids = torch.tensor([list(range(3, 63))])
    with torch.inference_mode():
        window = tiny_oracles("mistral-window")[1].model
        free, limited = without_window(window)(ids).logits, window(ids).logits
        assert torch.equal(free[:, :24], limited[:, :24])
        assert not torch.allclose(free[:, 24:], limited[:, 24:], atol=0.1)
        assert window.config.sliding_window == 24
        rope = tiny_oracles("llama-rope-linear")[1].model
        wrong = with_wrong_rope(rope)
        inverse = [m.model.rotary_emb.inv_freq for m in (wrong, rope)]
        assert torch.allclose(inverse[0], 2 * inverse[1])
        experts = tiny_oracles("qwen3-moe")[1].model
        gates = [m.model.layers[0].mlp.gate.weight for m in (with_wrong_experts(experts), experts)]
        assert torch.equal(gates[0][1:], gates[1][:-1])


@pytest.mark.parametrize("name", ["mistral-window", "phi3", "qwen2-window", "llama-gqa3"])
def test_struck_rows_are_seen(name: str) -> None:
    """Catches: a fault planted in a row that no layer reads any more, which no model can notice."""
    config = tiny_oracles(name)[1].config
    rows = torch.stack([draw_rows(np.random.default_rng(seed), config) for seed in range(50)])
    least = CACHED + 1 - 24 if name in ("mistral-window", "phi3") else 0
    assert least <= int(rows.min()) <= least + 3
    assert int(rows.max()) == CACHED - 1


def test_a_length_of_ones_own(tmp_path: Path) -> None:
    """Catches: a maximum of positions that the built model does not have."""
    built = build_named("llama-gqa7", tmp_path / "m", max_positions=4096)
    assert json.loads((built.path / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"] == 4096
