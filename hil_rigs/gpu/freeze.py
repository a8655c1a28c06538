"""Shows that no CPU is in the path: the engine's process frozen in mid-stream, and what it costs while it is not.

    python -m hil_rigs.gpu.freeze [--model PATH] [--seconds S] [--out FILE]

The engine process is stopped with SIGSTOP while requests run. Device-driven, every stream goes on, and requests that
are submitted meanwhile are admitted and end; host-driven, the control, everything stands still. Meanwhile no thread of
the engine spends user or system time or switches context (/proc), and NVML shows no other process on the engine's own
GPU; what runs on other GPUs of the machine is none of its business.
Exit 0: so it was.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from blink_core.abi.enums import EventKind
from blink_core.abi.params import SamplingParams
from hil_rigs.description import load_rig
from hil_rigs.gpu.processes import PROC, Activity, Gpu, activity, environment_of, first_gpu, gpu_processes
from hil_rigs.local import LocalOptions, LocalRig

STREAMS = 8
# Of the no-op model: more tokens than eight streams can make in the time, a hundred thousand steps a second.
ENDLESS = {
    "max_len": 1 << 20, "pages": 1 << 19, "max_rows": 16, "slots": 16, "sq_entries": 64, "token_budget": 64,
    "arena_tokens": 1 << 20,
}  # fmt: skip


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


TICKS = os.sysconf("SC_CLK_TCK")
STOP_S = 5.0


def await_stopped(pid: int) -> Activity:
    """The activity of a process once all its threads stand still. Raises TimeoutError after `STOP_S`."""
    deadline = time.monotonic() + STOP_S
    while (seen := activity(pid)).states != "T":
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid}: threads in states {seen.states} {STOP_S:g} s after SIGSTOP, not all T")
        time.sleep(0.005)
    return seen


def others_on_gpu(engine: int, gpu: Gpu, before: list[int] | None, proc: Path = PROC) -> dict[str, Any]:
    """Processes with a context on the engine's GPU: whether the engine's is seen, and all others.

    before: those that had one when the engine was not started yet, None where NVML did not say. Within a container NVML
    may give the pids of another namespace: the one process that appeared with the engine, of a pid that nobody has
    here, is the engine then. Raises RuntimeError where NVML does not say.
    """
    found = gpu_processes(gpu)
    appeared = [] if before is None else [pid for pid in found if pid not in before]
    foreign = len(appeared) == 1 and engine not in found and not (proc / str(appeared[0])).exists()
    own = appeared[0] if foreign else engine
    return {"bus": gpu.bus, "engine": own in found, "others": [pid for pid in found if pid != own]}


class Contexts:
    """Who has a context on the engine's GPU, before it is started and later. Which GPU that is is asked for before the
    engine is frozen: CUDA takes seconds to say so."""

    def __init__(self) -> None:
        self._gpu: Gpu | None = None
        self._before: list[int] | None = None
        self._unknown: str | None = None
        # Where it cannot be told, it cannot be told of the engine either, which is what the verdict looks at.
        with suppress(RuntimeError):
            self._gpu = first_gpu(os.environ)
            self._before = gpu_processes(self._gpu)

    def started(self, engine: int) -> None:
        """The engine runs, on the GPU that its environment gives it."""
        try:
            gpu = first_gpu(environment_of(engine))
        except RuntimeError as error:
            self._unknown = str(error)
            return
        if gpu != self._gpu:
            self._gpu, self._before = gpu, None

    def beside(self, engine: int) -> dict[str, Any]:
        """As :func:`others_on_gpu`, or why it is unknown."""
        if self._unknown is not None or self._gpu is None:
            return {"unknown": self._unknown or "which GPU is the engine's was not asked"}
        try:
            return others_on_gpu(engine, self._gpu, self._before)
        except RuntimeError as error:
            return {"unknown": str(error)}


def observe(model: Path | None, launch: str, seconds: float) -> dict[str, Any]:
    """One engine: running, then frozen, then running again."""
    description = load_rig("gpu")
    command = (*description.engine_command, "--launch", launch)
    sizes = {"lease_us": 60_000_000} | ({} if model is not None else ENDLESS)
    options = LocalOptions(engine=sizes, engine_command=command)
    contexts = Contexts()
    with LocalRig(description, model, http=False, options=options) as rig:
        contexts.started(rig.pid("engine"))
        client = rig.ring(1)
        longest = rig.descriptor.config.max_len
        params = SamplingParams(max_tokens=longest - 64, ignore_eos=True)
        for i in range(STREAMS):
            client.submit(np.arange(1 + i, 33 + i, dtype=np.int32), params)
        collect(client, 0.5)
        pid = rig.pid("engine")
        before = activity(pid)
        running = collect(client, seconds)
        after = activity(pid)
        rig.send("engine", signal.SIGSTOP)
        try:
            still = await_stopped(pid)
            collect(client, 0.3)  # what was on its way
            frozen = collect(client, seconds)
            for i in range(4):
                client.submit(np.arange(7 + i, 40 + i, dtype=np.int32), SamplingParams(max_tokens=40, ignore_eos=True))
            admitted = collect(client, seconds)
            moved = activity(pid).moved_since(still)
            gpu = contexts.beside(pid)
        finally:
            rig.send("engine", signal.SIGCONT)
        again = collect(client, seconds)
        return {
            "launch": launch, "seconds": seconds, "running": running, "frozen": frozen, "frozen_with_new": admitted,
            "again": again, "cpu_seconds": (after.user + after.system - before.user - before.system) / TICKS,
            "context_switches": after.switches - before.switches, "moved_while_frozen": moved, "gpu": gpu,
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
    for name, seen in (("device-driven", device), ("host-driven", host)):
        if seen["moved_while_frozen"]:
            wrong.append(f"frozen, {name}: the engine process was active: {', '.join(seen['moved_while_frozen'])}")
    if "unknown" in device["gpu"]:
        wrong.append(f"other CUDA contexts: {device['gpu']['unknown']}")
    elif not device["gpu"]["engine"]:
        wrong.append("other CUDA contexts: NVML does not show the engine's own, so it would show no other either")
    elif device["gpu"]["others"]:
        wrong.append(f"other processes have a context on the GPU: {device['gpu']['others']}")
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
