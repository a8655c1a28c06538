"""The HuggingFace oracle: dtypes, causality of its cache, greedy continuation, chat ids, clear refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.gguf_models import write_gguf_model
from tests.tiny_models import tiny_model
from verification.oracles.float64 import Float64Islands
from verification.oracles.gguf_decode import check_weights
from verification.oracles.hf import HFOracle, OracleError

Rig = Any  # conftest.Rig; conftest modules cannot be imported


def test_dtypes_are_those_asked_for_throughout(tiny3: Rig) -> None:
    """Catches: a float64 oracle that was cast from float32, or that keeps float32 rotary frequencies."""
    for oracle, dtype in ((tiny3.hf64, "float64"), (tiny3.hf32, "float32")):
        run = oracle.forward(tiny3.sequences[0])
        assert {run.logits.dtype.name, run.k.dtype.name, run.v.dtype.name} == {dtype}
        assert {a.dtype.name for a in oracle.parameters().values()} == {dtype}
        assert str(oracle.model.model.rotary_emb.inv_freq.dtype) == f"torch.{dtype}"
        assert oracle.config._attn_implementation == "eager"


def test_float64_run_has_no_float32_rounding_left(tiny3: Rig) -> None:
    """Catches: a norm, softmax or rotary angle still in float32: a reference that carries float32 errors."""
    ids = tiny3.sequences[0]
    with torch.inference_mode():
        plain = tiny3.hf64.model(torch.tensor([ids])).logits[0].numpy()  # without the islands lifted
    lifted, ordinary = tiny3.hf64.teacher_force(ids), tiny3.hf32.teacher_force(ids)
    residue, yardstick = np.abs(plain - lifted).max(), np.abs(ordinary - lifted).max()
    assert 0 < residue < yardstick < 1e-3
    layer = tiny3.hf64.model.model.layers[0].input_layernorm
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((4, layer.weight.shape[0])))
    with torch.inference_mode(), Float64Islands() as mode:
        got = layer(x)
        exact = layer.weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + layer.variance_epsilon)
    assert mode.lifted > 0
    assert float((got - exact).abs().max()) < 1e-13


def test_teacher_forcing_predicts_its_own_greedy_tokens(tiny3: Rig) -> None:
    """Catches: rows off by one against the tokens they predict, or a start that is not applied."""
    for ids in tiny3.sequences:
        prompt = tiny3.prompt
        rows = tiny3.hf64.teacher_force(ids, start=prompt - 1)
        assert rows.dtype == np.float64
        assert rows.shape == (len(ids) - prompt + 1, 512)
        assert rows[:-1].argmax(axis=1).tolist() == ids[prompt:]
        np.testing.assert_allclose(rows, tiny3.hf64.teacher_force(ids)[prompt - 1 :], rtol=0, atol=1e-11)


def test_batches_prefixes_and_cache_agree_with_single_runs(tiny3: Rig) -> None:
    """Catches: padding seen by real rows, results in the wrong order, or a cached run of another sequence."""
    parts = [s[: 20 + 7 * i] for i, s in enumerate(tiny3.sequences)]
    fresh = HFOracle.load(tiny3.model.path, dtype="float64", threads=1)
    starts = [3 * i for i in range(len(parts))]
    batch = fresh.forward_many(parts, start=starts, batch_tokens=150)
    for ids, start, run in zip(parts, starts, batch, strict=True):
        alone = HFOracle.load(tiny3.model.path, dtype="float64", threads=1).forward(ids, start=start)
        assert run.ids == tuple(ids)
        for name in ("logits", "k", "v"):
            got, want = getattr(run, name), getattr(alone, name)
            assert got.shape == want.shape
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-11)
        again = fresh.forward(ids[: start + 5], start=start)
        assert np.array_equal(again.logits, run.logits[:5])
        assert np.array_equal(again.k, run.k[:, : start + 5])
    other = [*parts[0][:-1], (parts[0][-1] + 1) % 512]
    assert not np.array_equal(fresh.teacher_force(other)[-1], batch[0].logits[-1])


def test_kv_has_the_documented_layout(tiny7: Rig) -> None:
    """Catches: heads and positions exchanged, K before the rotary embedding, or K and V exchanged."""
    ids, model = tiny7.sequences[0][:9], tiny7.hf64.model
    k, v = tiny7.hf64.kv(ids)
    assert k.shape == v.shape == (2, 9, 2, 16)
    layer = model.model.layers[0]
    with torch.inference_mode(), Float64Islands():
        x = layer.input_layernorm(model.model.embed_tokens(torch.tensor(ids)))
        plain = layer.self_attn.k_proj(x).view(9, 2, 16)
        value = layer.self_attn.v_proj(x).view(9, 2, 16).numpy()
        angle = torch.arange(9, dtype=torch.float64)[:, None] * model.model.rotary_emb.inv_freq
        first, second = plain[..., :8], plain[..., 8:]
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).numpy()
    np.testing.assert_allclose(v[0], value, rtol=0, atol=1e-12)
    np.testing.assert_allclose(k[0], turned, rtol=0, atol=1e-12)


def test_results_cannot_be_changed_by_a_caller(tiny3: Rig) -> None:
    """Catches: one test's perturbation that becomes the next one's reference."""
    with pytest.raises(ValueError, match="read-only"):
        tiny3.hf64.teacher_force(tiny3.sequences[0])[0, 0] = 1.0


def test_the_cache_is_bounded(tiny3: Rig) -> None:
    """Catches: an oracle that grows until the machine is out of memory."""
    oracle = HFOracle.load(tiny3.model.path, dtype="float32", threads=1, cache_bytes=1 << 18)
    for ids in tiny3.sequences:
        oracle.teacher_force(ids)
    assert len(oracle._cache) == 1


def test_greedy_generation_and_its_end(tiny3: Rig) -> None:
    """Catches: generation that samples, runs past the limit, or drops the end-of-sequence token."""
    prompt = tiny3.sequences[0][: tiny3.prompt]
    forced = tiny3.hf32.generate(prompt, 24, ignore_eos=True)
    assert forced == tiny3.sequences[0][tiny3.prompt :]
    fresh = HFOracle.load(tiny3.model.path, dtype="float32", threads=1)
    fresh.model.generation_config.eos_token_id = forced[4]
    assert fresh.generate(prompt, 24) == forced[: forced.index(forced[4]) + 1]


def test_an_ignored_end_is_a_token_like_all_others(tiny3: Rig) -> None:
    """Catches: an end-of-sequence token that is kept from being chosen where it should be ignored: the oracle's tokens
    would be no greedy ones, and a right engine be refused."""
    prompt = tiny3.sequences[0][: tiny3.prompt]
    greedy = tiny3.hf32.generate(prompt, 24, ignore_eos=True)
    fresh = HFOracle.load(tiny3.model.path, dtype="float32", threads=1)
    for place in (0, 4):
        fresh.model.generation_config.eos_token_id = greedy[place]
        assert fresh.generate(prompt, 24, ignore_eos=True) == greedy
        assert fresh.model.generation_config.eos_token_id == greedy[place]


def test_chat_ids_are_the_template_s_text(tiny3: Rig) -> None:
    """Catches: special tokens encoded as text, or a chat encoding that is not the rendered template's."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße, 7 <b>?"}]
    text = tiny3.hf32.render_chat(messages)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGrüße, 7 <b>?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tiny3.hf32.encode_chat(messages)
    assert ids == tiny3.hf32.encode(text)
    assert (ids.count(1), ids.count(2)) == (3, 2)
    assert tiny3.hf32.decode(ids) == text
    assert tiny3.hf32.eos_token_ids == (2,)


def test_what_it_cannot_do_is_refused_with_value_and_limit(tiny3: Rig, tmp_path: Path) -> None:
    """Catches: an index error deep inside torch, or a silent truncation, where the caller made the mistake."""
    oracle: HFOracle = tiny3.hf32
    with pytest.raises(OracleError, match="0 tokens"):
        oracle.teacher_force([])
    with pytest.raises(OracleError, match="513 tokens.*512"):
        oracle.teacher_force([3] * 513)
    for bad in (-1, 512):
        with pytest.raises(OracleError, match=f"token {bad} .*512"):
            oracle.kv([3, bad])
    with pytest.raises(OracleError, match="start 2"):
        oracle.teacher_force([3, 4], start=2)
    with pytest.raises(OracleError, match="n is 0"):
        oracle.generate([3], 0)
    with pytest.raises(OracleError, match="neither"):
        HFOracle.load(tmp_path, dtype="float32")
    with pytest.raises(OracleError, match="float16"):
        HFOracle.load(tiny3.model.path, dtype="float16")  # type: ignore[arg-type]
    truncated = tmp_path / "cut.gguf"
    truncated.write_bytes(b"GGUF\x03\x00\x00\x00\x01")
    with pytest.raises(OracleError, match=r"cut\.gguf"):
        HFOracle.load(truncated, dtype="float32")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama-rope-llama3", "RoPE scaling 'none' with tables .*rope_freqs"),
        ("phi3-longrope", "RoPE scaling 'longrope'"),
        ("phi3", "sliding window is 24, None would be used"),
    ],
)
def test_gguf_files_that_transformers_reads_as_another_model_are_refused(
    name: str, message: str, tmp_path: Path
) -> None:
    """Catches: an engine blamed for a reference that ignores the file's RoPE scaling or window."""
    write_gguf_model(tiny_model(name).path, tmp_path / "m.gguf")
    with pytest.raises(OracleError, match=message):
        HFOracle.load(tmp_path / "m.gguf", dtype="float32")


def test_smollm2_loads_and_its_weights_are_the_file_s(smollm2: Path) -> None:
    """Catches: a GGUF loader that permutes, packs or drops weights, or a tokeniser that splits as another model's."""
    oracle = HFOracle.load(smollm2, dtype="float32")
    assert check_weights(smollm2, oracle).ok()
    ids = oracle.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    assert ids[:3] == [1, 9690, 198]
    assert ids[-16:] == [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    assert oracle.encode("In 12345") == [788, 216, 33, 34, 35, 36, 37]
    answer = oracle.generate(ids, 12)
    assert oracle.decode(answer) == "The capital of France is Paris.<|im_end|>"
    assert oracle.eos_token_ids == (2,)
