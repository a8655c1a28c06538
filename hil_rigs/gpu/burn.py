"""Busy processes of a known kind and number, on chosen cores: a load beside an engine.

    python -m hil_rigs.gpu.burn --seconds S [--count N] [--cores 4-15] [--avoid 0-3] [--kinds arithmetic,memory]

Each is a process pinned to one core, the cores in turn, and never to one of --avoid (the front end's). `arithmetic`
stays in registers and caches; `memory` streams through more than a last-level cache. Every one ends by itself when its
time is over, and when the process that started it is gone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

KINDS = ("arithmetic", "memory")
MEMORY_BYTES = 64 << 20  # of a process; beyond the last-level cache of a core's share
PIECE_S = 0.05  # of work between two looks at the clock
START_S = 30.0
READY = "burning"


def parse_cores(text: str) -> list[int]:
    """ "0-2,5" as [0, 1, 2, 5]. Raises ValueError."""
    cores: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if low > high:
            raise ValueError(f"cores {part!r}: {low} is above {high}")
        cores += range(low, high + 1)
    return cores


def split_cores(reserved: int) -> tuple[list[int], list[int]]:
    """This process's cores as (reserved for front ends and clients, all others). Raises ValueError if none is left."""
    cores = sorted(os.sched_getaffinity(0))
    if not 0 < reserved < len(cores):
        raise ValueError(f"{reserved} cores to reserve of {len(cores)}: at least one must be left on either side")
    return cores[:reserved], cores[reserved:]


def burn(kind: str, until: float, parent: int) -> int:
    """Works until the monotonic time `until`, or until `parent` is gone. Returns the pieces of work done."""
    pieces = 0
    data = np.ones(MEMORY_BYTES // 8) if kind == "memory" else np.ones(1024)
    while (now := time.monotonic()) < until and os.getppid() == parent:
        end = min(until, now + PIECE_S)
        while time.monotonic() < end:
            if kind == "memory":
                data[: data.size // 2] = data[data.size // 2 :]
                data[data.size // 2 :] += 1.0
            else:
                for _ in range(50):
                    np.sqrt(data, out=data)
        pieces += 1
    return pieces


@contextmanager
def burning(
    count: int, cores: Sequence[int], seconds: float, kinds: Sequence[str] = KINDS
) -> Iterator[list[subprocess.Popen[str]]]:
    """`count` busy processes while inside, the cores and kinds in turn; under way when it is entered.

    seconds: after which each ends by itself. Raises ValueError for an unknown kind or no cores, TimeoutError.
    """
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"kinds of load {', '.join(sorted(unknown))}; known: {', '.join(KINDS)}")
    if count and not cores:
        raise ValueError(f"{count} busy processes and no core for them")
    running: list[subprocess.Popen[str]] = []
    try:
        for index in range(count):
            kind, core = kinds[index % len(kinds)], cores[index % len(cores)]
            command = [sys.executable, "-m", "hil_rigs.gpu.burn", "--one", kind, "--core", str(core)]
            command += ["--seconds", str(seconds), "--parent", str(os.getpid())]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        deadline = time.monotonic() + START_S
        for process in running:
            assert process.stdout is not None
            # Its one line, or its end: either comes before START_S, for each has a deadline of its own.
            if process.stdout.readline().strip() != READY or time.monotonic() > deadline:
                raise TimeoutError(f"a busy process did not start: status {process.poll()}")
        yield running
    finally:
        for process in running:
            process.kill()
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
            if process.stdout is not None:
                process.stdout.close()


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--count", type=int, default=0, help="processes; four a core by default")
    parser.add_argument("--cores", type=parse_cores, help="those of this process by default")
    parser.add_argument("--avoid", type=parse_cores, default=[], help="cores that stay free")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        until = time.monotonic() + options.seconds
        os.sched_setaffinity(0, {options.core})
        print(READY, flush=True)
        burn(options.one, until, options.parent)
        return 0
    cores = [c for c in options.cores or sorted(os.sched_getaffinity(0)) if c not in options.avoid]
    count = options.count or 4 * len(cores)
    try:
        with burning(count, cores, options.seconds, options.kinds.split(",")) as running:
            print(f"{count} busy processes on cores {cores} for {options.seconds:g} s", flush=True)
            for process in running:
                process.wait(options.seconds + START_S)
    except (ValueError, TimeoutError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
