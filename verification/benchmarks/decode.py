"""Engine against HuggingFace on the host: `python -m verification.benchmarks.decode --model PATH [--json]`.

Decode: float32, one thread each, the same prompts and greedy tokens, HuggingFace `generate` and the engine process in
turn; the time of one step is that of a run with STEPS + 1 tokens less that of a run with one. Memory: the engine
process's peak resident set, after a prompt as long as the rig takes, against the float32 weights it uses. Ratios are
what counts: absolute times are this machine's. Other load on the machine shows in both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from blink_core.abi.enums import EventKind
from blink_core.abi.params import SamplingParams
from blink_core.frontend.ring_client import RingClient
from hil_rigs.description import load_rig
from hil_rigs.local import LocalOptions, LocalRig
from verification.benchmarks.results import Result, command
from verification.oracles.hf import HFOracle

STEPS, PROMPT, ROUNDS = 24, 32, 7
BATCHES = (1, 8)
TARGETS = {1: 1.0, 8: 0.9}
MEMORY_ALLOWANCE_MIB = 512
WAIT_S = 120.0
MIB = 1 << 20


def prompts(batch: int, vocab: int) -> list[list[int]]:
    """`batch` prompts of PROMPT random ids; the first ids are left out, they are special in many vocabularies."""
    rng = np.random.default_rng(batch)
    return [rng.integers(min(100, vocab // 2), vocab, PROMPT).tolist() for _ in range(batch)]


def engine_run(client: RingClient, batch: list[list[int]], tokens: int) -> float:
    """Seconds until all requests of `batch` have given `tokens` tokens. Raises RuntimeError after WAIT_S seconds."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    for prompt in batch:
        client.submit(prompt, params)
    got = 0
    while got < len(batch) * tokens or client.live:
        events = client.poll(1.0)
        got += int((events["kind"] == EventKind.TOKEN).sum())
        if (events["kind"] == EventKind.ERROR).any():
            raise RuntimeError(f"the engine refused a request of the benchmark: {events}")
        if time.perf_counter() - start > WAIT_S:
            raise RuntimeError(f"{got} of {len(batch) * tokens} tokens after {WAIT_S} s")
    return time.perf_counter() - start


def oracle_run(oracle: HFOracle, batch: list[list[int]], tokens: int) -> float:
    """Seconds of one `generate` call over the whole batch."""
    import torch

    ids = torch.tensor(batch)
    start = time.perf_counter()
    with torch.inference_mode():
        oracle.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return time.perf_counter() - start


def step_ms(run: Callable[[int], float]) -> float:
    """Milliseconds of one decode step."""
    first = run(1)
    return (run(STEPS + 1) - first) / STEPS * 1e3


def measure_decode(client: RingClient, oracle: HFOracle) -> list[Result]:
    results = []
    for size in BATCHES:
        batch = prompts(size, oracle.vocab_size)
        engine_ms: list[float] = []
        oracle_ms: list[float] = []
        for turn in range(ROUNDS + 1):
            engine = step_ms(lambda n, b=batch: engine_run(client, b, n))  # type: ignore[misc]
            theirs = step_ms(lambda n, b=batch: oracle_run(oracle, b, n))  # type: ignore[misc]
            if turn:  # the first warms up
                engine_ms.append(engine)
                oracle_ms.append(theirs)
        ours, hf = statistics.median(engine_ms), statistics.median(oracle_ms)
        results += [
            Result(f"engine decode step, batch {size}", ours, "ms", "", tuple(engine_ms)),
            Result(f"HuggingFace decode step, batch {size}", hf, "ms", "", tuple(oracle_ms)),
            Result(f"HuggingFace / engine, batch {size}", hf / ours, "x", f">= {TARGETS[size]}"),
        ]
    return results


def measure_memory(rig: LocalRig, client: RingClient, oracle: HFOracle) -> list[Result]:
    longest = rig.descriptor.config.max_len - 1
    engine_run(client, [[i % 1000 + 100 for i in range(longest)]], 1)
    status = Path(f"/proc/{rig.pid('engine')}/status").read_text()
    peak = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))) / 1024
    weights = sum({id(p): p.numel() * 4 for p in oracle.model.parameters()}.values()) / MIB  # tied ones once
    return [
        Result("float32 weights in use", weights, "MiB"),
        Result("engine peak resident set", peak, "MiB", f"< {weights + MEMORY_ALLOWANCE_MIB:.0f}"),
    ]


def run(model: Path) -> list[Result]:
    """All measurements with one engine on the local rig and one oracle. Raises RigFailure or OracleError."""
    oracle = HFOracle.load(model, dtype="float32", threads=1, attention="sdpa")  # what transformers takes by default
    with LocalRig(load_rig("local"), model, http=False, options=LocalOptions(threads=1)) as rig:
        client = rig.ring(1)
        return measure_decode(client, oracle) + measure_memory(rig, client, oracle)


if __name__ == "__main__":
    command(__doc__, run)
