"""The output folder of a run: what lies in it, how it is made ready, how it is finished and signed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from verification.certificate.collector import JOURNAL
from verification.certificate.jsonable import dump
from verification.certificate.keys import signing_key
from verification.certificate.records import TestRecord
from verification.certificate.shards import STATE
from verification.certificate.sign import ENVELOPE, sign

REPORT = "report.json"
PAGE = "report.html"
JUNIT = "junit.xml"
ALLURE = "allure-results"
LOG = "pytest.log"
EVIDENCE = "evidence"
BUNDLES = "failures"
PROCESS_LOGS = "logs"
SHARDS = "shards"  # of a joined run: the folders of its shards
CORPUS = "corpus"  # replays of earlier failures
REQUIRED = "required.yaml"
THRESHOLDS = "thresholds.yaml"
# Everything that a run may write; nothing else is ever removed.
OWNED: tuple[str, ...] = (
    *(REPORT, PAGE, JUNIT, ALLURE, LOG, EVIDENCE, BUNDLES, PROCESS_LOGS, REQUIRED, THRESHOLDS, JOURNAL, ENVELOPE),
    *(STATE, SHARDS, CORPUS),
)
# What an interrupted shard has already, and keeps when it goes on.
RESUMED = (ALLURE, EVIDENCE, BUNDLES, PROCESS_LOGS, STATE, CORPUS)


class OutputError(ValueError):
    """The output folder cannot be used."""


def prepare(folder: Path, keep: Collection[str] = ()) -> None:
    """Make an empty output folder, removing an earlier run's files but those named in `keep`.

    Raises `OutputError` when it holds anything that no run wrote, so that `--out .` destroys nothing.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"output {folder} is not a folder")
    folder.mkdir(parents=True, exist_ok=True)
    foreign = sorted(entry.name for entry in folder.iterdir() if entry.name not in OWNED)
    if foreign:
        raise OutputError(
            f"output {folder} holds files that are not of a Blink run ({', '.join(foreign[:5])}); name a new folder"
        )
    for entry in [entry for entry in folder.iterdir() if entry.name not in keep]:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def stamp(folder: Path) -> tuple[int, int] | None:
    """What differs between one writing of the folder's report and the next; None where there is none. Whoever starts a
    run that may be refused tells by it whether what lies there is an earlier one's."""
    try:
        found = (folder / REPORT).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def lock_name(folder: Path) -> str:
    """Name of the lock that keeps two runs out of one output folder."""
    return f"out-{sha256(str(folder.resolve()).encode()).hexdigest()[:16]}"


def finish(
    folder: Path, report: dict[str, Any], required_text: str, thresholds_text: str | None, key: Path | None = None
) -> None:
    """Write report, page and configuration of a run into its folder, give allure results own ids, and sign it all.

    Args:
        folder: the output folder, with junit.xml and allure-results already in it.
        report: a report as `report.build` made it.
        required_text, thresholds_text: the texts whose digests stand in the report.
        key: file of the private key, see `keys.signing_key`.
    """
    from verification.certificate.html import render

    private = signing_key(key)
    (folder / ENVELOPE).unlink(missing_ok=True)
    (folder / REQUIRED).write_text(required_text, encoding="utf-8")
    if thresholds_text is not None:
        (folder / THRESHOLDS).write_text(thresholds_text, encoding="utf-8")
    own_allure_ids(folder / ALLURE, [TestRecord.from_json(json.dumps(test)) for test in report["tests"]])
    (folder / REPORT).write_text(dump(report), encoding="utf-8")
    names = sorted({entry.name for entry in folder.iterdir()} | {PAGE, ENVELOPE})
    (folder / PAGE).write_text(render(report, names), encoding="utf-8")
    sign(folder, report, private)


_ATTACHED = (("timeline.txt", "text/plain"), ("history.svg", "image/svg+xml"), ("failure.json", "application/json"))


def _attach(folder: Path, bundle: Path) -> list[dict[str, str]]:
    """Copies the readable part of a bundle beside allure's results; returns them as allure's attachments."""
    attachments = []
    for name, kind in _ATTACHED:
        if (bundle / name).is_file():
            source = f"{sha256(f'{bundle.name}/{name}'.encode()).hexdigest()[:32]}-attachment{Path(name).suffix}"
            shutil.copyfile(bundle / name, folder / source)
            attachments.append({"name": name, "source": source, "type": kind})
    return attachments


def own_allure_ids(folder: Path, records: Sequence[TestRecord]) -> None:
    """Give each allure result the history id of its own id, and the record's outcome and measurements.

    allure-pytest derives history from file names and parameters, so that a moved file or a renamed parameter starts a
    new history. Measured values are parameters that are excluded from it.
    """
    by_id = {record.id: record for record in records}
    for path in sorted(folder.glob("*-container.json")) if folder.is_dir() else []:
        container = json.loads(path.read_text(encoding="utf-8"))
        for one in (*(container.get("befores") or []), *(container.get("afters") or [])):
            one.pop("statusDetails", None)  # of a fixture that failed: the test's result has it, without prompts
        path.write_text(json.dumps(container), encoding="utf-8")
    for path in sorted(folder.glob("*-result.json")) if folder.is_dir() else []:
        result = json.loads(path.read_text(encoding="utf-8"))
        own = next((label["value"] for label in result.get("labels", []) if label["name"] == "as_id"), None)
        record = by_id.get(own) if own is not None else None
        if own is None or record is None:
            continue
        result["historyId"] = sha256(f"history:{own}".encode()).hexdigest()[:32]
        result["testCaseId"] = sha256(f"case:{own}".encode()).hexdigest()[:32]
        result["labels"].append({"name": "blink_outcome", "value": str(record.outcome)})
        if result.get("statusDetails") and record.message:  # allure's own has what the report withholds
            result["statusDetails"] = {"message": record.message, "trace": record.details}
        if record.clause:
            result["labels"].append({"name": "story", "value": record.clause})
        shown = [
            {"name": name, "value": f"{entry['value']} {entry['unit']}".strip(), "excluded": True}
            for name, entry in record.measurements.items()
        ]
        result["parameters"] = [*(result.get("parameters") or []), *shown]
        if record.signature:
            result["labels"].append({"name": "blink_signature", "value": record.signature})
        if record.bundle:
            attached = _attach(folder, folder.parent / record.bundle)
            result["attachments"] = [*(result.get("attachments") or []), *attached]
        path.write_text(json.dumps(result), encoding="utf-8")
