"""Decode steps with each way to lay out their kernels (`blink_core.ops.cuda_variants`), measured in turn.

    python -m hil_rigs.gpu.step_ab [--steps qwen-1,llama-1,...] [--variants base,leave,...] [--rounds 21] [--out FILE]

Each step of random weights is captured once a variant; the graphs are replayed in turn, there and back, so that what
drifts hits all alike, several replays a sample. `again` is `base` once more: what differs less is noise. Products of
more than 8 rows are chosen once, with `base`. Every variant must leave the logits, keys and values of `base`, bit by
bit. One multiprocessor is left alone, as beside the resident scheduler (--reserved 0: none). Exit status: 0 all bits
were equal, 1 not so.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blink_core.ops.cuda_variants import Variants

if TYPE_CHECKING:
    from hil_rigs.gpu.stack import Stack, Step

BASE = Variants()
# What the sources do by themselves: rings that fill a multiprocessor, every kernel for itself.
PLAIN = Variants(ring=20, norm_ring=16, gate_up_ring=14, attention_stages=(3, 3), join_rows=0, ahead_kib=0)
VARIANTS: dict[str, Variants] = {
    "base": BASE,
    "plain": PLAIN,
    "ring-16": replace(BASE, ring=16),
    "ring-20": replace(BASE, ring=20),
    "norm-16": replace(BASE, norm_ring=16),
    "norm-18": replace(BASE, norm_ring=18),
    "stages-2": replace(BASE, attention_stages=(2, 3)),
    "stages-3": replace(BASE, attention_stages=(3, 3)),
    "leave": replace(BASE, leave=True),
    "apart": replace(BASE, join_rows=0),
    "join-more": replace(BASE, join_rows=32),
    "gate-9": replace(BASE, gate_up_ring=9),
    "gate-14": replace(BASE, gate_up_ring=14),
    "ahead-0": replace(BASE, ahead_kib=0),
    "ahead-64": replace(BASE, ahead_kib=64),
    "again": BASE,
}
STEPS = ("qwen-1", "llama-1", "llama-8", "llama-16", "llama-32")
CONTEXT = 192  # tokens of a row: 128 in and 129 out on average
REPLAYS = 4  # of a sample


@dataclass(frozen=True, slots=True)
class Found:
    """One variant of a step: microseconds of a step, a sample each, and whether its bits are base's."""

    step: str
    variant: str
    us: list[float]
    equal: bool


def chosen(step: str, names: Sequence[str]) -> list[str]:
    """Variants worth measuring for a step: some differ in a mixture's kernels alone."""
    if step.startswith("qwen"):
        return list(names)

    def dense(v: Variants) -> Variants:
        return replace(v, ahead_kib=BASE.ahead_kib, gate_up_ring=BASE.gate_up_ring)

    return [n for n in names if n in ("base", "again") or dense(VARIANTS[n]) != BASE]


def rounds_of(names: Sequence[str], rounds: int) -> list[str]:
    """The order of the samples: all in turn, there and back."""
    return [name for r in range(rounds) for name in (names if r % 2 == 0 else names[::-1])]


def table(found: Sequence[Found]) -> list[str]:
    """A line for each variant: median, range, ratio to base in the median of the rounds, bits."""
    lines = [f"{'step':10s} {'variant':26s} {'median us':>10s} {'least':>9s} {'most':>9s} {'of base':>8s}  bits"]
    for f in found:
        base = next(b for b in found if b.step == f.step and b.variant == "base")
        ratio = statistics.median(a / b for a, b in zip(f.us, base.us, strict=True))
        lines.append(
            f"{f.step:10s} {f.variant:26s} {statistics.median(f.us):10.1f} {min(f.us):9.1f} {max(f.us):9.1f} "
            f"{ratio:8.4f}  {'same' if f.equal else 'DIFFER'}"
        )
    return lines


# -- on the GPU --------------------------------------------------------------------------------------------------------


def compare(stack: Stack, step: str, names: Sequence[str], rounds: int, reserved: int) -> Iterator[Found]:
    """Every variant of one step over the weights of ``stack``, whose operations are base's."""
    import cupy as cp

    from blink_core.ops.cuda_capture import captured, in_turn
    from blink_core.ops.cuda_ops import CudaOps
    from hil_rigs.gpu.ops_timing import tune
    from hil_rigs.gpu.stack import Step

    rows = int(step.split("-")[1])
    stack.ops.kernels.reserved = reserved
    if stack.shape.experts is None:
        for line in tune(stack.ops, stack, Step(stack, [(1, CONTEXT)] * rows)):
            print(line, flush=True)
    stack.ops.gemm.library()  # so that all share its choices
    stream = cp.cuda.Stream(non_blocking=True)
    graphs: dict[str, Any] = {}
    bits: dict[str, bytes] = {}
    kept = []  # what the graphs use
    for name in names:
        ops = CudaOps("bfloat16")
        ops.kernels.reserved, ops.kernels.variants = reserved, VARIANTS[name]
        ops.gemm = replace(stack.ops.gemm, kernels=ops.kernels)
        mine = copy.copy(stack)
        mine.ops = ops
        work = Step(mine, [(1, CONTEXT)] * rows)
        for layer in stack.layers:  # nothing may be left of the variant before
            layer.k.reshape(-1, *layer.k.shape[2:])[work.slots] = 0x7FC0
            layer.v.reshape(-1, *layer.v.shape[2:])[work.slots] = 0x7FC0
        work.logits.fill(float("nan"))
        cp.cuda.Device().synchronize()
        with stream:
            work.run()
            stream.synchronize()
            if not bool(cp.isfinite(work.logits).all()):
                raise RuntimeError(f"{step} {name}: logits are not finite, so equal bits would say nothing")
            parts = [work.logits, *(pool.reshape(-1, *pool.shape[2:])[work.slots]
                                    for layer in stack.layers for pool in (layer.k, layer.v))]  # fmt: skip
            bits[name] = b"".join(cp.asnumpy(part).tobytes() for part in parts)
        graphs[name] = captured(stream, partial(_repeat, work))
        kept.append(work)
    us: dict[str, list[float]] = {name: [] for name in names}
    order = rounds_of(names, rounds)
    run = in_turn(stream, graphs)
    run(names)  # warm
    for name, took in zip(order, run(order), strict=True):
        us[name].append(took / REPLAYS)
    for name in names:
        yield Found(step, name, us[name], bits[name] == bits["base"])


def _repeat(work: Step) -> None:
    for _ in range(REPLAYS):
        work.run()


def measure(steps: Sequence[str], names: Sequence[str], rounds: int, reserved: int) -> Iterator[Found]:
    """All steps, a model's weights made once."""
    from blink_core.ops.cuda_ops import CudaOps
    from hil_rigs.gpu.ops_timing import free
    from hil_rigs.gpu.stack import LLAMA_3_8B, PAGE, QWEN3_30B_A3B, Stack

    for model, shape in (("qwen", QWEN3_30B_A3B), ("llama", LLAMA_3_8B)):
        mine = [s for s in steps if s.startswith(model)]
        if not mine:
            continue
        most = max(int(s.split("-")[1]) for s in mine)
        stack = Stack(CudaOps("bfloat16"), shape, 2 + most * -(-CONTEXT // PAGE))
        for step in mine:
            begin = time.monotonic()
            yield from compare(stack, step, chosen(step, names), rounds, reserved)
            print(f"measured {step} in {time.monotonic() - begin:.1f} s", flush=True)
        del stack
        free()


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--variants", default=",".join(VARIANTS), help="base is always among them")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--reserved", type=int, default=1, help="multiprocessors left alone")
    parser.add_argument("--out", type=Path, help="JSON file of all samples")
    options = parser.parse_args(arguments)
    steps, names = options.steps.split(","), options.variants.split(",")
    if unknown := [s for s in steps if s not in STEPS] + [n for n in names if n not in VARIANTS]:
        parser.error(f"unknown: {', '.join(unknown)}; steps are {', '.join(STEPS)}, variants {', '.join(VARIANTS)}")
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}, expected at least 1")
    names = ["base", *(n for n in names if n != "base")]
    found = list(measure(steps, names, options.rounds, options.reserved))
    print("\n".join(table(found)))
    if options.out is not None:
        options.out.write_text(json.dumps([{"step": f.step, "variant": f.variant, "us": f.us, "equal": f.equal}
                                           for f in found]))  # fmt: skip
    return 0 if all(f.equal for f in found) else 1


if __name__ == "__main__":
    sys.exit(main())
