"""Which kernels a step spends its time in: a decode step or a prefill chunk of a model's shape, kernel by kernel.

    python -m hil_rigs.gpu.profile [--shape llama-3-8b] [--rows 1 | --chunk 2048] [--layers N] [--ncu] [--out FILE]

Without --ncu the launches of one step are recorded, grouped by kernel and size, and each group is launched again from a
graph of its own, every layer's in turn, so that weights come from memory as in the step; a kernel's time then holds its
launch (about a microsecond), and nothing overlaps. The whole step is timed beside it, with the clock and the power of
the chip meanwhile. With --ncu Nsight Compute counts the same launches, caches as the kernel before left them, which
gives the share of DRAM throughput. Weights are random.
Exit status: 0 a table was printed, 1 not, 2 ncu is not there.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from blink_core.ops.cublaslt import Choice
    from hil_rigs.gpu.stack import Step

SHAPES = ("llama-3-8b", "qwen3-30b-a3b")
CONTEXT = 192  # tokens of a decode row: 128 in and 129 out on average
# A chunk heats the chip until its power limits it, which takes a while.
STEP_SAMPLES, CHUNK_SAMPLES = 9, 60
NCU_LAYERS = 2  # more say nothing new, and each kernel takes ncu a while
TIME, DRAM = "gpu__time_duration.sum", "dram__throughput.avg.pct_of_peak_sustained_elapsed"


@dataclass(slots=True)
class Launch:
    """One launch of a step: what it is, how to do it again, and the bytes of weights it reads (0: unknown)."""

    name: str
    again: Callable[[], None]
    weights: int = 0


@dataclass(slots=True)
class Row:
    """A kernel in the table. us: of one launch, a sample each. dram: percent of the peak, where it was counted."""

    name: str
    count: int
    us: list[float]
    weights: int = 0
    dram: list[float] = field(default_factory=list)

    @property
    def total_us(self) -> float:
        """Of the step."""
        return self.count * float(np.median(self.us))

    @property
    def line(self) -> str:
        """One line of the table."""
        each = float(np.median(self.us))
        text = f"{self.name:44s} {self.count:5d} {each:10.2f} {self.total_us:11.1f}"
        text += f" {self.weights / each / 1e6:8.2f}" if self.weights else f" {'-':>8s}"
        return text + (f" {float(np.mean(self.dram)):7.1f}" if self.dram else f" {'-':>7s}")


HEAD = f"{'kernel':44s} {'count':>5s} {'us each':>10s} {'us in all':>11s} {'TB/s':>8s} {'DRAM %':>7s}"


def table(rows: Iterable[Row]) -> list[str]:
    """Kernels, the most expensive first; TB/s is of the weights a kernel reads."""
    ordered = sorted(rows, key=lambda r: -r.total_us)
    return [HEAD, *(r.line for r in ordered), f"{'sum':44s} {'':5s} {'':10s} {sum(r.total_us for r in ordered):11.1f}"]


# -- without ncu -------------------------------------------------------------------------------------------------------


def weight_bytes(arguments: Iterable[Any], itemsize: int = 2) -> int:
    """Bytes of weights that a launch of an own product reads, from its parameters; 0 where it is none, or grouped."""
    for a in arguments:
        kind = type(a).__name__
        if kind in ("MatmulParams", "SkinnyParams"):
            m = a.matmul if kind == "SkinnyParams" else a
            return 0 if m.blocks else int(m.n * m.k * itemsize)
        if kind == "RouterParams":
            return int(a.experts * a.hidden * itemsize)
        if kind == "OneParams":
            return int(a.top_k * a.hidden * a.inner * itemsize)
    return 0


def library_name(shape: Iterable[int], choice: Choice) -> str:
    """A product of cuBLASLt in the table: rows x out x in, the algorithm's place in the heuristic's list, its piece."""
    return f"cuBLASLt {'x'.join(str(n) for n in shape)} {choice.name}"


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Every launch of own kernels and of cuBLASLt inside, in order."""
    from blink_core.ops.cublaslt import CublasLt
    from blink_core.ops.cuda_modules import Kernel

    found: list[Launch] = []
    launch, product = Kernel.launch, CublasLt.launch

    def own(self: Any, grid: int, threads: int, *args: Any, dependent: bool = True) -> None:
        factor = 2 if "silu" in self.name or self.name == "moe_gate_up_one" else 1
        name = f"{self.name} <{grid}, {threads}>"
        again = lambda: launch(self, grid, threads, *args, dependent=False)  # noqa: E731
        found.append(Launch(name, again, factor * weight_bytes(args)))
        launch(self, grid, threads, *args, dependent=dependent)

    def library(self: Any, x: Any, weight: Any, out: Any, residual: Any, choice: Choice) -> None:
        again = lambda: product(self, x, weight, out, residual, choice)  # noqa: E731
        found.append(Launch(library_name((x.shape[0], *weight.nk.shape), choice), again, int(weight.nk.nbytes)))
        product(self, x, weight, out, residual, choice)

    Kernel.launch, CublasLt.launch = own, library  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Kernel.launch, CublasLt.launch = launch, product  # type: ignore[method-assign]


def by_events(step: Step, samples: int) -> tuple[list[Row], list[float], str]:
    """Rows of the table, microseconds of the whole step in so many runs back to back, and what the clock did then."""
    import cupy as cp

    from hil_rigs.gpu.clocks import Clocks
    from hil_rigs.gpu.ops_timing import timed

    clocks = Clocks(str(cp.cuda.runtime.deviceGetPCIBusId(cp.cuda.Device().id)))
    whole = timed(step.run, samples=samples, during=clocks)
    with recorded() as launches:
        step.run()
    groups: dict[tuple[str, int], list[Launch]] = {}
    for launch in launches:
        groups.setdefault((launch.name, launch.weights), []).append(launch)

    def repeat(group: list[Launch]) -> None:
        for launch in group:
            launch.again()

    rows = []
    for (name, weights), group in groups.items():
        times = [t / len(group) for t in timed(lambda group=group: repeat(group), samples=7)]  # type: ignore[misc]
        rows.append(Row(name, len(group), times, weights))
    return rows, whole, clocks.line


# -- with ncu ----------------------------------------------------------------------------------------------------------


def read_ncu(text: str) -> list[Row]:
    """Rows from ncu's `--csv --print-units base` output, a line a metric of a launch. ValueError if there are none."""
    lines = text.splitlines()
    head = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if head is None:
        raise ValueError(f"no table in ncu's output: {text[-400:]!r}")
    values: dict[str, dict[str, float]] = {}
    names: dict[str, str] = {}
    for record in csv.DictReader(lines[head:]):
        if record["Metric Name"] not in (TIME, DRAM):
            continue
        names[record["ID"]] = f"{record['Kernel Name'].split('(')[0]} {record['Grid Size']}"
        values.setdefault(record["ID"], {})[record["Metric Name"]] = float(record["Metric Value"].replace(",", ""))
    rows: dict[str, Row] = {}
    for launch, metrics in values.items():
        row = rows.setdefault(names[launch], Row(names[launch], 0, []))
        row.count += 1
        row.us.append(metrics[TIME] / 1e3)
        row.dram.append(metrics[DRAM])
    if not rows:
        raise ValueError("ncu counted no kernel")
    return list(rows.values())


def by_ncu(options: argparse.Namespace) -> list[Row]:
    """Rows from a process of this module under ncu. TimeoutExpired after --limit seconds; ValueError if it failed."""
    inner = [sys.executable, "-m", "hil_rigs.gpu.profile", "--inner", "--shape", options.shape]
    inner += ["--rows", str(options.rows), "--layers", str(options.layers or NCU_LAYERS)]
    if options.chunk:
        inner += ["--chunk", str(options.chunk)]
    command = [
        "ncu", "--csv", "--print-units", "base", "--profile-from-start", "off", "--cache-control", "none",
        "--clock-control", "none", "--metrics", f"{TIME},{DRAM}", *inner,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=options.limit, check=False)
    if done.returncode != 0:
        raise ValueError(f"ncu: exit status {done.returncode}: {(done.stderr or done.stdout)[-800:]}")
    return read_ncu(done.stdout)


def inner(step: Step) -> None:
    """The step once between profiler marks, not captured: what ncu watches."""
    import cupy as cp

    step.run()
    cp.cuda.Device().synchronize()
    cp.cuda.profiler.start()
    step.run()
    cp.cuda.Device().synchronize()
    cp.cuda.profiler.stop()


# ----------------------------------------------------------------------------------------------------------------------


def make_step(options: argparse.Namespace) -> Step:
    """The step of the options over random weights, cuBLASLt tuned for it."""
    from dataclasses import replace

    from blink_core.ops.cuda_ops import CudaOps
    from hil_rigs.gpu import ops_timing
    from hil_rigs.gpu.stack import LLAMA_3_8B, PAGE, QWEN3_30B_A3B, Stack, Step

    shape = {"llama-3-8b": LLAMA_3_8B, "qwen3-30b-a3b": QWEN3_30B_A3B}[options.shape]
    if options.layers:
        shape = replace(shape, layers=options.layers)
    lengths = [(options.chunk, options.chunk)] if options.chunk else [(1, CONTEXT)] * options.rows
    ops = CudaOps("bfloat16")
    stack = Stack(ops, shape, 2 + sum(-(-c // PAGE) for _, c in lengths))
    step = Step(stack, lengths)
    for line in ops_timing.tune(ops, stack, step):
        print(line, flush=True)
    return step


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--rows", type=int, default=1, help="of a decode step")
    parser.add_argument("--chunk", type=int, help="a prefill step of so many tokens instead")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--ncu", action="store_true")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for ncu")
    parser.add_argument("--out", type=Path, help="JSON file of all samples")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name in ("rows", "chunk", "layers"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} is {value}, expected at least 1")
    if options.inner:
        inner(make_step(options))
        return 0
    what = f"prefill chunk of {options.chunk}" if options.chunk else f"decode step of {options.rows} x {CONTEXT}"
    whole: list[float] = []
    clock = ""
    if options.ncu:
        if shutil.which("ncu") is None:
            print("ncu is not on the path: install Nsight Compute, or leave --ncu out", file=sys.stderr)
            return 2
        try:
            rows = by_ncu(options)
        except (subprocess.TimeoutExpired, ValueError) as error:
            print(f"no profile: {error}", file=sys.stderr)
            return 1
        print(f"{options.shape}, {what}, {options.layers or NCU_LAYERS} layers, by ncu")
    else:
        rows, whole, clock = by_events(make_step(options), CHUNK_SAMPLES if options.chunk else STEP_SAMPLES)
        print(f"{options.shape}, {what}, {options.layers or 'all'} layers: whole step {np.median(whole):.1f} us")
        print(f"first of {len(whole)} {whole[0]:.1f}, least {min(whole):.1f}, most {max(whole):.1f} us; {clock}")
    print("\n".join(table(rows)))
    if options.out is not None:
        record = {"shape": options.shape, "what": what, "step_us": whole, "clock": clock}
        options.out.write_text(json.dumps(record | {"kernels": [asdict(r) for r in rows]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
