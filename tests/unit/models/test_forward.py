"""The Llama forward pass against a dense float64 reference written here, and the batch-invariant mode bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blink_core.models import load_model

F64 = npt.NDArray[np.float64]

PAGES, PAGE_SIZE = 64, 4


def dense_reference(config: dict[str, Any], tensors: dict[str, Any], tokens: list[int]) -> tuple[F64, F64, F64]:
    """Logits [T, vocab], keys and values [layers, kv_heads, T, head_dim] of one sequence, all in float64."""
    w = {name: value.astype(np.float64) for name, value in tensors.items()}
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    count, eps = len(tokens), config["rms_norm_eps"]
    frequency = config["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    angle = np.arange(count)[:, None] * np.concatenate((frequency, frequency))
    cos, sin = np.cos(angle), np.sin(angle)

    def norm(x: F64, name: str) -> F64:
        scaled: F64 = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w[name]
        return scaled

    def rotate(x: F64) -> F64:  # [heads, T, dim]
        turned: F64 = x * cos + np.concatenate((-x[..., dim // 2 :], x[..., : dim // 2]), -1) * sin
        return turned

    x = w["model.embed_tokens.weight"][tokens]
    keys, values = [], []
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        h = norm(x, f"{at}input_layernorm.weight")
        q, k, v = (
            (h @ w[f"{at}self_attn.{p}_proj.weight"].T).reshape(count, n, dim).swapaxes(0, 1)
            for p, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, k = rotate(q), rotate(k)
        keys.append(k)
        values.append(v)
        k, v = (np.repeat(a, heads // kv_heads, axis=0) for a in (k, v))
        scores = q @ k.swapaxes(1, 2) / np.sqrt(dim)
        scores[:, np.triu(np.ones((count, count), bool), 1)] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        attended = (p / p.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(count, heads * dim)
        x = x + attended @ w[f"{at}self_attn.o_proj.weight"].T
        h = norm(x, f"{at}post_attention_layernorm.weight")
        gate = h @ w[f"{at}mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[f"{at}mlp.up_proj.weight"].T)) @ w[f"{at}mlp.down_proj.weight"].T
    head = w["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return norm(x, "model.norm.weight") @ head.T, np.stack(keys), np.stack(values)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (7, 1)])
@pytest.mark.parametrize("tied", [False, True])
def test_forward_matches_dense_float64(
    make_tiny: Callable[..., Any],
    make_driver: Callable[..., Any],
    heads: int,
    kv_heads: int,
    tied: bool,
    batch_invariant: bool,
) -> None:
    """Catches: a wrong layer order, rotation, head ratio, mask, page lookup or scale, in prefill, chunks or decode."""
    tiny = make_tiny(num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=tied)
    driver = make_driver(load_model(tiny.path, batch_invariant=batch_invariant), pages=PAGES, page_size=PAGE_SIZE)
    rng = np.random.default_rng(1)
    a, b, c = (rng.integers(0, 101, n).tolist() for n in (23, 17, 9))
    got: dict[str, list[npt.NDArray[np.float32]]] = {"a": [], "b": [], "c": []}
    # a: two chunks then decode; b: decode from the start; c: one prefill beside them.
    for rows in (
        [("a", a[:10]), ("b", b[:1])],
        [("b", b[1:2]), ("a", a[10:20]), ("c", c)],
        *([("b", b[2 + i : 3 + i]), ("a", a[20 + i : 21 + i])] for i in range(3)),
        *([("b", b[5 + i : 6 + i])] for i in range(12)),
    ):
        for (name, _), logits in zip(rows, driver.step(rows), strict=True):
            got[name].append(logits)
    for name, tokens, at in (("a", a, [9, 19, 20, 21, 22]), ("b", b, list(range(17))), ("c", c, [8])):
        logits, keys, values = dense_reference(tiny.config, tiny.tensors, tokens)
        scale = np.abs(logits).max()
        np.testing.assert_allclose(np.stack(got[name]), logits[at], rtol=0, atol=2e-5 * scale)
        for gathered, expected in zip(driver.kv(name), (keys, values), strict=True):
            np.testing.assert_allclose(gathered, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.fixture(scope="module")
def invariant_model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """A tiny model in batch-invariant mode; sizes that are no multiples of a tile or a SIMD vector."""
    write_tiny = request.getfixturevalue("write_tiny_model")
    tiny = write_tiny(
        tmp_path_factory.mktemp("invariant"),
        hidden_size=52,
        intermediate_size=77,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=10,
    )
    return load_model(tiny.path, batch_invariant=True)


def run_alone(driver: Any, tokens: list[int]) -> npt.NDArray[np.float32]:
    """Logits of every position, one token a step."""
    return np.concatenate([driver.step([("alone", [t])]) for t in tokens])


@st.composite
def programs(draw: st.DrawFn) -> list[list[int]]:
    """For each of up to five requests, the sizes of its chunks; lengths pass the attention block of 128."""
    count = draw(st.integers(1, 5))
    return [
        draw(st.lists(st.sampled_from([1, 1, 2, 3, 5, 8, 31, 64, 100]), min_size=1, max_size=6)) for _ in range(count)
    ]


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(program=programs(), seed=st.integers(0, 1000))
def test_invariant_mode_is_bitwise(
    invariant_model: Any, make_driver: Callable[..., Any], program: list[list[int]], seed: int
) -> None:
    """Catches: any result that depends on batch, row, pages or chunks: alone by decode = in any batch in any chunks."""
    rng = np.random.default_rng(seed)
    driver = make_driver(invariant_model, pages=1024, page_size=8, seed=seed)
    prompts = {str(i): rng.integers(0, 101, sum(chunks)).tolist() for i, chunks in enumerate(program)}
    pending = {str(i): list(chunks) for i, chunks in enumerate(program)}
    sampled: dict[str, list[tuple[int, npt.NDArray[np.float32]]]] = {name: [] for name in prompts}
    while pending:
        names = rng.permutation(sorted(pending)).tolist()
        names = names[: int(rng.integers(1, len(names) + 1))]
        rows = []
        for name in names:
            start = driver.contexts.get(name, 0)
            rows.append((name, prompts[name][start : start + pending[name].pop(0)]))
            if not pending[name]:
                del pending[name]
        for (name, _), logits in zip(rows, driver.step(rows), strict=True):
            sampled[name].append((driver.contexts[name] - 1, logits))
    for name, prompt in prompts.items():
        alone = make_driver(invariant_model, pages=128, page_size=16, seed=seed + 1)
        expected = run_alone(alone, prompt)
        for position, logits in sampled[name]:
            assert logits.tobytes() == expected[position].tobytes(), (name, position)
        for got, want in zip(driver.kv(name), alone.kv("alone"), strict=True):
            assert got.tobytes() == want.tobytes(), name


@pytest.mark.parametrize("kernels", ["Haswell", "Sandybridge"])
def test_invariant_mode_is_bitwise_with_other_kernels(kernels: str) -> None:
    """Catches: a dependence on batch or chunks that the kernels of this machine's processor happen not to show.

    OpenBLAS takes the name of another x86 processor; a BLAS that knows no such variable repeats the test above.
    """
    environment = os.environ | {"OPENBLAS_CORETYPE": kernels, "OPENBLAS_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", __file__, "-k", "test_invariant_mode_is_bitwise and not other_kernels"],
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed" in result.stdout


def test_fast_mode_is_not_bitwise(make_tiny: Callable[..., Any], make_driver: Callable[..., Any]) -> None:
    """Catches: a bitwise comparison that cannot fail, because the inputs give equal bits in any mode."""
    model = load_model(make_tiny().path)
    tokens = np.random.default_rng(0).integers(0, 101, 60).tolist()
    chunked = make_driver(model, pages=PAGES, page_size=PAGE_SIZE)
    whole = make_driver(model, pages=PAGES, page_size=PAGE_SIZE)
    run_alone(chunked, tokens)
    whole.step([("alone", tokens)])
    assert chunked.kv("alone")[0].tobytes() != whole.kv("alone")[0].tobytes()
