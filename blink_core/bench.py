"""Benchmarks of scheduler, ring and prefix cache: `python -m blink_core.bench [--json]`.

Scheduler: steps with a no-op model and 64 running rows, on one core. Front-end round trip: a ring client submits, an
engine process with the no-op model answers, the terminal event is polled; beside it, measured in the same run, a bare
ping-pong of two words in shared memory between two processes, which no round trip on this machine can beat. Prefix
cache, if the default model has been fetched: time to the first token of prompts whose first 512 tokens are new, and of
others that begin like them, taken in turns. Prints values against their targets and judges nothing, because any other
load on the machine shows here.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from blink_core import _native
from blink_core.abi.config import EngineConfig
from blink_core.abi.dtypes import Array
from blink_core.abi.enums import EventKind, LogLevel
from blink_core.abi.params import SamplingParams
from blink_core.frontend.engine_client import open_ring
from blink_core.frontend.ring_client import RingClient
from blink_core.model_store import ModelStoreError, resolve
from blink_core.runtime.cpu import CpuRuntime
from blink_core.runtime.descriptor import EngineDescriptor
from blink_core.transport.interface import TransportTimeout
from blink_core.transport.shm import Segment, ShmTransport

RUNNING = 64
BATCH_STEPS, BATCHES = 1000, 7
ROUND_TRIPS, WARM_UP = 2000, 200
STEPS_TARGET, ROUND_TRIP_TARGET_US = 300_000, 200.0
WAIT_S = 30.0
MODEL, SHARED, OWN = "SmolLM2-135M-Instruct", 512, 8  # tokens that prompts share, and that each has for itself
PAIRS, FIRST_TOKEN_TARGET = 9, 5.0
MODEL_WAIT_S = 180.0
_PING, _PONG = 0, 64  # byte offsets of the two words, a cache line apart


@dataclass(frozen=True, slots=True)
class Result:
    """One measured quantity. target: '>= x' or '< x' in the same unit, '' where there is none. n: observations."""

    name: str
    value: float
    unit: str
    n: int
    target: str = ""


def _name() -> str:
    return f"blink-bench-{os.getpid()}-{secrets.token_hex(4)}"


def _client(segment: str, config: EngineConfig) -> RingClient:
    layouts = config.layouts()
    ring = ShmTransport(Segment(segment), layouts["Control"].nbytes, layouts["Ring"].nbytes)
    return RingClient(ring, config)


def scheduler_steps(log_level: LogLevel) -> Result:
    """Steps a second of boundary and poll with 64 decoding rows: median of seven batches of 1000 steps."""
    config = EngineConfig(
        vocab=251,
        slots=RUNNING,
        sq_entries=4 * RUNNING,
        cq_entries=16 * RUNNING,
        max_len=8192,
        arena_tokens=1 << 16,
        max_rows=RUNNING,
        token_budget=1024,
        pages=RUNNING * 512 + 2,
        log_level=log_level,
    )
    runtime = CpuRuntime(config, _name())
    try:
        client = _client(runtime.segment.name, config)
        attaching = threading.Thread(target=client.attach)
        attaching.start()
        while attaching.is_alive():
            runtime.scheduler.run_noop(1)
        for _ in range(RUNNING):
            client.submit(range(1, 17), SamplingParams(max_tokens=8000))
        runtime.scheduler.run_noop(2 + 16 * RUNNING // config.token_budget)
        rates = []
        for _ in range(BATCHES):
            start = time.perf_counter()
            taken = runtime.scheduler.run_noop(BATCH_STEPS)
            rates.append(taken / (time.perf_counter() - start))
        running = int(config.layouts()["State"].view(runtime.state.buffer, "header")["running"][0])
        if running != RUNNING:
            raise RuntimeError(f"{running} rows were running at the end, expected {RUNNING}")
    finally:
        runtime.close()
    name = f"scheduler steps, {RUNNING} running, no-op model, event log {log_level.name.lower()}"
    return Result(name, statistics.median(rates), "steps/s", BATCHES * BATCH_STEPS, f">= {STEPS_TARGET}")


@contextmanager
def engine_process(*options: str) -> Iterator[EngineDescriptor]:
    """An engine in a process of its own; without a model among its options it runs the no-op model."""
    with tempfile.TemporaryDirectory(prefix="blink-bench-") as folder:
        command = [sys.executable, "-m", "blink_core.runtime.engine_main", "--run-dir", folder, "--segment", _name()]
        command += ["--exit-with-parent", str(os.getpid()), "--verbosity", "warning", "--slots", "64", *options]
        # One thread: a BLAS pool that spins beside the scheduler's thread would be measured too.
        environment = os.environ | dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
        try:
            limit = MODEL_WAIT_S if options else WAIT_S
            ready, deadline = Path(folder) / "engine.json", time.monotonic() + limit
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the engine process was not ready within {limit:g} s: {process.poll()}")
                time.sleep(0.01)
            yield EngineDescriptor.read(ready)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def round_trips() -> list[float]:
    """Microseconds from submit to the terminal event of a one-token request, one at a time."""
    with engine_process() as descriptor:
        client = open_ring(descriptor, 0)
        client.attach()
        params = SamplingParams(max_tokens=1)
        times = []
        for _ in range(WARM_UP + ROUND_TRIPS):
            start = time.perf_counter()
            client.submit((1, 2, 3, 4), params)
            while client.live:
                if not len(client.poll(WAIT_S)):
                    raise TransportTimeout(f"no event of a request within {WAIT_S:g} s")
            times.append((time.perf_counter() - start) * 1e6)
        return times[WARM_UP:]


def first_token(client: RingClient, prompt: Array) -> tuple[float, int]:
    """Seconds from submit to the only token of a request, and the prompt tokens that were in the prefix cache."""
    start, taken = time.perf_counter(), 0.0
    client.submit(prompt, SamplingParams(max_tokens=1))
    while True:
        events = client.poll(MODEL_WAIT_S)
        if not len(events):
            raise TransportTimeout(f"no event of a request within {MODEL_WAIT_S:g} s")
        for event in events:
            if event["kind"] == EventKind.TOKEN:
                taken = time.perf_counter() - start
            elif event["kind"] == EventKind.FINISH and taken:
                return taken, int(event["token"])
            else:
                raise RuntimeError(f"a request ended with event kind {event['kind']}, reason {event['reason']}")


def first_tokens(model: Path) -> tuple[list[float], list[float]]:
    """Seconds to the first token, cold and with SHARED tokens found, in turns: each pair has its own beginning.

    Raises RuntimeError when the prefix cache did not find what it must, or found what it cannot.
    """
    draw = np.random.default_rng(1)
    cold: list[float] = []
    found: list[float] = []
    with engine_process("--model", str(model), "--name", MODEL) as descriptor:
        client = open_ring(descriptor, 0)
        client.attach()
        vocab = descriptor.config.vocab
        for pair in range(PAIRS + 1):  # the first one is for caches and page tables
            shared = draw.integers(0, vocab, SHARED)
            for times, expected in ((cold, 0), (found, SHARED)):
                taken, hit = first_token(client, np.concatenate((shared, draw.integers(0, vocab, OWN))))
                if hit != expected:
                    raise RuntimeError(f"{hit} prompt tokens came from the prefix cache, expected {expected}")
                if pair:
                    times.append(taken)
    return cold, found


def prefix_cache() -> list[Result]:
    """Times to the first token; nothing, with a line on standard error, where the model has not been fetched."""
    try:
        model = resolve(MODEL)
    except ModelStoreError as e:
        print(f"prefix cache not measured: {e}", file=sys.stderr)
        return []
    cold, found = map(np.array, first_tokens(model))
    name = f"first token, {SHARED} shared prompt tokens"
    ratio = float(np.median(cold) / np.median(found))
    return [
        Result(f"{name}, new, median", float(np.median(cold) * 1e3), "ms", PAIRS),
        Result(f"{name}, found, median", float(np.median(found) * 1e3), "ms", PAIRS),
        Result(f"{name}, new over found", ratio, "ratio", PAIRS, f">= {FIRST_TOKEN_TARGET:g}"),
    ]


def ping_pongs() -> list[float]:
    """Microseconds for one word to another process and its answer, both waiting as the ring client does."""
    segment = Segment(_name(), 4096)
    process = subprocess.Popen([sys.executable, "-m", "blink_core.bench", "--pong", segment.name])
    try:
        if _native.wait_word(segment.address + _PONG, 0, int(WAIT_S * 1e6)) == 0:
            raise TransportTimeout(f"the other process did not start within {WAIT_S:g} s")
        times = []
        for i in range(2, WARM_UP + ROUND_TRIPS + 2):
            start = time.perf_counter()
            _native.store_release(segment.address + _PING, i)
            if _native.wait_word(segment.address + _PONG, i - 1, int(WAIT_S * 1e6)) != i:
                raise TransportTimeout(f"no answer from the other process within {WAIT_S:g} s")
            times.append((time.perf_counter() - start) * 1e6)
        return times[WARM_UP:]
    finally:
        _native.store_release(segment.address + _PING, 2**63)
        process.wait(WAIT_S)
        segment.close()


def pong(name: str) -> None:
    """The other process of `ping_pongs`: answers each word until one says stop."""
    segment, seen = Segment(name), 0
    _native.store_release(segment.address + _PONG, 1)
    while seen < 2**63:
        value = _native.wait_word(segment.address + _PING, seen, int(WAIT_S * 1e6))
        if value == seen:
            return  # the benchmark is gone
        seen = value
        _native.store_release(segment.address + _PONG, min(seen, 2**63))


def measure() -> list[Result]:
    """All quantities, in the order in which they are printed."""
    results = [scheduler_steps(LogLevel.DECISIONS), scheduler_steps(LogLevel.OFF)]
    bare, whole = ping_pongs(), round_trips()
    for name, times, target in (
        ("front-end round trip", whole, f"< {ROUND_TRIP_TARGET_US:g}"),
        ("bare shared-memory ping-pong", bare, ""),
    ):
        results.append(Result(f"{name}, median", float(np.median(times)), "us", len(times), target))
        results.append(Result(f"{name}, p99", float(np.percentile(times, 99)), "us", len(times)))
    for what, q in (("median", 50), ("p99", 99)):
        ratio = float(np.percentile(whole, q) / np.percentile(bare, q))
        results.append(Result(f"round trip over ping-pong, {what}", ratio, "ratio", len(whole)))
    return results + prefix_cache()


def table(results: list[Result]) -> str:
    """The results as aligned text."""
    width = max(len(r.name) for r in results)
    lines = [f"{'quantity':{width}}  {'value':>12}  {'unit':8} {'n':>6}  target"]
    for r in results:
        value = f"{r.value:,.0f}" if r.value >= 10_000 else f"{r.value:,.2f}"
        lines.append(f"{r.name:{width}}  {value:>12}  {r.unit:8} {r.n:>6}  {r.target}".rstrip())
    load = " ".join(f"{x:.1f}" for x in os.getloadavg())
    return "\n".join([*lines, f"cores: {os.cpu_count()}, load average: {load}"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m blink_core.bench", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--pong", metavar="SEGMENT", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.pong:
        pong(args.pong)
        return 0
    results = measure()
    if args.json:
        about = {"cores": os.cpu_count(), "load_average": os.getloadavg(), "results": [asdict(r) for r in results]}
        print(json.dumps(about, indent=1))
    else:
        print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
