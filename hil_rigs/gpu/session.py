"""A GPU engine within this process, with ring clients beside it: for checks and measurements of the runtime itself."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blink_core.abi.config import EngineConfig
from blink_core.abi.enums import ErrorReason, EventKind, FinishReason
from blink_core.abi.params import SamplingParams
from blink_core.frontend.ring_client import RingClient
from blink_core.runtime.cuda_model import CudaNetwork
from blink_core.runtime.launch import HostDriven, LaunchOptions, Runtime, make_runtime
from blink_core.transport.shm import ShmTransport


@dataclass
class Answer:
    """What came back for one request. ``ended``: name of the reason; None while it lives."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: str | None = None


@contextmanager
def running(config: EngineConfig, network: CudaNetwork | None, options: LaunchOptions) -> Iterator[Runtime]:
    """An engine that serves while inside; stopped and closed at the end."""
    name = f"blink-gpu-{os.getpid()}-{secrets.token_hex(4)}"
    runtime = make_runtime(config, name, network, options)
    failed: list[BaseException] = []

    def serve() -> None:
        try:
            runtime.serve()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=serve, name="engine", daemon=True)
    thread.start()
    try:
        yield runtime
    finally:
        runtime.request_stop()
        thread.join(15.0)
        runtime.close()
    if failed:
        raise failed[0]
    if thread.is_alive():
        raise RuntimeError("the engine did not stop within 15 s")


def client_of(runtime: Runtime, ring: int = 0) -> RingClient:
    """A client attached to a ring."""
    layouts = runtime.config.layouts()
    size = layouts["Ring"].nbytes
    client = RingClient(ShmTransport(runtime.segment, layouts["Control"].nbytes + ring * size, size), runtime.config)
    client.attach()
    return client


def why(kind: int, reason: int) -> str:
    """Name of a terminal event's reason."""
    return FinishReason(reason).name if kind == EventKind.FINISH else f"ERROR {ErrorReason(reason).name}"


def ask(client: RingClient, requests: Sequence[tuple[Any, SamplingParams]], timeout: float = 30.0) -> list[Answer]:
    """Submits all (token ids, parameters) and polls until each has ended. TimeoutError says what is missing."""
    answers: dict[tuple[int, int], Answer] = defaultdict(Answer)
    order = []
    deadline = time.monotonic() + timeout
    for prompt, params in requests:
        handle = client.submit(np.asarray(prompt, np.int32), params)
        order.append((handle.slot, handle.generation))
    while client.live:
        events = client.poll(0.2)
        for event in events:
            answer = answers[int(event["slot"]), int(event["generation"])]
            kind = int(event["kind"])
            if kind == EventKind.TOKEN:
                answer.tokens.append(int(event["token"]))
                answer.logprobs.append(float(event["logprob"]))
            elif kind in (EventKind.FINISH, EventKind.ERROR):
                answer.ended = why(kind, int(event["reason"]))
        if time.monotonic() > deadline:
            made = sum(len(a.tokens) for a in answers.values())
            raise TimeoutError(f"{client.live} of {len(order)} requests live after {timeout} s; {made} tokens came")
    return [answers[key] for key in order]


def is_host(runtime: Runtime) -> bool:
    """Whether the host drives the steps."""
    return isinstance(runtime, HostDriven)
