"""Corpus rows M and N: what a model computes, against transformers or bit for bit against itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from blink_core.models import ModelError, load_model
from blink_core.ops.logits import SamplingRow
from blink_core.ops.numpy_ops import NumpyOps
from blink_core.ops.sampling import sample
from tests.scenarios.models import PagedDriver, write_tiny
from tests.tiny_models import tiny_model
from verification.models.tiny import tiny_names

F32 = npt.NDArray[np.float32]


@pytest.mark.parametrize("experts", [6, 60, 128])
@pytest.mark.parametrize("normalize", [False, True])
def test_m05_m07_m08_routing_with_all_logits_negative(experts: int, normalize: bool) -> None:
    """M05, M07, M08. Catches: padding lanes, which hold 0, that win over negative logits; raw logits taken for weights
    where they are not normalised; weights not normalised where they should be.

    Condition: every logit is below 0, by far; the number of experts fills no vector or power of two (6, 60).
    """
    rng = np.random.default_rng(experts)
    logits = (rng.standard_normal((40, experts)) * 2 - 50).astype(np.float32)
    assert logits.max() < -30
    index, weight = NumpyOps().route(logits, 4, normalize=normalize)
    exact = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    exact /= exact.sum(1, keepdims=True)
    for row in range(40):
        chosen = sorted(range(experts), key=lambda i, r=row: (-logits[r, i], i))[:4]  # type: ignore[misc]
        assert index[row].tolist() == chosen
        want = exact[row, chosen] / (exact[row, chosen].sum() if normalize else 1)
        np.testing.assert_allclose(weight[row], want, rtol=1e-5)
    shifted = NumpyOps().route(logits + np.float32(64), 4, normalize=normalize)
    np.testing.assert_array_equal(shifted[0], index)
    assert normalize == np.allclose(weight.sum(1), 1.0)


def test_m08_argmax_with_all_logits_negative() -> None:
    """M08 (the same of the vocabulary). Catches: a padding id, whose logit is 0, that wins where all are negative.

    Condition: the greatest logit is below 0; the vocabulary is no multiple of a block or vector.
    """
    for vocab in (37, 301, 8193, 49_153):
        logits = (np.random.default_rng(vocab).standard_normal((3, vocab)) - 40).astype(np.float32)
        assert logits.max() < 0
        rows = [SamplingRow(), SamplingRow(temperature=1e-4), SamplingRow(logprobs=3)]
        result = sample(logits, rows)
        assert result.tokens.tolist() == logits.argmax(1).tolist()
        assert set(result.top_tokens[2].tolist()) == set(np.argsort(-logits[2])[:3].tolist())


def test_m10_biases_are_loaded_and_each_key_is_consumed(tmp_path: Path) -> None:
    """M10. Catches: q, k and v biases of Qwen2 that are not loaded; a checkpoint key that nobody reads, or reads twice.

    Condition: the file holds biases that are not zero, and the answer without them is another one.
    """
    source = tiny_model("qwen2").path
    tensors = load_file(source / "model.safetensors")
    biases = sorted(name for name in tensors if name.endswith(".bias"))
    assert len(biases) == 3 * load_model(source).config.num_layers
    assert all(np.abs(tensors[name]).max() > 0.01 for name in biases)
    ids = list(range(3, 40))

    def logits_of(changed: dict[str, F32], name: str) -> F32:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_bytes((source / "config.json").read_bytes())
        save_file(changed, folder / "model.safetensors")
        return PagedDriver(load_model(folder), pages=8, page_size=16).step([("a", ids)])

    whole = logits_of(tensors, "whole")
    for name in biases[:3]:
        without = logits_of({**tensors, name: np.zeros_like(tensors[name])}, name)
        assert np.abs(whole - without).max() > 1e-3, f"{name} makes no difference"
        with pytest.raises(ModelError, match=name):
            logits_of({k: v for k, v in tensors.items() if k != name}, f"no {name}")
    with pytest.raises(ModelError, match="nobody"):
        logits_of({**tensors, "model.layers.0.self_attn.q_proj.nobody": tensors[biases[0]]}, "more")


def test_m11_fused_rows_are_split_by_head_counts(tmp_path: Path) -> None:
    """M11. Catches: a fused query-key-value projection cut into thirds, or at sizes of another head ratio.

    Condition: 40 query and 10 KV heads as in Phi-4, so that the parts are 4:1:1 and no third; against transformers.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Phi3Config(
        vocab_size=64,
        hidden_size=160,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=40,
        num_key_value_heads=10,
        max_position_embeddings=64,
        original_max_position_embeddings=64,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
    )
    theirs = transformers.Phi3ForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert (model.config.num_heads, model.config.num_kv_heads, model.config.head_dim) == (40, 10, 4)
    ids = np.random.default_rng(0).integers(3, 64, 21).tolist()
    with torch.no_grad():
        want = theirs(torch.tensor([ids])).logits[0, -1].numpy()
    got = PagedDriver(model, pages=4, page_size=16).step([("a", ids)])[0]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_m13_logits_that_bfloat16_cannot_tell_apart() -> None:
    """M13. Catches: logits rounded to bfloat16 before the greatest is taken: of equals the first wins.

    Condition: the two greatest differ, become equal in bfloat16, and the greater has the higher id; also as the output
    of a model whose weights are stored in bfloat16.
    """
    logits = np.full((1, 1000), -5, np.float32)
    logits[0, 17], logits[0, 900] = 20.01, 20.05
    rounded = (logits[0, [17, 900]].view(np.uint32) + 0x8000) & 0xFFFF0000
    assert rounded[0] == rounded[1]
    assert sample(logits, [SamplingRow()]).tokens.tolist() == [900]


@pytest.mark.parametrize("name", ["llama-gqa3", "qwen3-moe", "mistral-window"])
def test_p15_l16_hit_and_miss_have_the_same_bits(name: str) -> None:
    """P15, L16. Catches: another sum where a prefill has another number of rows: a hit, a chunk, a whole sequence of
    more than 256 tokens.

    Condition: the lengths are no multiples of the page; one step has more than 256 tokens; and in the fast mode, which
    makes no such promise, the same comparison does differ.
    """
    assert name in tiny_names()
    ids = np.random.default_rng(4).integers(3, 500, 300).tolist()
    differs = []
    for invariant in (True, False):
        model = load_model(tiny_model(name).path, batch_invariant=invariant)
        whole = PagedDriver(model, pages=40, page_size=16)
        cold = whole.step([("a", ids)])[0]
        for hit in (16, 48, 288):  # so many tokens are there: the prefill has other numbers of rows
            warm = PagedDriver(model, pages=40, page_size=16, seed=hit)
            warm.step([("a", ids[:hit])])
            again = warm.step([("a", ids[hit:])])[0]
            assert len(ids) % 16
            if invariant:
                assert again.tobytes() == cold.tobytes(), hit
                assert [a.tobytes() for a in warm.kv("a")] == [a.tobytes() for a in whole.kv("a")], hit
            else:
                differs.append(again.tobytes() != cold.tobytes())
    assert any(differs), "these inputs give the same bits in any mode"


def test_l16_a_sequence_scored_as_a_prompt_chooses_the_same_tokens(tmp_path: Path) -> None:
    """L16. Catches: another block size, and so another argmax, for prompts of more than 256 tokens than in decode.

    Condition: 290 tokens of which the model chose the last 40 one by one are then computed as one prompt of each length
    beyond 256.
    """
    model = load_model(write_tiny(tmp_path / "m").path, batch_invariant=True)
    ids = np.random.default_rng(4).integers(3, 100, 250).tolist()
    decode = PagedDriver(model, pages=40, page_size=16)
    row = decode.step([("a", ids)])[0]
    rows = []
    for _ in range(40):
        ids.append(int(row.argmax()))
        rows.append(row)
        row = decode.step([("a", ids[-1:])])[0]
    for length in (257, 270, 289):
        got = PagedDriver(model, pages=40, page_size=16).step([("a", ids[:length])])[0]
        assert got.tobytes() == rows[length - 250].tobytes()
        assert int(got.argmax()) == ids[length]


def test_l22_runs_of_many_rows_repeat_bit_for_bit(tmp_path: Path) -> None:
    """L22. Catches: sums whose order hangs on the number of rows or on chance, seen in log probabilities only.

    Condition: 44 rows in a step, five times, and each of them alone; sampled and greedy, with alternatives.
    """
    model = load_model(write_tiny(tmp_path / "m").path, batch_invariant=True)
    rng = np.random.default_rng(0)
    prompts = {str(i): rng.integers(3, 100, 3 + i % 9).tolist() for i in range(44)}
    asked = [SamplingRow(temperature=0.8 * (i % 2), seed=i, logprobs=5) for i in range(44)]

    def results(names: list[str]) -> list[tuple[bytes, ...]]:
        driver = PagedDriver(model, pages=60, page_size=16)
        logits = driver.step([(name, prompts[name]) for name in names])
        made = sample(logits, [asked[int(name)] for name in names])
        parts = (logits, made.tokens, made.logprobs, made.top_tokens, made.top_logprobs)
        return [tuple(part[i].tobytes() for part in parts) for i in range(len(names))]

    first = results(list(prompts))
    assert len(first) == 44
    assert all(results(list(prompts)) == first for _ in range(4))
    assert [results([name])[0] for name in prompts] == first


def test_g17_logits_belong_to_their_rows(tmp_path: Path) -> None:
    """G17 (the part of one device). Catches: rows gathered for the output projection in another shape or order.

    Condition: batches of one, two and more rows of unlike lengths, of which some sample, in another order.
    """
    model = load_model(write_tiny(tmp_path / "m").path, batch_invariant=True)
    prompts: dict[str, list[int]] = {"a": [5, 6, 7], "b": [9], "c": list(range(3, 14))}
    alone = {name: PagedDriver(model, pages=9, page_size=16).step([(name, ids)])[0] for name, ids in prompts.items()}
    assert len({row.tobytes() for row in alone.values()}) == 3
    for names, wanted in ((["a"], [0]), (["b", "a"], [1, 0]), (["c", "b", "a"], [2, 0]), (["a", "c", "b"], [1])):
        driver = PagedDriver(model, pages=9, page_size=16)
        batch: Any = driver.batch([(name, prompts[name]) for name in names], wanted)
        got = model.forward(batch, driver.pool)
        assert [row.tobytes() for row in got] == [alone[names[i]].tobytes() for i in wanted]
