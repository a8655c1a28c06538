"""A decoder of any layer shape with random weights, captured as one graph a step: what whole-step timings run.

It has the operations of models.layers.Decoder in their order, fused where the GPU has a fused one, from token ids to
sampled tokens. Random weights cost the same time as real ones; nothing is learned from the values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import cupy as cp
import numpy as np

from blink_core.ops.cuda_ops import (
    AttentionShape,
    CudaAttentionPlan,
    CudaMoe,
    CudaOps,
    CudaSampler,
    CudaWeight,
    Norm,
    StepArrays,
)
from blink_core.ops.cuda_sampling import SAMPLE_ROW, STEP_RESULT

PAGE = 16


@dataclass(frozen=True, slots=True)
class StackShape:
    """Sizes of a model. ``experts``: (count, top_k, inner) or None."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: tuple[int, int, int] | None = None
    normed: bool = False


LLAMA_3_8B = StackShape("Llama-3-8B", 32, 4096, 14336, 32, 8, 128, 128256)
QWEN3_30B_A3B = StackShape("Qwen3-30B-A3B", 48, 2048, 0, 32, 4, 128, 151936, (128, 8, 768), normed=True)


def random_weight(ops: CudaOps, *shape: int) -> cp.ndarray:
    """Values of about normal size 0.02, made on the GPU a slice at a time."""
    out = cp.empty(int(np.prod(shape)), ops.storage)
    step = 1 << 27
    for start in range(0, out.size, step):
        n = min(step, out.size - start)
        # A bfloat16 with random sign and mantissa and an exponent of -7 to -5: the magnitude of a weight.
        bits = cp.random.randint(0, 1 << 16, n, dtype=cp.uint16)
        out[start : start + n] = (bits & 0x80FF) + 0x3C00
    return out.reshape(shape)


@dataclass(slots=True)
class _Layer:
    qkv: CudaWeight
    out: CudaWeight
    gate_up: CudaWeight
    down: CudaWeight
    router: CudaWeight | None
    norms: tuple[cp.ndarray, cp.ndarray]
    k: cp.ndarray
    v: cp.ndarray


@dataclass(slots=True)
class Stack:
    """Weights and KV pages of a shape; bfloat16."""

    ops: CudaOps
    shape: StackShape
    pages: int
    layers: list[_Layer] = field(init=False)

    def __post_init__(self) -> None:
        s, ops = self.shape, self.ops
        ones = cp.full(s.hidden, 0x3F80, cp.uint16)
        pool = (self.pages, PAGE, s.kv_heads, s.head_dim)
        self.layers = []
        for _ in range(s.layers):
            lead: tuple[int, ...] = (s.experts[0],) if s.experts else ()
            inner = s.experts[2] if s.experts else s.inner
            self.layers.append(
                _Layer(
                    CudaWeight(random_weight(ops, (s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden), part="qkv"),
                    CudaWeight(random_weight(ops, s.hidden, s.heads * s.head_dim), part="out"),
                    CudaWeight(random_weight(ops, *lead, 2 * inner, s.hidden), part="gate_up"),
                    CudaWeight(random_weight(ops, *lead, s.hidden, inner), part="down"),
                    CudaWeight(random_weight(ops, s.experts[0], s.hidden)) if s.experts else None,
                    (ones, ones),
                    random_weight(ops, *pool),
                    random_weight(ops, *pool),
                )
            )
        self.table = random_weight(ops, s.vocab, s.hidden)
        self.head = CudaWeight(random_weight(ops, s.vocab, s.hidden), part="head")
        self.norm = ones
        self.qk_norm = cp.full((s.heads + s.kv_heads, s.head_dim), 0x3F80, cp.uint16) if s.normed else None
        angles = np.arange(4096)[:, None] * 5e5 ** -(np.arange(s.head_dim // 2) / (s.head_dim // 2))
        self.tables = (cp.asarray(np.cos(angles), cp.float32), cp.asarray(np.sin(angles), cp.float32))

    table: cp.ndarray = field(init=False)
    head: CudaWeight = field(init=False)
    norm: cp.ndarray = field(init=False)
    qk_norm: cp.ndarray | None = field(init=False)
    tables: tuple[cp.ndarray, cp.ndarray] = field(init=False)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a decode step of many rows reads: everything but the embedding."""
        total = self.head.nk.nbytes
        for layer in self.layers:
            total += sum(w.nk.nbytes for w in (layer.qkv, layer.out, layer.gate_up, layer.down))
        return int(total)


class Step:
    """One step of ``lengths`` (new tokens, context) of each row over a stack; :meth:`run` may be captured."""

    def __init__(self, stack: Stack, lengths: list[tuple[int, int]], seed: int = 0) -> None:
        self.stack = stack
        s, ops = stack.shape, stack.ops
        rng = np.random.default_rng(seed)
        self.decode = any(n == 1 for n, _ in lengths)
        self.prefill = any(n > 1 for n, _ in lengths)
        rows = len(lengths)
        self.attention = AttentionShape(s.heads, s.kv_heads, s.head_dim, PAGE)
        needed = [-(-c // PAGE) for _, c in lengths]
        free = rng.permutation(np.arange(2, stack.pages))
        tables = np.zeros((rows, max(needed)), np.uint32)
        slots, positions = [], []
        at = 0
        for r, (new, context) in enumerate(lengths):
            tables[r, : needed[r]] = free[at : at + needed[r]]
            at += needed[r]
            where = np.arange(context - new, context)
            positions.append(where)
            slots.append(tables[r, where // PAGE].astype(np.int64) * PAGE + where % PAGE)
        starts = np.cumsum([0, *(n for n, _ in lengths)]).astype(np.int32)
        self.tokens = tokens = int(starts[-1])
        self.arrays = StepArrays(
            cp.asarray(np.array([rows, tokens, rows, 0], np.int32)), cp.asarray(starts),
            cp.asarray(np.array([c for _, c in lengths], np.int32)), cp.asarray(tables),
            cp.arange(rows, dtype=cp.int32),
        )  # fmt: skip
        self.ids = cp.asarray(rng.integers(0, s.vocab, tokens).astype(np.int32))
        self.positions = cp.asarray(np.concatenate(positions).astype(np.int32))
        self.slots = cp.asarray(np.concatenate(slots))
        self.last = cp.asarray(starts[1:] - 1)
        self.plan = CudaAttentionPlan(ops.kernels, self.attention, rows, tokens)
        width = s.heads + 2 * s.kv_heads
        self.x, self.h = ops.empty(tokens, s.hidden), ops.empty(tokens, s.hidden)
        self.delta = ops.empty(tokens, s.hidden)
        self.qkv, self.attended = ops.empty(tokens, width * s.head_dim), ops.empty(tokens, s.heads * s.head_dim)
        self.moe = None
        if s.experts:
            count, top_k, inner = s.experts
            self.moe = CudaMoe(ops.kernels, ops.gemm, count, top_k, s.hidden, inner, tokens, ops.storage)
        self.both, self.acted = ops.empty(tokens, 2 * s.inner), ops.empty(tokens, s.inner)
        self.final = ops.empty(rows, s.hidden)
        self.logits = cp.empty((rows, s.vocab), cp.float32)
        self.sampler = CudaSampler(ops.kernels, s.vocab, rows, rows)
        records = np.zeros(rows, SAMPLE_ROW)
        records["repetition"], records["top_p"], records["owner"] = 1, 1, 1
        records["out"] = records["row"] = np.arange(rows)
        self.records = cp.asarray(records.view(np.uint8))
        self.results = cp.zeros(rows * STEP_RESULT.itemsize, cp.uint8)
        self.top = (cp.empty((rows, 20), cp.int32), cp.empty((rows, 20), cp.float32))

    def run(self, skip: frozenset[str] = frozenset()) -> None:
        """Launch the step. ``skip``: parts left out, to see what they cost: attention, small, products, sampler."""
        ops, stack = self.stack.ops, self.stack
        s = stack.shape
        attends, small, products = "attention" not in skip, "small" not in skip, "products" not in skip
        ops.embedding(stack.table, self.ids, self.x)
        self.plan.make(self.arrays)
        shaped = self.qkv.reshape(self.tokens, -1, s.head_dim)
        fused = small and ops.gemm.norms(self.tokens, s.hidden)
        pending: cp.ndarray | None = None  # a projection not yet added to the residual stream
        following = [layer.qkv for layer in stack.layers[1:]]
        for index, layer in enumerate(stack.layers):
            first, second = (Norm(w, 1e-5) if fused else None for w in layer.norms)
            h = self.x if fused else self.h
            if small and not fused:
                self._norm(pending, layer.norms[0])
            if products:
                ops.linear(h, layer.qkv, self.qkv, norm=first)
            rope = (self.positions, self.slots, stack.tables, layer.k, layer.v)
            if small and attends:
                ops.rope_attention(
                    shaped, self.plan, *rope, self.attended, norm=stack.qk_norm, decode=self.decode,
                    prefill=self.prefill,
                )  # fmt: skip
            elif small:
                ops.rope_append(shaped, self.attention, *rope, norm=stack.qk_norm)
            elif attends:
                ops.paged_attention(
                    shaped, layer.k, layer.v, self.plan, self.attended, decode=self.decode, prefill=self.prefill
                )
            if products:
                pending = self._project(self.attended, layer.out)
            mixture, router = self.moe, layer.router
            if small and not fused:
                self._norm(pending, layer.norms[1])
            if products and mixture is not None and router is not None:
                pending = None
                mixture(
                    h, router, layer.gate_up, layer.down, self.arrays.sizes, self.x, normalize=True,
                    residual=self.x, norm=second, normed=self.h, ahead=next(iter(following[index:]), None),
                )  # fmt: skip
            elif products:
                if small or ops.gemm.fuses_silu(h, layer.gate_up, self.acted):
                    ops.gate_up_silu(h, layer.gate_up, self.acted, self.both, norm=second)
                else:
                    ops.linear(self.h, layer.gate_up, self.both)
                pending = self._project(self.acted, layer.down)
        ops.chosen_rms_norm(self.x, pending, self.last, stack.norm, 1e-5, self.final)
        if products:
            ops.linear(self.final, stack.head, self.logits)
        if "sampler" not in skip:
            self.sampler(self.logits, self.records, self.arrays.sizes, self.results, *self.top)

    def _project(self, x: cp.ndarray, weight: CudaWeight) -> cp.ndarray | None:
        """Own kernels add to the residual stream; cuBLASLt's product is added by the norm that follows, which costs
        less than its epilogue."""
        if self.stack.ops.gemm.adds_residual(x, weight, self.delta):
            self.stack.ops.linear(x, weight, self.x, self.x)
            return None
        return self.stack.ops.linear(x, weight, self.delta)

    def _norm(self, pending: cp.ndarray | None, weight: cp.ndarray) -> None:
        if pending is None:
            self.stack.ops.rms_norm(self.x, weight, 1e-5, self.h)
        else:
            self.stack.ops.add_rms_norm(self.x, pending, weight, 1e-5, self.h)

    def results_host(self) -> Any:
        """STEP_RESULT records of the rows."""
        return cp.asnumpy(self.results).view(STEP_RESULT)
