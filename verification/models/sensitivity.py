"""Does a model notice faults? Probes that must change its greedy tokens, and margins that must be far above rounding.

A tiny random model whose logits hang on the last token only would pass every test of the KV cache. Each model is
therefore shown, at build, to change a greedy token for a wrong page, position, row or head (design section 9), and,
where it has such a thing, for a window that is ignored, for the wrong rotary factors, and for a wrong expert.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from verification.oracles.hf import HFOracle
from verification.result import JSON
from verification.thresholds import TinyModelThresholds

PAGE = 16
PROBES = 6
CACHED = 3 * PAGE - 5  # rows in the cache when the fault strikes: two full pages and a part of the third
STEPS = 24

# Exchanging two full pages is no fault that tokens can show: attention ignores the order of rows that carry their
# rotation (the KV criterion sees it). Exchanging a full page with the part of the last is one, for rows are lost and
# stale ones read; so are a page or row of another request, and a row rotated for another place.
FAULTS = ("foreign-page", "swapped-pages", "foreign-row", "wrong-position", "wrong-head")


def faults_of(config: Any) -> tuple[str, ...]:
    """Faults that a model of this HuggingFace configuration must notice: FAULTS, and those of what it has."""
    found: tuple[str, ...] = FAULTS
    if windowed_layers(config):
        found += ("ignored-window",)
    if config.rope_parameters["rope_type"] != "default":
        found += ("wrong-rope",)
    if getattr(config, "num_experts", 0):
        found += ("wrong-expert",)
    return found


def windowed_layers(config: Any) -> int:
    """Number of layers with a sliding window."""
    if getattr(config, "sliding_window", None) is None:
        return 0
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * int(config.num_hidden_layers)
    return list(kinds).count("sliding_attention")


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What the probes showed.

    margin: least top-2 margin of float64 over the rows that emit a token. bound: largest float32 logit error on those
    rows. rows: their number. killed: by fault, probes whose greedy tokens changed. probes: probes of each fault.
    """

    margin: float
    bound: float
    rows: int
    probes: int
    killed: Mapping[str, int]

    @property
    def margin_ratio(self) -> float:
        return self.margin / self.bound if self.bound > 0 else float("inf")

    def shortfalls(self, limits: TinyModelThresholds) -> list[str]:
        """What is missing, one line each; empty for a model that is sensitive enough."""
        missing = []
        if not self.margin_ratio > limits.margin_factor:
            missing.append(
                f"least margin {self.margin:.3g} is {self.margin_ratio:.3g}x the error bound {self.bound:.3g}, "
                f"not above {limits.margin_factor:g}x"
            )
        for fault in dict.fromkeys((*FAULTS, *self.killed)):
            found = self.killed.get(fault, 0)
            if found < limits.min_kill_fraction * self.probes:
                missing.append(f"{fault} changed a greedy token in {found} of {self.probes} probes")
        return missing

    def to_json(self) -> dict[str, JSON]:
        return {**asdict(self), "killed": dict(self.killed), "margin_ratio": self.margin_ratio}


def measure_sensitivity(oracle64: HFOracle, oracle32: HFOracle, seed: int) -> Sensitivity:
    """Run the probes, whose prompts are drawn from ``seed``, on a model given by its two oracles."""
    draw = np.random.default_rng([seed, 1])
    prompts = torch.from_numpy(draw.integers(3, oracle32.vocab_size, (PROBES, CACHED + 1)))
    model = oracle32.model
    rows = draw_rows(draw, model.config)
    with torch.inference_mode():
        clean, tokens = _continue(model, prompts, None)
        killed = {
            fault: int((tokens != _continue(model, prompts, perturb, clean)[1]).any(dim=1).sum())
            for fault, perturb in cache_faults(model, rows).items()
        }
        for fault, make in MODEL_FAULTS.items():
            if fault in faults_of(model.config):
                killed[fault] = int((tokens != _continue(make(model), prompts, None)[1]).any(dim=1).sum())
    sequences = torch.cat([prompts, tokens], dim=1)[:, :-1].tolist()
    reference = oracle64.forward_many(sequences, start=[CACHED] * PROBES, batch_tokens=PROBES * len(sequences[0]))
    ordinary = oracle32.forward_many(sequences, start=[CACHED] * PROBES, batch_tokens=PROBES * len(sequences[0]))
    r, h = (np.concatenate([run.logits for run in runs]).astype(np.float64) for runs in (reference, ordinary))
    ordered = np.sort(r, axis=1)
    margin = float((ordered[:, -1] - ordered[:, -2]).min())
    if not np.array_equal(r.argmax(axis=1), tokens.numpy().ravel()):
        margin = 0.0  # float64 would have continued otherwise: no margin at all
    return Sensitivity(
        margin, float(np.abs(h - r).max()), len(r), PROBES, {f: killed[f] for f in faults_of(model.config)}
    )


def draw_rows(draw: np.random.Generator, config: Any) -> torch.Tensor:
    """The position that is struck in each probe, int64 [PROBES].

    A row that no layer sees any more is no fault: where every layer has a window, one within the next token's is drawn.
    """
    window = config.sliding_window if windowed_layers(config) == config.num_hidden_layers else CACHED
    return torch.from_numpy(draw.integers(max(0, CACHED + 1 - window), CACHED, PROBES))


Perturb = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
KV = list[tuple[torch.Tensor, torch.Tensor]]


def _continue(
    model: Any, prompts: torch.Tensor, perturb: Perturb | None, cached: KV | None = None
) -> tuple[KV, torch.Tensor]:
    """The clean cache, and the greedy tokens [probes, STEPS] after it was perturbed."""
    if cached is None:
        cache = DynamicCache()
        model(prompts[:, :CACHED], cache=cache, use_cache=True)
        cached = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    cache = DynamicCache()  # without the configuration, with which it would drop rows outside a window
    for index, (k, v) in enumerate(cached):
        cache.update(*(perturb(k, v) if perturb else (k, v)), index)
    token = prompts[:, CACHED:]
    tokens = []
    for _ in range(STEPS):
        token = model(token, cache=cache, use_cache=True).logits[:, -1].argmax(dim=-1, keepdim=True)
        tokens.append(token)
    return cached, torch.cat(tokens, dim=1)


def cache_faults(model: Any, rows: torch.Tensor) -> dict[str, Perturb]:
    """Faults on K, V [probes, kv_heads, positions, head_dim]; ``rows`` is the position struck in each probe."""
    probe = torch.arange(len(rows))
    angle = torch.cat([model.model.rotary_emb.inv_freq] * 2)  # of LongRoPE: those of the last call

    def foreign_page(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = k.clone(), v.clone()
        for part in (k, v):
            part[:, :, PAGE : 2 * PAGE] = part[:, :, PAGE : 2 * PAGE].roll(1, dims=0)
        return k, v

    def swapped_pages(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        last, filled = CACHED // PAGE * PAGE, CACHED % PAGE
        k, v = k.clone(), v.clone()
        for part in (k, v):
            full = part[:, :, PAGE : 2 * PAGE].clone()
            stale = full.roll(1, dims=0)  # what a former owner left where the last page is not filled yet
            part[:, :, PAGE : PAGE + filled] = part[:, :, last:]
            part[:, :, PAGE + filled : 2 * PAGE] = stale[:, :, filled:]
            part[:, :, last:] = full[:, :, :filled]
        return k, v

    def foreign_row(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = k.clone(), v.clone()
        for part in (k, v):
            part[probe, :, rows] = part.roll(1, dims=0)[probe, :, rows]
        return k, v

    def wrong_position(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k = k.clone()
        k[probe, :, rows] = rotate(k[probe, :, rows], angle)
        return k, v

    return {
        "foreign-page": foreign_page,
        "swapped-pages": swapped_pages,
        "foreign-row": foreign_row,
        "wrong-position": wrong_position,
    }


def rotate(k: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    """K [..., head_dim] turned on by ``angle`` [rotated] (the two halves alike): one position further for inv_freq."""
    turned, rest = k[..., : len(angle)], k[..., len(angle) :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((turned * angle.cos() + torch.cat((-second, first), dim=-1) * angle.sin(), rest), dim=-1)


def with_wrong_heads(model: Any) -> Any:
    """A copy in which query head h reads KV head h % kv_heads where it should read h // group.

    Query heads are moved to the place of the KV head that they wrongly read, in the query's rows and the output
    projection's columns alike, so that the mapping is all that changes.
    """
    wrong = copy.deepcopy(model)
    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    place = [(h % kv_heads) * (heads // kv_heads) + h // kv_heads for h in range(heads)]
    order = torch.tensor([place.index(slot) for slot in range(heads)])
    for layer in wrong.model.layers:
        attention = layer.self_attn
        size = attention.head_dim
        rows = (order[:, None] * size + torch.arange(size)).reshape(-1)
        query = attention.qkv_proj if hasattr(attention, "qkv_proj") else attention.q_proj  # fused: query rows first
        for parameter in (query.weight, query.bias):
            if parameter is not None:
                parameter.data[: len(rows)] = parameter.data[rows]
        attention.o_proj.weight.data = attention.o_proj.weight.data[:, rows]
    return wrong


def without_window(model: Any) -> Any:
    """A copy whose queries see all earlier positions."""
    wrong = copy.deepcopy(model)
    wrong.config.sliding_window = 1 << 30  # the masks are made from the configuration at every call
    return wrong


def with_wrong_rope(model: Any) -> Any:
    """A copy with the frequencies of no scaling, or of LongRoPE's other table."""
    wrong = copy.deepcopy(model)
    config = copy.deepcopy(model.config)
    rope = config.rope_parameters
    if rope["rope_type"] == "longrope":
        rope["short_factor"], rope["long_factor"] = rope["long_factor"], rope["short_factor"]
    else:
        config.rope_parameters = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    wrong.model.rotary_emb = type(model.model.rotary_emb)(config)
    return wrong


def with_wrong_experts(model: Any) -> Any:
    """A copy whose router picks the neighbour of each expert that it should."""
    wrong = copy.deepcopy(model)
    for layer in wrong.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.weight.data = layer.mlp.gate.weight.data.roll(1, dims=0)
    return wrong


MODEL_FAULTS: Mapping[str, Callable[[Any], Any]] = {
    "wrong-head": with_wrong_heads,
    "ignored-window": without_window,
    "wrong-rope": with_wrong_rope,
    "wrong-expert": with_wrong_experts,
}
