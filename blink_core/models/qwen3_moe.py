"""Qwen3-MoE: Qwen3 whose MLPs are mixtures of experts, in all layers or some (arXiv 2505.09388)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from blink_core.models import qwen2, qwen3
from blink_core.models.config import ExpertConfig
from blink_core.models.family import Family, Values
from blink_core.models.fields import Fields
from blink_core.models.layers import GatedMlp, Mlp
from blink_core.models.loaders import WeightReader
from blink_core.ops.numpy_ops import F32, LinearWeight, NumpyOps


@dataclass(frozen=True, slots=True)
class SparseMlp:
    """Each token's ``top_k`` experts, weighted by the router.

    An expert runs on its tokens together. A token's parts are added in the order of its experts' numbers, as in
    HuggingFace, and a row of a product has the same bits in any company, so that batch-invariant mode holds.
    """

    router: LinearWeight
    experts: tuple[GatedMlp, ...]
    top_k: int
    normalize: bool

    def __call__(self, x: F32, ops: NumpyOps) -> F32:
        """float32 [T, hidden] -> [T, hidden]."""
        index, weight = ops.route(ops.linear(x, self.router), self.top_k, normalize=self.normalize)
        out = np.zeros_like(x)
        for number in np.unique(index):
            token, place = np.nonzero(index == number)  # a token takes an expert once
            out[token] += self.experts[number](x[token], ops) * weight[token, place, None]
        return out


class Qwen3Moe(qwen3.Qwen3):
    """Qwen3MoeForCausalLM."""

    def read_mlp(self, reader: WeightReader, at: str, index: int) -> Mlp:
        """Router and experts, or a dense MLP in the layers that are not sparse."""
        c = self.config
        if c.experts is None or index not in c.experts.layers:
            return super().read_mlp(reader, at, index)
        e = c.experts
        router = self.read_linear(reader, [f"{at}.gate"], [e.count], c.hidden_size)
        gate_up = reader.experts(
            f"{at}.experts", ["gate_proj", "up_proj"], "gate_up_proj", e.count, e.intermediate_size, c.hidden_size
        )
        down = reader.experts(f"{at}.experts", ["down_proj"], "down_proj", e.count, c.hidden_size, e.intermediate_size)
        prepare = self._ops.prepare_linear
        experts = tuple(GatedMlp(prepare(a), prepare(b)) for a, b in zip(gate_up, down, strict=True))
        return SparseMlp(router, experts, e.top_k, e.normalize)


def from_hf(raw: Fields, layers: int) -> Values:
    """Layer i is sparse if ``decoder_sparse_step`` divides i + 1, unless ``mlp_only_layers`` lists it.

    transformers 5 writes the number of experts as ``num_local_experts``. The window, if in use, is every layer's.
    """
    step, dense = raw.get("decoder_sparse_step", int, 1), raw.get("mlp_only_layers", list, [])
    if step < 1:
        raise raw.fail(f"decoder_sparse_step is {step}, expected at least 1")
    experts = ExpertConfig(
        count=raw.get("num_experts" if raw.has("num_experts") else "num_local_experts", int),
        top_k=raw.get("num_experts_per_tok", int),
        intermediate_size=raw.get("moe_intermediate_size", int),
        normalize=raw.get("norm_topk_prob", bool, False),
        layers=tuple(i for i in range(layers) if (i + 1) % step == 0 and i not in dense),
    )
    window = raw.optional("sliding_window", int) if raw.get("use_sliding_window", bool, False) else None
    return qwen3.attention_bias(raw) | {"experts": experts, "windows": (window,) * layers}


def from_gguf(raw: Fields, layers: int) -> Values:
    """Sparse layers are those with a router; llama.cpp normalises the weights of this family unless told otherwise."""
    experts = ExpertConfig(
        count=raw.get("expert_count", int),
        top_k=raw.get("expert_used_count", int),
        intermediate_size=raw.get("expert_feed_forward_length", int),
        normalize=raw.get("expert_weights_norm", bool, True),
        layers=tuple(i for i in range(layers) if f"blk.{i}.ffn_gate_inp.weight" in raw.tensors),
    )
    raw.only(**{"expert_shared_count": 0, "attention.sliding_window": 0})
    return {"experts": experts}


FAMILY = Family(
    model_type="qwen3_moe",
    causal_lm="Qwen3MoeForCausalLM",
    gguf="qwen3moe",
    network=Qwen3Moe,
    defaults={
        **qwen2.DEFAULTS,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_local_experts": 128,
    },
    from_hf=from_hf,
    from_gguf=from_gguf,
    gguf_names={
        **qwen3.NORM_NAMES,
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.gate_proj",
        "ffn_up_exps": "mlp.experts.up_proj",
        "ffn_down_exps": "mlp.experts.down_proj",
    },
)
