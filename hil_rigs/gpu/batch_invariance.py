"""Batch-invariant mode on the GPU: bits of one request alone and in company, and what the mode costs.

    python -m hil_rigs.gpu.batch_invariance [--models DIR] [--dtypes T,...] [--skip-cost] [--limit S] [--out FILE]

The cost first: the ratio of step times to the normal mode at batch 1, 8 and 32, on the Llama-3-8B shape with random
weights: normal, invariant and normal once more, medians of several rounds. Then engines, in bfloat16 of two small
random models, in all types of those in DIR: tokens and logits of three requests (greedy and sampled, a short and two
long prompts) alone, in batches of 2 to 64 at the first, a middle and the last place, with a prefix hit, after a
preemption, and in small chunks. They are compared bit by bit. And operations, each by itself; as a control the normal
mode of the element type goes through the same, where bits must differ.

Each part is a process with a deadline, all are over within `--limit`, and what a part found until then is kept and
told. A call with the `--out` of an earlier one, of the same sources and sizes, goes on: what was finished is not run
again.
Exit status: 0 all equal, 1 a difference or a failure, 2 not all parts were finished, without a difference so far.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from blink_core.abi.capture import record_dtype
from blink_core.abi.config import EngineConfig
from blink_core.abi.enums import EventKind, LogKind
from blink_core.abi.params import SamplingParams

DTYPES = ("bfloat16", "float16", "float32")
Told = Callable[[dict[str, Any]], None]
PART_S, LEAST_S = 120.0, 5.0  # of a part at most; with less time left none is begun
SMALL: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1024, "num_layers": 3, "num_heads": 8, "num_kv_heads": 2,
    "vocab_size": 2048, "max_position_embeddings": 1024,
}  # fmt: skip
COST_BUDGET = 512  # tokens of a step: larger ones take most of a normal engine's start, for products not compared here
BATCHES = (2, 3, 8, 9, 16, 17, 32, 33, 64)
BIG_VOCAB, FEW_BATCHES = 8192, (2, 9, 33, 64)  # where rows of logits are many megabytes a step
COST_BATCHES = (1, 8, 32)
NEW = 24
LONGEST = 700  # tokens of a request: more than one piece of attention's (cuda_attention.KEY_PIECE)
LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Probe:
    """A request whose bits are watched; without `number` one that only keeps it company."""

    prompt: tuple[int, ...]
    params: SamplingParams
    number: int | None = None


@dataclass
class Seen:
    """What rounds of requests left: logits by probe, round and position; tokens by probe and round."""

    logits: list[dict[int, dict[int, bytes]]] = field(default_factory=list)
    tokens: list[dict[int, list[int]]] = field(default_factory=list)
    hits: int = 0
    preempted: set[tuple[int, int]] = field(default_factory=set)  # (round, probe)


def probes(rng: np.random.Generator, vocab: int, longest: int) -> list[Probe]:
    """Three of them, no longer than `longest` with their output."""
    lengths = [5, min(33, longest - NEW), min(600, longest - NEW)]
    params = [
        SamplingParams(NEW, ignore_eos=True),
        SamplingParams(NEW, temperature=0.8, seed=7, ignore_eos=True, logprobs=3),
        SamplingParams(NEW, repetition_penalty=1.2, ignore_eos=True),
    ]
    made = [tuple(int(t) for t in rng.integers(0, vocab, n)) for n in lengths]
    return [Probe(prompt, p, i) for i, (prompt, p) in enumerate(zip(made, params, strict=True))]


def company(rng: np.random.Generator, vocab: int, count: int, longest: int) -> list[Probe]:
    """Others, with outputs long enough to be there all the time."""
    found = []
    for _ in range(count):
        length = int(rng.integers(1, max(2, min(100, longest - 2 * NEW))))
        prompt = tuple(int(t) for t in rng.integers(0, vocab, length))
        found.append(
            Probe(prompt, SamplingParams(NEW + int(rng.integers(0, NEW)), ignore_eos=True, prefix_cache=False))
        )
    return found


def placed(watched: list[Probe], others: list[Probe]) -> list[Probe]:
    """The probes first, in the middle and last."""
    half = len(others) // 2
    return [*watched[:1], *others[:half], *watched[1:2], *others[half:], *watched[2:]]


def uncached(probe: Probe) -> Probe:
    return replace(probe, params=replace(probe.params, prefix_cache=False))


def run(network: Any, config: EngineConfig, strategy: str, rounds: list[list[Probe]]) -> Seen:
    """Rounds of requests on one engine, one after the other; those of a round are submitted at once."""
    from blink_core.runtime.launch import LaunchOptions
    from hil_rigs.gpu.session import client_of, running

    seen = Seen()
    who: dict[tuple[int, int], tuple[int, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "capture.bin"
        options = LaunchOptions(strategy=strategy, capture=file, mirror=False, step_limit_s=20.0, tune=False)
        with running(config, network, options) as runtime:
            client = client_of(runtime)
            for number, requests in enumerate(rounds):
                seen.tokens.append({p.number: [] for p in requests if p.number is not None})
                seen.logits.append({p.number: {} for p in requests if p.number is not None})
                for probe in requests:
                    handle = client.submit(np.array(probe.prompt, np.int32), probe.params)
                    if probe.number is not None:
                        who[handle.slot, handle.generation] = number, probe.number
                _collect(client, who, seen)
            views = runtime.layouts["State"].views(runtime.state.buffer)
            _settle(client, views["header"][0])
            seen.hits = int(views["header"][0]["hits"])
            entries = runtime.layouts["Log"].views(runtime.log.buffer)["entries"]
            for entry in entries[entries["kind"] == LogKind.PREEMPT]:
                key = (int(entry["slot"]), int(entry["generation"]))
                if key in who:
                    seen.preempted.add(who[key])
        records = np.memmap(file, record_dtype(config.vocab), mode="r")
        for index, key in enumerate(zip(records["slot"].tolist(), records["generation"].tolist(), strict=True)):
            if key in who:
                number, watched = who[key]
                row = records[index]
                seen.logits[number][watched][int(row["position"])] = row["logits"].tobytes()
        del records
    return seen


def _settle(client: Any, header: Any) -> None:
    """Until the copy of the header that the host sees, made now and then, knows of the end of all requests."""
    deadline = time.monotonic() + LIMIT_S
    while int(header["live"]):
        client.poll(0.05)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{int(header['live'])} requests live in the engine's header after {LIMIT_S} s")


def _collect(client: Any, who: dict[tuple[int, int], tuple[int, int]], seen: Seen) -> None:
    deadline = time.monotonic() + LIMIT_S
    while client.live:
        for event in client.poll(0.2):
            kind, key = int(event["kind"]), (int(event["slot"]), int(event["generation"]))
            if kind == EventKind.ERROR:
                raise RuntimeError(f"a request ended with error {int(event['reason'])}")
            if kind == EventKind.TOKEN and key in who:
                number, probe = who[key]
                seen.tokens[number][probe].append(int(event["token"]))
        if time.monotonic() > deadline:
            raise TimeoutError(f"{client.live} requests live after {LIMIT_S} s")


def compare(way: str, seen: Seen, alone: Seen) -> tuple[int, list[str]]:
    """Rows compared, and what differs from the probes alone (round n of `alone` is probe n)."""
    rows, wrong = 0, []
    for number, (tokens, logits) in enumerate(zip(seen.tokens, seen.logits, strict=True)):
        for probe, mine in logits.items():
            reference = alone.logits[probe][probe]
            rows += len(mine)
            if len(reference) != NEW or mine.keys() != reference.keys():
                wrong.append(f"{way}, round {number}: probe {probe} has {len(mine)} rows, alone {len(reference)}")
                continue
            differ = [p for p in sorted(mine) if mine[p] != reference[p]]
            if differ:
                wrong.append(f"{way}, round {number}: probe {probe} differs in {len(differ)} rows from {differ[0]} on")
            if tokens[probe] != alone.tokens[probe][probe]:
                wrong.append(f"{way}, round {number}: probe {probe} has other tokens")
    return rows, wrong


def check_engine(
    network: Any, strategy: str = "auto", seed: int = 0, *, few: bool = False, told: Told = lambda found: None
) -> dict[str, Any]:
    """Every way for one network, whose operations are batch-invariant. few: fewer batches, each with the probes in one
    order, as with a big vocabulary. told: after each way. Result: rows compared by way, and `wrong`."""
    m, rng = network.config, np.random.default_rng(seed)
    longest = min(LONGEST, m.max_position_embeddings)
    cached = int(m.keys_are_final(longest))
    base = EngineConfig(
        vocab=m.vocab_size, eos_ids=m.eos_token_ids, slots=128, sq_entries=512, cq_entries=8192, max_len=longest,
        pages=2 + 70 * -(-longest // 16), max_rows=64, token_budget=512, arena_tokens=1 << 16, prefix_cache=cached,
    )  # fmt: skip
    watched = probes(rng, m.vocab_size, longest)
    plain = [uncached(p) for p in watched]

    def others(count: int) -> list[Probe]:
        return company(rng, m.vocab_size, count, longest)

    begin = time.monotonic()
    alone = run(network, base, strategy, [[p] for p in plain])
    print(f"  alone: {time.monotonic() - begin:.1f} s", flush=True)
    ways: dict[str, tuple[EngineConfig, list[list[Probe]]]] = {}
    batches = []
    few = few or m.vocab_size > BIG_VOCAB
    for number, count in enumerate(FEW_BATCHES if few else BATCHES):
        for shift in (number % 3,) if few else range(3):
            some = (plain[shift:] + plain[:shift])[: min(3, count)]
            batches.append(placed(some, others(count - len(some))))
    ways["in batches"] = base, batches
    if cached:
        ways["prefix hits"] = base, [*([p] for p in watched), *([p] for p in watched), placed(watched, others(9))]
    tight = 2 + 20 + -(-longest // 16)
    late = [[*others(13), *some] for some in (plain, plain[::-1], plain[:2], plain[1::-1])]
    ways["preemption"] = replace(base, pages=tight, token_budget=64, max_rows=16), late
    for tokens, most in ((17, 16), (100, base.max_rows)):
        chunks = [*([p] for p in plain), placed(plain, others(9))]
        ways[f"chunks of {tokens}"] = replace(base, token_budget=tokens, max_rows=most), chunks
    result: dict[str, Any] = {"rows": {}, "wrong": []}
    for way, (config, rounds) in ways.items():
        begin = time.monotonic()
        seen = run(network, config, strategy, rounds)
        rows, wrong = compare(way, seen, alone)
        result["rows"][way] = rows
        result["wrong"] += wrong
        if way == "prefix hits" and seen.hits == 0:
            result["wrong"].append("prefix hits: there were none")
        if way == "preemption" and not seen.preempted:
            result["wrong"].append("preemption: no probe was preempted")
        print(f"  {way}: {rows} rows, {len(wrong)} wrong, {time.monotonic() - begin:.1f} s", flush=True)
        told(result)
    return result


def cost(layers: int, rounds: int, told: Told = lambda found: None) -> dict[str, Any]:
    """Step times of the normal and the invariant mode on the Llama-3-8B shape, bfloat16. told: after each mode."""
    from blink_core.ops.cuda_ops import CudaOps
    from blink_core.runtime.cuda_model import random_network
    from blink_core.runtime.launch import LaunchOptions
    from hil_rigs.gpu.bench import LLAMA_3_8B, run_batch
    from hil_rigs.gpu.invariance_cases import shared_weights
    from hil_rigs.gpu.session import client_of, running

    shape = replace(LLAMA_3_8B, num_layers=layers)
    most = max(COST_BATCHES)
    config = EngineConfig(
        vocab=shape.vocab_size, slots=128, max_len=512, pages=2 + most * 18, max_rows=most, prefix_cache=0,
        token_budget=COST_BUDGET, arena_tokens=1 << 18,
    )  # fmt: skip
    begin = time.monotonic()
    normal = random_network(shape, CudaOps("bfloat16"), config.max_len)
    modes = {"normal": normal, "invariant": shared_weights(normal, CudaOps("bfloat16", batch_invariant=True))}
    found: dict[str, Any] = {"layers": layers, "runs": []}
    print(f"weights made in {time.monotonic() - begin:.1f} s", flush=True)
    for name in ("normal", "invariant", "normal"):
        begin = time.monotonic()
        with running(config, modes[name], LaunchOptions(mirror=False, step_limit_s=20.0)) as runtime:
            built = time.monotonic() - begin
            client = client_of(runtime)
            run_batch(runtime, client, 1, 99)
            for rows in COST_BATCHES:
                for number in range(rounds):
                    found["runs"].append({"mode": name, **run_batch(runtime, client, rows, number)})
        print(f"{name}: engine built in {built:.1f} s, all in {time.monotonic() - begin:.1f} s", flush=True)
        told(found)
        if name == "invariant":
            print("\n".join(cost_table(found)), flush=True)
    return found


def cost_table(found: dict[str, Any]) -> list[str]:
    """One line a batch: medians, and the ratio of the invariant mode to the normal one."""

    def median(mode: str, rows: int, name: str) -> float:
        runs = [r for r in found["runs"] if r["mode"] == mode and r["rows"] == rows]
        return float(np.median(np.concatenate([np.atleast_1d(r[name]) for r in runs])))

    lines = []
    for rows in COST_BATCHES:
        step = [median(mode, rows, "step_us") / 1e3 for mode in ("normal", "invariant")]
        first = [median(mode, rows, "first_token_ms") for mode in ("normal", "invariant")]
        lines.append(
            f"batch {rows:3d}: step {step[0]:.3f} -> {step[1]:.3f} ms, ratio {step[1] / step[0]:.3f}; "
            f"first token {first[0]:.2f} -> {first[1]:.2f} ms, ratio {first[1] / first[0]:.3f}"
        )
    return lines


def check_operations(dtype: str) -> list[str]:
    """What is wrong with the operations of an element type; the normal mode is the control."""
    from blink_core.ops.cuda_ops import CudaOps
    from hil_rigs.gpu.invariance_cases import bits, differing, values

    wrong = []
    for cases in (bits, values):
        for outcome in cases(CudaOps(dtype, batch_invariant=True), np.random.default_rng(1)):
            if not outcome.ok:
                wrong.append(f"{outcome.op} [{outcome.case}]: {outcome.error:.3g} > {outcome.limit:.3g}")
    if dtype != "float32":  # which is always invariant
        rows = differing(CudaOps(dtype), np.random.default_rng(1))
        print(f"operations {dtype}: control, normal mode: {rows} rows differ", flush=True)
        if rows == 0:
            wrong.append("no row of the normal mode differs: the check sees nothing")
    return wrong


# -- parts -------------------------------------------------------------------------------------------------------------


def small_network(name: str) -> Any:
    """A small random bfloat16 model of its own, in this mode: SMALL's sizes, `dense` or `mixture`."""
    from blink_core.models.config import ExpertConfig
    from blink_core.ops.cuda_ops import CudaOps
    from blink_core.runtime.cuda_model import random_network
    from hil_rigs.gpu.bench import LLAMA_3_8B, QWEN3_30B_A3B

    mixture = name == "mixture"
    experts = ExpertConfig(16, 4, 256, True, tuple(range(SMALL["num_layers"]))) if mixture else None
    shape = replace(QWEN3_30B_A3B if mixture else LLAMA_3_8B, **SMALL, experts=experts)
    return random_network(shape, CudaOps("bfloat16", batch_invariant=True), LONGEST)


def parts_of(dtypes: list[str], paths: list[Path], *, skip_cost: bool) -> list[str]:
    """Names of the parts, the most wanted first: `cost`, `operations TYPE`, `engine MODEL TYPE`."""

    def takes(path: Path, dtype: str) -> bool:
        from blink_core.models.load_config import load_config
        from blink_core.ops.cuda_attention import HEAD_DIMS

        return dtype == "float32" or load_config(path).head_dim in HEAD_DIMS

    parts = [] if skip_cost else ["cost"]
    for dtype in dtypes:
        if dtype == "bfloat16":
            parts += [f"engine {name} bfloat16" for name in ("dense", "mixture")]
        parts.append(f"operations {dtype}")
        parts += [f"engine {path} {dtype}" for path in paths if takes(path, dtype)]
    return parts


def run_part(part: str, options: argparse.Namespace, told: Told) -> dict[str, Any]:
    """One part in this process. told: gets what there is so far. The result holds `wrong`."""
    if part == "cost":
        return cost(options.layers, options.rounds, told) | {"wrong": []}
    kind, _, rest = part.partition(" ")
    model, _, dtype = rest.rpartition(" ")
    if kind == "operations":
        return {"wrong": check_operations(dtype)}
    if model in ("dense", "mixture"):
        network = small_network(model)
    else:
        from blink_core.models.load_config import load_config
        from blink_core.ops.cuda_ops import CudaOps
        from blink_core.runtime.cuda_model import load_network

        longest = min(LONGEST, load_config(Path(model)).max_position_embeddings)
        network = load_network(Path(model), CudaOps(dtype, batch_invariant=True), longest)
    return check_engine(network, options.launch, told=told)


def child(part: str, options: argparse.Namespace) -> int:
    """One part in this process, which writes what it has found to `--out`, again and again."""

    def told(found: dict[str, Any]) -> None:
        half = options.out.with_suffix(".half")
        half.write_text(json.dumps(found))
        half.replace(options.out)

    try:
        result = run_part(part, options, told)
    except Exception as error:
        traceback.print_exc()
        told({"wrong": [f"{type(error).__name__}: {error}"]})
        return 1
    told(result | {"finished": True})
    return 1 if result["wrong"] else 0


def run_apart(part: str, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """One part in a process of its own, killed when its time is over: what it found, as far as it came."""
    command = [sys.executable, "-m", "hil_rigs.gpu.batch_invariance", "--part", part, "--launch", options.launch]
    command += ["--layers", str(options.layers), "--rounds", str(options.rounds)]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "part.json"
        print(f"--- {part}, at most {limit_s:.0f} s", flush=True)
        try:
            done = subprocess.run([*command, "--out", str(out)], timeout=limit_s, check=False)
            status = "" if done.returncode in (0, 1) else f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            status = f"not over after {limit_s:.0f} s"
        found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    found.setdefault("wrong", [])
    found |= {"finished": bool(found.get("finished")), "seconds": round(time.monotonic() - begin, 1), "status": status}
    return found


def digest() -> str:
    """Of the sources that a finished part depends on."""
    from hil_rigs.gpu.evidence import COVERED, sources_digest

    return sources_digest(patterns=(*COVERED, "hil_rigs/gpu/invariance_cases.py", "hil_rigs/gpu/ops_cases.py"))


def earlier(out: Path | None, now: str) -> dict[str, Any]:
    """Parts of an earlier call into the same file that are finished, if the sources are the same."""
    if out is None or not out.exists():
        return {}
    with suppress(ValueError):
        record = json.loads(out.read_text())
        if record.get("digest") == now:
            return {name: part for name, part in record["parts"].items() if part["finished"] and not part["wrong"]}
    return {}


def lines_of(found: dict[str, Any]) -> list[str]:
    """A part for whoever reads: what is equal, what it costs, and how far it came."""
    lines = cost_table(found) if len({r["mode"] for r in found.get("runs", [])}) == 2 else []
    if "rows" in found:
        lines.append(f"rows equal to those alone, to the bit: {json.dumps(found['rows'])}")
    return [*lines, state_of(found), *(f"WRONG {text}" for text in found["wrong"][:40])]


def state_of(found: dict[str, Any]) -> str:
    """How far a part came."""
    word = "finished" if found["finished"] else f"NOT FINISHED, {found['status'] or 'failed'},"
    return f"{word} in {found['seconds']} s, {len(found['wrong'])} wrong"


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path("build/gpu-models"), help="folder of models, each checked")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--launch", choices=("host", "fire", "tail", "auto"), default="auto")
    parser.add_argument("--skip-cost", action="store_true")
    parser.add_argument("--layers", type=int, default=32, help="of the shape whose cost is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of the whole")
    parser.add_argument("--out", type=Path, help="JSON; parts that an earlier call finished into it are not run again")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part is not None:
        return child(options.part, options)
    over = time.monotonic() + options.limit
    paths = sorted(p for p in options.models.glob("*") if (p / "config.json").exists() or p.suffix == ".gguf")
    names = parts_of(options.dtypes.split(","), paths, skip_cost=options.skip_cost)
    now = f"{digest()}, {options.launch}, {options.layers} layers, {options.rounds} rounds"
    done = earlier(options.out, now)
    record: dict[str, Any] = {"digest": now, "parts": {name: done[name] for name in names if name in done}}
    for name in names:
        left = over - time.monotonic()
        if name not in record["parts"] and left > LEAST_S:
            found = record["parts"][name] = run_apart(name, options, min(left, PART_S))
            print("\n".join(lines_of(found)), flush=True)
            if options.out is not None:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(record))
    print(f"\n{'part':44s} state")
    parts = record["parts"]
    for name in names:
        print(
            f"{name:44s} {lines_of(parts[name])[-1 - len(parts[name]['wrong'][:40])] if name in parts else 'NOT RUN'}"
        )
    wrong = sum(len(found["wrong"]) for found in parts.values())
    unfinished = [name for name in names if name not in parts or not parts[name]["finished"]]
    print(f"batch invariance: {wrong} wrong, {len(names) - len(unfinished)} of {len(names)} parts finished")
    return 1 if wrong else 2 if unfinished or not names else 0


if __name__ == "__main__":
    sys.exit(main())
