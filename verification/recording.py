"""Recordings of failing programs: a JSON file each, which `pytest --replay FILE` runs again (design section 9).

A recording says which test of which run it is of, and what was drawn: the program with its history, or the plan of a
fault. With it the test draws nothing: the recorded program runs in place of every program of that test, on the same
rig kind, with the same root seed, and the test's own checks judge it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verification.history import History
from verification.program import Program
from verification.result import CheckResult, plain

FORMAT = "blink-recording"
VERSION = 1
MOST_BYTES = 256 << 20


class RecordingError(ValueError):
    """A file that is no recording, or one of another version; the message names file, value and what is known."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What `--replay` needs of a recording. subject: the engine that ran it ("model", "llama-gqa3",
    "engine-0f3a9c-1" ...). rig, rig_kind: the rig's name or description file, and its kind."""

    path: Path
    test: str
    nodeid: str
    rig: str
    rig_kind: str
    profile: str
    seed: int
    model: str | None
    subject: str
    program: Program | None
    plan: dict[str, Any] | None


def check_rig(recorded: Recording, rig: str, kind: str) -> None:
    """Raises RecordingError when a recording is of another rig than the run's, by name and by kind."""
    if recorded.rig != rig and recorded.rig_kind != kind:
        raise RecordingError(
            f"{recorded.path} is of rig {recorded.rig} (kind {recorded.rig_kind}), this run is on rig {rig} (kind "
            f"{kind}); name a rig of the recorded kind with --rig or --rig-file"
        )


def recording(
    about: Mapping[str, Any],
    result: CheckResult | None,
    *,
    history: History | None = None,
    plan: Mapping[str, Any] | None = None,
    observed: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A recording as JSON values. about: "run" (id, rig, profile, seed, model) and "test" (id, nodeid).

    plan, observed: of a fault scenario, what was drawn and what was seen.
    """
    content: dict[str, Any] = {"format": FORMAT, "version": VERSION, **about}
    content["result"] = None if result is None else result.to_json()
    if history is not None:
        content["history"] = plain(history.to_json())
    if plan is not None:
        content["plan"] = plain(dict(plan))
    if observed is not None:
        content["observed"] = plain(dict(observed))
    return content


def read_recording(path: Path) -> Recording:
    """Reads and checks a recording. Raises RecordingError naming what is wrong with the file."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise RecordingError(f"{path} has {size} bytes, a recording has at most {MOST_BYTES}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordingError(f"cannot read the recording {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, RecordingError):
            raise
        raise RecordingError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RecordingError(f'{path} is not a recording of Blink: it has no "format": "{FORMAT}"')
    if content.get("version") != VERSION:
        raise RecordingError(f"{path} has version {content.get('version')!r}, this Blink replays version {VERSION}")
    try:
        run, test = content["run"], content["test"]
        history, plan = content.get("history"), content.get("plan")
        program = None if history is None else Program.from_json(history["program"])
        source = plan if history is None else history
        if source is None or None not in (history, plan):
            raise KeyError("history or plan, one of them")
        return Recording(
            path=path,
            test=str(test["id"]),
            nodeid=str(test["nodeid"]),
            rig=str(run["rig"]),
            rig_kind=str(run.get("rig_kind") or run["rig"]),  # those of older runs name the rig alone
            profile=str(run["profile"]),
            seed=int(run["seed"]),
            model=None if run["model"] is None else str(run["model"]),
            subject=str(source["subject"]),
            program=program,
            plan=plan,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecordingError(f"{path} is a damaged recording: {type(error).__name__} at {error}") from error
