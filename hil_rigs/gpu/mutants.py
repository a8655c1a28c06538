"""Runs ops_check on kernels with a seeded fault each, and prints which comparison noticed it.

    python -m hil_rigs.gpu.mutants DIR [--only NAME,...] [--seeds N] [--limit SECONDS]

DIR is what `python -m verification.mutants.gpu DIR` wrote. Each mutant runs in a process of its own, whose kernels are
those of its folder. Killed: a comparison was beyond its limit with every seed, or held a NaN. A compile error, a crash
or a timeout is no kill. The unchanged kernels run first with the same seeds and must pass. Exit status: 0 every mutant
was killed, 1 not so, 2 the unchanged kernels failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The child's own command line: the folder of kernels is put in before anything reads a kernel.
CHILD = (
    "import sys; from pathlib import Path; from blink_core.ops import cuda_sources as c; "
    "c.source.__defaults__ = (Path(sys.argv.pop(1)),); c.KERNELS = c.source.__defaults__[0]; "
    "from hil_rigs.gpu.ops_check import main; sys.exit(main())"
)


@dataclass(frozen=True, slots=True)
class Ran:
    """One run of ops_check. word: found, nothing, broken (compile error, crash) or timeout. what: the first of it."""

    word: str
    what: str


def run(folder: Path | None, parts: str, dtypes: str, seed: int, limit_s: float) -> Ran:
    """ops_check on the kernels of `folder`, or on the product's own."""
    from blink_core.ops.cuda_sources import KERNELS

    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-c", CHILD, str(folder or KERNELS), "--only", parts, "--dtypes", dtypes]
        command += ["--skip-timing", "--seed", str(seed), "--out", out]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            return Ran("timeout", f"not over after {limit_s:g} s")
        report = Path(out) / "ops_check.json"
        if not report.exists():
            return Ran("broken", (done.stderr or done.stdout).strip()[-200:])
        record: dict[str, Any] = json.loads(report.read_text())
    failed = [c for c in record["comparisons"] if not c["error"] <= c["limit"]]
    if failed:
        first = failed[0]
        count = f"{len(failed)} of {len(record['comparisons'])} comparisons"
        return Ran("found", f"{count}: {first['op']} [{first['case']}] {first['error']:.3g} > {first['limit']:.3g}")
    if record["broken"]:
        return Ran("broken", record["broken"][0].strip()[-200:])
    return Ran("nothing", f"{len(record['comparisons'])} comparisons")


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of one run")
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    options = parser.parse_args(arguments)
    plan = json.loads((options.folder / "mutants.json").read_text())
    names = set(filter(None, options.only.split(",")))
    if unknown := names - {m["name"] for m in plan}:
        parser.error(f"no mutants {', '.join(sorted(unknown))} in {options.folder}")
    plan = [m for m in plan if not names or m["name"] in names]
    for parts, dtypes in sorted({(m["parts"], m["dtypes"]) for m in plan}):
        for seed in range(options.seeds):
            clean = run(None, parts, dtypes, seed, 3 * options.limit)
            print(f"unchanged {parts} {dtypes} seed {seed}: {clean.word} {clean.what}", flush=True)
            if clean.word != "nothing":
                return 2
    results = []
    for mutant in plan:
        runs = [
            run(options.folder / mutant["name"], mutant["parts"], mutant["dtypes"], seed, options.limit)
            for seed in range(options.seeds)
        ]
        killed = all(ran.word == "found" for ran in runs)
        words = ",".join(ran.word for ran in runs)
        print(
            f"{'killed  ' if killed else 'SURVIVES'} {mutant['class']} {mutant['name']:44s} {words:16s} {runs[0].what}",
            flush=True,
        )
        results.append({**mutant, "killed": killed, "runs": [[ran.word, ran.what] for ran in runs]})
    count = sum(r["killed"] for r in results)
    print(f"{count} of {len(results)} CUDA mutants killed, {options.seeds} seeds each")
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1))
    return 0 if count == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
