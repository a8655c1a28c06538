"""Writes what was measured on a machine with a GPU: `python -m hil_rigs.gpu.evidence NAME [--only PART,...] [--merge]`.

`hil_rigs/evidence/NAME.json` gets the machine, driver, commit, date, a digest of the sources that the figures depend
on, and each part's raw samples. Nothing else writes there. README rows name the file; once a covered source has changed
they must say STALE, which `--mark` sees to and a test checks.

A part that fails or hangs costs the others nothing. `--merge` goes on with a record, as long as its digest is that of
today's sources and its GPU and driver are these: without `--only` it runs the parts that the record lacks, or has as
failed; a part that fails now leaves what was measured before. So calls of `--limit` seconds each make one record.
Exit 0: the parts that were asked for are in the record; 1: one is not; 2: nothing was run.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "hil_rigs" / "evidence"
README = ROOT / "README.md"
STALE = "STALE"
FACTS_S, GIT_S, KILL_S = 60.0, 60.0, 20.0
LIMIT_S = 570.0  # of a call; a part whose time does not fit any more is not begun
SAME = ("gpu", "driver", "cuda_driver")  # facts of the machine that parts of one record share
# What a figure of the GPU engine depends on.
COVERED = (
    "blink_core/abi/*.py",
    "blink_core/device/*.hpp",
    "blink_core/device/*.cu*",
    "blink_core/device/kernels/*",
    "blink_core/ops/cu*.py",
    "blink_core/ops/tuning.py",
    "blink_core/runtime/cuda_*.py",
    "blink_core/runtime/launch*.py",
    "blink_core/runtime/switch_graph.py",
    "blink_core/runtime/capture_writer.py",
    "blink_core/runtime/serve_abi.py",
    *(f"hil_rigs/gpu/{name}.py" for name in ("bench", "burn", "freeze", "interference", "ops_timing", "processes")),
    *(f"hil_rigs/gpu/{name}.py" for name in ("runtime_check", "session", "batch_invariance")),
)
NOT_COVERED = ("kv_sanitizer.cu",)  # of another mode
CHECK = ("-m", "hil_rigs.gpu.runtime_check", "--stage")
BENCH = ("-m", "hil_rigs.gpu.bench")
# Part -> arguments of Python, and seconds. `{out}`: a file that the part writes; without it, its RESULT line counts.
PARTS: dict[str, tuple[tuple[str, ...], float]] = {
    "noop-fire": ((*CHECK, "noop-fire"), 90),
    "noop-tail": ((*CHECK, "noop-tail"), 60),
    "gap-fire": ((*CHECK, "gap-fire"), 60),
    "gap-bare": ((*CHECK, "gap-bare"), 60),
    "gap-tail": ((*CHECK, "gap-tail"), 60),
    "gap-switch": ((*CHECK, "gap-switch"), 60),
    "gap-host": ((*CHECK, "gap-host"), 60),
    "entry-fire": ((*CHECK, "entry-fire"), 60),
    "freeze": (("-m", "hil_rigs.gpu.freeze", "--out", "{out}"), 75),
    "interference": (("-m", "hil_rigs.gpu.interference", "--out", "{out}"), 120),
    "kernels": ((*BENCH, "--stages", "kernels", "--out", "{out}"), 130),
    "llama-auto": ((*BENCH, "--stages", "llama", "--rounds", "3", "--out", "{out}"), 190),
    "llama-tail": ((*BENCH, "--stages", "llama", "--rounds", "2", "--launch", "tail", "--out", "{out}"), 190),
    "llama-busy": (
        (*BENCH, "--stages", "llama", "--rounds", "3", "--batches", "8", "--burners", "64", "--out", "{out}"),
        190,
    ),
    "qwen-moe": ((*BENCH, "--stages", "qwen", "--rounds", "3", "--out", "{out}"), 190),
    "batch-invariance": (
        ("-m", "hil_rigs.gpu.batch_invariance", "--dtypes", "bfloat16", "--limit", "240", "--out", "{out}"),
        250,
    ),
}


def covered_files(root: Path = ROOT, patterns: Iterable[str] = COVERED) -> list[Path]:
    """The covered sources, sorted."""
    found = {p for pattern in patterns for p in root.glob(pattern) if p.is_file()}
    return sorted(p for p in found if p.name not in NOT_COVERED)


def sources_digest(root: Path = ROOT, patterns: Iterable[str] = COVERED) -> str:
    """SHA-256 over names and contents of the covered sources."""
    digest = hashlib.sha256()
    for path in covered_files(root, patterns):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def cover(path: Path, root: Path = ROOT) -> None:
    """Writes the digest of today's patterns into a record, of the commit that it was measured at.

    ValueError if the sources that were measured are not that commit's.
    """
    record = json.loads(path.read_text())
    sources = record["sources"]
    with tempfile.TemporaryDirectory() as folder:
        archive = ["git", "archive", record["commit"]]
        packed = subprocess.run(archive, cwd=root, capture_output=True, timeout=GIT_S, check=False)
        if packed.returncode != 0:
            raise ValueError(f"{path.name}: no commit {record['commit']}: {packed.stderr.decode().strip()}")
        subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, timeout=GIT_S, check=True)
        then = sources_digest(Path(folder), sources["patterns"])
        if then != sources["digest"]:
            raise ValueError(
                f"{path.name}: measured {sources['digest'][:12]}, commit {record['commit']} is {then[:12]}"
            )
        files = len(covered_files(Path(folder)))
        record["sources"] = {"digest": sources_digest(Path(folder)), "files": files, "patterns": COVERED}
    path.write_text(json.dumps(record) + "\n")


def run_part(name: str) -> dict[str, Any]:
    """One part in processes of its own, which are killed when its time is over. With `failed`, `result` is what it had
    written until then."""
    arguments, limit = PARTS[name]
    with tempfile.TemporaryDirectory() as folder:
        out, told, erred = (Path(folder) / name for name in ("part.json", "told", "erred"))
        command = [sys.executable, *(str(out) if a == "{out}" else a for a in arguments)]
        print(f"{name}: {' '.join(command[1:])}", flush=True)
        with told.open("w") as said, erred.open("w") as errors:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=errors, cwd=ROOT,
                start_new_session=True,  # so that all it starts can be killed: none of it may run beside the next part
            )  # fmt: skip
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILL_S)
        text = told.read_text(errors="replace")
        result = result_of(out, text)
        shown = "\n".join(line for line in text.splitlines() if not line.startswith(("RESULT ", "{")))
        print(shown[-1500:], flush=True)
        if code is None:
            return {"failed": f"not over after {limit:.0f} s", "result": result}
        if code != 0 or result is None:
            reason = erred.read_text(errors="replace") or text
            return {"failed": f"exit status {code}: {reason[-600:]}", "result": result}
        return {"command": " ".join(arguments), "result": result}


def result_of(out: Path, text: str) -> Any:
    """What a part wrote, or the last RESULT line of what it said; None where there is neither, or half of it."""
    lines = [line[7:] for line in text.splitlines() if line.startswith("RESULT ")]
    with suppress(ValueError):
        return json.loads(out.read_text()) if out.exists() else json.loads(lines[-1]) if lines else None
    return None


def to_go_on(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """A record that parts measured now may be put into. Raises ValueError where it is of other sources or another
    machine."""
    record: dict[str, Any] = json.loads(path.read_text())
    measured, now = record["sources"]["digest"], sources_digest()
    if measured != now:
        raise ValueError(f"{path.name} was measured with sources {measured[:12]}, these are {now[:12]}")
    for name in SAME:
        if record["machine"].get(name) != facts.get(name):
            raise ValueError(f"{path.name}: {name} was {record['machine'].get(name)}, here {facts.get(name)}")
    return record


def measure(record: dict[str, Any], names: Iterable[str], path: Path, limit_s: float) -> list[str]:
    """Runs parts and writes the record after each, which keeps what it has of a part that fails now. Returns what is
    not in it for all that: name and reason."""
    over, missing = time.monotonic() + limit_s, []
    for name in names:
        if PARTS[name][1] > over - time.monotonic():
            missing.append(f"{name} (not begun: no time left)")
            continue
        begin = time.monotonic()
        part = run_part(name)
        part["date"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        took = time.monotonic() - begin
        before = record["parts"].get(name, {"failed": ""})
        if "failed" not in part or "failed" in before:
            record["parts"][name] = part
        if "failed" in part:
            missing.append(f"{name} ({part['failed'][:100]!r})")
        print(f"{name}: {'failed' if 'failed' in part else 'measured'} in {took:.0f} s", flush=True)
        path.write_text(json.dumps(record) + "\n")
    return missing


def machine() -> dict[str, Any]:
    """Facts of machine and GPU, from a process of its own: asking makes a CUDA context, and a part looks for contexts
    that are not the engine's. Raises RuntimeError if it fails."""
    code = (
        "import json; from hil_rigs.gpu.machine import gpu_facts; from hil_rigs.probe import machine_facts; "
        "print(json.dumps(machine_facts() | gpu_facts()))"
    )
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FACTS_S, cwd=ROOT, check=False)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"facts of the machine: not over after {FACTS_S:g} s") from error
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        raise RuntimeError(f"facts of the machine: exit status {done.returncode}: {done.stderr[-600:]}")
    facts: dict[str, Any] = json.loads(lines[-1])
    return facts


def commit_of(given: str | None) -> str:
    """The commit, with `+` if the tree has changes; what was given where there is no repository."""
    if given:
        return given
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        changes = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")


def stale_rows(readme: str, folder: Path = FOLDER, root: Path = ROOT) -> list[tuple[int, bool]]:
    """README's table rows that name an evidence file: (line number from 0, whether it must say STALE)."""
    current = sources_digest(root)
    found = []
    for number, line in enumerate(readme.splitlines()):
        if not line.startswith("|"):
            continue
        for path in folder.glob("*.json"):
            if f"evidence/{path.name}" in line:
                found.append((number, json.loads(path.read_text())["sources"]["digest"] != current))
    return found


def mark(readme: str, rows: list[tuple[int, bool]]) -> str:
    """README with STALE put before the first cell's text, or taken away, as the rows need it."""
    lines = readme.splitlines()
    for number, stale in rows:
        bare = lines[number].replace(f"| {STALE}: ", "| ", 1)
        lines[number] = bare.replace("| ", f"| {STALE}: ", 1) if stale else bare
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="of the file")
    parser.add_argument("--only", help="parts, separated by commas; without it all, or with --merge those missing")
    parser.add_argument("--merge", action="store_true", help="go on with NAME's record, if its digest is today's")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of this call")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder")
    parser.add_argument("--cover", action="store_true", help="only write NAME's digest anew, after COVERED has grown")
    parser.add_argument("--mark", action="store_true", help="bring README's STALE marks up to date, and nothing else")
    options = parser.parse_args(arguments)
    if options.mark:
        text = README.read_text(encoding="utf-8")
        README.write_text(mark(text, stale_rows(text)), encoding="utf-8")
        return 0
    if options.cover:
        if options.name is None:
            parser.error("--cover needs a name")
        try:
            cover(options.out / f"{options.name}.json")
        except (OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0
    names = list(PARTS) if options.only is None else options.only.split(",")
    if options.name is None or (unknown := set(names) - set(PARTS)):
        parser.error(f"give a name, and parts of {', '.join(PARTS)}" + (f", not {unknown}" if options.name else ""))
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    path = options.out / f"{options.name}.json"
    try:
        facts = machine()
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    record: dict[str, Any] = {
        "schema_version": 1,
        "name": options.name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit_of(options.commit),
        "machine": facts,
        "sources": {"digest": sources_digest(), "files": len(covered_files()), "patterns": COVERED},
        "parts": {},
    }
    if options.merge and path.exists():
        call = {name: record[name] for name in ("date", "commit", "machine")}
        try:
            record = to_go_on(path, record["machine"])
        except (ValueError, KeyError) as error:
            print(f"error: {error}: nothing is merged into it", file=sys.stderr)
            return 2
        record.setdefault("merged", []).append(call)
        if options.only is None:
            names = [name for name in names if "failed" in record["parts"].get(name, {"failed": ""})]
    options.out.mkdir(parents=True, exist_ok=True)
    missing = measure(record, names, path, options.limit)
    print(f"{len(names) - len(missing)} of {len(names)} parts measured; not: {', '.join(missing) or 'none'}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
