"""compute-sanitizer over a short serve of small random models, driven by the host.

    python -m hil_rigs.gpu.sanitize [--tools memcheck,racecheck,...] [--models DIR] [--timeout S] [--out DIR]

The sanitizers serialise kernels, so that a resident scheduler beside its steps would wait for ever: these runs are
host-driven, with the same model kernels and graphs. The scheduler itself is checked on the host, by ThreadSanitizer.
Each tool is a process with a time limit; racecheck, which follows every access to shared memory, serves fewer and
shorter requests in smaller layers.

memcheck also reports CUDA calls that return an error. Those of `PROBES` ask whether there is something and expect to
be told that there is not: they are counted apart, by the call and its error, and no other finding is.
Exit 0: every tool ran, requests were served under it, and it found nothing; 1: one found something or the serve failed;
2: compute-sanitizer is not there.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SERVED = "SERVED"
PLACES = ("/usr/local/cuda/bin",)
MOST_PRINTED = 2000  # findings; those that are not printed cannot be told apart and count as they are
# cuda-bindings looks up every function of its headers at its first call, those too that the driver has not (its
# cydriver.pyx); it keeps what it finds, and a call of one that is not there raises.
PROBES = frozenset({("CUDA_ERROR_NOT_FOUND", "cuGetProcAddress"), ("CUDA_ERROR_NOT_FOUND", "cuGetProcAddress_v2")})
_SUMMARY = re.compile(r"^========= (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?$|hazards? )", re.MULTILINE)
_API_ERROR = re.compile(r"^========= Program hit (\w+) \(error \d+\).* on CUDA API call to (\w+)", re.MULTILINE)
_FINDING = re.compile(r"^========= (?! |COMPUTE-SANITIZER|(?:ERROR|RACECHECK|LEAK) SUMMARY)(\S.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is served. lengths: of the greedy requests' prompts; one more, of the last but one length, samples with all
    parameters."""

    lengths: tuple[int, ...]
    tokens: int
    hidden: int
    vocab: int
    max_rows: int
    token_budget: int


WHOLE = Workload((3, 16, 65, 130), tokens=6, hidden=512, vocab=1000, max_rows=4, token_budget=64)
BRIEF = Workload((3, 40, 70), tokens=3, hidden=256, vocab=512, max_rows=2, token_budget=32)
WORKLOADS = {"memcheck": WHOLE, "racecheck": BRIEF, "initcheck": WHOLE, "synccheck": WHOLE}


@dataclass(frozen=True, slots=True)
class Found:
    """One tool's run. findings: by its own summary, less `probes`; None if it gave none. probes: errors of API calls
    that expect them. served: lines of what was served."""

    tool: str
    findings: int | None
    served: int
    seconds: float
    status: str
    probes: int = 0

    @property
    def ok(self) -> bool:
        return self.findings == 0 and self.served > 0 and self.status == "ended"


def read(tool: str, text: str, seconds: float, code: int | None) -> Found:
    """What a run's output says. code: its exit status, None if it was killed for its time."""
    counts = [int(n) for n in _SUMMARY.findall(text)]
    probes = sum(error in PROBES for error in _API_ERROR.findall(text))
    served = sum(line.startswith(SERVED) for line in text.splitlines())
    status = "TIMEOUT" if code is None else "ended" if code == 0 else f"exit status {code}"
    return Found(tool, sum(counts) - probes if counts else None, served, seconds, status, probes)


def kinds(text: str) -> list[tuple[str, int]]:
    """First lines of the findings, most frequent first, without numbers that differ from thread to thread."""
    found: Counter[str] = Counter()
    for line in _FINDING.findall(text):
        error = _API_ERROR.match(f"========= {line}")
        if error is None or error.groups() not in PROBES:
            found[re.sub(r"0x[0-9a-f]+|\b\d+\b", "#", line)] += 1
    return found.most_common()


def first_finding(text: str) -> str:
    """The first finding that is no probe, with its backtrace; empty if there is none."""
    for match in _FINDING.finditer(text):
        error = _API_ERROR.match(match[0])
        if error is not None and error.groups() in PROBES:
            continue
        end = re.search(r"^=========\s*$", text[match.end() :], re.MULTILINE)
        return text[match.start() : match.end() + (end.start() if end else 3000)]
    return ""


def sanitizer() -> str | None:
    """Path of compute-sanitizer, None where there is none."""
    return shutil.which("compute-sanitizer", path=os.pathsep.join((os.environ.get("PATH", ""), *PLACES)))


def run_tool(program: str, tool: str, models: Path | None, limit_s: float) -> tuple[Found, str]:
    """One tool over the serve; its output too."""
    command = [program, "--tool", tool, "--print-limit", str(MOST_PRINTED)]
    command += [sys.executable, "-m", "hil_rigs.gpu.sanitize", "--serve", tool]
    if models is not None:
        command += ["--models", str(models)]
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, 9)
            process.wait(30.0)
        out.seek(0)
        text = out.read()
    return read(tool, text, time.monotonic() - begin, code), text


def serve(models: Path | None, work: Workload) -> None:
    """Serves what the sanitizers look at: every kind of step, a dense and a mixture model, all kernels of sampling."""
    begin = time.monotonic()
    import cupy as cp
    import numpy as np

    cp.cuda.set_allocator(None)  # one allocation an array: within a pool a write beyond an end is nobody's fault
    from blink_core.abi.config import EngineConfig
    from blink_core.abi.params import SamplingParams
    from blink_core.models.load_config import load_config
    from blink_core.ops.cuda_ops import CudaOps
    from blink_core.runtime.cuda_model import load_network, random_network
    from blink_core.runtime.launch import LaunchOptions
    from hil_rigs.gpu.bench import LLAMA_3_8B, QWEN3_30B_A3B
    from hil_rigs.gpu.session import ask, client_of, running

    def small(shape: Any) -> Any:
        sizes = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "vocab_size": work.vocab}
        sizes |= {"hidden_size": work.hidden, "intermediate_size": work.hidden}
        experts = shape.experts and replace(shape.experts, count=8, top_k=2, intermediate_size=256, layers=(0, 1))
        return replace(shape, max_position_embeddings=256, experts=experts, **sizes)

    todo: list[tuple[str, Any]] = []
    if models is None:
        for name, shape in (("dense", LLAMA_3_8B), ("mixture", QWEN3_30B_A3B)):
            todo.append((name, random_network(small(shape), CudaOps("bfloat16"), 256)))
    else:
        for path in sorted(p for p in models.iterdir() if (p / "config.json").exists()):
            length = min(256, load_config(path).max_position_embeddings)
            todo.append((path.name, load_network(path, CudaOps("float32"), length)))
    rng = np.random.default_rng(1)
    sampled = SamplingParams(
        max_tokens=work.tokens, ignore_eos=True, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=3, logprobs=4,
        repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, logit_bias=((5, 1.0),),
    )  # fmt: skip
    for name, network in todo:
        m = network.config
        config = EngineConfig(
            vocab=m.vocab_size, slots=8, sq_entries=32, cq_entries=256, max_rows=work.max_rows,
            token_budget=work.token_budget, pages=34, max_len=min(256, m.max_position_embeddings),
            arena_tokens=1024,
        )  # fmt: skip
        prompts = [rng.integers(3, m.vocab_size, n) for n in work.lengths]
        greedy = SamplingParams(max_tokens=work.tokens, ignore_eos=True)
        requests = [(p, greedy) for p in prompts] + [(prompts[-2], sampled)]
        options = LaunchOptions(strategy="host", step_limit_s=300.0, tune=False, mirror=False)
        with running(config, network, options) as runtime:
            answers = ask(client_of(runtime), requests, 240.0)
        if any(answer.ended != "LENGTH" for answer in answers):
            raise RuntimeError(f"{name}: requests ended {[answer.ended for answer in answers]}")
        made = sum(len(a.tokens) for a in answers)
        print(f"{SERVED} {name}: {made} tokens, {time.monotonic() - begin:.1f} s since the start", flush=True)


def _told(text: str, most: int = 12) -> str:
    """Of a run that is not clean: kinds of findings, the first one whole, and the end of the output."""
    lines = [f"{count:6d} x {line}" for line, count in kinds(text)[:most]]
    return "\n".join([*lines, first_finding(text)[:4000], "...", text[-1000:]])


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--models", type=Path, help="folder of model folders, in float32; small random ones without it")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds of a tool")
    parser.add_argument("--out", type=Path, help="folder for each tool's output")
    parser.add_argument("--serve", choices=TOOLS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        # Each kernel that is loaded is patched, cuBLASLt's thousands among them; nothing resident forbids to wait here.
        os.environ["CUDA_MODULE_LOADING"] = "LAZY"
        serve(options.models, WORKLOADS[options.serve])
        return 0
    tools = options.tools.split(",")
    if unknown := set(tools) - set(TOOLS):
        parser.error(f"unknown tools {', '.join(sorted(unknown))}; there are {', '.join(TOOLS)}")
    program = sanitizer()
    if program is None:
        print("compute-sanitizer is not on the PATH", file=sys.stderr)
        return 2
    rows = []
    for tool in tools:
        found, text = run_tool(program, tool, options.models, options.timeout)
        rows.append(found)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / f"{tool}.log").write_text(text)
        if not found.ok:
            print(f"--- {tool}\n{_told(text)}", flush=True)
    print(f"{'tool':12s} {'findings':>8s} {'probes':>6s} {'served':>6s} {'s':>6s}  status")
    for row in rows:
        print(f"{row.tool:12s} {row.findings!s:>8s} {row.probes:6d} {row.served:6d} {row.seconds:6.1f}  {row.status}")
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
