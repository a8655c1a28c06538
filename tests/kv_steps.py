"""The real scheduler, call by call, over a KV pool of no model: what the KV sanitizer sees of an engine.

Each step appends rows to every layer and reads them as attention does, under `SanitizedOps`; tokens are drawn.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from blink_core.abi.config import EngineConfig
from blink_core.abi.enums import LogLevel, StepStatus
from blink_core.abi.params import SamplingParams
from blink_core.frontend.ring_client import Handle, RingClient
from blink_core.models import KVPool, StepBatch
from blink_core.ops.sanitized_ops import SanitizedOps
from blink_core.runtime.cpu import CpuRuntime, Plan, poison
from blink_core.runtime.kv_sanitizer import KvSanitizer
from blink_core.runtime.model_step import step_batch
from blink_core.transport.shm import Segment, ShmTransport

LAYERS, VOCAB = 2, 50
SIZES: dict[str, Any] = {
    "rings": 1, "slots": 8, "sq_entries": 64, "cq_entries": 256, "arena_tokens": 4096, "max_len": 64, "page_size": 4,
    "pages": 34, "max_rows": 4, "token_budget": 11, "log_entries": 1 << 12, "log_level": int(LogLevel.ALL),
    "lease_us": 0, "max_bias": 1, "max_logprobs": 0,
}  # fmt: skip

Change = Callable[[Plan], Plan]


class KvSteps:
    """One engine without a model. Close it."""

    def __init__(self, folder: Path, *, seed: int = 0, **sizes: int) -> None:
        self.config = EngineConfig(vocab=VOCAB, **(SIZES | sizes))
        self.runtime = CpuRuntime(self.config, f"blink-kvsteps-{os.getpid()}-{secrets.token_hex(4)}")
        shape = (2, LAYERS, self.config.pages, self.config.page_size, 1, 4)
        pool = np.zeros(shape, np.float32)
        poison(pool)
        self.kv = KVPool(pool[0], pool[1], self.config.page_size)
        self.ops = SanitizedOps()
        self.file = folder / "reports.jsonl"
        cached = bool(self.config.prefix_cache)
        self.sanitizer = KvSanitizer(self.kv, prefix_cache=cached, reports=self.file)
        self.sanitizer.bind(self.runtime)
        self.ops.store = self.sanitizer
        self.draw = np.random.default_rng(seed)
        self.now = 0
        layouts = self.config.layouts()
        ring = ShmTransport(Segment(self.runtime.segment.name), layouts["Control"].nbytes, layouts["Ring"].nbytes)
        self.client = RingClient(ring, self.config)
        self.attach()
        self.events: list[dict[str, Any]] = []

    def attach(self) -> None:
        """A new epoch."""
        attaching = threading.Thread(target=self.client.attach)
        attaching.start()
        while attaching.is_alive():
            self.now += 1
            self.runtime.scheduler.boundary(self.now)
            self.runtime.scheduler.poll(self.now)

    def submit(self, prompt: list[int], new: int, **params: Any) -> Handle:
        return self.client.submit(prompt, SamplingParams(new, temperature=0.0, ignore_eos=True, **params))

    def prompt(self, length: int) -> list[int]:
        return [int(t) for t in self.draw.integers(0, VOCAB, length)]

    def step(
        self,
        change: Change = lambda plan: plan,
        batch_change: Callable[[StepBatch], StepBatch] = lambda batch: batch,
        beside: Callable[[Plan, StepBatch], None] = lambda plan, batch: None,
        window: int | None = None,
    ) -> Plan | None:
        """One boundary, with the step it plans (None: no step). `change` and `batch_change` are what goes wrong;
        `beside` runs once the step's tags are written and checked."""
        self.runtime.scheduler.poll(self.now)
        self.now += 1
        if not self.runtime.scheduler.boundary(self.now):
            self._take()
            return None
        plan = change(self.runtime.current_plan())
        self.sanitizer.begin_step(plan)
        batch = batch_change(step_batch(plan))
        self.forward(batch, window)
        plan.results["token"] = self.draw.integers(0, VOCAB, len(plan.rows))
        plan.results["status"] = StepStatus.OK
        self.sanitizer.end_step(plan)
        beside(plan, batch)
        self.runtime.scheduler.poll(self.now)
        self._take()
        return plan

    def forward(self, batch: StepBatch, window: int | None = None) -> None:
        """Appends and reads of every layer."""
        ops, tokens = self.ops, batch.token_ids.size
        ops.begin_run(batch.token_ids, batch.positions, batch.row_starts, batch.context_lens, batch.origin)
        work = ops.plan_attention(
            batch.row_starts, batch.context_lens, batch.block_tables, self.config.page_size, window
        )
        rows = np.ones((tokens, 1, 4), np.float32)
        for k_pages, v_pages in zip(self.kv.k, self.kv.v, strict=True):
            ops.append_kv(k_pages, batch.kv_slots, rows)
            ops.append_kv(v_pages, batch.kv_slots, rows)
            with np.errstate(invalid="ignore"):
                ops.paged_attention(rows, k_pages, v_pages, work)

    def _take(self) -> None:
        for event in self.client.poll(0.0):
            self.events.append({name: int(event[name]) for name in ("slot", "kind", "reason", "generation", "index")})

    def run(self, change: Change = lambda plan: plan, limit: int = 500) -> None:
        """Steps until no request lives."""
        for _ in range(limit):
            self.step(change)
            if not self.client.live:
                return
        raise AssertionError(f"requests still live after {limit} steps")

    def reports(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]

    def close(self) -> None:
        self.runtime.close()
