"""Logits, keys and values against transformers, on tiny random Llamas and on SmolLM2's real weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

from blink_core.models import load_config, load_model
from tests.real_model import real_model


def huggingface(model: Any, tokens: list[int]) -> tuple[npt.NDArray[Any], list[npt.NDArray[Any]]]:
    """Logits [T, vocab] and ``[keys, values]``, each [layers, kv_heads, T, head_dim]."""
    with torch.no_grad():
        out = model(torch.tensor([tokens]), use_cache=True)
    layers = out.past_key_values.layers
    return out.logits[0].numpy(), [
        torch.stack([getattr(layer, kind)[0] for layer in layers]).numpy() for kind in ("keys", "values")
    ]


def rms_error(got: npt.NDArray[Any], want: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Root-mean-square difference over the last axis."""
    error: npt.NDArray[Any] = np.sqrt(np.mean((got.astype(np.float64) - want) ** 2, axis=-1))
    return error


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("heads", "kv_heads", "tied"), [(6, 2, False), (7, 1, True)])
def test_tiny_llama(
    tmp_path: Path, make_driver: Callable[..., Any], heads: int, kv_heads: int, tied: bool, dtype: str
) -> None:
    """Catches: weights read wrongly (also bf16, fp16, shards), and any numerical difference from HuggingFace."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=heads * 16,
        intermediate_size=150,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=211,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    original = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype))
    # A small shard size: the bfloat16 case is read through the index.
    original.save_pretrained(tmp_path, max_shard_size="60KB" if dtype == "bfloat16" else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (dtype == "bfloat16")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    exact = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)

    tokens = np.random.default_rng(0).integers(0, 211, 50).tolist()
    driver = make_driver(load_model(tmp_path), pages=32, page_size=4)
    logits = np.concatenate([driver.step([("r", tokens[:30])]), *(driver.step([("r", [t])]) for t in tokens[30:])])
    logits64, kv64 = huggingface(exact, tokens)
    logits32, kv32 = huggingface(reference, tokens)
    theirs = np.percentile(rms_error(logits32, logits64), 99)
    assert rms_error(logits, logits64[29:]).max() <= 8 * theirs
    for got, want32, want64 in zip(driver.kv("r"), kv32, kv64, strict=True):
        assert rms_error(got, want64).max() <= 8 * np.percentile(rms_error(want32, want64), 99)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The real GGUF file; skipped only where it has not been fetched."""
    return real_model()


# "The quick brown fox jumps over the lazy dog. In 1969 two astronauts walked on the Moon, while a third stayed in
# orbit; the mission had been planned for eight years, and" by the model's own tokenizer.
PROMPT = [
    *(504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767, 30, 533, 216, 33, 41, 38, 41, 827, 17885, 13197, 335),
    *(260, 8872, 28, 979, 253, 3464, 14692, 281, 8591, 43, 260, 4527, 761, 719, 8176, 327, 4475, 929, 28, 284),
]


def test_smollm2_gguf(smollm2: Path, make_driver: Callable[..., Any]) -> None:
    """Catches: wrong dequantisation, row order of q/k, rotary base or special tokens for a real GGUF file."""
    tokens = PROMPT
    model = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
    )
    config = load_config(smollm2)
    assert (config.eos_token_ids, config.bos_token_id) == ((model.config.eos_token_id,), model.config.bos_token_id)
    assert config.vocab_size == model.config.vocab_size
    logits32, kv32 = huggingface(model, tokens)
    # Widening float32 weights and rotary frequencies is exact; a second load would take half a minute.
    logits64, kv64 = huggingface(model.double(), tokens)
    driver = make_driver(load_model(smollm2), pages=8, page_size=16)
    logits = np.concatenate([driver.step([("r", tokens[:25])]), *(driver.step([("r", [t])]) for t in tokens[25:])])
    assert rms_error(logits, logits64[24:]).max() <= 8 * np.percentile(rms_error(logits32, logits64), 99)
    assert logits.argmax(-1).tolist() == logits64[24:].argmax(-1).tolist()
    for got, want32, want64 in zip(driver.kv("r"), kv32, kv64, strict=True):
        ours, theirs = rms_error(got, want64), rms_error(want32, want64)
        assert (ours.max(axis=(1, 2)) <= 8 * np.percentile(theirs, 99, axis=(1, 2))).all()


def test_smollm2_invariant_mode_is_bitwise(smollm2: Path, make_driver: Callable[..., Any]) -> None:
    """Catches: decode and prefill, or unlike chunks and batches, that differ in a bit for a real model's shapes."""
    model = load_model(smollm2, batch_invariant=True)
    whole, mixed = make_driver(model, pages=8, page_size=16), make_driver(model, pages=16, page_size=8, seed=1)
    expected = whole.step([("r", PROMPT)])
    mixed.step([("other", PROMPT[:7]), ("r", PROMPT[:21])])
    mixed.step([("r", PROMPT[21:34]), ("other", [3])])
    for token in PROMPT[34:39]:
        mixed.step([("other", [5]), ("r", [token])])
    assert mixed.step([("r", PROMPT[39:])]).tobytes() == expected.tobytes()
    for got, want in zip(mixed.kv("r"), whole.kv("r"), strict=True):
        assert got.tobytes() == want.tobytes()
