"""Command line: `python -m verification.on_device shapes|long [options]`. Exit 0 valid, 1 not, 2 could not run."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from hil_rigs.description import RigError, load_rig
from hil_rigs.local import RigFailure
from verification.result import CheckResult, Verdict
from verification.thresholds import default_thresholds

LONG_MODEL = "llama-gqa3"


def run_shapes(options: argparse.Namespace) -> list[tuple[str, CheckResult]]:
    """Every shape and element type; a shape that raises is undecided, and the others go on."""
    from verification.on_device.check_shape import check_shape
    from verification.on_device.shapes import SHAPES

    found: list[tuple[str, CheckResult]] = []
    for name in options.shape.split(",") if options.shape != "all" else SHAPES:
        try:
            result = check_shape(
                name,
                load_rig(options.rig),
                layers=options.layers,
                dtypes=tuple(options.dtypes.split(",")),
                seed=options.seed,
                device=options.device,
                folder=options.folder,
            )
        except (RigError, ValueError):
            raise
        except Exception as error:
            traceback.print_exc()
            found.append((name, _broken(error)))
            continue
        print(f"{name}: {result.parameters / 1e9:.2f}e9 parameters, seconds {json.dumps(result.seconds)}", flush=True)
        found += [(f"{name} {dtype}", verdict) for dtype, verdict in result.verdicts.items()]
    return found


def run_long_runs(options: argparse.Namespace) -> list[tuple[str, CheckResult]]:
    """Every way of launching, and HuggingFace's verdict on the tokens."""
    from verification.models.tiny import build_named
    from verification.on_device.long_runs import (
        LAUNCHES,
        LongRun,
        check_run,
        check_same,
        check_tokens,
        counts_of,
        run_long,
    )
    from verification.oracles.hf import HFOracle

    counts, begin = tuple(int(c) for c in options.steps.split(",")), time.monotonic()

    def passed(what: str) -> None:
        print(f"{what} after {time.monotonic() - begin:.0f} s", flush=True)

    found: list[tuple[str, CheckResult]] = []
    runs: dict[str, list[LongRun]] = {}
    with tempfile.TemporaryDirectory(prefix="blink-long-", dir=options.folder) as folder:
        model = options.model or build_named(LONG_MODEL, Path(folder), max_positions=max(counts) + 64).path
        passed("model built")
        ways = LAUNCHES if options.launch is None else tuple(options.launch.split(","))
        launches: tuple[str | None, ...] = ways if load_rig(options.rig).kind == "gpu" else (None,)
        for place, launch in enumerate(launches):
            name = launch or options.rig
            try:
                asked = counts_of(place, counts) or counts
                runs[name] = ran = run_long(load_rig(options.rig), model, launch, asked, options.seed, max(counts))
            except (RigFailure, TimeoutError) as error:
                found.append((name, CheckResult(Verdict.INVALID, "token-equivalence", "steps", str(error))))
                continue
            for run in ran:
                print(f"{name} {run.asked}: {run.seconds * 1e6 / run.asked:.0f} us a step", flush=True)
                found.append((f"{name} {run.asked}", check_run(run)))
            passed(name)
        if len(runs) > 1:
            found.append(("tokens of all", check_same(runs)))
        if runs:
            oracles = HFOracle.load_pair(model, threads=options.threads, device=options.device)
            limits = default_thresholds().tokens
            for run in next(iter(runs.values())):
                found.append((f"HuggingFace {run.asked}", check_tokens(run, *oracles, limits)))
            passed("HuggingFace")
    return found


def _broken(error: BaseException) -> CheckResult:
    return CheckResult(Verdict.UNKNOWN, "token-equivalence", "run", f"{type(error).__name__}: {error}")


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m verification.on_device", description=__doc__)
    parser.add_argument("what", choices=("shapes", "long"))
    parser.add_argument("--rig", default="gpu")
    parser.add_argument("--device", default="cuda", help="where HuggingFace computes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where weights lie for a while; the system's temporary folder")
    parser.add_argument("--shape", default="all", help="shapes, comma-separated")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--launch", help="long: ways on rig gpu, all by default; only the first takes the longest runs")
    parser.add_argument("--steps", default="120,1000,10000")
    parser.add_argument("--model", type=Path, help="long: a model; by default a tiny random one")
    parser.add_argument("--threads", type=int, default=8, help="of HuggingFace")
    parser.add_argument("--json", type=Path, help="results, with all measurements")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    try:
        found = run_shapes(options) if options.what == "shapes" else run_long_runs(options)
    except (RigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, result in found:
        print(f"{name:24s} {result.verdict:8s} {result.clause}: {result.message}")
    print(f"{sum(r.ok() for _, r in found)} of {len(found)} valid, {time.monotonic() - begin:.0f} s")
    if options.json is not None:
        record: list[dict[str, Any]] = [{"name": name, **result.to_json()} for name, result in found]
        options.json.write_text(json.dumps(record, indent=1))
    if any(result.verdict is Verdict.INVALID for _, result in found):
        return 1
    return 0 if found and all(result.ok() for _, result in found) else 2


if __name__ == "__main__":
    sys.exit(main())
