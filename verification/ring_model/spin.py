"""Runs Spin: Promela to C, C to a checker, and the checker, each with a deadline; reads what it prints."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from verification.ring_model.variants import DEADLOCK, PROGRESS, Search

FOLDER = Path(__file__).parent
APT = "apt-get install -y spin gcc"
TIMEOUT_S = 1500.0
DEPTH = 1_000_000
MEMORY_MIB = 4096
TRAIL_LINES = 200  # of a counterexample: its last ones are kept, where it fails


class SpinMissing(RuntimeError):
    """There is no Spin, or no C compiler for what it writes."""


class SpinFailed(RuntimeError):
    """A tool failed, or did not come to its end in time."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one search found. clause: of the assertion that failed, `progress` or `deadlock`; "" if none did.

    complete: every reachable state was visited: no depth, memory or time limit cut it, and states were stored whole.
    trail: the last steps of the counterexample, one a line as Spin prints them; empty where nothing failed.
    """

    search: Search
    clause: str
    states: int
    depth: int
    complete: bool
    seconds: float
    trouble: str = ""
    trail: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """The protocol as it is holds in every state; a variant fails by one of its clauses."""
        if self.trouble:
            return False
        return self.clause in self.search.fails if self.search.fails else self.complete and not self.clause

    def line(self) -> str:
        wanted = " or ".join(self.search.fails) if self.search.fails else "no error"
        found = self.clause or ("no error" if self.complete else "no error so far")
        cut = "" if self.complete or self.search.fails else ", cut short"
        mark = "ok  " if self.ok else "FAIL"
        size = f"{self.states:>10,} states  depth {self.depth:>6}  {self.seconds:6.1f} s"
        text = f"{mark} {self.search!s:40} {size}  {found}"
        return text + cut + ("" if self.ok else f" (wanted: {wanted}) {self.trouble}")


def tools() -> tuple[str, str]:
    """Paths of Spin and of a C compiler. Raises SpinMissing, with the command that brings them."""
    spin, compiler = shutil.which("spin"), shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc")
    if spin is None or compiler is None:
        what = "spin" if spin is None else "a C compiler"
        raise SpinMissing(f"{what} is not installed: {APT}")
    return spin, compiler


def run(search: Search, *, timeout_s: float = TIMEOUT_S) -> Outcome:
    """One exhaustive search: no hash compaction, no bit state. Raises SpinMissing, SpinFailed."""
    spin, compiler = tools()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="blink-spin-") as name:
        folder = Path(name)
        shutil.copy(FOLDER / f"{search.model}.pml", folder)
        defines = [f"-D{one}" for one in (*search.defines, *(["PROGRESS"] if search.progress else []))]
        _tool([spin, "-a", *defines, f"{search.model}.pml"], folder)
        # Weak fairness needs the liveness checker; NFAIR is enough copies of the counter for the processes of a model.
        kind = ["-DNFAIR=3"] if search.progress else ["-DSAFETY"]
        speed = "-O1" if search.model == "ring" else "-O0"  # the others take longer to compile than to search
        _tool([compiler, speed, "-w", *kind, f"-DMEMLIM={MEMORY_MIB}", "-o", "pan", "pan.c"], folder)
        flags = ["-a", "-f"] if search.progress else []
        try:
            done = subprocess.run(
                ["./pan", f"-m{DEPTH}", *flags],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Outcome(search, "", 0, 0, False, time.monotonic() - begin, f"not finished in {timeout_s:.0f} s")
        outcome = parse(search, done.stdout + done.stderr, time.monotonic() - begin)
        return replace(outcome, trail=_trail(spin, defines, search, folder)) if outcome.clause else outcome


def _trail(spin: str, defines: list[str], search: Search, folder: Path) -> tuple[str, ...]:
    """Spin's replay of the counterexample that the checker left behind. Raises SpinFailed if there is none."""
    lines = _tool([spin, "-t", "-p", "-g", *defines, f"{search.model}.pml"], folder).splitlines()
    cut = len(lines) - TRAIL_LINES
    return (f"... {cut} lines before", *lines[cut:]) if cut > 0 else tuple(lines)


def parse(search: Search, text: str, seconds: float) -> Outcome:
    """What the checker printed."""
    counts = re.search(r"depth reached (\d+), errors: (\d+)", text)
    stored = re.search(r"^\s*(\d+) states, stored", text, re.M)
    if counts is None or stored is None:
        return Outcome(search, "", 0, 0, False, seconds, f"no result: {text[-300:].strip()}")
    clause = trouble = ""
    failed = re.search(r"pan:\d+: (.*)", text)
    if failed is not None:
        claim = re.search(r"assertion violated .*?clause_([A-Z]\d+)", failed[1])
        if claim is not None:
            clause = claim[1]
        elif "acceptance cycle" in failed[1]:
            clause = PROGRESS
        elif "invalid end state" in failed[1]:
            clause = DEADLOCK
        else:
            trouble = failed[1]
    elif int(counts[2]):
        trouble = f"{counts[2]} errors of an unknown kind"
    cut = (
        "Search not completed",
        "max search depth too small",
        "out of memory",
        "memory limit",
        "Bit statespace",
        "Hash-Compact",
    )
    complete = "Full statespace search" in text and not any(one in text for one in cut)
    return Outcome(search, clause, int(stored[1]), int(counts[1]), complete, seconds, trouble)


def _tool(command: list[str], folder: Path) -> str:
    """What it printed. Raises SpinFailed."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired as error:
        raise SpinFailed(f"{command[0]} did not end within 120 s") from error
    if done.returncode:
        raise SpinFailed(f"{' '.join(command)}\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout
