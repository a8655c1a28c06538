"""The gap between decode steps and nothing else, in about a minute: 64 running rows of the no-op model, 4,096 slots.

    python -m hil_rigs.gpu.perf [--rows 64] [--slots 4096] [--step-us 100,0] [--no-phases] [--out FILE]

A step of 100 us is shorter than any model's; behind one of 0 us the scheduler is still busy with what it does while a
step runs, so that all of its work lies in the gap. The phases are measured by a build of their own (BLINK_PHASES),
whose stamps cost a little: the gap is the other build's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from blink_core.runtime.serve_abi import PHASES

# What lies between two moments of serve_abi.PHASES.
WORK = {
    "prepared": "call, look whether prepared",
    "judged": "read results, judge rows",
    "written": "vote, write the plan",
    "planned": "barrier",
    "chosen": "bucket",
    "fenced": "fence",
    "launched": "launch call",
    "finished": "while it runs: events, pages, log",
    "looked": "while it runs: first look at the rings",
    "ready": "while it runs: prepare the next boundary",
}


def phase_times(stamps: Any, most: int) -> dict[str, list[float]]:
    """Microseconds of each phase from :meth:`DeviceDriven.phases`, over the steady boundaries of the last ``most``."""
    rows = stamps[np.argsort(stamps[:, -1], kind="stable")][-most:].astype(np.int64)
    whole = (rows[:, 0] > 0) & (np.diff(rows, axis=1) >= 0).all(axis=1)
    spent = np.diff(rows[whole], axis=1) / 1e3
    return {name: spent[:, i].tolist() for i, name in enumerate(PHASES[1:])}


def phase_table(found: dict[str, list[float]]) -> list[str]:
    """Lines with median, 90th and 99th percentile of each phase; the gap's phases come first."""
    count = len(next(iter(found.values())))
    lines = [f"phases of {count} steady boundaries, us             p50     p90     p99"]
    if count == 0:
        return [*lines, "none: no boundary was steady"]
    for name, values in found.items():
        marks = np.percentile(values, (50, 90, 99))
        lines.append(f"  {name:9s} {WORK[name]:40s} " + " ".join(f"{m:7.2f}" for m in marks))
    return lines


def gap_line(step_us: float, found: dict[str, Any]) -> str:
    """One line of `runtime_check.gap`."""
    parts = ("gap", "notice", "boundary", "launch", "start")
    text = "  ".join(f"{p} {found[f'{p}_us_p50']:.2f}/{found[f'{p}_us_p99']:.2f}" for p in parts)
    return f"step {step_us:g} us, {found['gaps']} gaps, p50/p99 us: {text}"


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--slots", type=int, default=4096)
    parser.add_argument("--step-us", default="100,0")
    parser.add_argument("--launch", choices=("fire", "tail"), default="fire")
    parser.add_argument("--no-phases", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    from hil_rigs.gpu.runtime_check import gap

    results: dict[str, Any] = {}
    lines = []
    steps = [float(us) for us in options.step_us.split(",")]
    for us in steps:
        found = gap(options.launch, rows=options.rows, slots=options.slots, step_us=us)
        results[f"step {us:g}"] = found
        lines.append(gap_line(us, found))
        print(lines[-1], flush=True)
    if not options.no_phases:
        found = gap(options.launch, rows=options.rows, slots=options.slots, step_us=steps[0], phases=True)
        results["phases"] = found["phases"]
        lines += [f"with stamps: {gap_line(steps[0], found)}", *phase_table(found["phases"])]
    print("\n".join(lines))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
