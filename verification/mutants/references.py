"""What HuggingFace gives for the requests that the checkers of the model families draw, kept on disk by seed.

A checker runs once for each mutant and seed, HuggingFace once for each seed: prompts do not hang on the product, and
its answers are compared as far as its tokens are HuggingFace's own greedy ones. torch is imported only where something
is missing on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from verification.mutants.model import PRODUCT

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

FOLDER = PRODUCT / "build" / "mutants"
VERSION = 4  # of what is drawn and kept
COMPUTE_S = 300.0  # for another process that computes the same, as shards side by side do
ENDLESS = 1 << 30  # `after` of a request that comes once nothing is open
FAMILIES = (
    *("llama-gqa3", "mistral-window", "qwen3-moe-mixed", "phi4-longrope", "qwen2-yarn", "llama-rope-llama3"),
    *("qwen2-window", "qwen3-moe", "phi3-longrope", "llama-bias", "qwen2", "qwen3", "qwen3-untied", "llama-gqa7"),
    *("mistral-full", "llama-rope-linear", "phi3"),
)


@dataclass(frozen=True, slots=True)
class Sequence64:
    """One request. prompt; tokens: HuggingFace's greedy ones behind it. after: see `RequestSpec`.

    logits: of the rows that give the tokens, [tokens, vocab]; k, v: of all positions but the last token's, [layers,
    positions, kv_heads, head_dim]; each in float64 and in HuggingFace's float32.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    after: int
    logits64: F64
    logits32: F32
    k64: F64
    v64: F64
    k32: F32
    v32: F32


def model_path(name: str) -> Path:
    """Folder of the tiny model `name`, built on first use."""
    path = FOLDER / "models" / name
    if not (path / "tiny.json").exists():
        from verification.models.tiny import build_named

        scratch = path.with_name(f".{name}-{os.getpid()}")
        build_named(name, scratch)
        try:
            scratch.rename(path)
        except OSError:  # another process was first
            shutil.rmtree(scratch)
    return path


def draw_prompts(config: dict[str, object], seed: int) -> list[tuple[tuple[int, ...], int, int]]:
    """(prompt, new tokens, after) of each request; config: of config.json.

    Lone tokens, a short prompt, one beyond every window and original maximum, one that outgrows the original maximum
    while it decodes, one that begins like another, and two behind page boundaries. Of LongRoPE one more, which begins
    like the one that outgrew the original maximum and stays within it: none of that one's keys are right for it.
    """
    rng = np.random.default_rng([seed, 7])
    vocab = int(str(config["vocab_size"]))
    rope = config.get("rope_parameters")
    original = rope.get("original_max_position_embeddings", 32) if isinstance(rope, dict) else 32

    def ids(count: int) -> tuple[int, ...]:
        return tuple(int(i) for i in rng.integers(3, vocab, count))

    long = ids(int(rng.integers(44, 57)))
    shared = long[: int(rng.integers(33, 41))] + ids(5)
    drawn = [(ids(1), 1, 0) for _ in range(4)]
    drawn.append((ids(int(rng.integers(6, 15))), 8, 0))
    drawn.append((long, 10, 0))
    drawn.append((ids(int(original) - int(rng.integers(2, 5))), 10, 0))
    drawn += [(ids(17), 8, 0), (ids(int(rng.integers(31, 35))), 8, 0)]
    drawn.append((shared, 8, ENDLESS))
    if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
        drawn.append((drawn[6][0][: int(rng.integers(17, 25))] + ids(3), 4, ENDLESS))
    return drawn


def reference(name: str, seed: int) -> tuple[Sequence64, ...]:
    """The requests of a tiny model and seed with HuggingFace's answers."""
    path = model_path(name)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    drawn = draw_prompts(config, seed)
    told = (path / "tiny.json").read_bytes() + json.dumps([VERSION, config, drawn], sort_keys=True).encode()
    file = FOLDER / "references" / f"{name}-{seed}-{hashlib.sha256(told).hexdigest()[:12]}.npz"
    _once(file, lambda to: _compute(path, drawn, to))
    with np.load(file) as held:
        return tuple(_sequence(held, index, prompt, after) for index, (prompt, _, after) in enumerate(drawn))


def remembered(kind: str, told: object, compute: Callable[[], object]) -> Any:
    """What `compute` gives, as JSON has it, kept on disk under a digest of `told`; for oracles that take long to load.

    told: everything that the answer hangs on, as JSON has it.
    """
    digest = hashlib.sha256(json.dumps([VERSION, told], sort_keys=True).encode()).hexdigest()[:20]
    file = FOLDER / "references" / f"{kind}-{digest}.json"
    _once(file, lambda to: to.write_text(json.dumps(compute()), encoding="utf-8"))
    return json.loads(file.read_text(encoding="utf-8"))


def _once(file: Path, compute: Callable[[Path], object]) -> None:
    """Has `compute` write a file that is not there yet; of several processes that want it one does, the others wait.
    Raises filelock.Timeout."""
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock"), timeout=COMPUTE_S):
        if not file.exists():
            scratch = file.with_suffix(f".part{file.suffix}")
            compute(scratch)
            scratch.replace(file)


_FIELDS = ("logits64", "logits32", "k64", "v64", "k32", "v32")


def _sequence(held: np.lib.npyio.NpzFile, index: int, prompt: tuple[int, ...], after: int) -> Sequence64:
    tokens = tuple(int(t) for t in held[f"tokens{index}"])
    return Sequence64(prompt, tokens, after, *(held[f"{name}_{index}"] for name in _FIELDS))


def _compute(path: Path, drawn: Sequence[tuple[tuple[int, ...], int, int]], file: Path) -> None:
    from verification.oracles.hf import HFOracle

    pair: tuple[HFOracle, HFOracle] | None = _ORACLES.get(path)
    if pair is None:
        pair = _ORACLES[path] = HFOracle.load_pair(path, threads=1)
    hf64, hf32 = pair
    arrays: dict[str, NDArray[np.generic]] = {}
    for index, (prompt, new, _) in enumerate(drawn):
        tokens = hf64.generate(prompt, new, ignore_eos=True)
        ids, start = [*prompt, *tokens[:-1]], len(prompt) - 1
        wide, narrow = hf64.forward(ids, start=start), hf32.forward(ids, start=start)
        values = (wide.logits, narrow.logits, wide.k, wide.v, narrow.k, narrow.v)
        arrays[f"tokens{index}"] = np.array(tokens, np.int32)
        arrays |= {f"{name}_{index}": value for name, value in zip(_FIELDS, values, strict=True)}
    np.savez(file, **arrays)  # type: ignore[arg-type]


_ORACLES: dict[Path, Any] = {}  # torch and transformers stay unloaded until something is missing
