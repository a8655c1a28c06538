"""What the GPU engine is measured by, in one command: kernels, decode steps, first token, prefill chunk.

    python -m hil_rigs.gpu.bench [--stages kernels,llama,qwen] [--launch auto] [--burners N] [--out FILE]

kernels: read bandwidth, and decode attention of 64 rows x 2,048 tokens as a share of it. llama, qwen: the shapes of
Llama-3-8B and Qwen3-30B-A3B in the real runtime with seeded random bfloat16 weights, 128 tokens in and 129 out, greedy,
end of sequence ignored, prefix cache off; step times are the GPU's own (globaltimer at the first kernel of each step
graph), so they hold the scheduler's gap; time to first token is the client's, on this machine; llama also has the step
of a 2,048-token prompt. Each stage is a process with a time limit, 8 minutes in all. Raw samples go to FILE.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
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
MOE_TARGET_MS = {1: 2.2}  # Qwen3-30B-A3B
FIRST_TOKEN_MS, CHUNK_MS, ATTENTION_SHARE = 8.0, 48.0, 0.75
CHUNK, CHUNKS = 2048, 5  # tokens of a prompt that is one step, and how many are timed
TOTAL_S = 480.0

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
# Stage -> model shape or None, batches, and seconds at most.
STAGES: dict[str, tuple[ModelConfig | None, str, float]] = {
    "kernels": (None, "", 120.0),
    "llama": (LLAMA_3_8B, "1,8,32,128", 180.0),
    "qwen": (QWEN3_30B_A3B, "1,8", 180.0),
}


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


def run_chunk(runtime: Any, client: Any, seed: int) -> list[float]:
    """Milliseconds of the step of a prompt of CHUNK tokens, by the GPU's clock; one prompt after the other."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(CHUNKS):
        client.submit(rng.integers(0, runtime.config.vocab, CHUNK).astype(np.int32), SamplingParams(max_tokens=1))
        deadline = time.perf_counter() + 20.0
        while client.live:
            client.poll(0.5)
            if time.perf_counter() > deadline:
                raise TimeoutError(f"a prompt of {CHUNK} tokens has no token after 20 s")
        samples, times = runtime.times()
        begun, ended = times[int(samples["step"].max()) & (len(samples) - 1)].astype(np.int64)
        if ended <= begun:
            raise RuntimeError(f"the step of a prompt has no times: begun {begun}, ended {ended}")
        found.append(float(ended - begun) / 1e6)
    return found


def measure(
    shape: ModelConfig, batches: list[int], launch: str, busy: int, rounds: int, *, chunk: bool = False
) -> dict[str, Any]:
    """All batches on one engine, and with `chunk` a long prompt. Returns the raw samples and what was built."""
    from blink_core.ops.cuda_ops import CudaOps
    from blink_core.runtime.cuda_model import random_network
    from blink_core.runtime.launch import LaunchOptions
    from hil_rigs.gpu.session import client_of, running

    most = max(batches)
    longest = CHUNK + 64 if chunk else 512
    config = EngineConfig(
        vocab=shape.vocab_size, slots=max(128, most), max_len=longest, pages=2 + most * 18 + longest // 16,
        max_rows=most, prefix_cache=0, token_budget=max(CHUNK, most), arena_tokens=1 << 18,
    )  # fmt: skip
    begin = time.monotonic()
    network = random_network(shape, CudaOps("bfloat16"), config.max_len)
    made = time.monotonic() - begin
    with running(config, network, LaunchOptions(strategy=launch, mirror=False, step_limit_s=20.0)) as runtime:
        client = client_of(runtime)
        built = time.monotonic() - begin
        run_batch(runtime, client, min(batches), 99)  # warms caches of the host
        results = []
        chunk_ms: list[float] = []
        with burners(busy):
            for rows in batches:
                for number in range(rounds):
                    results.append(run_batch(runtime, client, rows, number))
            if chunk and hasattr(runtime, "times"):
                run_chunk(runtime, client, 98)
                chunk_ms = run_chunk(runtime, client, 0)
        return {
            "report": runtime.report, "weights_seconds": made, "start_seconds": built, "batches": results,
            "chunk_ms": chunk_ms, "burners": busy, "launch": launch,
        }  # fmt: skip


def judged(value: float, limit: float, *, least: bool = False) -> str:
    """'met' or 'MISSED', with the limit."""
    return f"limit {limit:g}: {'met' if (value >= limit if least else value <= limit) else 'MISSED'}"


def table(found: dict[str, Any], targets: dict[int, float], first_ms: float = 0.0) -> list[str]:
    """One line a batch, over all its rounds, and one for the chunk. `first_ms`: limit of the first token at batch 1."""
    lines = []
    for rows in dict.fromkeys(b["rows"] for b in found["batches"]):
        of = [b for b in found["batches"] if b["rows"] == rows]
        steps = np.concatenate([b["step_us"] for b in of])
        text = f"batch {rows:4d}: step p50 {np.median(steps) / 1e3:7.3f} ms  p99/p50 "
        text += f"{np.percentile(steps, 99) / np.median(steps):6.3f}"
        if "gap_us" in of[0]:
            gaps, kernel = (np.concatenate([b[n] for b in of]) for n in ("gap_us", "kernel_us"))
            text += f"  kernels {np.median(kernel) / 1e3:7.3f} ms  gap {np.median(gaps):6.1f} us"
        if rows in targets:
            text += f"  {judged(float(np.median(steps)) / 1e3, targets[rows])}"
        first = float(np.median([b["first_token_ms"] for b in of]))
        text += f"  first token {first:7.2f} ms"
        if first_ms and rows == 1:
            text += f"  {judged(first, first_ms)}"
        lines.append(text)
    if found["chunk_ms"]:
        chunk = float(np.median(found["chunk_ms"]))
        lines.append(f"prefill chunk of {CHUNK} tokens: {chunk:.2f} ms  {judged(chunk, CHUNK_MS)}")
    return lines


def kernels() -> tuple[dict[str, Any], list[str]]:
    """Read bandwidth and decode attention in one process: the record and the table."""
    from blink_core.ops.cuda_ops import CudaOps
    from hil_rigs.gpu import ops_timing

    ops = CudaOps("bfloat16")
    read = ops_timing.bandwidth()
    tbps = read.bytes_read / read.median / 1e6
    timings = [read]
    lines = [read.line]
    for rows, context in ((64, 2048), (1, 192), (32, 192), (1, 8192)):
        for timing in ops_timing.decode_attention(ops, tbps, rows, context):
            timings.append(timing)
            lines.append(timing.line)
            if (rows, context) == (64, 2048) and timing.bytes_read:
                share = timing.bytes_read / timing.median / 1e6 / tbps
                lines.append(f"  share of the read bandwidth {share:.3f}  {judged(share, ATTENTION_SHARE, least=True)}")
    return {"read_tbps": tbps, "timings": [t.record() for t in timings]}, lines


def run_stage(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One stage in this process; prints its table."""
    shape, batches, _ = STAGES[name]
    if shape is None:
        record, lines = kernels()
        print("\n".join(lines), flush=True)
        return record
    whole = not options.layers
    if options.layers:
        experts = shape.experts and replace(shape.experts, layers=tuple(range(options.layers)))
        shape = replace(shape, num_layers=options.layers, experts=experts)
    sizes = [int(b) for b in (options.batches or batches).split(",")]
    found = measure(shape, sizes, options.launch, options.burners, options.rounds, chunk=name == "llama")
    print(f"{name} {shape.num_layers} layers, bfloat16, {options.launch}, {options.burners} burners")
    print(json.dumps({k: v for k, v in found["report"].items() if k != "buckets"}))
    targets = TARGET_MS if name == "llama" else MOE_TARGET_MS
    first = FIRST_TOKEN_MS if name == "llama" and whole else 0.0
    print("\n".join(table(found, targets if whole else {}, first)), flush=True)
    return {"shape": name, "layers": shape.num_layers, **found}


def run_apart(name: str, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """One stage in a process of its own, which is killed when its time is over."""
    command = [sys.executable, "-m", "hil_rigs.gpu.bench", "--stage", name, "--launch", options.launch]
    command += ["--burners", str(options.burners), "--rounds", str(options.rounds)]
    for option in ("batches", "layers"):
        if value := getattr(options, option):
            command += [f"--{option}", str(value)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        print(f"{name}: not over after {limit:.0f} s", flush=True)
        return {"failed": f"not over after {limit:.0f} s"}
    results = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    print("\n".join(line for line in done.stdout.splitlines() if not line.startswith("RESULT ")), flush=True)
    if done.returncode != 0 or not results:
        print(f"{name}: exit status {done.returncode}\n{done.stderr[-2000:]}", flush=True)
        return {"failed": f"exit status {done.returncode}: {done.stderr[-600:]}"}
    found: dict[str, Any] = json.loads(results[-1])
    return found


def main(arguments: list[str] | None = None) -> int:
    """Command line. Exit status 0: every stage ran, whether or not its limits are met; 1: one failed."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--stage", choices=sorted(STAGES), help="run this stage in this process")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--batches", help="of llama and qwen")
    parser.add_argument("--launch", choices=("host", "fire", "tail", "switch", "auto"), default="auto")
    parser.add_argument("--burners", type=int, default=0, help="busy processes beside the engine")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.stage:
        print(f"RESULT {json.dumps(run_stage(options.stage, options))}", flush=True)
        return 0
    names = options.stages.split(",")
    if unknown := set(names) - set(STAGES):
        parser.error(f"unknown stages {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    begin = time.monotonic()
    found: dict[str, Any] = {}
    for name in names:
        left = TOTAL_S - (time.monotonic() - begin)
        found[name] = run_apart(name, options, max(1.0, min(STAGES[name][2], left)))
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps({"stages": found, "seconds": time.monotonic() - begin}))
    failed = [name for name, result in found.items() if "failed" in result]
    print(f"{len(found) - len(failed)} of {len(found)} stages in {time.monotonic() - begin:.0f} s; failed: "
          f"{', '.join(failed) or 'none'}")  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
