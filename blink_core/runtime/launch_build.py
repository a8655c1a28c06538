"""What is built over the scheduler's regions before anything starts, whoever drives the step graphs then."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np

from blink_core.abi.config import EngineConfig
from blink_core.runtime.capture_writer import CaptureWriter
from blink_core.runtime.cuda_graphs import StepGraphs
from blink_core.runtime.cuda_memory import Pinned
from blink_core.runtime.cuda_model import CudaNetwork
from blink_core.runtime.cuda_sanitizer import KvReporter
from blink_core.runtime.cuda_step import (
    Bucket,
    CudaStep,
    NoopStep,
    StepMemory,
    buckets_of,
    poison,
    poisoned_pool,
)
from blink_core.runtime.descriptor import SanitizerInfo
from blink_core.runtime.launch_choice import LaunchChoice, measure

MIRROR_LIMIT = 4 << 30  # bytes of KV, as float32, that are shown to verification


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """strategy: host, fire (fire-and-forget), tail (tail launch), switch (a loop in one graph of the host) or auto
    (fire or tail, by bucket). capture: file of the logits.

    step_limit_s: a step that takes longer ends the engine. run_limit_s: the engine stops by itself; 0: never.
    time_slots: steps whose times are kept, a power of two. mirror: show state and KV pages to verification.
    tune: time cuBLASLt's algorithms at start, and with auto in 16-bit types what the scheduler costs the steps of each
    size, by which they are launched; without it a rule decides (`launch_choice`).
    noop_step_us: how long a step of the no-op model takes at least.
    kv_sanitizer: file of its reports; None: it is off. phases: take the times of what a boundary consists of.
    """

    strategy: str = "auto"
    capture: Path | None = None
    step_limit_s: float = 30.0
    run_limit_s: float = 0.0
    time_slots: int = 1 << 14
    mirror: bool = True
    tune: bool = True
    noop_step_us: float = 0.0
    kv_sanitizer: Path | None = None
    phases: bool = False

    def tail(self, bucket: Bucket, choice: LaunchChoice) -> bool:
        """Whether the scheduler leaves while a step of a bucket runs; ``choice``: auto's."""
        return self.strategy in ("tail", "switch") or (self.strategy == "auto" and choice.tail(bucket))


class Built:
    """KV pool, step and graphs over the scheduler's regions, whoever drives them, and what they took."""

    def __init__(
        self,
        network: CudaNetwork | None,
        config: EngineConfig,
        memory: StepMemory,
        options: LaunchOptions,
        kv: cp.ndarray | None = None,
    ) -> None:
        device = options.strategy != "host"
        begin = time.monotonic()
        self.writer: CaptureWriter | None = None
        self.reporter: KvReporter | None = None
        self.step: CudaStep | NoopStep
        if network is None:
            self.kv = cp.zeros(1, cp.float32)
            self.step = NoopStep(config, memory, options.noop_step_us)
        else:
            self.kv = poisoned_pool(network, config) if kv is None else kv
            if options.capture is not None:
                self.writer = CaptureWriter(options.capture, network.config.vocab_size, config.max_rows, Pinned)
            if options.kv_sanitizer is not None:
                self.reporter = KvReporter(options.kv_sanitizer, config.slots, Pinned)
            self.step = CudaStep(
                network, config, self.kv, memory, self.writer.memory if self.writer else None,
                self.reporter.memory if self.reporter else None,
            )  # fmt: skip
        choice = LaunchChoice()
        if options.tune and isinstance(self.step, CudaStep) and network is not None:
            if options.strategy == "auto" and network.ops.dtype != "float32":
                choice = measure(self.step, buckets_of(config))
            for bucket in buckets_of(config):
                self.step.tune(bucket, resident=device and not options.tail(bucket, choice))
        tuned = time.monotonic()
        self.graphs = StepGraphs(
            self.step, buckets_of(config), device=device, tail=lambda bucket: options.tail(bucket, choice),
            apart=options.strategy != "switch",
        )  # fmt: skip
        if network is not None:
            poison(self.kv, network.ops.dtype)  # the warm runs wrote to the page of padding rows
            cp.cuda.Device().synchronize()
        free, total = cp.cuda.runtime.memGetInfo()
        self.report: dict[str, Any] = {
            "strategy": options.strategy,
            "dtype": network.ops.dtype if network else "none",
            "weights_bytes": network.nbytes if network else 0,
            "kv_bytes": int(self.kv.nbytes),
            "step_bytes": self.step.nbytes,
            "buckets": [g.bucket.name for g in self.graphs.graphs],
            "launch_choice": [m.record() for m in choice.measured],
            "products": self.step.products if isinstance(self.step, CudaStep) else [],
            "graphs": len(self.graphs.graphs),
            "executables": self.graphs.executables,
            "graph_nodes": self.graphs.nodes,
            "gpu_bytes_used": int(total - free),
            "tune_seconds": round(tuned - begin, 3),
            "capture_seconds": round(time.monotonic() - tuned, 3),
        }

    @property
    def original_max(self) -> int:
        """LongRoPE's, where sequences may outgrow it, else 0."""
        return self.step.network.original_max if isinstance(self.step, CudaStep) else 0

    @property
    def sanitizer_info(self) -> SanitizerInfo | None:
        """Where others find the KV sanitizer's reports and counters."""
        return self.reporter.info if self.reporter else None

    def close(self) -> None:
        """Ends the threads; the steps have ended before."""
        for helper in (self.writer, self.reporter):
            if helper is not None:
                helper.close()


def kv_shape(network: CudaNetwork | None, config: EngineConfig) -> tuple[int, ...]:
    """[2 (k, v), layers, pages, page_size, kv_heads, head_dim]; empty for the no-op model."""
    if network is None:
        return (0,)
    m = network.config
    return (2, m.num_layers, config.pages, config.page_size, m.num_kv_heads, m.head_dim)


def mirrored_bytes(network: CudaNetwork | None, config: EngineConfig, options: LaunchOptions) -> int:
    """Bytes of the KV pool as verification sees it, float32; 0 if it does not."""
    nbytes = 4 * int(np.prod(kv_shape(network, config)))
    return nbytes if options.mirror and nbytes <= MIRROR_LIMIT else 0
