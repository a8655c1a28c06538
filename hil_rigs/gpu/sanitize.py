"""compute-sanitizer over short serves of small random models, driven by the host.

    python -m hil_rigs.gpu.sanitize [--tools memcheck,...] [--parts dense,...] [--jobs N] [--timeout S] [--out DIR]

The sanitizers serialise kernels, so that a resident scheduler beside its steps would wait for ever: these runs are
host-driven, with the same model kernels and graphs. The scheduler itself is checked on the host, by ThreadSanitizer.
Each part (`sanitize_serve.PARTS`: bfloat16 dense, mixture, batch-invariant; float32 with capture and KV sanitizer; and
`direct`: kernels that no serve comes to, by themselves) is a process of its own under each tool, `--jobs` at a time,
all over within `--timeout`. Before that each part runs once without a tool, which compiles its kernels. Lines tell how
far each is, so that a run that is cut off tells it too.

memcheck also reports CUDA calls that return an error. Those of `PROBES` ask whether there is something and expect to
be told that there is not: they are counted apart, by the call and its error, and no other finding is.
initcheck sees neither the stores of cuBLASLt's kernels, which go by TMA, nor, likely, their loads: an uninitialised
input of such a product would pass. The parts `strict`, `invariant` and `direct` use none of them.
Exit 0: every part ran under every tool to its end and nothing was found, and every kernel was run; 1: not so; 2:
compute-sanitizer is not there, or takes no device of this machine.
"""

from __future__ import annotations

import argparse
import os
import re
import selectors
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from blink_core.ops.cuda_sources import KERNELS
from hil_rigs.gpu.sanitize_serve import AT, EVERY, LIBRARY, MODELS, RAN, SERVED, TOOLS
from hil_rigs.gpu.sanitize_warm import LOOK_S, warm_cache

PLACES = ("/usr/local/cuda/bin",)
MOST_PRINTED = 2000  # findings; those that are not printed cannot be told apart and count as they are
KILL_S = 30.0  # for a process that was killed to be gone
MARK = "BLINK_SANITIZE_RUN"  # in the environment of all that a run starts, with a value of its own
# cuda-bindings looks up every function of its headers at its first call, those too that the driver has not (its
# cydriver.pyx); it keeps what it finds, and a call of one that is not there raises.
_LOOKUPS, _ANSWERS = ("cuGetProcAddress", "cuGetProcAddress_v2"), ("CUDA_ERROR_NOT_FOUND", "CUDA_ERROR_INVALID_VALUE")
PROBES = frozenset((answer, lookup) for answer in _ANSWERS for lookup in _LOOKUPS)
# The stand-in for the resident scheduler, in measurements only; the no-op model's step; and what nothing launches.
NOT_OF_A_STEP = frozenset({"resident_stand_in.cu:resident_stand_in", "step_end.cu:step_noop"})
_KERNEL = re.compile(
    r'^extern "C" __global__ void\s+(?:(?:__\w+__\((?:[^()]|\([^()]*\))*\)|[A-Z]+(?=\s))\s*)*(\w+)\(', re.M
)
_BY_MACRO = re.compile(r"^KERNEL\((\w+),", re.M)  # `KERNEL(NAME, ...)` declares one
_VARIANT = re.compile(r"^#define KERNEL (\w+)$", re.M)  # `KERNEL` is the name itself
_SUMMARY = re.compile(r"^========= (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?$|hazards? )", re.MULTILINE)
_API_ERROR = re.compile(r"^========= Program hit (\w+) \(error \d+\).* on CUDA API call to (\w+)", re.MULTILINE)
_UNPRINTED = re.compile(r"^========= (?:ERROR|RACECHECK) SUMMARY: (\d+) \w+ (?:were|was) not printed", re.MULTILINE)
_FINDING = re.compile(r"^========= (?! |COMPUTE-SANITIZER|(?:ERROR|RACECHECK|LEAK) SUMMARY)(\S.*)$", re.MULTILINE)
_TOLD_NEXT = re.compile(r"^=========(.*)$", re.MULTILINE)
_BLOCK_END = re.compile(r"^=========\s*$", re.MULTILINE)
_REFUSED = re.compile(r"^=========.*[Dd]evice not supported", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Found:
    """One part's run under one tool. findings: by the tool's own summaries less `probes`, and no fewer than it told of;
    None if it gave no summary. probes: errors of API calls that expect them. served: lines of what was served. ran:
    kernels, as file:kernel. reached: how far it came."""

    tool: str
    findings: int | None
    served: int
    seconds: float
    status: str
    probes: int = 0
    part: str = ""
    ran: frozenset[str] = field(default_factory=frozenset)
    reached: str = ""

    @property
    def ok(self) -> bool:
        return self.findings == 0 and self.served > 0 and self.status == "ended"


def read(tool: str, text: str, seconds: float, code: int | None, part: str = "") -> Found:
    """What a run's output says. code: its exit status, None if it was killed for its time."""
    counts = [int(n) for n in _SUMMARY.findall(text)]
    probes = sum(error in PROBES for error in _API_ERROR.findall(text))
    lines = [line.partition(" ") for line in text.splitlines()]
    served = sum(word.startswith(SERVED) for word, _, _ in lines)
    ran = frozenset(kernel for word, _, rest in lines if word == RAN for kernel in rest.split())
    reached = [rest for word, _, rest in lines if word in (AT, SERVED)]
    status = "TIMEOUT" if code is None else "ended" if code == 0 else f"exit status {code}"
    if _REFUSED.search(text):
        status = "REFUSED: device not supported"
    # Each process sums up its own, and one that was killed does not: its probes are not to be taken from another's sum.
    told = _printed(text) + sum(int(n) for n in _UNPRINTED.findall(text))
    if counts and sum(counts) < probes + told and status == "ended":
        status = f"PART OF IT WITHOUT A SUMMARY: {probes + told} errors told, {sum(counts)} summed up"
    findings = max(sum(counts) - probes, told) if counts else None
    return Found(tool, findings, served, seconds, status, probes, part, ran, reached[-1] if reached else "not begun")


def _no_probes(text: str) -> Iterator[re.Match[str]]:
    """First lines of all that the tool tells, probes left out."""
    for match in _FINDING.finditer(text):
        error = _API_ERROR.match(match[0])
        if error is None or error.groups() not in PROBES:
            yield match


def _printed(text: str) -> int:
    """Findings that are no probes: what has a place or a backtrace below it, which what the tool says of itself has
    not."""
    following = (_TOLD_NEXT.search(text, match.end()) for match in _no_probes(text))
    return sum(line is not None and line[1].startswith("   ") for line in following)


def kinds(text: str) -> list[tuple[str, int]]:
    """First lines of the findings, most frequent first, without numbers that differ from thread to thread."""
    return Counter(re.sub(r"0x[0-9a-f]+|\b\d+\b", "#", match[1]) for match in _no_probes(text)).most_common()


def first_finding(text: str) -> str:
    """The first finding that is no probe, with its backtrace; empty if there is none."""
    for match in _no_probes(text):
        end = _BLOCK_END.search(text, match.end())
        return text[match.start() : end.start() if end else match.end() + 3000]
    return ""


def sanitizer() -> str | None:
    """Path of compute-sanitizer, None where there is none."""
    return shutil.which("compute-sanitizer", path=os.pathsep.join((os.environ.get("PATH", ""), *PLACES)))


def kernels_in(text: str) -> list[str]:
    """Names of the kernels of a source, of all its variants."""
    declared = [name for name in _KERNEL.findall(text) if name != "KERNEL"]
    return declared + _BY_MACRO.findall(text) + _VARIANT.findall(text)


def all_kernels() -> set[str]:
    """Those of all files, as file:kernel, that a model step can run."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in KERNELS.glob("*.cu")}
    return {f"{file}:{name}" for file, text in texts.items() for name in kernels_in(text)} - NOT_OF_A_STEP


def not_run(ran: Iterable[str]) -> list[str]:
    """Kernels that did not run."""
    return sorted(all_kernels() - set(ran))


class Session:
    """Runs parts under tools until a common deadline, and tells how far each is."""

    def __init__(self, program: str, models: Path | None, limit_s: float, out: Path | None = None) -> None:
        self._program, self._models, self._out = program, models, out
        self._begun = time.monotonic()
        self._deadline = self._begun + limit_s
        self._printing = threading.Lock()

    def told(self, text: str) -> None:
        """One line or more, with the time since the begin."""
        with self._printing:
            print(f"[{time.monotonic() - self._begun:5.1f} s] {text}", flush=True)

    def one(self, tool: str, part: str) -> Found:
        """A part under a tool, its kernels compiled before."""
        serve = [sys.executable, "-m", "hil_rigs.gpu.sanitize_serve", "--part", part, "--tool", tool]
        serve += [] if self._models is None else ["--models", str(self._models)]
        failed = warm_cache(part, self._models, lambda: self._run("no tool", part, serve), self._deadline)
        if failed is not None:
            text, code = failed
            status = "TIMEOUT" if code is None else f"exit status {code}"
            self.told(f"--- {tool} {part}: fails without the tool, {status}\n{text[-2000:]}")
            reached = read(tool, text, 0.0, code).reached
            return Found(tool, None, 0, 0.0, f"{status} without the tool", part=part, reached=reached)
        begin = time.monotonic()
        command = [self._program, "--tool", tool, "--print-limit", str(MOST_PRINTED), *serve]
        text, code = self._run(tool, part, command)
        if self._out is not None:
            self._out.mkdir(parents=True, exist_ok=True)
            (self._out / f"{tool}-{part}.log").write_text(text)
        found = read(tool, text, time.monotonic() - begin, code, part)
        self.told(f"{tool} {part}: {'clean' if found.ok else found.status}, {found.findings} findings")
        if not found.ok:
            self.told(f"--- {tool} {part}\n{_told(text)}")
        return found

    def _run(self, tool: str, part: str, command: list[str]) -> tuple[str, int | None]:
        """A process' output and exit status, None if it had to be killed at the deadline; its progress is told.

        It is over when it has ended and nobody holds its output any more: whatever it started may outlive it.
        """
        if time.monotonic() >= self._deadline:
            return "", None
        mark = uuid.uuid4().hex
        # In this process's group, so that whoever ends this one's group ends it too.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1", MARK: mark},
        )  # fmt: skip
        assert process.stdout is not None
        lines: list[str] = []
        try:
            for line in lines_until(process.stdout.fileno(), self._deadline):
                lines.append(line)
                word, _, rest = line.rstrip().partition(" ")
                if word in (AT, SERVED):
                    self.told(f"{tool} {part}: {rest}")
            code: int | None = process.wait(max(0.0, self._deadline - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            code = None
        finally:
            over = time.monotonic() + KILL_S
            process.kill()  # this does nothing to a process that has been waited for
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILL_S)
            left = kill_marked(mark, over)
            if left:
                self.told(f"{tool} {part}: processes {left} live on {KILL_S:g} s after they were killed")
            process.stdout.close()
        return "".join(lines), code


def lines_until(pipe: int, deadline: float) -> Iterator[str]:
    """Lines that come out of a pipe, to its end. Raises TimeoutError, after what has come, at a monotonic time."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(left):
                continue
            if not (read := os.read(pipe, 1 << 16)):
                break
            *whole, rest = (rest + read).split(b"\n")
            yield from (f"{line.decode(errors='replace')}\n" for line in whole)
    if rest:
        yield rest.decode(errors="replace")
    if left <= 0:
        raise TimeoutError


def kill_marked(mark: str, deadline: float) -> list[int]:
    """Kills all processes with this mark in their environment: a parent that has ended no longer leads to them. Returns
    those that live on nevertheless at a monotonic time."""
    while found := marked(mark):  # again, for a process may start another one while it is looked for
        for process in found:
            with suppress(psutil.Error):  # what cannot be killed is waited for, and told
                process.kill()
        psutil.wait_procs(found, LOOK_S)  # no longer: one that is dead, and not yet fetched by its parent, has no mark
        if time.monotonic() >= deadline:
            return [process.pid for process in marked(mark)]
    return []


def marked(mark: str) -> list[psutil.Process]:
    """Processes of this user that were started with a mark."""
    found = []
    for pid in psutil.pids():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process = psutil.Process(pid)
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def _told(text: str, most: int = 12) -> str:
    """Of a run that is not clean: kinds of findings, the first one whole, and the end of the output."""
    lines = [f"{count:6d} x {line}" for line, count in kinds(text)[:most]]
    return "\n".join([*lines, first_finding(text)[:4000], "...", text[-1000:]])


def report(rows: list[Found], *, whole: bool) -> int:
    """Prints the tables and returns the exit status. whole: all parts were asked for, so all kernels must run."""
    print(f"\n{'tool':10s} {'part':10s} {'findings':>8s} {'probes':>6s} {'served':>6s} {'s':>6s}  status")
    for row in rows:
        status = row.status if row.status == "ended" else f"{row.status}, at: {row.reached}"
        print(
            f"{row.tool:10s} {row.part:10s} {row.findings!s:>8s} {row.probes:6d} {row.served:6d} {row.seconds:6.1f}  "
            f"{status}"
        )
    missing: list[str] = []
    counts: dict[str, int] = {}
    for tool in dict.fromkeys(row.tool for row in rows):
        ran = sorted({kernel for row in rows if row.tool == tool and row.ok for kernel in row.ran})
        own = [kernel for kernel in ran if not kernel.startswith(f"{LIBRARY}:")]
        counts[tool] = len(own)
        print(f"{tool}: clean over {len(own)} kernels: {' '.join(ran) or 'none'}")
        if whole and (left := not_run(ran)):
            missing.append(tool)
            print(f"{tool}: NOT RUN, or not clean: {' '.join(left)}")
    if rows and all(row.status.startswith("REFUSED") for row in rows):
        return 2
    clean = bool(rows) and all(row.ok for row in rows) and not missing
    print(f"{'clean' if clean else 'NOT CLEAN'}: {', '.join(f'{t}, {n} kernels clean' for t, n in counts.items())}")
    return 0 if clean else 1


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--parts", default=",".join(EVERY))
    parser.add_argument("--models", type=Path, help="folder of model folders, served in float32 in place of the parts")
    parser.add_argument(
        "--jobs", type=int, default=0, help="processes at a time; as many as there are cores by default"
    )
    parser.add_argument("--timeout", type=float, default=480.0, help="seconds of the whole")
    parser.add_argument("--out", type=Path, help="folder for each run's output")
    options = parser.parse_args(arguments)
    tools = options.tools.split(",")
    if unknown := set(tools) - set(TOOLS):
        parser.error(f"unknown tools {', '.join(sorted(unknown))}; there are {', '.join(TOOLS)}")
    parts = options.parts.split(",") if options.models is None else [MODELS]
    if options.models is None and (unknown := set(parts) - set(EVERY)):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; there are {', '.join(EVERY)}")
    program = sanitizer()
    if program is None:
        print("compute-sanitizer is not on the PATH", file=sys.stderr)
        return 2
    session = Session(program, options.models, options.timeout, options.out)
    with ThreadPoolExecutor(options.jobs or len(os.sched_getaffinity(0))) as pool:
        rows = list(pool.map(lambda one: session.one(*one), [(tool, part) for tool in tools for part in parts]))
    return report(rows, whole=set(parts) == set(EVERY))


if __name__ == "__main__":
    sys.exit(main())
