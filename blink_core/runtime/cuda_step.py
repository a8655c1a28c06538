"""The model step on the GPU: from the scheduler's plan to sampled tokens, in memory fixed at start, ready for capture.

It has the operations of `models.layers.Decoder` in their order, fused where the GPU has a fused one. All it reads of a
step lies where the scheduler wrote it; the host passes nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import cupy as cp
import numpy as np

from blink_core.abi.capture import record_dtype
from blink_core.abi.config import EngineConfig
from blink_core.ops.cuda_attention import AttentionShape, CudaAttentionPlan, StepArrays
from blink_core.ops.cuda_gemm import CudaWeight, Norm, Tuning, tune_step
from blink_core.ops.cuda_kv_sanitizer import CudaKvSanitizer
from blink_core.ops.cuda_modules import Kernel, pointer
from blink_core.ops.cuda_moe import CudaMoe
from blink_core.ops.cuda_ops import random_normal
from blink_core.ops.cuda_sampling import SAMPLE_ROW, CudaSampler
from blink_core.ops.cuda_sources import source
from blink_core.ops.kv_tags_abi import KvHostMemory
from blink_core.runtime.capture_writer import CaptureMemory
from blink_core.runtime.cuda_memory import device_view
from blink_core.runtime.cuda_model import CudaLayer, CudaNetwork
from blink_core.runtime.nvrtc import step_options
from blink_core.runtime.redo import REDO
from blink_core.runtime.serve_abi import (
    MAX_PLANS,
    CaptureEndParams,
    CaptureParams,
    NoopParams,
    StepEndParams,
    StepViewParams,
)

CAPTURE_LIMIT_NS = 10_000_000_000
PARTS = ("qkv", "out", "gate_up", "down")  # a layer's products: CudaWeight.part
TUNED_BYTES, TUNED_LAYERS = 300 << 20, 4  # weights at least that do not stay in the L2 from one product to the next


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sizes of a step graph: at most so many tokens, rows and sampled rows; ``decode``: rows of one token only."""

    tokens: int
    rows: int
    samples: int
    decode: bool

    @property
    def name(self) -> str:
        """For logs."""
        return f"{'decode' if self.decode else 'mixed'} {self.tokens}"


def buckets_of(config: EngineConfig) -> list[Bucket]:
    """Buckets in order of cost: decode steps of 1, 2, 4 ... rows, then steps with prefill of 32, 64 ... tokens.

    A step with prefill samples from few rows as a rule: each of its sizes comes with 8 rows of logits and with as many
    as there can be.
    """
    found: list[Bucket] = []
    rows = 1
    while True:
        n = min(rows, config.max_rows)
        found.append(Bucket(n, n, n, True))
        if n == config.max_rows:
            break
        rows *= 2
    tokens = 32
    while True:
        n = min(tokens, config.token_budget)
        most = min(n, config.max_rows)
        for samples in sorted({min(8, most), most}):
            found.append(Bucket(n, most, samples, False))
        if n == config.token_budget:
            break
        tokens *= 2
    return found


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Addresses, as a kernel sees them, of what the scheduler owns, and what the end of a step reports to.

    state, plan: the regions. done: u64, the step that ended last. times: u64 [time_slots, 2], 0 for none.
    """

    state: int
    plan: int
    done: int
    times: int = 0
    time_slots: int = 1


class CudaStep:
    """Buffers of the largest step, and `run`, which launches one on CuPy's current stream."""

    def __init__(
        self,
        network: CudaNetwork,
        config: EngineConfig,
        kv: cp.ndarray,
        memory: StepMemory,
        capture: CaptureMemory | None = None,
        sanitizer: KvHostMemory | None = None,
    ) -> None:
        """kv: [2, layers, pages, page_size, kv_heads, head_dim] of the element type. sanitizer: where the KV sanitizer
        reports; None: it is off and nothing of it is launched. Raises ValueError for a prefix cache of pages that
        LongRoPE computes anew."""
        if network.original_max and config.prefix_cache:
            raise ValueError(
                f"sequences beyond {network.original_max} tokens have their keys computed anew: no prefix cache with "
                f"max_len {config.max_len}"
            )
        self.network, self.config, self._memory, self._capture = network, config, memory, capture
        self._keys, self._values = kv
        ops, m = network.ops, network.config
        self._ops, self._hidden = ops, m.hidden_size
        self._shape = AttentionShape(m.num_heads, m.num_kv_heads, m.head_dim, config.page_size)
        rows, tokens = config.max_rows, config.token_budget
        windows = {layer.window for layer in network.layers}
        if len(windows) > MAX_PLANS:
            raise ValueError(f"the model has {len(windows)} attention windows, at most {MAX_PLANS}")
        self._plans = {
            w: CudaAttentionPlan(
                ops.kernels,
                self._shape,
                rows,
                tokens,
                window=w,
                invariant=ops.batch_invariant,
                max_context=config.max_len,
            )
            for w in sorted(windows, key=lambda w: w or 0)
        }
        self._view_arrays(rows, tokens)
        self.sanitizer = None if sanitizer is None else self._sanitized(sanitizer)
        self._activations(rows, tokens)
        width = max(1, config.max_logprobs)
        self._sampler = CudaSampler(
            ops.kernels, m.vocab_size, rows, rows, config.max_logprobs, invariant=ops.batch_invariant
        )
        plan = config.layouts()["Plan"].sections
        self._results = device_view(memory.plan + plan["results"].offset, (16 * rows,), cp.uint8)
        self._top = tuple(
            device_view(memory.plan + plan[name].offset, (rows, width), dtype)
            for name, dtype in (("top_tokens", cp.int32), ("top_logprobs", cp.float32))
        )
        self._kernels = _step_kernels()
        self._tuned: set[tuple[str, int, int, int, bool]] = set()
        self.products: list[dict[str, Any]] = []

    def _view_arrays(self, rows: int, tokens: int) -> None:
        """What step_view makes of the plan."""
        self.sizes = cp.zeros(4, cp.int32)
        self.token_ids, self.positions = cp.zeros(tokens, cp.int32), cp.zeros(tokens, cp.int32)
        self.kv_slots = cp.zeros(tokens, cp.int64)
        self.row_starts, self.context_lens = cp.zeros(rows + 1, cp.int32), cp.zeros(rows, cp.int32)
        self.table_rows, self.sample_tokens = cp.zeros(rows, cp.int32), cp.zeros(rows, cp.int32)
        self.sample_rows = cp.zeros(rows * SAMPLE_ROW.itemsize, cp.uint8)
        self.begun = cp.zeros(1, cp.uint64)
        # LongRoPE: the pass that runs ahead of a plan, and each token's row of the rotary tables.
        self.redo = cp.zeros(REDO.itemsize, cp.uint8) if self.network.original_max else None
        self.angles = self.positions if self.redo is None else cp.zeros(tokens, cp.int32)
        state = self.config.layouts()["State"].sections
        self._tables = device_view(
            self._memory.state + state["block_tables"].offset, (self.config.max_rows, self.config.max_pages), cp.uint32
        )

    def _sanitized(self, host: KvHostMemory) -> CudaKvSanitizer:
        names = ("token_ids", "positions", "kv_slots", "row_starts", "context_lens", "table_rows")
        return CudaKvSanitizer(
            self.config, self.network.config.num_layers, state=self._memory.state, plan=self._memory.plan,
            view={name: getattr(self, name) for name in names}, options=step_options(),
            redo=pointer(self.redo), host=host,
        )  # fmt: skip

    def _activations(self, rows: int, tokens: int) -> None:
        ops, m = self._ops, self.network.config
        width = m.num_heads + 2 * m.num_kv_heads
        self.x, self._h = ops.empty(tokens, m.hidden_size), ops.empty(tokens, m.hidden_size)
        self._delta = ops.empty(tokens, m.hidden_size)
        self._qkv = ops.empty(tokens, width * m.head_dim)
        # Padding tokens have no attention, but products read their rows: never what memory happened to hold.
        self._attended = cp.zeros((tokens, m.num_heads * m.head_dim), ops.storage)
        self._both = ops.empty(tokens, 2 * m.intermediate_size)
        self._acted = ops.empty(tokens, m.intermediate_size)
        self._final = ops.empty(rows, m.hidden_size)
        self.logits = cp.empty((rows, -(-m.vocab_size // 4) * 4), cp.float32)
        e = m.experts
        self._moe = None
        if e is not None:
            self._moe = CudaMoe(
                ops.kernels, ops.gemm, e.count, e.top_k, m.hidden_size, e.intermediate_size, tokens, ops.storage
            )

    # -- the step ------------------------------------------------------------------------------------------------------

    def run(self, bucket: Bucket, *, resident: bool = False) -> None:
        """Launch the step; it may be captured. What is there of it is read on the device, padded to ``bucket``.

        resident: the scheduler's block keeps a multiprocessor meanwhile.
        """
        ops, tokens = self._ops, bucket.tokens
        ops.kernels.reserved = int(resident)
        self._launch_view(bucket)
        if self.sanitizer is not None:
            self.sanitizer.begin()
        x, h = self.x[:tokens], self._h[:tokens]
        ops.embedding(self.network.embedding, self.token_ids[:tokens], x)
        arrays = StepArrays(
            self.sizes, self.row_starts[: bucket.rows + 1], self.context_lens[: bucket.rows], self._tables,
            self.table_rows[: bucket.rows],
        )  # fmt: skip
        for plan in self._plans.values():
            plan.make(arrays)
        eps = self.network.config.rms_norm_eps
        fused = ops.gemm.norms(tokens, self._hidden)
        pending: cp.ndarray | None = None  # a projection not yet added to the residual stream
        for index, layer in enumerate(self.network.layers):
            if not fused:
                self._norm(x, pending, layer.attention_norm, h)
            pending = self._attend(index, layer, bucket, x if fused else h, fused)
            if not fused:
                self._norm(x, pending, layer.mlp_norm, h)
            pending = self._mlp(index, tokens, x if fused else h, fused)
        final, logits = self._final[: bucket.samples], self.logits[: bucket.samples]
        ops.chosen_rms_norm(x, pending, self.sample_tokens[: bucket.samples], self.network.norm, eps, final)
        ops.linear(final, self.network.head, logits)
        self._sampler(logits, self.sample_rows, self.sizes, self._results, *self._top)
        if self.sanitizer is not None:
            self.sanitizer.end()
        self._launch_end(bucket)

    def _attend(self, index: int, layer: CudaLayer, bucket: Bucket, h: cp.ndarray, fused: bool) -> cp.ndarray | None:
        ops, m, tokens = self._ops, self.network.config, bucket.tokens
        norm = Norm(layer.attention_norm, m.rms_norm_eps) if fused else None
        qkv, attended = self._qkv[:tokens], self._attended[:tokens]
        ops.linear(h, layer.qkv, qkv, norm=norm)
        shaped = qkv.reshape(tokens, -1, m.head_dim)
        keys, values, plan = self._keys[index], self._values[index], self._plans[layer.window]
        rope = (self.angles[:tokens], self.kv_slots[:tokens], self.network.tables, keys, values)
        norms: dict[str, Any] = {"norm": layer.qk_norm, "eps": m.rms_norm_eps}
        if self.sanitizer is None:
            ops.rope_attention(shaped, plan, *rope, attended, **norms, prefill=not bucket.decode)
        else:
            ops.rope_append(shaped, self._shape, *rope, **norms)
            self.sanitizer.append(index)
            self.sanitizer.check(index, layer.window)
            ops.paged_attention(shaped, keys, values, plan, attended, prefill=not bucket.decode)
        return self._project(attended, layer.out, tokens)

    def _mlp(self, index: int, tokens: int, h: cp.ndarray, fused: bool) -> cp.ndarray | None:
        ops, m, layer = self._ops, self.network.config, self.network.layers[index]
        norm = Norm(layer.mlp_norm, m.rms_norm_eps) if fused else None
        x = self.x[:tokens]
        if layer.experts is not None:
            assert self._moe is not None
            assert m.experts is not None
            e, layers = layer.experts, self.network.layers
            self._moe(
                h, e.router, e.gate_up, e.down, self.sizes, x, normalize=m.experts.normalize, residual=x, norm=norm,
                normed=self._h[:tokens], ahead=layers[index + 1].qkv if index + 1 < len(layers) else None,
            )  # fmt: skip
            return None
        assert layer.gate_up is not None
        assert layer.down is not None
        acted = self._acted[:tokens]
        ops.gate_up_silu(h, layer.gate_up, acted, self._both[:tokens], norm=norm)
        return self._project(acted, layer.down, tokens)

    def _project(self, x: cp.ndarray, weight: CudaWeight, tokens: int) -> cp.ndarray | None:
        """Adds to the residual stream, or returns what is still to be added to it."""
        delta = self._delta[:tokens]
        if self._ops.gemm.adds_residual(x, weight, delta):
            self._ops.linear(x, weight, self.x[:tokens], self.x[:tokens])
            return None
        return self._ops.linear(x, weight, delta)

    def _norm(
        self,
        x: cp.ndarray,
        pending: cp.ndarray | None,
        weight: cp.ndarray,
        out: cp.ndarray,
    ) -> None:
        eps = self.network.config.rms_norm_eps
        if pending is None:
            self._ops.rms_norm(x, weight, eps, out)
        else:
            self._ops.add_rms_norm(x, pending, weight, eps, out)

    # -- its ends ------------------------------------------------------------------------------------------------------

    def _launch_view(self, bucket: Bucket) -> None:
        state, plan = (self.config.layouts()[name].sections for name in ("State", "Plan"))

        def of(region: Mapping[str, Any], base: int, name: str) -> int:
            return base + int(region[name].offset)

        p, s = self._memory.plan, self._memory.state
        params = StepViewParams(
            of(state, s, "config"), of(plan, p, "header"), of(plan, p, "rows"), of(plan, p, "token_ids"),
            of(plan, p, "positions"), of(plan, p, "kv_slots"), of(state, s, "sampling"), of(state, s, "bias"),
            of(state, s, "tokens"), of(state, s, "masks"),
            *(int(a.data.ptr) for a in (self.sizes, self.token_ids, self.positions, self.kv_slots, self.row_starts)),
            *(int(a.data.ptr) for a in (self.context_lens, self.table_rows, self.sample_tokens, self.sample_rows)),
            int(self.begun.data.ptr), pointer(self.redo), int(self._tables.data.ptr), pointer(self.angles),
            bucket.rows, bucket.tokens, bucket.samples, self.network.original_max, self.network.tables[0].shape[0] // 2,
        )  # fmt: skip
        self._kernels["step_view"].launch(1, 256, params, dependent=False)

    def _launch_end(self, bucket: Bucket) -> None:
        plan = self.config.layouts()["Plan"].sections
        header = self._memory.plan + plan["header"].offset
        if self._capture is not None:
            params = CaptureParams(
                header, self._memory.plan + plan["rows"].offset, self._memory.plan + plan["results"].offset,
                int(self.sample_rows.data.ptr), int(self.sizes.data.ptr), int(self.logits.data.ptr),
                self.logits.shape[1], self._capture.records, self.network.config.vocab_size,
                record_dtype(self.network.config.vocab_size).itemsize,
            )  # fmt: skip
            self._kernels["capture_rows"].launch(bucket.samples, 256, params, dependent=False)
            end = CaptureEndParams(
                int(self.sizes.data.ptr), header, self._capture.offered, self._capture.taken, CAPTURE_LIMIT_NS
            )
            self._kernels["capture_end"].launch(1, 32, end, dependent=False)
        launch_end(self._kernels, header, self._memory, self.begun, list(self._plans.values()), self.redo)

    def set_redo(self, part: tuple[int, int, int]) -> None:
        """Makes the next run a pass ahead of the plan, (0, 0, 0) the plan again. For the host-driven loop; the step
        must not be running."""
        if self.redo is None:
            raise ValueError("no sequence outgrows LongRoPE's original maximum here")
        record = np.zeros(1, REDO)
        record["row"], record["first"], record["count"] = part
        self.redo.set(record.view(np.uint8))
        cp.cuda.Device().synchronize()

    def tune(self, bucket: Bucket, *, resident: bool = False) -> None:
        """Measures the ways to make the products of a bucket and takes the fastest of each (see :meth:`Gemm.tune`);
        then, in whole steps on the empty plan, whether another is faster in its place (see :func:`tune_step`).
        ``products`` gets a record of it."""
        ops, rows = self._ops, bucket.tokens
        ops.kernels.reserved = int(resident)
        if ops.dtype == "float32" or ops.batch_invariant:
            return
        parts = {name: [getattr(layer, name) for layer in self.network.layers] for name in PARTS}
        parts["head"] = [self.network.head]
        found = {}
        for part, weights in parts.items():
            there = [w for w in weights if w is not None]
            tuning = self._tune(part, bucket.samples if part == "head" else rows, there, resident)
            if tuning is not None:
                found[part] = tuning
        if not found:
            return
        duels = tune_step(list(found.values()), partial(self.run, bucket, resident=resident))
        # The names of what is open in the duels' combinations, and microseconds that each comparison said.
        record = {
            "bucket": bucket.name, "resident": resident, "alone": {part: t.line for part, t in found.items()},
            "options": {part: [c.name for c in t.options] for part, t in found.items() if len(t.options) > 1},
            "in_step": [
                {"taken": d.taken, "other": d.other, "gain_us": round(d.gain_us, 2), "noise_us": round(d.noise_us, 2),
                 "won": d.won}
                for d in duels
            ],
        }  # fmt: skip
        self.products.append(record)

    def _tune(self, part: str, rows: int, weights: list[CudaWeight], resident: bool) -> Tuning | None:
        """The tuning of a product, None where there is nothing to choose or the choice is made."""
        ops = self._ops
        if rows <= ops.gemm.skinny_rows or not weights:
            return None
        n, k = weights[0].nk.shape
        key = (part, rows, n, k, resident)
        if key in self._tuned:
            return None
        self._tuned.add(key)
        x = random_normal(ops.dtype, rows, k)
        out = self.logits[:rows] if part == "head" else ops.empty(rows, n)
        acted = self._acted[:rows]

        def gated(weight: CudaWeight) -> None:
            ops.gate_up_silu(x, weight, acted, out)

        silu = part == "gate_up"
        return ops.gemm.tune(x, enough(weights), out, gated if silu else None, silu=silu)

    @property
    def nbytes(self) -> int:
        """Device memory of the step's buffers."""
        arrays = [v for v in vars(self).values() if isinstance(v, cp.ndarray) and v.base is None]
        total = sum(int(a.nbytes) for a in arrays) + self._sampler.nbytes + sum(p.nbytes for p in self._plans.values())
        total += self.sanitizer.nbytes if self.sanitizer is not None else 0
        return total - int(self._keys.nbytes + self._values.nbytes) if self._keys.base is None else total


def enough(weights: list[CudaWeight]) -> list[CudaWeight]:
    """The first of a model's weights of one shape: so many that reading them in turn is reading from memory."""
    each = int(weights[0].nk.nbytes)
    return weights[: max(TUNED_LAYERS, -(-TUNED_BYTES // each))]


def launch_end(
    kernels: dict[str, Kernel],
    header: int,
    memory: StepMemory,
    begun: cp.ndarray,
    plans: list[CudaAttentionPlan],
    redo: cp.ndarray | None = None,
) -> None:
    """The kernel that says that a step is over; nothing may follow it in the graph."""
    counts = [int(plan.counts.data.ptr) for plan in plans]
    params = StepEndParams(
        header, memory.done, int(begun.data.ptr), memory.times, (ctypes.c_void_p * MAX_PLANS)(*counts), len(counts),
        memory.time_slots, pointer(redo),
    )  # fmt: skip
    kernels["step_end"].launch(1, 32, params, dependent=False)


class NoopStep:
    """The no-op model on the GPU, for the protocol's tests and the scheduler's own cost."""

    def __init__(self, config: EngineConfig, memory: StepMemory, step_us: float = 0.0) -> None:
        """step_us: how long a step takes at least."""
        self._config, self._memory, self._spin_ns = config, memory, int(step_us * 1e3)
        self._begun = cp.zeros(1, cp.uint64)
        self._kernels = _step_kernels()
        self.nbytes = 0

    def run(self, bucket: Bucket, *, resident: bool = False) -> None:
        """Launch the step; it may be captured."""
        plan = {name: self._memory.plan + s.offset for name, s in self._config.layouts()["Plan"].sections.items()}
        params = NoopParams(
            plan["header"], plan["rows"], plan["results"], plan["top_tokens"], plan["top_logprobs"],
            self._config.max_logprobs, int(self._begun.data.ptr), self._spin_ns,
        )  # fmt: skip
        self._kernels["step_noop"].launch(1, 256, params, dependent=False)
        launch_end(self._kernels, plan["header"], self._memory, self._begun, [])


def _step_kernels() -> dict[str, Kernel]:
    found = {}
    for file, names in (
        ("step_view.cu", ("step_view",)),
        ("step_end.cu", ("step_end", "step_noop", "capture_rows", "capture_end")),
    ):
        module = cp.RawModule(code=source(file), backend="nvrtc", options=step_options())
        for name in names:
            found[name] = Kernel(name, module.get_function(name))
    return found


def poisoned_pool(network: CudaNetwork, config: EngineConfig) -> cp.ndarray:
    """A KV pool [2, layers, pages, page_size, kv_heads, head_dim] full of NaN (design section 5)."""
    m = network.config
    shape = (2, m.num_layers, config.pages, config.page_size, m.num_kv_heads, m.head_dim)
    pool = cp.empty(shape, network.ops.storage)
    poison(pool, network.ops.dtype)
    return pool


def poison(pool: cp.ndarray, dtype: str) -> None:
    """Fills a KV pool of an element type with NaN."""
    pool.fill(0x7FC0 if dtype == "bfloat16" else np.nan)
