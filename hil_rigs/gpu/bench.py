"""Decode and prefill of a model's shape in the real runtime, with seeded random bfloat16 weights on the GPU.

    python -m hil_rigs.gpu.bench [--shape llama-3-8b] [--batches 1,8,32,128] [--launch auto] [--burners N] [--out FILE]

Every request has 128 tokens in and 129 out, greedy, end of sequence ignored, prefix cache off. Step times are the GPU's
own (globaltimer at the first kernel of each step graph), so they hold the scheduler's gap; time to first token is the
client's, on this machine. Raw samples go to FILE.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from blink_core.abi.config import EngineConfig
from blink_core.abi.enums import EventKind
from blink_core.abi.params import SamplingParams
from blink_core.models.config import ExpertConfig, ModelConfig, RopeConfig

PROMPT, OUTPUT = 128, 129
TARGET_MS = {1: 4.4, 8: 4.5, 32: 4.9, 128: 6.5}  # Llama-3-8B
VLLM_MS = {1: 4.89, 8: 5.02, 32: 5.44, 128: 7.17}

LLAMA_3_8B = ModelConfig(
    architecture="llama", hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32, num_kv_heads=8,
    head_dim=128, vocab_size=128256, max_position_embeddings=8192, rms_norm_eps=1e-5, rope=RopeConfig(5e5, 128),
    tie_word_embeddings=False, bos_token_id=None, eos_token_ids=(),
)  # fmt: skip
QWEN3_30B_A3B = ModelConfig(
    architecture="qwen3_moe", hidden_size=2048, intermediate_size=6144, num_layers=48, num_heads=32, num_kv_heads=4,
    head_dim=128, vocab_size=151936, max_position_embeddings=32768, rms_norm_eps=1e-6, rope=RopeConfig(1e6, 128),
    tie_word_embeddings=False, bos_token_id=None, eos_token_ids=(),
    experts=ExpertConfig(128, 8, 768, True, tuple(range(48))),
)  # fmt: skip
SHAPES = {"llama-3-8b": LLAMA_3_8B, "qwen3-30b-a3b": QWEN3_30B_A3B}


def burn(kind: int) -> None:
    """One busy process: arithmetic, or memory."""
    if kind == 0:
        while True:
            pass
    data = np.random.default_rng(0).random(4_000_000)
    while True:
        np.roll(data, 1)


@contextmanager
def burners(count: int) -> Iterator[None]:
    """`count` busy processes while inside, half of each kind."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=burn, args=(i % 2,), daemon=True) for i in range(count)]
    for process in processes:
        process.start()
    if count:
        time.sleep(3.0)  # until they are under way: the measurement needs them busy, not started
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def run_batch(runtime: Any, client: Any, rows: int, seed: int) -> dict[str, Any]:
    """One batch: time to first token and the GPU's step times while all rows decode."""
    rng = np.random.default_rng(seed)
    vocab = runtime.config.vocab
    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
    prompts = rng.integers(0, vocab, (rows, PROMPT)).astype(np.int32)
    first: float | None = None
    begin = time.perf_counter()
    for prompt in prompts:
        client.submit(prompt, params)
    tokens = failed = 0
    while client.live:
        events = client.poll(1.0)
        kinds = events["kind"]
        count = int((kinds == EventKind.TOKEN).sum())
        failed += int((kinds == EventKind.ERROR).sum())
        tokens += count
        if count and first is None:
            first = time.perf_counter() - begin
        if time.perf_counter() - begin > 60.0:
            raise TimeoutError(f"{client.live} of {rows} requests live after 60 s, {tokens} tokens")
    seconds = time.perf_counter() - begin
    if failed or tokens != rows * OUTPUT:
        raise RuntimeError(f"{failed} requests failed, {tokens} of {rows * OUTPUT} tokens came")
    result: dict[str, Any] = {"rows": rows, "first_token_ms": (first or 0.0) * 1e3, "seconds": seconds}
    if hasattr(runtime, "times"):
        samples, times = runtime.times()
        last = runtime.status("steps")
        order = np.arange(last - 110, last - 20) & (len(samples) - 1)
        after = (order + 1) & (len(samples) - 1)
        period = (times[after, 0] - times[order, 0]).astype(np.int64) / 1e3
        result |= {
            "step_us": period.tolist(),
            "kernel_us": ((times[order, 1] - times[order, 0]).astype(np.int64) / 1e3).tolist(),
            "gap_us": ((times[after, 0] - times[order, 1]).astype(np.int64) / 1e3).tolist(),
        }
    else:
        result["step_us"] = [seconds / OUTPUT * 1e6]
    return result


def measure(shape: ModelConfig, batches: list[int], launch: str, busy: int, rounds: int) -> dict[str, Any]:
    """All batches on one engine. Returns the raw samples and what was built."""
    from blink_core.ops.cuda_ops import CudaOps
    from blink_core.runtime.cuda_model import random_network
    from blink_core.runtime.launch import LaunchOptions
    from hil_rigs.gpu.session import client_of, running

    most = max(batches)
    config = EngineConfig(
        vocab=shape.vocab_size, slots=max(128, most), max_len=512, pages=2 + most * 18, max_rows=most, prefix_cache=0,
        token_budget=max(2048, most), arena_tokens=1 << 18,
    )  # fmt: skip
    begin = time.monotonic()
    network = random_network(shape, CudaOps("bfloat16"), config.max_len)
    made = time.monotonic() - begin
    with running(config, network, LaunchOptions(strategy=launch, mirror=False, step_limit_s=20.0)) as runtime:
        client = client_of(runtime)
        built = time.monotonic() - begin
        run_batch(runtime, client, min(batches), 99)  # warms caches of the host
        results = []
        with burners(busy):
            for rows in batches:
                for number in range(rounds):
                    results.append(run_batch(runtime, client, rows, number))
        return {
            "report": runtime.report, "weights_seconds": made, "start_seconds": built, "batches": results,
            "burners": busy, "launch": launch,
        }  # fmt: skip


def table(found: dict[str, Any], targets: dict[int, float]) -> list[str]:
    """One line a batch, over all its rounds."""
    lines = []
    for rows in dict.fromkeys(b["rows"] for b in found["batches"]):
        of = [b for b in found["batches"] if b["rows"] == rows]
        steps = np.concatenate([b["step_us"] for b in of])
        text = f"batch {rows:4d}: step p50 {np.median(steps) / 1e3:7.3f} ms  p99/p50 "
        text += f"{np.percentile(steps, 99) / np.median(steps):6.3f}"
        if "gap_us" in of[0]:
            gaps, kernel = (np.concatenate([b[n] for b in of]) for n in ("gap_us", "kernel_us"))
            text += f"  kernels {np.median(kernel) / 1e3:7.3f} ms  gap {np.median(gaps):6.1f} us"
        text += f"  first token {np.median([b['first_token_ms'] for b in of]):7.2f} ms"
        if rows in targets:
            text += f"  target {targets[rows]}: {'met' if np.median(steps) / 1e3 <= targets[rows] else 'MISSED'}"
        lines.append(text)
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--launch", choices=("host", "fire", "tail", "auto"), default="auto")
    parser.add_argument("--burners", type=int, default=0, help="busy processes beside the engine")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    shape = SHAPES[options.shape]
    if options.layers:
        experts = shape.experts and replace(shape.experts, layers=tuple(range(options.layers)))
        shape = replace(shape, num_layers=options.layers, experts=experts)
    batches = [int(b) for b in options.batches.split(",")]
    found = measure(shape, batches, options.launch, options.burners, options.rounds)
    print(f"{options.shape} {shape.num_layers} layers, bfloat16, {options.launch}, {options.burners} burners")
    print(json.dumps({k: v for k, v in found["report"].items() if k != "buckets"}))
    whole = options.shape == "llama-3-8b" and not options.layers
    print("\n".join(table(found, TARGET_MS if whole else {})))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"shape": options.shape, "layers": shape.num_layers, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
