"""A ring client and a scheduler that moves only when a test says so."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from blink_core.abi.config import EngineConfig
from blink_core.abi.dtypes import EVENT, Array
from blink_core.abi.enums import EventKind
from blink_core.frontend.ring_client import (
    RingClient,
)
from blink_core.runtime.cpu import CpuRuntime, noop_step
from blink_core.transport.shm import Segment, ShmTransport


class Stepped:
    """An engine whose scheduler moves only when the test says so, and a client of its ring."""

    def __init__(self, **fields: Any) -> None:
        sizes: dict[str, Any] = {"slots": 4, "sq_entries": 16, "cq_entries": 32, "max_len": 32, "arena_tokens": 64}
        sizes |= {"pages": 66, "page_size": 4, "max_rows": 4, "token_budget": 64}
        self.config = EngineConfig(vocab=251, **(sizes | fields))
        self.now = 1  # microseconds, the scheduler's clock
        self.runtime = CpuRuntime(self.config, f"blink-test-{os.getpid()}-{secrets.token_hex(4)}")
        self.layout = self.config.layouts()["Ring"]
        self.base = self.config.layouts()["Control"].nbytes
        self.ring = self.layout.views(self.runtime.segment.buffer, self.base)
        self.client = self.connect()
        self.attach(self.client)

    def connect(self, transport: type[ShmTransport] = ShmTransport) -> RingClient:
        return RingClient(transport(Segment(self.runtime.segment.name), self.base, self.layout.nbytes), self.config)

    def attach(self, client: RingClient) -> int:
        epochs: list[int] = []
        thread = threading.Thread(target=lambda: epochs.append(client.attach(30.0)))
        thread.start()
        while thread.is_alive():
            self.step()  # an epoch is acknowledged at a boundary: pages of a running step are not free before
        return epochs[0]

    def step(self) -> None:
        if self.runtime.scheduler.boundary(self.now):
            noop_step(self.runtime.current_plan())
        self.runtime.scheduler.poll(self.now)

    def finish(self) -> Array:
        """Steps until nothing lives; returns all events."""
        events = [np.zeros(0, EVENT)]
        for _ in range(500):
            self.step()
            events.append(self.client.poll(0.0))
            if not self.client.live:
                return np.concatenate(events)
        raise AssertionError(f"{self.client.live} requests live after 500 steps")


class Meddled(ShmTransport):
    """`during` is called once, behind the write with the number `place`."""

    place = -1
    during: Callable[[], None] | None = None
    posted = 0

    def post_write(self, offset: int, data: Any) -> int:
        work = super().post_write(offset, data)
        at, self.posted = self.posted, self.posted + 1
        if self.during is not None and at == self.place:
            self.during()
        return work


def ends(events: Array) -> list[tuple[int, int]]:
    return [(int(e["kind"]), int(e["reason"])) for e in events if e["kind"] >= EventKind.FINISH]


def bits_of(config: EngineConfig, *ids: int) -> Array:
    words = np.zeros(config.mask_words, np.uint32)
    for token in ids:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


def lease(e: Stepped) -> int:
    return int(e.ring["front_end"]["lease"][0])
