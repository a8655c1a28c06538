"""`blink triage DIR...`: failures of any number of runs, grouped by property, clause and signature."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from verification.failures import known_issues
from verification.failures.bundle import FAILURE
from verification.failures.known_issues import KnownIssue

MAX_FAILURE_BYTES = 64 << 20  # a file beyond that is not ours


@cache
def _validator() -> Any:
    import jsonschema

    text = (resources.files("verification") / "failures" / "failure.schema.json").read_text(encoding="utf-8")
    return jsonschema.Draft202012Validator(json.loads(text))


@dataclass(slots=True)
class Group:
    """Failures with one property, clause and signature. example: the newest bundle, and its replay command."""

    property: str
    clause: str
    signature: str
    pattern: str
    outcome: str
    count: int = 0
    runs: set[str] = field(default_factory=set)
    tests: set[str] = field(default_factory=set)
    rigs: set[str] = field(default_factory=set)
    seeds: set[int] = field(default_factory=set)
    first_seen: str = ""
    last_seen: str = ""
    example: str = ""
    replay: str = ""
    known_issue: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        lists = {name: sorted(getattr(self, name)) for name in ("runs", "tests", "rigs", "seeds")}
        names = ("property", "clause", "signature", "pattern", "outcome", "count", "first_seen", "last_seen", "example")
        return {**{n: getattr(self, n) for n in names}, **lists, "replay": self.replay, "known_issue": self.known_issue}


@dataclass(slots=True)
class Triage:
    """groups: the most frequent first. problems: what could not be read, and why. issues: state of the known ones."""

    groups: list[Group]
    problems: list[str]
    issues: list[dict[str, Any]]
    bundles: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "bundles": self.bundles,
            "groups": [group.to_json() for group in self.groups],
            "problems": self.problems,
            "known_issues": self.issues,
        }


def find(folders: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """failure.json files below folders, sorted, each once; and what is wrong with the folders."""
    found: dict[Path, None] = {}
    problems = []
    for folder in folders:
        if folder.is_file() and folder.name == FAILURE:
            found[folder.resolve()] = None
            continue
        if not folder.is_dir():
            problems.append(f"{folder}: {'not a folder' if folder.exists() else 'does not exist'}")
            continue
        here = sorted(path.resolve() for path in folder.rglob(FAILURE) if path.is_file())
        found |= dict.fromkeys(here)
        for bundles in sorted(folder.rglob("failures")):  # a bundle whose writer died has no failure.json
            problems += [
                f"{entry}: no {FAILURE}: cut short, or none of Blink's"
                for entry in (sorted(bundles.iterdir()) if bundles.is_dir() else ())
                if entry.is_dir() and not (entry / FAILURE).is_file()
            ]
    return sorted(found), problems


def read(path: Path) -> dict[str, Any]:
    """A bundle's failure.json. Raises ValueError that says what is wrong with it."""
    try:
        if (size := path.stat().st_size) > MAX_FAILURE_BYTES:
            raise ValueError(f"{size} bytes, at most {MAX_FAILURE_BYTES} are read")
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not readable as JSON: {error}") from error
    import jsonschema

    wrong = jsonschema.exceptions.best_match(_validator().iter_errors(loaded))
    if wrong is not None:
        raise ValueError(f"no failure bundle: at {wrong.json_path}: {wrong.message[:200]}")
    failure: dict[str, Any] = loaded
    for name, entry in failure["files"].items():
        there = path.parent / name
        if Path(name).name != name or not there.is_file():
            raise ValueError(f"its file {name} is missing")
        if there.stat().st_size != entry["bytes"]:
            raise ValueError(f"its file {name} has {there.stat().st_size} bytes, {entry['bytes']} were written")
    return failure


def triage(folders: Sequence[Path], issues: Sequence[KnownIssue] = (), today: dt.date | None = None) -> Triage:
    """Groups all bundles below some folders. A damaged or foreign folder is a problem in the result, never an error."""
    today = today or dt.datetime.now(dt.UTC).date()
    paths, problems = find(folders)
    groups: dict[tuple[str, str, str], Group] = {}
    matched: dict[str, list[str]] = {}
    read_well = 0
    for path in paths:
        try:
            failure = read(path)
        except ValueError as error:
            problems.append(f"{path.parent}: {error}")
            continue
        read_well += 1
        group = _add(groups, failure, path.parent)
        issue = known_issues.match(_as_issue(failure), issues)
        if issue is not None:
            matched.setdefault(issue.id, []).append(failure["test"])
            shown = {name: str(getattr(issue, name)) for name in ("id", "owner", "reason", "link", "expires")}
            group.known_issue = {**shown, "expired": issue.expired(today)}
    ordered = sorted(groups.values(), key=lambda g: (-g.count, g.property, g.clause, g.signature))
    tests = {name: sorted(set(ids)) for name, ids in matched.items()}
    return Triage(ordered, problems, known_issues.status(issues, tests, today), read_well)


def _as_issue(failure: dict[str, Any]) -> dict[str, Any]:
    from verification.certificate.required import RequiredSetError, required_name

    rig = failure["run"]["rig"]
    try:
        rig = required_name(rig)
    except RequiredSetError:  # a rig file that is not here any more
        rig = Path(rig).stem
    found = failure["signature"]
    return {
        "property": failure["property"],
        "clause": failure["clause"],
        "rig": rig,
        "signature_id": found["id"],
        "signature_pattern": found["pattern"],
    }


def _add(groups: dict[tuple[str, str, str], Group], failure: dict[str, Any], folder: Path) -> Group:
    name, clause, found = failure["property"] or "", failure["clause"], failure["signature"]
    group = groups.get((name, clause, found["id"]))
    if group is None:
        group = groups[name, clause, found["id"]] = Group(
            name, clause, found["id"], found["pattern"], failure["outcome"]
        )
    run, time = failure["run"], failure["run"]["time"]
    group.count += 1
    group.runs.add(run["id"])
    group.tests.add(failure["test"])
    group.rigs.add(run["rig"])
    group.seeds |= {seed for seed in (failure["seeds"].get("root"),) if isinstance(seed, int)}
    group.first_seen = min(filter(None, (group.first_seen, time)))
    if time >= group.last_seen:
        group.last_seen, group.example, group.replay = time, str(folder), failure["replay"]
    return group


def print_text(result: Triage, echo: Any) -> None:
    """The groups for a terminal; `echo` prints one line."""
    for group in result.groups:
        echo(f"{group.count} x {group.property or 'no property'}: {group.clause or '-'}: {group.pattern}")
        runs, seeds = len(group.runs), len(group.seeds)
        rigs = ", ".join(sorted(group.rigs))
        echo(f"    signature {group.signature}, {group.outcome}, {runs} runs, {seeds} seeds, rig {rigs}")
        seen = group.first_seen if group.first_seen == group.last_seen else f"{group.first_seen} to {group.last_seen}"
        echo(f"    seen {seen} in {', '.join(sorted(group.tests)[:4])}{' ...' if len(group.tests) > 4 else ''}")
        if (known := group.known_issue) is not None:
            state = "EXPIRED" if known["expired"] else "until"
            link = f", {known['link']}" if known["link"] else ""
            who = f"{known['owner']}, {state} {known['expires']}{link}"
            echo(f"    known issue {known['id']} ({who}): {known['reason']}")
        echo(f"    bundle {group.example}")
        echo(f"    replay {group.replay}")
    for issue in result.issues:
        if issue["expired"]:
            echo(f"known issue {issue['id']} expired on {issue['expires']}; its owner is {issue['owner']}")
        if issue["unmatched"]:
            echo(f"known issue {issue['id']} matches no failure here")
    for problem in result.problems:
        echo(f"problem: {problem}")
    echo(f"failures: {result.bundles}, groups: {len(result.groups)}, unreadable: {len(result.problems)}")
