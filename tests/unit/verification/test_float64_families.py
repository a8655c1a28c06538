"""The float64 oracle of every family: nothing in it is still float32, and its rotary tables are exact."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny_models import tiny_oracles
from verification.models.tiny import tiny_names
from verification.oracles.float64 import Float64Islands

IDS = np.random.default_rng(1).integers(3, 512, 110).tolist()


class Dtypes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations whose result is float32, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.float32: set[str] = set()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count += 1
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor) and value.dtype is torch.float32:
                self.float32.add(str(func))
        return out


@pytest.mark.parametrize("name", tiny_names())
def test_no_operation_of_the_reference_is_float32(name: str) -> None:
    """Catches: an island of float32 in a family: q/k norm, router softmax, LongRoPE's second table, a mask, a bias."""
    hf64, hf32 = tiny_oracles(name)
    for length in (20, len(IDS)):
        with torch.inference_mode(), Dtypes() as plain:
            hf64.model(torch.tensor([IDS[:length]]))
        assert plain.float32, "the check sees no float32 in a run that is known to have it"
        with torch.inference_mode(), Dtypes() as seen, Float64Islands():
            hf64.model(torch.tensor([IDS[:length]]))
        assert seen.count > 100
        assert seen.float32 == set()
    reference, ordinary = hf64.teacher_force(IDS), hf32.teacher_force(IDS)
    with torch.inference_mode():
        islands = hf64.model(torch.tensor([IDS])).logits[0].numpy()
    start = 0 if hf64.rope_switch is None else hf64.rope_switch
    residue, error = np.abs(islands - reference)[start:].max(), np.abs(ordinary - reference).max()
    assert 0 < residue < 2 * error < 1e-2


def exact_frequencies(config: Any, *, long: bool) -> list[float]:
    """Inverse frequencies in Python floats, restated from the papers."""
    rope = config.rope_parameters
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dim = int(head * rope.get("partial_rotary_factor", 1.0))
    plain = [rope["rope_theta"] ** (-2 * i / dim) for i in range(dim // 2)]
    kind = rope["rope_type"]
    if kind == "longrope":
        return [f / d for f, d in zip(plain, rope["long_factor" if long else "short_factor"], strict=True)]
    if kind == "linear":
        return [f / rope["factor"] for f in plain]
    original = rope.get("original_max_position_embeddings", 0)
    found = []
    for i, f in enumerate(plain):
        turns = original * f / (2 * math.pi)
        if kind == "llama3":
            kept = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        elif kind == "yarn":
            bounds = [
                dim * math.log(original / (n * 2 * math.pi)) / (2 * math.log(rope["rope_theta"])) for n in (32, 1)
            ]
            low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), dim - 1)
            kept = 1 - (i - low) / (high - low)
        else:
            kept = 1.0
        kept = min(max(kept, 0.0), 1.0)
        found.append(kept * f + (1 - kept) * f / rope.get("factor", 1.0))
    return found


@pytest.mark.parametrize("name", tiny_names())
def test_rotary_frequencies_are_exact(name: str) -> None:
    """Catches: frequencies of a scaled RoPE that were computed in float32, or kept from the float32 model."""
    hf64 = tiny_oracles(name)[0]
    for length in (10, len(IDS)):
        fresh = hf64.teacher_force(IDS[::-1][:length])  # leaves the frequencies of its length in the module
        assert fresh.dtype == np.float64
        inverse = hf64.model.model.rotary_emb.inv_freq
        switch = hf64.rope_switch
        # A run past the switch ends with the call that goes no further than it.
        assert inverse.dtype is torch.float64
        if switch is None:
            np.testing.assert_allclose(inverse.numpy(), exact_frequencies(hf64.config, long=False), rtol=1e-14)
    if switch is not None:
        with torch.inference_mode(), Float64Islands():
            for length, long in ((switch, False), (switch + 1, True)):
                hf64.model(torch.tensor([IDS[:length]]))
                inverse = hf64.model.model.rotary_emb.inv_freq
                np.testing.assert_allclose(inverse.numpy(), exact_frequencies(hf64.config, long=long), rtol=1e-14)


@pytest.mark.parametrize("name", ["phi3-longrope", "phi4-longrope"])
def test_rows_around_the_switch_are_runs_of_their_own_prefix(name: str) -> None:
    """Catches: rows before LongRoPE's switch computed as part of a longer sequence, K and V of two tables, or a cached
    run of the other side."""
    hf64 = tiny_oracles(name)[0]
    switch = hf64.rope_switch
    assert switch is not None
    ids = np.random.default_rng(2).integers(3, 512, switch + 7).tolist()
    whole = hf64.forward(ids)
    assert whole.logits.shape[0] == len(ids)
    for length in (1, 9, switch - 1, switch, switch + 1, len(ids)):
        with torch.inference_mode(), Float64Islands():
            alone = hf64.model(torch.tensor([ids[:length]])).logits[0, -1].numpy()
        np.testing.assert_allclose(whole.logits[length - 1], alone, rtol=0, atol=1e-11)
    late = hf64.forward(ids, start=switch + 2)
    np.testing.assert_allclose(late.logits, whole.logits[switch + 2 :], rtol=0, atol=1e-11)
    part = hf64.forward(ids[:switch])  # a prefix of a cached run, but of the short table
    assert np.abs(part.k - whole.k[:, :switch]).max() > 1e-3
    many = hf64.forward_many([ids, ids[: switch - 3]], start=[switch - 2, 0])
    np.testing.assert_allclose(many[0].logits, whole.logits[switch - 2 :], rtol=0, atol=1e-11)


def test_keys_before_a_window_are_kept() -> None:
    """Catches: a reference whose K and V end with the window, because transformers' cache forgets the rest."""
    hf64 = tiny_oracles("mistral-window")[0]
    k, v = hf64.kv(IDS)
    assert k.shape == v.shape == (2, len(IDS), 2, 16)
    short, _ = hf64.kv(IDS[::-1][::-1][:5])
    np.testing.assert_allclose(k[:, :5], short, rtol=0, atol=1e-12)
