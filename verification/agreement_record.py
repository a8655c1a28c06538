"""What a run answered to the agreement programs, as a file that another run compares itself with.

It holds whole programs and tokens: both are of a tiny random model and drawn ids, nobody's prompts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verification.certificate.output import CORPUS
from verification.properties.agreement import Ran
from verification.run_context import RunContext

FILE = "agreement.json"
FORMAT, VERSION = "blink-agreement", 1
MOST_BYTES = 64 << 20


class AgreementError(ValueError):
    """A folder without a record of agreement programs, or with a damaged one."""


@dataclass(frozen=True, slots=True)
class AgreementRecord:
    """One run's record. subject: the model's name; its weights are built from `seed` and the run's root seed."""

    rig: str
    run: str
    root_seed: int
    seed: int
    subject: str
    ran: tuple[Ran, ...]


def write(path: Path, run: RunContext, seed: int, subject: str, ran: Sequence[Ran]) -> None:
    """Writes a record of `ran` to `path`."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "rig": run.rig,
        "run": run.run_id,
        "root_seed": run.seed,
        "seed": seed,
        "subject": subject,
        "programs": [one.to_json() for one in ran],
    }
    path.write_text(json.dumps(content), encoding="utf-8")


def _files(folder: Path) -> list[Path]:
    """Records under a folder; those of replays of earlier failures are left aside."""
    return sorted(path for path in folder.rglob(FILE) if CORPUS not in path.relative_to(folder).parts)


def holds_any(folder: Path) -> bool:
    """Whether a run recorded any answers, be it in one record or in too many."""
    return folder.is_file() or bool(_files(folder))


def find(folder: Path) -> Path:
    """The record in a run's output folder, or the file itself; those of replays of earlier failures are left aside.

    Raises AgreementError where there is not exactly one."""
    if folder.is_file():
        return folder
    found = _files(folder)
    if len(found) != 1:
        raise AgreementError(
            f"{folder} holds {len(found)} files {FILE}, one is needed: name it, or a run's output folder"
        )
    return found[0]


def read(folder: Path) -> AgreementRecord:
    """Reads the record of a run. Raises AgreementError with file and cause."""
    path = find(folder)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise AgreementError(f"{path} has {path.stat().st_size} bytes, a record has at most {MOST_BYTES}")
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise AgreementError(
                f"{path} is {content['format']} version {content['version']}, expected {FORMAT} {VERSION}"
            )
        return AgreementRecord(
            str(content["rig"]),
            str(content["run"]),
            int(content["root_seed"]),
            int(content["seed"]),
            str(content["subject"]),
            tuple(Ran.from_json(one) for one in content["programs"]),
        )
    except AgreementError:
        raise
    except OSError as error:
        raise AgreementError(f"cannot read {path}: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise AgreementError(f"{path} is a damaged record: {type(error).__name__} at {error}") from error
