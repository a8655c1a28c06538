"""Decode beside busy processes: an engine that the GPU drives, and the host-driven control, idle and under load.

    python -m hil_rigs.gpu.interference [--model PATH] [--seconds S] [--per-core N] [--reserved R] [--out FILE]

R cores belong to the client that reads the streams (the front end's place); the engine's process and N busy processes a
core share all others. Steps are counted by the engine's own status line. Exit 0: the device-driven engine keeps its
pace within `KEEPS`, while the control loses more than that; 1: not so; 2: could not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from blink_core.abi.enums import EventKind
from blink_core.abi.params import SamplingParams
from hil_rigs.description import load_rig
from hil_rigs.gpu.burn import burning, split_cores
from hil_rigs.gpu.freeze import ENDLESS, STREAMS
from hil_rigs.local import LocalOptions, LocalRig, RigFailure

KEEPS = 0.95  # of the idle pace, at least; the control must fall below it
MARGIN_S = 60.0  # beyond the measurement, for which busy processes may live


@contextlib.contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """This thread, and processes that it starts, on some cores while inside."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def measure(rig: LocalRig, client: Any, seconds: float) -> dict[str, Any]:
    """Steps a second, and the gaps in microseconds between the arrivals of events at the client."""
    gaps, tokens, errors = [], 0, 0
    begin = last = time.perf_counter()
    steps = rig.memory.status("steps")
    while (now := time.perf_counter()) - begin < seconds:
        kinds = client.poll(0.2)["kind"]
        if len(kinds) == 0:
            continue
        now = time.perf_counter()
        gaps.append((now - last) * 1e6)
        last = now
        tokens += int((kinds == EventKind.TOKEN).sum())
        errors += int((kinds == EventKind.ERROR).sum())
    lasted = time.perf_counter() - begin
    made = rig.memory.status("steps") - steps
    p50, p99 = (float(np.percentile(gaps, p)) for p in (50, 99)) if gaps else (float("nan"), float("nan"))
    return {
        "steps_per_s": made / lasted, "tokens": tokens, "errors": errors, "gap_us_p50": p50, "gap_us_p99": p99,
        "gap_us_max": max(gaps, default=float("nan")), "raw_gap_us": gaps[-1000:],
    }  # fmt: skip


def observe(launch: str, options: argparse.Namespace) -> dict[str, Any]:
    """One engine, idle and then beside the busy processes."""
    reserved, others = split_cores(options.reserved)
    description = load_rig("gpu")
    sizes = {"lease_us": 60_000_000} | ({} if options.model is not None else ENDLESS)
    command = (*description.engine_command, "--launch", launch)
    rig = LocalRig(description, options.model, http=False, options=LocalOptions(engine=sizes, engine_command=command))
    with on_cores(others), rig, on_cores(reserved):
        client = rig.ring(1)
        longest = rig.descriptor.config.max_len
        for i in range(STREAMS):
            prompt = np.arange(1 + i, 33 + i, dtype=np.int32)
            client.submit(prompt, SamplingParams(max_tokens=longest - 64, ignore_eos=True))
        measure(rig, client, 0.5)
        idle = measure(rig, client, options.seconds)
        count = options.per_core * len(others)
        with burning(count, others, options.seconds + MARGIN_S):
            busy = measure(rig, client, options.seconds)
    return {"launch": launch, "busy_processes": count, "cores": len(others), "idle": idle, "busy": busy}


def judge(device: dict[str, Any], host: dict[str, Any]) -> list[str]:
    """What is wrong; nothing if the GPU-driven engine does not notice the load and the control does."""
    wrong = []
    for name, seen in (("device-driven", device), ("host-driven", host)):
        for part in ("idle", "busy"):
            if seen[part]["errors"] or not seen[part]["tokens"]:
                wrong.append(f"{name}, {part}: {seen[part]['tokens']} tokens, {seen[part]['errors']} errors")
    kept, control = (seen["busy"]["steps_per_s"] / max(seen["idle"]["steps_per_s"], 1e-9) for seen in (device, host))
    if not kept >= KEEPS:
        wrong.append(f"device-driven: {kept:.3f} of its idle pace beside busy processes, at least {KEEPS}")
    if not control < KEEPS:
        wrong.append(f"the host-driven control kept {control:.3f} of its pace: this load proves nothing")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="GGUF file or folder; the no-op model without it")
    parser.add_argument("--launch", default="fire")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--per-core", type=int, default=4)
    parser.add_argument("--reserved", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    try:
        device, host = observe(options.launch, options), observe("host", options)
    except (RigFailure, ValueError, TimeoutError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for seen in (device, host):
        for part in ("idle", "busy"):
            told = {k: round(v, 1) for k, v in seen[part].items() if k != "raw_gap_us"}
            print(f"{seen['launch']:5s} {part}: {json.dumps(told)}", flush=True)
    wrong = judge(device, host)
    print("\n".join(wrong) or f"{device['busy_processes']} busy processes: the GPU-driven engine keeps its pace")
    if options.out is not None:
        options.out.write_text(json.dumps({"device": device, "host": host, "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
