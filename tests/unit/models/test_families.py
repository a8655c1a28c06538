"""Every family against HuggingFace, by the project's criterion, on models whose build shows that they notice faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from blink_core.models import Model, StepBatchError, load_config, load_model
from tests.tiny_models import tiny_model, tiny_oracles
from verification.criterion import KVScores, TokenScores, judge_kv, judge_tokens, score_kv, score_tokens
from verification.models.tiny import tiny_names
from verification.models.variants import variant
from verification.thresholds import default_thresholds

F32 = npt.NDArray[np.float32]
Drivers = Callable[..., Any]
LONG_ROPE = ("phi3-longrope", "phi4-longrope")

# Lengths and first chunks: within and beyond every window (20, 24) and original maximum (32, 96), passing the latter in
# decode, inside a chunk and at a chunk's edge; "d" starts with one token, "e" stays within everything.
SEQUENCES = {"a": 120, "b": 75, "c": 104, "d": 40, "e": 19}
CHUNKS = {"a": [7, 1, 33, 46], "b": [3, 20], "c": [32, 31, 33], "d": [1], "e": [13]}


def sequences(model: Model) -> dict[str, list[int]]:
    draw = np.random.default_rng(3)
    return {name: draw.integers(3, model.config.vocab_size, n).tolist() for name, n in SEQUENCES.items()}


def run_mixed(driver: Any, tokens: dict[str, list[int]]) -> dict[str, dict[int, F32]]:
    """Logits by request and position: requests join one after the other, chunks then decode, in the same steps."""
    chunks = {name: list(sizes) for name, sizes in CHUNKS.items()}
    logits: dict[str, dict[int, F32]] = {name: {} for name in tokens}
    step = 0
    while any(driver.contexts.get(name, 0) < len(t) for name, t in tokens.items()):
        rows = []
        for index, (name, ids) in enumerate(tokens.items()):
            start = driver.contexts.get(name, 0)
            if step >= 2 * index and start < len(ids):
                size = chunks[name].pop(0) if chunks[name] else 1
                rows.append((name, ids[start : start + size]))
        for (name, _), row in zip(rows, driver.step(rows), strict=True):
            logits[name][driver.contexts[name] - 1] = row
        step += 1
    return logits


@pytest.mark.parametrize("name", tiny_names())
def test_logits_and_keys_are_huggingface_s(name: str, make_driver: Drivers) -> None:
    """Catches: any difference from the family's modelling code: bias, norm, window edge, rotary table, routing, head
    ratio, fused rows; in prefill chunks and decode, over scattered pages of a poisoned pool."""
    hf64, hf32 = tiny_oracles(name)
    model = load_model(tiny_model(name).path)
    driver = make_driver(model, pages=40, page_size=16, seed=5)
    tokens = sequences(model)
    logits = run_mixed(driver, tokens)
    limits = default_thresholds()
    rows, kv = [], []
    for request, ids in tokens.items():
        reference, ordinary = hf64.forward(ids), hf32.forward(ids)
        at = sorted(logits[request])
        ours = np.stack([logits[request][position] for position in at])
        forced = ours.argmax(axis=1)  # what a greedy engine would emit after each of these contexts
        rows.append(score_tokens(logits=ours, hf64=reference.logits[at], hf32=ordinary.logits[at], emitted=forced))
        k, v = (a.swapaxes(1, 2) for a in driver.kv(request))
        kv.append(score_kv(k=k, v=v, hf64=(reference.k, reference.v), hf32=(ordinary.k, ordinary.v)))
    result = judge_tokens(TokenScores.concatenate(rows), limits.tokens)
    assert result.ok(), result
    result = judge_kv(KVScores.concatenate(kv), limits.kv)
    assert result.ok(), result


@pytest.mark.parametrize("name", tiny_names())
def test_invariant_mode_is_bitwise(name: str, make_driver: Drivers) -> None:
    """Catches: a bit that depends on the batch or the chunks: expert grouping, blocks left out before a window, a norm
    whose order depends on rows, a table chosen by another request."""
    model = load_model(tiny_model(name).path, batch_invariant=True)
    tokens = sequences(model)
    mixed = make_driver(model, pages=40, page_size=16, seed=5)
    logits = run_mixed(mixed, tokens)
    for request, ids in tokens.items():
        whole = make_driver(model, pages=30, page_size=8, seed=6)
        last = whole.step([(request, ids)])[0]
        assert last.tobytes() == logits[request][len(ids) - 1].tobytes(), request
        for got, want in zip(mixed.kv(request), whole.kv(request), strict=True):
            assert got.tobytes() == want.tobytes(), request
        alone = make_driver(model, pages=30, page_size=16, seed=7)
        for position, token in enumerate(ids[:60]):
            row = alone.step([(request, [token])])[0]
            if position in logits[request]:
                assert row.tobytes() == logits[request][position].tobytes(), (request, position)


def greedy(driver: Any, prompt: list[int], count: int) -> list[int]:
    emitted: list[int] = []
    new = prompt
    for _ in range(count):
        emitted.append(int(driver.step([("r", new)])[0].argmax()))
        new = emitted[-1:]
    return emitted


@pytest.mark.parametrize("name", LONG_ROPE)
@pytest.mark.parametrize("past", [-6, -1, 0, 1, 5])
def test_greedy_across_the_original_maximum_is_generate_s(name: str, past: int, make_driver: Drivers) -> None:
    """Catches: keys of both LongRoPE tables in one request, a switch one token early or late, a stale key after it."""
    hf32 = tiny_oracles(name)[1]
    original = hf32.rope_switch
    assert original is not None
    prompt = np.random.default_rng(past + 9).integers(3, 512, original + past).tolist()
    model = load_model(tiny_model(name).path)
    expected = hf32.generate(prompt, 12, ignore_eos=True)
    assert greedy(make_driver(model, pages=16, page_size=16), prompt, 12) == expected


def test_outgrowing_is_done_in_pieces(make_driver: Drivers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: pieces of the recomputation that see the short table, or positions counted from the piece."""
    model = load_model(tiny_model("phi3-longrope").path, batch_invariant=True)
    ids = sequences(model)["b"]
    whole = make_driver(model, pages=16, page_size=16)
    last = whole.step([("r", ids)])[0]
    monkeypatch.setattr("blink_core.models.phi3.RECOMPUTE_TOKENS", 7)
    pieces = make_driver(model, pages=16, page_size=16, seed=3)
    pieces.step([("r", ids[:29])])
    assert pieces.step([("r", ids[29:])])[0].tobytes() == last.tobytes()
    for got, want in zip(pieces.kv("r"), whole.kv("r"), strict=True):
        assert got.tobytes() == want.tobytes()


def test_shared_pages_of_another_table_are_refused(make_driver: Drivers) -> None:
    """Catches: a short request that reads keys which a long one computed with the other table, as by a prefix cache."""
    model = load_model(tiny_model("phi3-longrope").path)
    ids = sequences(model)["b"]
    driver = make_driver(model, pages=16, page_size=16)
    driver.step([("long", ids)])
    driver.tables["short"], driver.contexts["short"] = list(driver.tables["long"][:1]), 16
    before = driver.pool.k.copy()
    with pytest.raises(StepBatchError, match=r"row 0: its 16 earlier keys .*original maximum is 32"):
        driver.step([("short", ids[16:18])])
    np.testing.assert_array_equal(driver.pool.k, before)
    driver.tables["never"], driver.contexts["never"] = [driver.free.pop()], 5
    with pytest.raises(StepBatchError, match="its 5 earlier keys"):
        driver.step([("never", ids[:1])])


@pytest.mark.parametrize("name", tiny_names())
def test_what_the_variant_is_for_is_in_the_configuration(name: str) -> None:
    """Catches: a variant that HuggingFace's class quietly built as something plainer, so that nothing is tested."""
    config = load_model(tiny_model(name).path).config
    wanted = variant(name)
    assert (config.num_heads, config.head_dim, config.tie_word_embeddings) == (
        wanted.heads,
        wanted.head_dim,
        wanted.tied,
    )
    assert config.num_heads & (config.num_heads - 1) != 0
    extra = dict(wanted.arguments or {})
    rope = extra.get("rope_parameters", {"rope_type": "default"})
    assert config.rope.kind == rope["rope_type"]
    assert config.rope.dim == int(wanted.head_dim * extra.get("partial_rotary_factor", 1.0))
    windows = {w for w in config.windows if w is not None}
    assert windows == ({extra["sliding_window"]} if extra.get("sliding_window") else set())
    assert (config.experts is not None) == ("num_experts" in extra)
    if name == "qwen2-window":
        assert config.windows == (None, 20, 20)
    if name == "qwen3-moe-mixed":
        assert config.experts is not None
        assert config.experts.layers == (1,)
    assert config.attention_bias == (config.architecture == "qwen2" or "attention_bias" in extra)


def test_windows_of_older_files(tmp_path: Path) -> None:
    """Catches: max_window_layers, which files without layer_types have, counted from the wrong end or off by one; the
    default window of Mistral and Qwen2 taken where the file says none."""
    for name, changes, expected in (
        ("qwen2-window", {"layer_types": ...}, (None, 20, 20)),
        ("qwen2-window", {"layer_types": ..., "max_window_layers": 2}, (None, None, 20)),
        ("qwen2-window", {"layer_types": ..., "use_sliding_window": False}, (None, None, None)),
        ("qwen2-window", {"layer_types": ..., "sliding_window": ..., "max_window_layers": 0}, (4096, 4096, 4096)),
        ("mistral-window", {"sliding_window": ...}, (4096, 4096)),
        ("mistral-window", {"sliding_window": None}, (None, None)),
        ("phi3", {"sliding_window": ...}, (None, None)),
    ):
        raw = json.loads((tiny_model(name).path / "config.json").read_text()) | changes
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))
        assert load_config(tmp_path).windows == expected, (name, changes)
