"""`blink certify --shards N`: all shards of a run side by side on one machine, then one report of them.

Each shard is a `blink certify --shard I/N` of its own in OUT/shards/I, with its output in OUT/shards/I.log; the joined
run is in OUT/whole. The same command goes on where it was interrupted, and runs no test again that is done.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from verification.certificate import output
from verification.certificate.console import show_refusal, show_result
from verification.certificate.fleet import CORES_EACH, cores, run_fleet
from verification.certificate.join import JoinError, join
from verification.certificate.keys import KeyFileError
from verification.certificate.required import RequiredSetError, load
from verification.certificate.shards import MOST
from verification.certificate.supervise import INTERRUPTED, interruptible
from verification.run_context import parse_seed

WHOLE, PARTS = "whole", "shards"


def certify_shards(
    words: Sequence[str],
    rig: str,
    profile: str,
    out: Path,
    seed: str | None,
    count: int,
    jobs: int | None = None,
    *,
    key: Path | None = None,
    as_json: bool = False,
    command: Sequence[str] = (sys.executable, "-m", "verification.cli"),
) -> int:
    """Run all `count` shards, at most `jobs` at once, and join them.

    Args:
        words: arguments of `blink certify` for every shard, without --out and --shard.
        jobs: None: a shard for every two cores that this process may use.
        key: private key file that signs the joined report; `words` name it for the shards.
        command: what stands for `blink`.

    Returns the exit code of the joined run; 2 as well where a shard left no report, or a signal came.
    """
    jobs = max(1, cores() // CORES_EACH) if jobs is None else jobs
    if (refused := _refused(rig, profile, out, seed, count, jobs)) is not None:
        return show_refusal(refused, as_json)
    names = [str(index) for index in range(1, count + 1)]
    folders = {name: out / PARTS / name for name in names}
    commands = {
        name: [*command, "certify", *words, "--out", str(folder), "--shard", f"{name}/{count}"]
        for name, folder in folders.items()
    }
    _say(f"{count} shards, {jobs} at once; their output is in {out / PARTS}/N.log")
    earlier = {name: output.stamp(folder) for name, folder in folders.items()}

    def told(name: str) -> bool:
        """Whether the shard wrote a report: one that refuses leaves that of an earlier run, of another seed maybe."""
        return output.stamp(folders[name]) not in (None, earlier[name])

    def ended(name: str, code: int, seconds: float) -> None:
        word = _word(folders[name]) if told(name) else "no report"
        _say(f"shard {name}/{count}: {word} (exit {code}), {seconds:.0f} s")

    with interruptible() as interrupted:
        run_fleet(commands, jobs, out / PARTS, interrupted, ended)
        if interrupted.is_set():
            return show_refusal(f"{INTERRUPTED}; the same command goes on with what is left", as_json)
    if silent := [name for name in names if not told(name)]:
        logs = ", ".join(str(out / PARTS / f"{name}.log") for name in silent)
        return show_refusal(f"no report of this run from shards {', '.join(silent)} of {count}; see {logs}", as_json)
    try:
        built = join(list(folders.values()), out / WHOLE, key, sys.argv)
    except (JoinError, KeyFileError, output.OutputError, OSError) as error:
        return show_refusal(str(error), as_json)
    show_result(built, out / WHOLE, as_json)
    return int(built["verdict"]["exit_code"])


def _refused(rig: str, profile: str, out: Path, seed: str | None, count: int, jobs: int) -> str | None:
    """Why no shard is worth starting: each of them would say it."""
    try:
        _, source = parse_seed(seed, profile)
        load(rig).profile(profile)
    except (RequiredSetError, ValueError) as error:
        return str(error)
    if source != "given":
        return f"--shards {count} needs --seed NUMBER: all shards of a run draw from one seed"
    if not 1 <= count <= MOST:
        return f"--shards {count}; 1 to {MOST} are possible"
    if jobs < 1:
        return f"--jobs {jobs}; at least 1 is needed"
    if out.exists() and not out.is_dir():
        return f"{out} is no folder"
    return None


def _word(folder: Path) -> str:
    """The verdict that a shard left."""
    try:
        return str(json.loads((folder / output.REPORT).read_text(encoding="utf-8"))["verdict"]["word"])
    except (OSError, ValueError, KeyError):
        return "no report"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
