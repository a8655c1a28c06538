"""Shows that no CPU is in the path: the engine's process frozen in mid-stream, and what it costs while it is not.

    python -m hil_rigs.gpu.freeze [--model PATH] [--seconds S] [--out FILE]

The engine process is stopped with SIGSTOP while requests run. Device-driven, every stream goes on, and requests that
are submitted meanwhile are admitted and end; host-driven, the control, everything stands still. Exit 0: so it was.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from blink_core.abi.enums import EventKind
from blink_core.abi.params import SamplingParams
from hil_rigs.description import load_rig
from hil_rigs.local import LocalOptions, LocalRig

STREAMS = 8


def collect(client: Any, seconds: float) -> dict[str, int]:
    """Tokens and ends polled within `seconds`."""
    until = time.monotonic() + seconds
    tokens = ends = errors = 0
    while (left := until - time.monotonic()) > 0:
        kinds = client.poll(min(left, 0.1))["kind"]
        tokens += int((kinds == EventKind.TOKEN).sum())
        ends += int((kinds == EventKind.FINISH).sum())
        errors += int((kinds == EventKind.ERROR).sum())
    return {"tokens": tokens, "ends": ends, "errors": errors}


def cost(process: psutil.Process) -> tuple[float, int]:
    """CPU seconds and context switches so far."""
    times, switches = process.cpu_times(), process.num_ctx_switches()
    return times.user + times.system, switches.voluntary + switches.involuntary


def observe(model: Path | None, launch: str, seconds: float) -> dict[str, Any]:
    """One engine: running, then frozen, then running again."""
    description = load_rig("gpu")
    command = (*description.engine_command, "--launch", launch)
    # An endless supply of tokens: more than the streams can make in the time.
    sizes = (
        {"max_len": 1 << 17, "pages": 1 << 16, "max_rows": 16, "slots": 64, "token_budget": 64} if model is None else {}
    )
    sizes |= {"lease_us": 60_000_000, "arena_tokens": 1 << 18} if model is None else {"lease_us": 60_000_000}
    options = LocalOptions(engine=sizes, engine_command=command)
    with LocalRig(description, model, http=False, options=options) as rig:
        client = rig.ring(1)
        longest = rig.descriptor.config.max_len
        params = SamplingParams(max_tokens=longest - 64, ignore_eos=True)
        for i in range(STREAMS):
            client.submit(np.arange(1 + i, 33 + i, dtype=np.int32), params)
        collect(client, 0.5)
        process = psutil.Process(rig.pid("engine"))
        before = cost(process)
        running = collect(client, seconds)
        after = cost(process)
        rig.send("engine", signal.SIGSTOP)
        try:
            collect(client, 0.3)  # what was on its way
            frozen = collect(client, seconds)
            for i in range(4):
                client.submit(np.arange(7 + i, 40 + i, dtype=np.int32), SamplingParams(max_tokens=40, ignore_eos=True))
            admitted = collect(client, seconds)
        finally:
            rig.send("engine", signal.SIGCONT)
        again = collect(client, seconds)
        return {
            "launch": launch, "seconds": seconds, "running": running, "frozen": frozen, "frozen_with_new": admitted,
            "again": again, "cpu_seconds": after[0] - before[0], "context_switches": after[1] - before[1],
        }  # fmt: skip


def judge(device: dict[str, Any], host: dict[str, Any]) -> list[str]:
    """What is wrong with the two observations; nothing if they show what they should."""
    wrong = []
    if device["frozen"]["tokens"] < 0.9 * device["running"]["tokens"]:
        wrong.append(
            f"frozen, device-driven: {device['frozen']['tokens']} tokens, {device['running']['tokens']} running"
        )
    if device["frozen_with_new"]["ends"] < 4:
        wrong.append(f"frozen, device-driven: {device['frozen_with_new']['ends']} of 4 new requests ended")
    if any(device[part]["errors"] for part in ("running", "frozen", "frozen_with_new", "again")):
        wrong.append("device-driven: requests ended with errors")
    if host["frozen"]["tokens"] or host["frozen_with_new"]["ends"]:
        wrong.append("the host-driven control went on while frozen: this check proves nothing")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="GGUF file or folder; the no-op model without it")
    parser.add_argument("--launch", default="fire")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    device = observe(options.model, options.launch, options.seconds)
    print(json.dumps(device))
    host = observe(options.model, "host", options.seconds)
    print(json.dumps(host))
    wrong = judge(device, host)
    print("\n".join(wrong) or "frozen for as long as asked: every stream went on, new requests were admitted and ended")
    if options.out is not None:
        options.out.write_text(json.dumps({"device": device, "host": host, "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
