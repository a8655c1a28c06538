"""All checks of the gpu rig that are not the suite's profiles, each a process with a deadline; one short table last.

    python -m hil_rigs.gpu.all [--stages NAME,...] [--skip NAME,...] [--jobs N] [--limit S] [--out DIR] [--list]
    python -m hil_rigs.gpu.all --skip 'mutants-*' --jobs 6         # and, for themselves:
    python -m hil_rigs.gpu.all --stages 'sanitize-*' --jobs 4
    python -m hil_rigs.gpu.all --stages 'mutants-*' --jobs 4

Names may end in `*`. Stages that measure time run alone, after all others; those share the GPU, N at a time. A stage
that is not over at its own limit, or at that of the whole, is killed with all its processes and says TIMEOUT; the
stages that share leave those that run alone their time. A stage of which a test was skipped has not passed: SKIPPED,
or PARTLY where others passed. `--list` tells what each takes beside others on one H200.
Exit 0: all passed; 1: one did not; 2: nothing ran.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

# The plugin by name where it is not installed as an entry point; twice would be an error.
_INSTALLED = any(point.name == "blink" for point in importlib.metadata.entry_points(group="pytest11"))
PYTEST = ("-m", "pytest", *(() if _INSTALLED else ("-p", "verification.plugin")), "-q", "-rs", "--no-header")
FAULTS = "engine-stop or engine-kill or frontend-stop or frontend-kill"


@dataclass(frozen=True, slots=True)
class Stage:
    """Arguments of Python, and seconds: the most it may take, and what it takes beside others. alone: it measures time,
    so nothing runs beside it. what: for whoever chooses."""

    arguments: tuple[str, ...]
    limit_s: float
    wanted_s: float
    alone: bool = False
    what: str = ""


# `hil_rigs.gpu.mutants` is for a machine with nothing but the product: here the kernels with a fault are written first.
MUTANTS = """
import json, sys, tempfile
from pathlib import Path
from hil_rigs.gpu.mutants import main
from verification.mutants.gpu import write
share, shares = (int(n) for n in sys.argv[1].split("/"))
with tempfile.TemporaryDirectory(prefix="blink-mutants-") as folder:
    write(Path(folder))
    names = sorted(m["name"] for m in json.loads((Path(folder) / "mutants.json").read_text()))[share - 1 :: shares]
    sys.exit(main([folder, "--only", ",".join(names)]))
"""
SHARES = 4  # of the mutants, which take a compilation each
SANITIZERS = (("memcheck", 150), ("racecheck", 200), ("initcheck", 150), ("synccheck", 150))


def _stages() -> dict[str, Stage]:
    device, here = ("-m", "verification.on_device"), "tests/hil/gpu"
    faults = "verification/suite/test_under_faults.py"
    shapes = ("llama-3-8b", "phi-4", "qwen3-32b", "qwen3-30b-a3b")
    return {
        "group": Stage((*PYTEST, f"{here}/test_group.py"), 150, 60, what="the scheduler's block against the host"),
        "watchdog": Stage((*PYTEST, f"{here}/test_watchdog.py"), 240, 90, what="what ends an engine is told"),
        "xid": Stage((*PYTEST, f"{here}/test_xid.py"), 200, 60, what="a real Xid, of another process"),
        "faults": Stage((*PYTEST, faults, "--rig", "gpu", "-k", FAULTS), 240, 45, what="the suite under faults"),
        "long": Stage((*device, "long"), 300, 80, what="120 to 10,000 steps in one go, every launch"),
        **{
            f"shape-{name}": Stage((*device, "shapes", "--shape", name), 300, 120, what="layers against HuggingFace")
            for name in shapes
        },
        "ops_check": Stage(("-m", "hil_rigs.gpu.ops_check", "--skip-timing"), 300, 120, what="kernels against NumPy"),
        "batch-invariance": Stage((*PYTEST, f"{here}/test_batch_invariance.py"), 400, 150, what="bits in any company"),
        **{
            f"sanitize-{tool}": Stage(
                ("-m", "hil_rigs.gpu.sanitize", "--tools", tool, "--timeout", "235"), 250, wanted,
                what="compute-sanitizer over every kernel",
            )
            for tool, wanted in SANITIZERS
        },
        **{
            f"mutants-{share}": Stage(
                ("-c", MUTANTS, f"{share}/{SHARES}"), 500, 280, what="kernels with a seeded fault are noticed"
            )
            for share in range(1, SHARES + 1)
        },
        "freeze": Stage(("-m", "hil_rigs.gpu.freeze"), 90, 45, alone=True, what="engine process stopped in mid-stream"),
        "interference": Stage(("-m", "hil_rigs.gpu.interference"), 120, 60, alone=True, what="beside busy processes"),
    }  # fmt: skip


STAGES = _stages()
ROOT = Path(__file__).parents[2]
KILL_S = 30.0


@dataclass(frozen=True, slots=True)
class Ran:
    """One stage's end. seconds: what it took. said: the last line of its output."""

    stage: str
    state: str
    seconds: float
    said: str


class Runner:
    """Runs stages until `deadline`, a monotonic time that may be moved between them."""

    def __init__(self, deadline: float, out: Path, tail: int) -> None:
        self.deadline, self._out, self._tail = deadline, out, tail
        self._printing = threading.Lock()
        self.ran: list[Ran] = []

    def run(self, name: str) -> Ran:
        """One stage, to its end or to its limit; all.json is written anew."""
        found = self._run(name)
        with self._printing:
            self.ran.append(found)
            (self._out / "all.json").write_text(json.dumps([asdict(one) for one in self.ran], indent=1))
        return found

    def _run(self, name: str) -> Ran:
        stage, begin = STAGES[name], time.monotonic()
        left = min(stage.limit_s, self.deadline - begin)
        if left <= 1.0:
            return Ran(name, "NOT RUN", 0.0, "the time of the whole was over")
        path = self._out / f"{name}.log"
        with path.open("w", errors="replace") as log:
            process = subprocess.Popen(
                [sys.executable, *stage.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": _python_path()},
                start_new_session=True,  # so that all of it can be killed
            )
            try:
                code: int | None = process.wait(left)
            except subprocess.TimeoutExpired:
                code = None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # One that does not die, be it of the driver's making, is told by its state and costs the others nothing.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_S)
        text = path.read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        state = "TIMEOUT" if code is None else "pass" if code == 0 else f"FAIL {code}"
        if code == 0 and stage.arguments[: len(PYTEST)] == PYTEST:
            state = judged((lines or [""])[-1])
        seconds = time.monotonic() - begin
        with self._printing:
            print(f"{name}: {state} after {seconds:.0f} s", flush=True)
            if state != "pass":
                print(f"--- {name}\n{text[-self._tail :]}\n---", flush=True)
        return Ran(name, state, round(seconds, 1), lines[-1] if lines else "")


def judged(counts: str) -> str:
    """What pytest's last line says of a stage that did not fail: a test that was skipped shows nothing."""
    if " passed" not in counts:
        return "SKIPPED"
    return "PARTLY" if " skipped" in counts else "pass"


def _python_path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def chosen(names: str, skip: str) -> list[str]:
    """Stages that match one of the patterns and none of `skip`. Raises ValueError for a pattern that none matches."""
    found: list[str] = []
    for pattern in names.split(","):
        matching = fnmatch.filter(STAGES, pattern)
        if not matching:
            raise ValueError(f"no stage {pattern!r}; there are {', '.join(STAGES)}")
        found += matching
    skipped = [pattern for pattern in skip.split(",") if pattern]
    kept = [name for name in STAGES if name in found]
    return [name for name in kept if not any(fnmatch.fnmatch(name, pattern) for pattern in skipped)]


def run_all(names: list[str], *, jobs: int, limit_s: float, out: Path, tail: int) -> list[Ran]:
    """Stages that share the GPU first, `jobs` at a time, then those that run alone; each leaves the time that is wanted
    by those after it."""
    alone = [name for name in names if STAGES[name].alone]
    over, after = time.monotonic() + limit_s, sum(STAGES[name].wanted_s for name in alone)
    runner = Runner(over - after, out, tail)
    with ThreadPoolExecutor(jobs) as pool:
        ran = list(pool.map(runner.run, [n for n in names if not STAGES[n].alone]))
    for name in alone:
        after -= STAGES[name].wanted_s
        runner.deadline = over - after
        ran.append(runner.run(name))
    return ran


def table(ran: list[Ran], whole_s: float) -> list[str]:
    """One line a stage, with what it took and what it is said to take, and one for the whole."""
    lines = [f"\n{'stage':22s} {'state':8s} {'took s':>7s} {'said s':>7s}  last line"]
    for one in ran:
        wanted = STAGES[one.stage].wanted_s
        lines.append(f"{one.stage:22s} {one.state:8s} {one.seconds:7.1f} {wanted:7.0f}  {one.said[:100]}")
    return [*lines, f"{len(ran)} stages, {sum(one.seconds for one in ran):.0f} s of stages in {whole_s:.0f} s"]


def listed() -> str:
    """One line a stage: its name, what it takes, and what it is."""
    rows = ((name, f"{s.wanted_s:.0f} s", "alone" if s.alone else "", s.what) for name, s in STAGES.items())
    return "\n".join(f"{name:22s} {takes:>6s} {alone:5s}  {what}" for name, takes, alone, what in rows)


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"stages:\n{listed()}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", default="*")
    parser.add_argument("--skip", default="")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--limit", type=float, default=540.0, help="seconds of the whole")
    parser.add_argument("--out", type=Path, help="folder that keeps the stages' output and all.json")
    parser.add_argument("--tail", type=int, default=1200, help="characters shown of a stage that did not pass")
    parser.add_argument("--list", action="store_true", help="names of the stages and what each takes, and nothing else")
    options = parser.parse_args(arguments)
    if options.list:
        print(listed())
        return 0
    try:
        names = chosen(options.stages, options.skip)
    except ValueError as error:
        parser.error(str(error))
    with contextlib.ExitStack() as stack:
        out = options.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="blink-gpu-")))
        out.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        ran = run_all(names, jobs=max(1, options.jobs), limit_s=options.limit, out=out, tail=options.tail)
    print("\n".join(table(ran, time.monotonic() - begin)))
    return 2 if not ran else 0 if all(one.state == "pass" for one in ran) else 1


if __name__ == "__main__":
    sys.exit(main())
