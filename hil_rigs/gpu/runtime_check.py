"""Checks the GPU runtime on the machine it runs on, stage by stage, and prints a short table last.

    python -m hil_rigs.gpu.runtime_check [--only STAGE,...] [--models DIR] [--out DIR] [--timeout SECONDS]

Each stage is a process of its own with a hard time limit, so that a kernel that hangs costs its stage and no more.
--models: folder of model folders or GGUF files. Exit status: 0 all stages pass, 1 one failed, 2 nothing ran.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from blink_core.abi.config import EngineConfig
from blink_core.abi.enums import LogLevel
from blink_core.abi.params import SamplingParams

STRATEGIES = ("host", "fire", "tail", "switch", "auto")
NOOP_VOCAB = 251
RAW = 1000  # samples that a result keeps
# Shorter than any model's step. Behind one of 0 us, `gap-bare`, the scheduler's work while a step runs is in the gap.
GAP_STEP_US = 100.0


class Failed(AssertionError):
    """A stage found something wrong."""


def expect(condition: bool, text: str) -> None:
    if not condition:
        raise Failed(text)


def noop_config(**fields: Any) -> EngineConfig:
    defaults: dict[str, Any] = {"slots": 128, "max_rows": 32, "pages": 2050, "max_len": 2048, "token_budget": 1024}
    return EngineConfig(vocab=NOOP_VOCAB, **(defaults | fields))


def noop(strategy: str, options: argparse.Namespace) -> dict[str, Any]:
    """Protocol: every request of the no-op model gets exactly the tokens of its formula, over 1,000 steps and more."""
    from blink_core.runtime.launch import DeviceDriven, LaunchOptions
    from hil_rigs.gpu.session import ask, client_of, running

    rng = np.random.default_rng(3)
    with running(noop_config(), None, LaunchOptions(strategy=strategy, step_limit_s=5.0, run_limit_s=40.0)) as runtime:
        client = client_of(runtime)
        for count, most in ((1, 130), (20, 300), (60, 64), (4, 1200)):
            todo = [
                (rng.integers(0, 251, int(rng.integers(1, 500))), SamplingParams(max_tokens=most - i, ignore_eos=True))
                for i in range(count)
            ]
            answers = ask(client, todo, 20.0)
            for (prompt, params), answer in zip(todo, answers, strict=True):
                expect(answer.ended == "LENGTH", f"ended {answer.ended}")
                expect(len(answer.tokens) == params.max_tokens, f"{len(answer.tokens)} of {params.max_tokens} tokens")
                steps = np.diff(answer.tokens) % 251
                expect(bool((steps == 7).all()), f"tokens of a prompt of {len(prompt)}: {answer.tokens[:8]}")
        result: dict[str, Any] = {"steps": runtime.status("steps"), "report": runtime.report}
        if isinstance(runtime, DeviceDriven):
            result |= gaps(runtime)
    return result


def gaps(runtime: Any) -> dict[str, Any]:
    """Microseconds between steps, from the records of a device-driven engine: medians and 99th percentiles."""
    samples, times = runtime.times()
    steps = int(samples["step"].max())
    size = len(samples)
    order = np.arange(max(2, steps - size + 2), steps) & (size - 1)
    before = (order - 1) & (size - 1)
    follows = samples["seen"][order] != 0
    begun, ended = times[order, 0].astype(np.int64), times[before, 1].astype(np.int64)
    s = samples[order]

    def us(name: str, values: Any) -> dict[str, float]:
        values = values[follows] / 1e3
        if values.size == 0:
            return {}
        return {f"{name}_p50": float(np.median(values)), f"{name}_p99": float(np.percentile(values, 99))}

    seen, planned, launched = (s[n].astype(np.int64) for n in ("seen", "planned", "launched"))
    return {
        **us("gap_us", begun - ended),
        **us("notice_us", seen - ended),
        **us("boundary_us", planned - seen),
        **us("launch_us", launched - planned),
        **us("start_us", begun - launched),
        "gaps": int(follows.sum()),
        "raw_gap_us": ((begun - ended)[follows][-RAW:] / 1e3).tolist(),
        "raw_boundary_us": ((planned - seen)[follows][-RAW:] / 1e3).tolist(),
        "raw_launch_us": ((launched - planned)[follows][-RAW:] / 1e3).tolist(),
    }


def gap(
    strategy: str, rows: int = 64, slots: int = 4096, step_us: float = 0.0, *, phases: bool = False
) -> dict[str, Any]:
    """The scheduler's own cost: `rows` running requests of the no-op model on a ring of `slots` slots.

    step_us: how long a step takes at least. phases: of which parts the boundary consists, see perf.py.
    """
    from blink_core.runtime.launch import DeviceDriven, LaunchOptions
    from hil_rigs.gpu.perf import phase_times
    from hil_rigs.gpu.session import ask, client_of, running

    config = noop_config(
        slots=slots, max_rows=rows, pages=8194, sq_entries=4 * slots, cq_entries=4 * slots, log_level=LogLevel.DECISIONS
    )
    launch = LaunchOptions(strategy=strategy, step_limit_s=5.0, run_limit_s=40.0, noop_step_us=step_us, phases=phases)
    with running(config, None, launch) as runtime:
        client = client_of(runtime)
        todo = [(np.arange(64) % 251, SamplingParams(max_tokens=1500, ignore_eos=True)) for _ in range(rows)]
        begin = time.perf_counter()
        ask(client, todo, 30.0)
        seconds = time.perf_counter() - begin
        found = gaps(runtime) if isinstance(runtime, DeviceDriven) else {}
        if phases and isinstance(runtime, DeviceDriven):
            found["phases"] = phase_times(runtime.phases(), RAW)
        return {"steps": runtime.status("steps"), "us_a_step": seconds * 1e6 / runtime.status("steps"), **found}


def entry(strategy: str, options: argparse.Namespace, count: int = 3000) -> dict[str, Any]:
    """Microseconds from the write of a submission entry until the scheduler has taken it, under steps of 5 ms.

    Seen from a host thread that spins on the ring's sq_head: the word's way back is in it.
    """
    from blink_core import _native
    from blink_core.frontend.ring_client import sq_word
    from blink_core.runtime.launch import LaunchOptions
    from hil_rigs.gpu.session import client_of, running

    config = noop_config(rings=2, max_rows=64, lease_us=0)
    launch = LaunchOptions(strategy=strategy, step_limit_s=5.0, run_limit_s=40.0, noop_step_us=5000.0)
    with running(config, None, launch) as runtime:
        busy, client = client_of(runtime, 0), client_of(runtime, 1)
        for _ in range(64):
            busy.submit(np.arange(64) % 251, SamplingParams(max_tokens=1900, ignore_eos=True))
        layouts = config.layouts()
        base = runtime.segment.address + layouts["Control"].nbytes + layouts["Ring"].nbytes
        at = {name: base + section.offset for name, section in layouts["Ring"].sections.items()}
        taken = []
        for index in range(count):
            place = at["sq"] + 8 * (index & (config.sq_entries - 1))
            begin = time.perf_counter_ns()
            _native.store_release(place, sq_word(index, 3, 1, 1))  # an operation that there is not: it is refused
            seen = _native.wait_word(at["gpu"] + 8, index, 100_000, 100_000)
            taken.append((time.perf_counter_ns() - begin) / 1e3)
            expect(seen == index + 1, f"entry {index}: sq_head is {seen}")
            if index % 64 == 0:
                client.poll(0.0)
                busy.poll(0.0)
        return {
            "entry_us_p50": float(np.median(taken)), "entry_us_p99": float(np.percentile(taken, 99)),
            "entry_us_max": max(taken), "raw_entry_us": taken[-RAW:], "steps": runtime.status("steps"),
        }  # fmt: skip


def models(options: argparse.Namespace) -> list[Path]:
    found = sorted(p for p in options.models.iterdir() if (p / "config.json").exists() or p.suffix == ".gguf")
    expect(bool(found), f"no models in {options.models}")
    return found


def step_diffs(dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """Whole steps against NumPy, every model of --models."""
    from blink_core.models.load_config import load_config
    from blink_core.ops.cuda_attention import HEAD_DIMS
    from hil_rigs.gpu.step_diff import diff

    result: dict[str, Any] = {}
    wrong: list[str] = []
    for model in models(options):
        if dtype != "float32" and load_config(model).head_dim not in HEAD_DIMS:
            continue
        try:
            found = diff(model, dtype)
        except Exception as error:
            result[model.name] = f"BROKEN {type(error).__name__}: {error}"
            wrong.append(model.name)
            traceback.print_exc()
            continue
        bad = [d for d in found if not d.ok]
        worst: dict[str, float] = {}
        for d in found:
            kind = d.name.split(" ")[0]
            worst[kind] = max(worst.get(kind, 0.0), d.error)
        result[model.name] = {"comparisons": len(found), "failed": len(bad), "worst": worst}
        if bad:
            wrong.append(model.name)
            result[model.name]["first"] = [f"step {d.step} {d.name}: {d.error:.3g} > {d.limit:.3g}" for d in bad[:6]]
    if wrong:
        print(json.dumps(result, indent=1), flush=True)
    expect(not wrong, f"differ: {', '.join(wrong)}")
    return result


def serve(strategy: str, options: argparse.Namespace) -> dict[str, Any]:
    """Many requests at once on every model in float32: the same tokens as each alone, and as the host-driven loop."""
    from blink_core.models.load_config import load_config
    from blink_core.ops.cuda_ops import CudaOps
    from blink_core.runtime.cuda_model import load_network
    from blink_core.runtime.launch import DeviceDriven, LaunchOptions
    from hil_rigs.gpu.session import ask, client_of, running
    from hil_rigs.gpu.step_diff import drawn_requests, outgrowing_requests

    result: dict[str, Any] = {}
    for model in models(options):
        m = load_config(model)
        config = EngineConfig(
            vocab=m.vocab_size, eos_ids=m.eos_token_ids, slots=64, sq_entries=256, cq_entries=2048, max_rows=8,
            arena_tokens=1 << 14, max_len=min(256, m.max_position_embeddings), pages=50, token_budget=64,
            prefix_cache=int(m.keys_are_final(min(256, m.max_position_embeddings))),
        )  # fmt: skip
        network = load_network(model, CudaOps("float32"), config.max_len)
        rng = np.random.default_rng(5)
        todo = drawn_requests(rng, 24, config)
        if network.original_max:
            todo = outgrowing_requests(rng, config, network.original_max) + todo
        answers = {}
        for way in ("host", strategy):
            with running(config, network, LaunchOptions(strategy=way, step_limit_s=5.0, run_limit_s=40.0)) as runtime:
                client = client_of(runtime)
                answers[way] = ask(client, todo, 30.0)
                if way != "host":
                    answers["alone"] = [ask(client, [one], 20.0)[0] for one in todo[:8]]
                    if isinstance(runtime, DeviceDriven):
                        result[model.name] = gaps(runtime)
        for name, other in (("host", answers["host"]), ("alone", answers["alone"])):
            for i, (a, b) in enumerate(zip(answers[strategy], other, strict=False)):
                told = f"{a.ended} {a.tokens[:6]} and {b.ended} {b.tokens[:6]}"
                same = a.ended == b.ended and a.tokens == b.tokens
                expect(same, f"{model.name}: request {i}, {strategy} and {name}: {told}")
        ends = [a.ended for a in answers[strategy]]
        expect(all(e in ("LENGTH", "EOS", "STOP_TOKEN", "CONTEXT") for e in ends), f"{model.name}: {ends}")
    return result


STAGES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    **{f"noop-{s}": (lambda o, s=s: noop(s, o)) for s in STRATEGIES},  # type: ignore[misc]
    **{f"diff-{d}": (lambda o, d=d: step_diffs(d, o)) for d in ("float32", "bfloat16")},  # type: ignore[misc]
    **{f"serve-{s}": (lambda o, s=s: serve(s, o)) for s in STRATEGIES},  # type: ignore[misc]
    "gap-fire": lambda o: gap("fire", step_us=GAP_STEP_US),
    "gap-bare": lambda o: gap("fire"),
    "entry-fire": lambda o: entry("fire", o),
    "gap-tail": lambda o: gap("tail", step_us=GAP_STEP_US),
    "gap-switch": lambda o: gap("switch", step_us=GAP_STEP_US),
    "gap-host": lambda o: gap("host", step_us=GAP_STEP_US),
}


def run_stage(name: str, options: argparse.Namespace) -> int:
    try:
        result = STAGES[name](options)
    except BaseException as error:
        traceback.print_exc()
        print(f"RESULT {json.dumps({'failed': f'{type(error).__name__}: {error}'})}", flush=True)
        return 1
    print(f"RESULT {json.dumps(result)}", flush=True)
    return 0


def run_all(names: list[str], options: argparse.Namespace) -> int:
    rows: list[tuple[str, str, float, Any]] = []
    for name in names:
        command = [sys.executable, "-m", "hil_rigs.gpu.runtime_check", "--stage", name, "--models", str(options.models)]
        begin = time.monotonic()
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=options.timeout, env=None, check=False
            )
            text, code = done.stdout + done.stderr, done.returncode
        except subprocess.TimeoutExpired as late:
            text = "".join(p.decode(errors="replace") for p in (late.stdout, late.stderr) if isinstance(p, bytes))
            code = -1
        seconds = time.monotonic() - begin
        result = next((json.loads(line[7:]) for line in text.splitlines() if line.startswith("RESULT ")), None)
        state = "pass" if code == 0 else "TIMEOUT" if code == -1 else "FAIL"
        rows.append((name, state, seconds, result))
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / f"{name}.log").write_text(text)
        if code != 0:
            print(f"--- {name} {state}\n{text[-options.tail :]}", flush=True)
    print("\nstage                state     s  result")
    for name, state, seconds, result in rows:
        print(f"{name:20s} {state:7s} {seconds:5.1f}  {json.dumps(_short(result))[:700]}")
    if options.out is not None:
        record = [{"stage": n, "state": s, "seconds": t, "result": r} for n, s, t, r in rows]
        (options.out / "runtime_check.json").write_text(json.dumps(record, indent=1))
    return 2 if not rows else 1 if any(state != "pass" for _, state, _, _ in rows) else 0


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items() if k != "report" and not k.startswith("raw_")}
    return value


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(STAGES))
    parser.add_argument("--stage", help="run this stage in this process")
    parser.add_argument("--models", type=Path, default=Path("build/gpu-models"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds of a stage")
    parser.add_argument("--tail", type=int, default=2500, help="characters shown of a failed stage's output")
    options = parser.parse_args(arguments)
    if options.stage:
        import os

        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
        return run_stage(options.stage, options)
    names = options.only.split(",")
    if unknown := set(names) - set(STAGES):
        parser.error(f"unknown stages {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    return run_all(names, options)


if __name__ == "__main__":
    sys.exit(main())
