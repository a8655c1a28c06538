"""`blink certificate join`: one report, and with it one certificate, from the shards of a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from verification.certificate import junit, output, provenance, replays, report, required
from verification.certificate.outcomes import Outcome
from verification.certificate.records import TestRecord
from verification.certificate.report import REQUIRED_SET, SHARD, RunDescription, foreign_engine
from verification.certificate.shards import DONE, OTHER, Shard, parse_shard
from verification.certificate.sign import ENVELOPE
from verification.certificate.verify import verify
from verification.run_context import new_run_id


class JoinError(ValueError):
    """Shards that do not make one run; the message names folder and cause."""


def join(folders: Sequence[Path], out: Path, key: Path | None = None, command: Sequence[str] = ()) -> dict[str, Any]:
    """Joins shards into a signed run in `out`, which holds their folders too; returns the report.

    Every shard must be there once, intact, and of the same rig, profile, seed, model, engine command, required set,
    thresholds, engine and sources, which must be those of this installation. Raises `JoinError` where they are not.
    """
    shards = _read(folders)
    first = shards[min(shards)]
    records = _records(shards)
    output.prepare(out)
    for index, (folder, _) in shards.items():
        shutil.copytree(folder, out / output.SHARDS / str(index))
        _copy_allure(folder / output.ALLURE, out / output.ALLURE)
    run, spans = first[1]["run"], [one["run"] for _, one in shards.values()]
    models = [one["claim"]["model"] for _, one in shards.values()]
    text = required.required_text(run["rig"])
    description = RunDescription(
        run_id=new_run_id(),
        rig=run["rig"],
        profile=run["profile"],
        seed=run["seed"],
        seed_source=run["seed_source"],
        started=min(span["started"] for span in spans),
        ended=max(span["ended"] for span in spans),
        duration_s=sum(span["duration_s"] for span in spans),
        command=list(command) or ["blink", "certificate", "join", *map(str, folders)],
        required_text=text,
        thresholds_text=required.thresholds_text(),
        model=next((m for m in models if m["sha256"] is not None), models[0]),
        facts=_facts(shards),
        known_issues=[{k: i[k] for k in _ISSUE} for i in first[1]["known_issues"]],
        capabilities=_capabilities(run["rig"]),
    )
    errors = [f"shard {i}: {error}" for i, (_, one) in shards.items() for error in one["session_errors"]]
    built = report.build(description, records, errors)
    junit.write(
        out / output.JUNIT, f"blink {run['profile']}", [TestRecord.from_json(json.dumps(t)) for t in built["tests"]]
    )
    output.finish(out, built, text, description.thresholds_text, key)
    return built


_ISSUE = ("id", "property", "clause", "signature", "rig", "owner", "reason", "link", "expires")
Shards = dict[int, tuple[Path, dict[str, Any]]]


def _read(folders: Sequence[Path]) -> Shards:
    shards: Shards = {}
    count = None
    for folder in folders:
        try:
            checked = verify(folder)
        except FileNotFoundError as error:
            raise JoinError(str(error)) from error  # it names the folder
        if not checked.valid:
            raise JoinError(f"{folder} is not intact: {'; '.join(checked.problems)}")
        found = json.loads((folder / output.REPORT).read_text(encoding="utf-8"))
        if found["run"]["judged"] != SHARD:
            raise JoinError(f"{folder} holds a whole run, no shard of one")
        shard: Shard = parse_shard(found["run"]["shard"])
        if shard.index in shards:
            raise JoinError(f"{folder} and {shards[shard.index][0]} both hold shard {shard}")
        if count is not None and shard.count != count:
            raise JoinError(f"{folder} holds shard {shard}, others are of {count}")
        count = shard.count
        shards[shard.index] = (folder, found)
    if not shards or count is None:
        raise JoinError("no shard was named")
    if absent := sorted(set(range(1, count + 1)) - shards.keys()):
        raise JoinError(f"shards {', '.join(map(str, absent))} of {count} are not among those that were named")
    _check_alike(shards)
    return dict(sorted(shards.items()))


def _check_alike(shards: Shards) -> None:
    """All of one run, and of the sources that join them."""
    for (folder, first), (other, one) in combinations(shards.values(), 2):
        for what, a, b in _identity(first, one):
            if a != b:
                raise JoinError(f"{folder} and {other} are of different runs: {what} {a!r} and {b!r}")
    folder, first = next(iter(shards.values()))
    here = {"sources": provenance.sources_digest(), "engine": provenance.engine_modules()}
    for name, value in here.items():
        if first["digests"][name] != value:
            raise JoinError(f"{folder} was run with other {name} than those installed here: join with what ran it")
    state = provenance.source_state()
    if first["source"] != state:
        raise JoinError(f"{folder} was run from the source tree {first['source']}, this one is {state}")


def _identity(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    pairs: list[tuple[str, Any, Any]] = [(name, a["run"][name], b["run"][name]) for name in ("rig", "profile", "seed")]
    pairs += [(f"digest of {name}", a["digests"][name], b["digests"][name]) for name in a["digests"]]
    pairs.append(("source", a["source"], b["source"]))
    # A shard whose tests need no served model has neither digest nor options of it.
    models = [one["claim"]["model"]["sha256"] for one in (a, b)]
    engines = [foreign_engine(one["run"]["facts"]) for one in (a, b)]
    if None not in models:
        pairs.append(("model", models[0], models[1]))
    pairs.append(("engine command", engines[0], engines[1]))
    return pairs


def _records(shards: Shards) -> list[TestRecord]:
    """Each test's record from the one shard that had it; what no shard ran is missing."""
    chosen: dict[str, TestRecord] = {}
    skipped: dict[str, TestRecord] = {}
    for index, (folder, found) in shards.items():
        for values in found["tests"]:
            record = TestRecord.from_json(json.dumps(values))
            left_out = record.message == DONE or record.message.startswith(OTHER)
            if record.outcome is Outcome.MISSING and left_out:
                skipped[record.id] = replace(record, message="no shard ran it")
                continue
            if record.id in chosen:
                raise JoinError(f"{folder}: test {record.id} is in another shard too")
            bundle = record.bundle and f"{output.SHARDS}/{index}/{record.bundle}"
            chosen[record.id] = replace(record, bundle=bundle)
    return [*chosen.values(), *(record for test, record in skipped.items() if test not in chosen)]


def _facts(shards: Shards) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for _, found in shards.values():
        facts |= {name: value for name, value in found["run"]["facts"].items() if value}
    # What each shard says of its own part, and none says for all of them.
    told = [(found["machine"]["hostname"], found["run"]["facts"]) for _, found in shards.values()]
    corpora: dict[str, list[dict[str, Any]]] = {}
    for machine, its in told:
        if its.get("corpus"):
            corpora.setdefault(machine, []).append(its["corpus"])
    merged: dict[str, Any] = {
        "corpus": replays.joined(corpora) if corpora else None,
        "interrupted": [one for _, its in told for one in its.get("interrupted") or []],
        "situations_unread": {k: v for _, its in told for k, v in (its.get("situations_unread") or {}).items()},
    }
    facts |= {name: value for name, value in merged.items() if value}
    facts["shards"] = [
        {
            "shard": found["run"]["shard"],
            "run": found["run"]["id"],
            "machine": found["machine"]["hostname"],
            "duration_s": found["run"]["duration_s"],
            "attestation": provenance.file_digest(folder / ENVELOPE),
        }
        for folder, found in shards.values()
    ]
    return facts


def _capabilities(rig: str) -> frozenset[str]:
    from hil_rigs.description import load_rig

    return frozenset(load_rig(rig).capabilities)


def _copy_allure(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)


def check_shards(folder: Path, found: dict[str, Any]) -> str | None:
    """What of a joined run contradicts the shards in its folder; None for nothing, and for a run that is not joined."""
    listed = found["run"]["facts"].get("shards")
    if found["run"]["judged"] != REQUIRED_SET or listed is None:
        return None
    outcomes: dict[str, str] = {}
    numbers = sorted(parse_shard(entry["shard"]).index for entry in listed)
    if any(numbers != list(range(1, parse_shard(entry["shard"]).count + 1)) for entry in listed):
        return f"those listed ({', '.join(entry['shard'] for entry in listed)}) are not all of one run"
    for entry in listed:
        part = folder / output.SHARDS / entry["shard"].partition("/")[0]
        if not (part / ENVELOPE).is_file() or provenance.file_digest(part / ENVELOPE) != entry["attestation"]:
            return f"shard {entry['shard']} is not the one that was joined"
        checked = verify(part)
        if not checked.valid:
            return f"shard {entry['shard']}: {'; '.join(checked.problems)}"
        values = json.loads((part / output.REPORT).read_text(encoding="utf-8"))
        outcomes |= {t["id"]: t["outcome"] for t in values["tests"] if t["outcome"] != Outcome.MISSING}
    joined = {t["id"]: t["outcome"] for t in found["tests"] if t["outcome"] != Outcome.MISSING}
    for test in sorted(joined.keys() | outcomes.keys()):
        if joined.get(test) != outcomes.get(test):
            return f"test {test} is {joined.get(test)} here and {outcomes.get(test)} in its shard"
    return None
