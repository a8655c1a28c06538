"""Builds the model kernels, checks each against its NumPy twin, times them; prints a short table last.

    python -m hil_rigs.gpu.ops_check [--only PART,...] [--dtypes T,...] [--skip-timing] [--out DIR] [--seed N]

Parts: rows, products, own, invariance, rope, attention, append, far, torch, moe, one, fixed, sampler (checks);
bandwidth, decode, prefill, gemm, llama, qwen (timings). Raw samples and every comparison go to DIR as JSON. Exit
status: 0 all comparisons pass, 1 one failed, 2 nothing ran.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np

from blink_core.ops.cuda_ops import CudaOps
from hil_rigs.gpu import ops_timing
from hil_rigs.gpu.invariance_cases import fixed
from hil_rigs.gpu.ops_cases import CASES, Outcome
from hil_rigs.gpu.ops_timing import Timing
from hil_rigs.gpu.sampler_cases import sampler

CHECKS = CASES | {"fixed": fixed}
DTYPES = ("float32", "bfloat16", "float16")


def check(parts: set[str], dtypes: list[str], seed: int) -> tuple[list[Outcome], list[str]]:
    """Outcomes of the chosen checks, and the tracebacks of those that broke."""
    outcomes: list[Outcome] = []
    broken: list[str] = []
    todo: list[tuple[str, str, Callable[[CudaOps, np.random.Generator], Iterator[Outcome]]]] = [
        (name, dtype, case) for dtype in dtypes for name, case in CHECKS.items() if name in parts
    ]
    if "sampler" in parts:
        todo.append(("sampler", "float32", sampler))
    for name, dtype, case in todo:
        begin = time.monotonic()
        try:
            for outcome in case(CudaOps(dtype), np.random.default_rng(seed)):
                outcomes.append(outcome)
                if not outcome.ok:
                    print(
                        f"FAILED {outcome.op} [{outcome.case}] {dtype}: {outcome.error:.3g} > {outcome.limit:.3g}",
                        flush=True,
                    )
            cp.cuda.Device().synchronize()
        except Exception:
            broken.append(f"{name} {dtype}\n{traceback.format_exc()}")
            print(f"BROKEN {broken[-1]}", flush=True)
        print(f"checked {name} {dtype} in {time.monotonic() - begin:.1f} s", flush=True)
    return outcomes, broken


def measure(parts: set[str]) -> tuple[list[Timing], list[str]]:
    """The chosen timings, printed as they come."""
    timings: list[Timing] = []
    broken: list[str] = []
    ops = CudaOps("bfloat16")

    def take(name: str, source: Callable[[], Iterator[Timing]]) -> None:
        if name not in parts:
            return
        begin = time.monotonic()
        try:
            for timing in source():
                timings.append(timing)
                print(timing.line, flush=True)
        except Exception:
            broken.append(f"{name}\n{traceback.format_exc()}")
            print(f"BROKEN {broken[-1]}", flush=True)
        ops_timing.free()
        print(f"timed {name} in {time.monotonic() - begin:.1f} s", flush=True)

    take("bandwidth", lambda: iter([ops_timing.bandwidth()]))
    read = next((t.bytes_read / t.median / 1e6 for t in timings), 4.2)
    for rows, context in ((64, 2048), (1, 192), (32, 192), (128, 192), (1, 8192)):
        take("decode", partial(ops_timing.decode_attention, ops, read, rows, context))
    for new, before in ((2048, 0), (2048, 6144)):
        take("prefill", partial(ops_timing.prefill_attention, ops, new, before))
    take("gemm", lambda: ops_timing.products(ops))
    take("llama", lambda: ops_timing.llama_steps(ops))
    take("qwen", lambda: ops_timing.moe_steps(ops))
    return timings, broken


def summary(outcomes: list[Outcome]) -> list[str]:
    """One line an operation and element type: comparisons, failures, worst error as a share of its limit."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.op, outcome.dtype), []).append(outcome)
    lines = []
    for (op, dtype), group in groups.items():
        worst = max(group, key=lambda o: np.inf if np.isnan(o.error) else o.error)
        failed = sum(not o.ok for o in group)
        lines.append(
            f"{'FAIL' if failed else 'ok  '} {op:34s} {dtype:9s} {len(group):4d} cases {failed:3d} failed  "
            f"worst {worst.error:.2e} limit {worst.limit:.1e}"
        )
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    everything = [*CHECKS, "sampler", "bandwidth", "decode", "prefill", "gemm", "llama", "qwen"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(everything))
    parser.add_argument("--skip-timing", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--no-pool", action="store_true", help="one CUDA allocation an array, for compute-sanitizer")
    options = parser.parse_args(arguments)
    parts = set(options.only.split(","))
    if unknown := parts - set(everything):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; there are {', '.join(everything)}")
    if options.no_pool:
        cp.cuda.set_allocator(None)
    device: dict[str, Any] = cp.cuda.runtime.getDeviceProperties(0)
    outcomes, broken = check(parts, options.dtypes.split(","), options.seed)
    timings: list[Timing] = []
    if not options.skip_timing:
        timings, more = measure(parts)
        broken += more
    print(f"\n{device['name'].decode()}, CUDA driver {cp.cuda.runtime.driverGetVersion()}, seed {options.seed}")
    print("\n".join(summary(outcomes)))
    print("\n".join(t.line for t in timings))
    failed = sum(not o.ok for o in outcomes)
    print(f"{len(outcomes)} comparisons, {failed} failed, {len(broken)} parts broken, {len(timings)} timings")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        record = {
            "device": device["name"].decode(),
            "seed": options.seed,
            "comparisons": [
                {"op": o.op, "case": o.case, "dtype": o.dtype, "error": o.error, "limit": o.limit} for o in outcomes
            ],
            "timings": [t.record() for t in timings],
            "broken": broken,
        }
        (options.out / "ops_check.json").write_text(json.dumps(record, indent=1))
    if not outcomes and not timings:
        return 2
    return 1 if failed or broken else 0


if __name__ == "__main__":
    sys.exit(main())
