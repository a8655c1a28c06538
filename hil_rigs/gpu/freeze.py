"""Shows that no CPU is in the path: the engine's process frozen in mid-stream, and what it costs while it is not.

    python -m hil_rigs.gpu.freeze [--model PATH] [--seconds S] [--windows N] [--out FILE]

The engine process is stopped with SIGSTOP while requests run. Device-driven, every stream goes on, and requests that
are submitted meanwhile are admitted and end; host-driven, the control, everything stands still. Meanwhile no thread of
the engine spends user or system time or switches context (/proc), and NVML shows no other process on the engine's own
GPU; what runs on other GPUs of the machine is none of its business.

Throughput is what the client got in windows of S seconds, running and frozen in turn, so that what drifts hits both.
The ratio of each frozen window to the mean of its two neighbours is taken. Their median must be at least `KEEPS`, and
two standard errors of that median (by the median absolute deviation) no more than what is left to 1: else the windows
are too noisy to say so, which is no pass. All windows are kept.
Exit 0: so it was.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from blink_core.abi.enums import EventKind
from blink_core.abi.params import SamplingParams
from hil_rigs.description import load_rig
from hil_rigs.gpu.processes import PROC, Activity, Gpu, activity, environment_of, first_gpu, gpu_processes
from hil_rigs.local import LocalOptions, LocalRig

STREAMS, NEW = 8, 4  # from the begin, and submitted to a frozen engine
# Of the no-op model: more tokens than eight streams can make in the time, a hundred thousand steps a second.
ENDLESS = {
    "max_len": 1 << 20, "pages": 1 << 19, "max_rows": 16, "slots": 16, "sq_entries": 64, "token_budget": 64,
    "arena_tokens": 1 << 20,
}  # fmt: skip


KEEPS = 0.99  # of the throughput while the engine's process runs, at least
WINDOWS, WINDOW_S = 9, 0.4
SETTLE_S = 0.1  # for what is on its way when the process is stopped or goes on


def collect(client: Any, seconds: float) -> dict[str, float]:
    """Tokens from one poll's return to another's, and the seconds between them, `seconds` or a poll more; ends and
    errors of the first poll too."""
    first = client.poll(0.1)["kind"]
    begin = now = time.perf_counter()
    found: dict[str, float] = {"tokens": 0} | _ends(first)
    while now - begin < seconds:
        kinds = client.poll(min(seconds, 0.1))["kind"]
        now = time.perf_counter()
        found["tokens"] += int((kinds == EventKind.TOKEN).sum())
        for name, count in _ends(kinds).items():
            found[name] += count
    return found | {"seconds": now - begin}


def _ends(kinds: Any) -> dict[str, float]:
    return {"ends": int((kinds == EventKind.FINISH).sum()), "errors": int((kinds == EventKind.ERROR).sum())}


def kept(running: Sequence[dict[str, float]], frozen: Sequence[dict[str, float]]) -> tuple[float, float]:
    """The median ratio of a frozen window's throughput to that of its neighbours, and two standard errors of it.
    running: one more than frozen. Not a number where nothing ran."""
    rates = [[w["tokens"] / w["seconds"] for w in some] for some in (running, frozen)]
    beside = [(a + b) / 2 for a, b in zip(rates[0], rates[0][1:], strict=False)]
    if not beside or not all(beside):
        return float("nan"), float("nan")
    ratios = [f / b for f, b in zip(rates[1], beside, strict=True)]
    middle = statistics.median(ratios)
    spread = statistics.median(abs(r - middle) for r in ratios)
    return middle, 2 * 1.2533 * 1.4826 * spread / len(ratios) ** 0.5


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


def observe(model: Path | None, launch: str, seconds: float, windows: int) -> dict[str, Any]:
    """One engine: running, then `windows` times frozen and running again; new requests come in the last frozen time."""
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
        running, frozen = [collect(client, seconds)], []
        after = activity(pid)
        moved: list[str] = []
        contexts_seen: list[dict[str, Any]] = []
        admitted: dict[str, float] = {}
        for number in range(windows):
            rig.send("engine", signal.SIGSTOP)
            try:
                still = await_stopped(pid)
                collect(client, SETTLE_S)
                frozen.append(collect(client, seconds))
                if number == windows - 1:
                    for i in range(NEW):
                        prompt = np.arange(7 + i, 40 + i, dtype=np.int32)
                        client.submit(prompt, SamplingParams(max_tokens=40, ignore_eos=True))
                    admitted = collect(client, seconds)
                moved += activity(pid).moved_since(still)
                contexts_seen.append(contexts.beside(pid))
            finally:
                rig.send("engine", signal.SIGCONT)
            collect(client, SETTLE_S)
            running.append(collect(client, seconds))
        ratio, noise = kept(running, frozen)
        gpu = next((g for g in contexts_seen if not g.get("engine") or g["others"]), contexts_seen[-1])
        return {
            "launch": launch, "seconds": seconds, "running": running, "frozen": frozen, "frozen_with_new": admitted,
            "kept": ratio, "noise": noise, "moved_while_frozen": moved, "gpu": gpu,
            "cpu_seconds": (after.user + after.system - before.user - before.system) / TICKS,
            "context_switches": after.switches - before.switches,
        }  # fmt: skip


def judge(device: dict[str, Any], host: dict[str, Any]) -> list[str]:
    """What is wrong with the two observations; nothing if they show what they should."""
    wrong = []
    ratio, noise = kept(device["running"], device["frozen"])
    if not ratio >= KEEPS:
        wrong.append(f"frozen, device-driven: {ratio:.4f} of the throughput while running, at least {KEEPS}")
    if not noise <= 1 - KEEPS:
        wrong.append(
            f"device-driven: windows too noisy, the ratio {ratio:.4f} is known to {noise:.4f}: take more of them"
        )
    new = device["frozen_with_new"]
    if new["ends"] < NEW:
        wrong.append(f"frozen, device-driven: {new['ends']:.0f} of {NEW} new requests ended")
    windows = [*device["running"], *device["frozen"], new]
    if any(w["errors"] for w in windows):
        wrong.append("device-driven: requests ended with errors")
    if any(w["ends"] for w in device["frozen"]) or any(w["ends"] for w in device["running"][:-1]):
        wrong.append("device-driven: streams ended within the windows, which then compare fewer of them with more")
    for name, seen in (("device-driven", device), ("host-driven", host)):
        if seen["moved_while_frozen"]:
            wrong.append(f"frozen, {name}: the engine process was active: {', '.join(seen['moved_while_frozen'])}")
    if "unknown" in device["gpu"]:
        wrong.append(f"other CUDA contexts: {device['gpu']['unknown']}")
    elif not device["gpu"]["engine"]:
        wrong.append("other CUDA contexts: NVML does not show the engine's own, so it would show no other either")
    elif device["gpu"]["others"]:
        wrong.append(f"other processes have a context on the GPU: {device['gpu']['others']}")
    if any(w["tokens"] for w in host["frozen"]) or host["frozen_with_new"]["ends"]:
        wrong.append("the host-driven control went on while frozen: this check proves nothing")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="GGUF file or folder; the no-op model without it")
    parser.add_argument("--launch", default="fire")
    parser.add_argument("--seconds", type=float, default=WINDOW_S, help="of a window")
    parser.add_argument("--windows", type=int, default=WINDOWS, help="frozen ones, of the device-driven engine")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.windows < 3:
        parser.error(f"--windows is {options.windows}: fewer than 3 have no median deviation")
    device = observe(options.model, options.launch, options.seconds, options.windows)
    print(json.dumps(device))
    host = observe(options.model, "host", options.seconds, 1)
    print(json.dumps(host))
    wrong = judge(device, host)
    print("\n".join(wrong) or "frozen for as long as asked: every stream went on, new requests were admitted and ended")
    print(
        f"throughput kept while frozen: {device['kept']:.4f}, known to {device['noise']:.4f}, {options.windows} windows"
    )
    if options.out is not None:
        options.out.write_text(json.dumps({"device": device, "host": host, "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
