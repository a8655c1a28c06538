"""Whole steps, GPU against NumPy: one scheduler's plans are computed by both, what they leave is compared by buffer.

The host's scheduler makes the plans from drawn requests (prefill in chunks, decode, preemption, shared prefixes,
sampling of every kind); NumPy's results are committed, so that both go on from the same history. The KV rows of
a layer come of the activations that enter its attention: the first that differs says where the fault is.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import cupy as cp
import numpy as np

from blink_core.abi.config import EngineConfig
from blink_core.abi.dtypes import Array
from blink_core.abi.params import SamplingParams
from blink_core.frontend.ring_client import RingClient
from blink_core.models import KVPool, load_model
from blink_core.ops.cuda_ops import CudaOps, to_host
from blink_core.ops.cuda_sampling import STEP_RESULT
from blink_core.runtime.cpu import CpuRuntime, Plan
from blink_core.runtime.cuda_graphs import StepGraphs
from blink_core.runtime.cuda_model import load_network
from blink_core.runtime.cuda_step import CudaStep, StepMemory, buckets_of, poisoned_pool
from blink_core.runtime.model_step import Capture, ModelStep
from blink_core.runtime.redo import redo_parts
from blink_core.transport.shm import ShmTransport

LIMITS = {"float32": 1e-4, "bfloat16": 2e-1, "float16": 3e-2}  # of ||gpu - numpy|| / ||numpy||, by buffer


@dataclass(frozen=True, slots=True)
class Difference:
    """One buffer of one step: relative error, against the limit. ``name``: 'k layer 3', 'logits', 'status' ..."""

    step: int
    name: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit


class _Kept(Capture):
    """Keeps the logits of the last step."""

    def __init__(self) -> None:
        self.logits: Array = np.zeros((0, 0), np.float32)

    def append(self, step: int, rows: Array, tokens: Array, logits: Array) -> None:
        self.logits = logits.copy()


def relative(got: Array, expected: Array) -> float:
    """||got - expected|| / ||expected||; NaN if there is one on either side."""
    scale = float(np.linalg.norm(expected.astype(np.float64)))
    return float(np.linalg.norm(got.astype(np.float64) - expected.astype(np.float64))) / max(scale, 1e-30)


def drawn_requests(rng: np.random.Generator, count: int, config: EngineConfig) -> list[tuple[Array, SamplingParams]]:
    """Prompts with common beginnings, and parameters of every kind."""
    common = rng.integers(0, config.vocab, config.max_len)
    found = []
    for i in range(count):
        length = int(rng.integers(1, config.max_len // 2))
        prompt = rng.integers(0, config.vocab, length)
        if rng.random() < 0.5:
            shared = int(rng.integers(0, length + 1))
            prompt[:shared] = common[:shared]
        sampled = rng.random() < 0.6
        params: dict[str, Any] = {"max_tokens": int(rng.integers(1, 24)), "ignore_eos": True}
        if sampled:
            params |= {
                "temperature": float(rng.choice([0.5, 1.0, 1.7])),
                "top_k": int(rng.choice([0, 1, 5, 40])),
                "top_p": float(rng.choice([1.0, 0.9, 0.3])),
                "min_p": float(rng.choice([0.0, 0.05])),
                "seed": int(rng.integers(0, 1 << 62)),
            }
        if rng.random() < 0.4:
            params |= {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
        if rng.random() < 0.3:
            params |= {"logit_bias": ((int(rng.integers(0, config.vocab)), 3.0),)}
        if rng.random() < 0.3:
            params |= {"logprobs": int(rng.integers(1, 21))}
        if rng.random() < 0.3:
            params |= {"min_tokens": 1, "ignore_eos": False}
        found.append((prompt.astype(np.int32), SamplingParams(choice=i, **params)))
    return found


def outgrowing_requests(
    rng: np.random.Generator, config: EngineConfig, original_max: int
) -> list[tuple[Array, SamplingParams]]:
    """Two that outgrow LongRoPE's original maximum, one in decode and one in a chunk of its prompt, which begins within
    unless a step's budget is longer than that maximum and the row has it for itself.

    Raises ValueError if `max_len` leaves no room for them.
    """
    lengths = {original_max - 3: 8, original_max // config.token_budget * config.token_budget + config.token_budget: 4}
    if max(n + new for n, new in lengths.items()) > config.max_len:
        raise ValueError(f"max_len {config.max_len} is not enough beyond an original maximum of {original_max}")
    return [
        (rng.integers(0, config.vocab, n).astype(np.int32), SamplingParams(max_tokens=new, ignore_eos=True))
        for n, new in lengths.items()
    ]


class Twins:
    """NumPy's and the GPU's model step over the plans of one scheduler."""

    def __init__(self, model: Path, dtype: str, config: EngineConfig, *, graphs: bool) -> None:
        self.config, self.dtype = config, dtype
        self.runtime = CpuRuntime(config, f"blink-diff-{os.getpid()}-{secrets.token_hex(4)}")
        self.now = 0
        reference = load_model(model)
        m = reference.config
        shape = (2, m.num_layers, config.pages, config.page_size, m.num_kv_heads, m.head_dim)
        self.pool = np.full(shape, np.nan, np.float32)
        self.kept = _Kept()
        self.model_step = ModelStep(reference, KVPool(self.pool[0], self.pool[1], config.page_size), self.kept)
        self.network = load_network(model, CudaOps(dtype), config.max_len)
        self.kv = poisoned_pool(self.network, config)
        self.state = cp.zeros(self.runtime.layouts["State"].nbytes, cp.uint8)
        self.plan = cp.zeros(self.runtime.layouts["Plan"].nbytes, cp.uint8)
        self.done = cp.zeros(1, cp.uint64)
        memory = StepMemory(*(int(a.data.ptr) for a in (self.state, self.plan, self.done)))
        self.step = CudaStep(self.network, config, self.kv, memory)
        self.graphs = StepGraphs(self.step, buckets_of(config), device=False)
        self._by_graph = graphs

    def close(self) -> None:
        self.runtime.close()

    def attach(self) -> RingClient:
        layouts = self.runtime.layouts
        transport = ShmTransport(self.runtime.segment, layouts["Control"].nbytes, layouts["Ring"].nbytes)
        client = RingClient(transport, self.config)
        thread = threading.Thread(target=client.attach)
        thread.start()
        while thread.is_alive():
            self.poll()
        thread.join()
        return client

    def poll(self) -> None:
        self.now += 1
        self.runtime.scheduler.poll(self.now)

    def tick(self) -> list[Difference]:
        """One boundary and its step, if there is one."""
        self.now += 1
        if not self.runtime.scheduler.boundary(self.now):
            self.poll()
            return []
        plan = self.runtime.current_plan()
        self._run_gpu()
        self.kept.logits = np.zeros((0, 0), np.float32)
        self.model_step(plan)
        anew = sum(count for _, _, count in self._redo_parts())
        found = [Difference(plan.step, f"anew {anew} positions", 0.0, 0.0)] if anew else []
        found += list(self._compare(plan.step, self._written(plan), np.flatnonzero(plan.rows["sample"]), plan.results))
        self.poll()
        return found

    def _run_gpu(self) -> None:
        runtime = self.runtime
        header = runtime.layouts["Plan"].views(runtime.plan.buffer)["header"][0]
        for device, host in ((self.state, runtime.state), (self.plan, runtime.plan)):
            device.set(np.frombuffer(host.buffer, np.uint8, device.size))
        sizes = (int(header["n_tokens"]), int(header["n_rows"]), int(header["n_samples"]))
        cp.cuda.Device().synchronize()
        parts = self._redo_parts()
        for part in parts:
            self.step.set_redo(part)
            self._launch(part[2], 1, 0)
        if parts:
            self.step.set_redo((0, 0, 0))
        self._launch(*sizes)

    def _redo_parts(self) -> list[tuple[int, int, int]]:
        """Passes that LongRoPE asks for ahead of the plan at hand."""
        rows = self.runtime.current_plan().rows
        return redo_parts(rows, self.network.original_max, self.config.token_budget)

    def _launch(self, tokens: int, rows: int, samples: int) -> None:
        graph = self.graphs.choose(tokens, rows, samples)
        if self._by_graph:
            self.graphs.launch(graph)
            return
        with self.graphs.stream:
            self.step.run(graph.bucket)
        self.graphs.stream.synchronize()

    def _written(self, plan: Plan) -> Array:
        """Slots that the step writes: of its new tokens, and of what it computes anew."""
        size, found = self.config.page_size, [plan.kv_slots]
        for row, first, count in self._redo_parts():
            at = np.arange(first, first + count)
            found.append(plan.block_tables[row][at // size].astype(np.int64) * size + at % size)
        return np.concatenate(found)

    def _compare(self, step: int, slots: Array, sampled: Array, results: Array) -> Iterator[Difference]:
        limit = LIMITS[self.dtype]
        if int(self.done.get()[0]) != step:
            yield Difference(step, f"done is {int(self.done.get()[0])}", np.inf, 0.0)
        page, offset = np.divmod(slots, self.config.page_size)
        where = (cp.asarray(page), cp.asarray(offset))
        for layer in range(self.pool.shape[1]):
            for side, name in enumerate("kv"):
                got = to_host(self.kv[side, layer][where], self.dtype)
                yield Difference(
                    step, f"{name} layer {layer}", relative(got, self.pool[side, layer][page, offset]), limit
                )
        if sampled.size == 0:
            return
        logits = self.step.logits.get()[: sampled.size, : self.config.vocab]
        yield Difference(step, "logits", relative(logits, self.kept.logits), limit)
        views = self.runtime.layouts["Plan"].views(memoryview(self.plan.get()))
        got = cast(Any, views["results"].view(STEP_RESULT))[sampled]
        expected = results[sampled]
        yield Difference(step, "status", float((got["status"] != expected["status"]).sum()), 0.0)
        same = got["token"] == expected["token"]
        # A draw near the edge of two tokens may fall to the other one within the rounding of the logits.
        allowed = 0.0 if self.dtype == "float32" else 1.0
        yield Difference(step, f"tokens {got['token'][~same][:3]} for {expected['token'][~same][:3]}",
                         float((~same).mean()), allowed)  # fmt: skip
        error = np.abs(got["logprob"][same] - expected["logprob"][same])
        yield Difference(step, "logprob", float(error.max(initial=0.0)), 40 * limit)


def diff(model: Path, dtype: str, *, requests: int = 14, seed: int = 0, graphs: bool = True) -> list[Difference]:
    """Differences of all steps of drawn requests on a small engine."""
    from blink_core.models.load_config import load_config

    m = load_config(model)
    config = EngineConfig(
        vocab=m.vocab_size, eos_ids=m.eos_token_ids, slots=16, sq_entries=64, cq_entries=1024, arena_tokens=1 << 13,
        max_len=min(160, m.max_position_embeddings), pages=26, max_rows=6, token_budget=40,
    )  # fmt: skip
    if not m.keys_are_final(config.max_len):
        config = replace(config, prefix_cache=0)
    twins = Twins(model, dtype, config, graphs=graphs)
    try:
        client = twins.attach()
        rng = np.random.default_rng(seed)
        todo = drawn_requests(rng, requests, config)
        if twins.network.original_max:
            todo += outgrowing_requests(rng, config, twins.network.original_max)
        found: list[Difference] = []
        for prompt, params in todo:
            client.submit(prompt, params)
            twins.poll()
            found += twins.tick()
        for _ in range(1000):
            found += twins.tick()
            client.poll(0.0)
            if client.live == 0:
                return found
        raise TimeoutError(f"{client.live} requests live after 1000 steps")
    finally:
        twins.close()
