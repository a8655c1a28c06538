"""Does a seed decide what the tester draws? Digests of everything that is drawn, for another process to repeat.

``python -m verification.determinism SEED`` prints them as JSON: a process with another hash seed, started elsewhere,
must print the same.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from blink_core.abi.enums import EventKind
from verification.canonical import digest, history_digest, program_digest
from verification.faults.model import known_faults
from verification.faults.scenario import draw_plan
from verification.history import History
from verification.lockstep.programs import execute, random_program
from verification.program import Shape, draw_program

SHAPE = Shape(512, 16, 96, masks=4)
PROGRAMS, LOCKSTEP = 20, 5
LIMIT_S = 120.0


def draws(seed: int) -> dict[str, str]:
    """Digest of each kind of thing that is drawn from a seed: programs, fault plans, lock-step programs with what the
    specification makes of them."""
    rng = random.Random(seed)
    programs = [program_digest(draw_program(rng, SHAPE)) for _ in range(PROGRAMS)]
    plans = [draw_plan(fault, seed, SHAPE).to_json() for fault in known_faults()]
    lockstep = []
    for _ in range(LOCKSTEP):
        driver = execute(random_program(rng)).d
        lockstep.append([list(driver.words), list(driver.expected)])
    return {"programs": digest(programs), "fault plans": digest(plans), "lock-step programs": digest(lockstep)}


def changed_tokens_noticed(history: History) -> list[bool]:
    """For each token that a history gives somebody: whether the history with another id there has another digest.

    Left out are tokens behind the cancel of their request, which are luck: as many as the cancel waited for count.
    """
    original, noticed = history_digest(history), []
    requests = {(s.slot, s.generation): history.program.requests[s.request] for s in history.submitted}
    for at, event in enumerate(history.events):
        request = requests.get((event["slot"], event["generation"]))
        if event["kind"] != EventKind.TOKEN or request is None:
            continue
        if request.cancel_after is None or event["index"] < request.cancel_after:
            events = [*history.events[:at], event | {"token": event["token"] + 1}, *history.events[at + 1 :]]
            noticed.append(history_digest(replace(history, events=events)) != original)
    return noticed


def draws_elsewhere(seed: int, folder: Path) -> dict[str, str]:
    """The same from a fresh process in `folder`, with another hash seed. Raises RuntimeError with what it printed."""
    root = Path(__file__).resolve().parents[1]
    path = os.environ.get("PYTHONPATH")
    other = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = os.environ | {
        "PYTHONHASHSEED": other,
        "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else str(root),
    }
    command = [sys.executable, "-m", "verification.determinism", str(seed)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}: {done.stderr[-500:]}")
    found: dict[str, str] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    print(json.dumps(draws(int(sys.argv[1]))))
