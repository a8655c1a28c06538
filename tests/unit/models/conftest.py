"""Helpers of the model tests: tiny random models on disk, and a driver that runs requests over a poisoned KV pool."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from blink_core.models import KVPool, Model, StepBatch

F32 = npt.NDArray[np.float32]


@dataclass
class PagedDriver:
    """Runs requests step by step on a pool that starts as NaN; pages are handed out in a drawn order."""

    model: Model
    pages: int
    page_size: int
    seed: int = 0
    contexts: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        c = self.model.config
        shape = (c.num_layers, self.pages, self.page_size, c.num_kv_heads, c.head_dim)
        self.pool = KVPool(np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32), self.page_size)
        self.free = np.random.default_rng(self.seed).permutation(self.pages).tolist()

    def batch(self, rows: list[tuple[str, list[int]]], sample: list[int]) -> StepBatch:
        """The step that gives each named request its next tokens."""
        tokens, positions, slots, starts, lens = [], [], [], [0], []
        for name, new in rows:
            start = self.contexts.get(name, 0)
            table = self.tables.setdefault(name, [])
            while len(table) * self.page_size < start + len(new):
                table.append(self.free.pop())
            for position, token in enumerate(new, start):
                tokens.append(token)
                positions.append(position)
                slots.append(table[position // self.page_size] * self.page_size + position % self.page_size)
            starts.append(len(tokens))
            lens.append(start + len(new))
            self.contexts[name] = start + len(new)
        width = max(len(self.tables[name]) for name, _ in rows)
        # Unused columns hold a page id that is out of range: reading one would fail.
        tables = [self.tables[name] + [-7] * (width - len(self.tables[name])) for name, _ in rows]
        return StepBatch(
            token_ids=np.array(tokens, np.int32),
            positions=np.array(positions, np.int32),
            kv_slots=np.array(slots, np.int64),
            row_starts=np.array(starts, np.int32),
            context_lens=np.array(lens, np.int32),
            block_tables=np.array(tables, np.int32),
            sample_rows=np.array(sample, np.int32),
        )

    def step(self, rows: list[tuple[str, list[int]]]) -> F32:
        """Run one step, all rows sampled: logits float32 [R, vocab]."""
        return self.model.forward(self.batch(rows, list(range(len(rows)))), self.pool)

    def kv(self, name: str) -> tuple[F32, F32]:
        """Keys and values of a request gathered from its pages, float32 [layers, kv_heads, length, head_dim] each."""
        length, table = self.contexts[name], self.tables[name]
        k, v = (
            a[:, table].reshape(a.shape[0], -1, *a.shape[3:])[:, :length].swapaxes(1, 2)
            for a in (self.pool.k, self.pool.v)
        )
        return k, v


@pytest.fixture
def make_driver() -> Callable[..., PagedDriver]:
    """``make_driver(model, pages=, page_size=, seed=)``: a :class:`PagedDriver`."""
    return PagedDriver


TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 101,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor shapes of a Llama with this config.json."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= {
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}self_attn.q_proj.weight": (q, hidden),
            f"{at}self_attn.k_proj.weight": (kv, hidden),
            f"{at}self_attn.v_proj.weight": (kv, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, q),
            f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}mlp.gate_proj.weight": (inner, hidden),
            f"{at}mlp.up_proj.weight": (inner, hidden),
            f"{at}mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


@dataclass(frozen=True)
class TinyModel:
    """A random Llama in a directory: its config.json as a dict and its float32 tensors."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, F32]


def write_tiny(path: Path, seed: int = 0, **changes: Any) -> TinyModel:
    """Write a random Llama to ``path``; ``changes`` replace entries of config.json."""
    config = TINY | changes
    rng = np.random.default_rng(seed)
    tensors = {
        name: (rng.standard_normal(shape) * (0.3 if len(shape) > 1 else 0.1) + (len(shape) == 1)).astype(np.float32)
        for name, shape in tiny_shapes(config).items()
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return TinyModel(path, config, tensors)


@pytest.fixture
def make_tiny(tmp_path: Path) -> Callable[..., TinyModel]:
    """``make_tiny(seed=, **config)``: a random Llama in a directory of its own."""
    count = 0

    def make(seed: int = 0, **changes: Any) -> TinyModel:
        nonlocal count
        count += 1
        return write_tiny(tmp_path / f"tiny{count}", seed, **changes)

    return make


@pytest.fixture(scope="session")
def write_tiny_model() -> Callable[..., TinyModel]:
    """``write_tiny_model(path, seed=, **config)``: as :func:`make_tiny`, for fixtures that outlive one test."""
    return write_tiny
