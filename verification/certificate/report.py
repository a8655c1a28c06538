"""Builds `report.json` from the records of a run, and checks it against its JSON Schema before it is written."""

from __future__ import annotations

import datetime as dt
import json
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from verification import scenarios
from verification.certificate import interruptions, provenance
from verification.certificate.collector import DESELECTED
from verification.certificate.corpus import PREFIX
from verification.certificate.outcomes import MEANINGS, Outcome, gravest
from verification.certificate.records import TestRecord
from verification.certificate.required import Profile, RequiredSet, parse, text_digest
from verification.certificate.shards import DONE, OTHER
from verification.certificate.statistics import CONFIDENCE, rate_interval
from verification.certificate.verdict import ExitCode, RunVerdict, TestOutcome, decide, not_applicable
from verification.failures import known_issues
from verification.situations.registry import SITUATIONS, reachable
from verification.thresholds import ThresholdError, parse_thresholds

SCHEMA_VERSION = "1.3"
REQUIRED_SET, SELECTION, SHARD = "required-set", "selection", "shard"  # what decides the verdict


class ReportError(ValueError):
    """A report that does not satisfy its schema."""


@dataclass(frozen=True, slots=True)
class RunDescription:
    """What was run: everything of a report that the tests do not say themselves.

    Times are ISO 8601 in UTC. `model` has "name", "path", "sha256"; unknown values are null. `judges_required`: the
    whole required set decides, or else only the tests that were selected, which certifies nothing.
    """

    run_id: str
    rig: str
    profile: str
    seed: int
    seed_source: str
    started: str
    ended: str
    duration_s: float
    command: list[str]
    required_text: str
    thresholds_text: str | None
    model: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    judges_required: bool = True
    known_issues: list[dict[str, Any]] = field(default_factory=list)
    shard: str | None = None  # "2/5": a part of a run, which `blink certificate join` makes whole
    capabilities: frozenset[str] | None = None  # of the rig; None: not known, so that every situation applies


@cache
def schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of `report.json`."""
    text = (resources.files("verification") / "certificate" / "report.schema.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def validate(report: Any) -> None:
    """Raise `ReportError` naming the first place where `report` breaks the schema."""
    import jsonschema

    validator = jsonschema.Draft202012Validator(schema())
    error = jsonschema.exceptions.best_match(validator.iter_errors(report))
    if error is not None:
        raise ReportError(f"report.json at {error.json_path}: {error.message[:500]}")


def outcomes_of(report: dict[str, Any]) -> list[TestOutcome]:
    """The tests of a report as the verdict needs them."""
    return [
        TestOutcome(test["id"], test["property"], Outcome(test["outcome"]), test["nodeid"]) for test in report["tests"]
    ]


def recompute(report: dict[str, Any], required: RequiredSet) -> RunVerdict:
    """The verdict that the report's own tests give under a required set."""
    profile = required.profile(report["run"]["profile"]) if report["run"]["judged"] == REQUIRED_SET else None
    return decide(outcomes_of(report), profile, report["session_errors"])


def build(run: RunDescription, records: Sequence[TestRecord], errors: Sequence[str]) -> dict[str, Any]:
    """Build the report of a run and validate it.

    Args:
        run: what was run.
        records: all tests, also those that never ran.
        errors: errors of the session itself (an internal error, the deadline).
    """
    required = parse(run.required_text, f"required/{run.rig}.yaml")
    profile = required.profile(run.profile)
    judged = profile if run.judges_required else None
    records = _with_missing(records, judged)
    statistics, wrong = _statistics(records, run.thresholds_text)
    errors = [*errors, *wrong]
    outcomes = [TestOutcome(r.id, r.property, r.outcome, r.nodeid) for r in records]
    verdict = decide(outcomes, judged, errors)
    engine = provenance.engine_modules()
    source = provenance.source_state()
    situations = _situations(records, profile.situations if judged else (), run.capabilities)
    certified = run.judges_required and is_certificate(run.profile, int(verdict.exit_code), source["dirty"], run.facts)
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": "certificate" if certified else "report",
        "tool": {"name": provenance.DISTRIBUTION, "version": provenance.tool_version()},
        "claim": _claim(run, required, verdict, certified, engine, source),
        "run": {
            "id": run.run_id,
            "rig": run.rig,
            "profile": run.profile,
            "seed": run.seed,
            "seed_source": run.seed_source,
            "started": run.started,
            "ended": run.ended,
            "duration_s": run.duration_s,
            "command": run.command,
            "judged": SHARD if run.shard else REQUIRED_SET if run.judges_required else SELECTION,
            "shard": run.shard,
            "facts": run.facts,
        },
        "machine": provenance.machine(),
        "source": source,
        "digests": {
            "required": text_digest(run.required_text),
            "thresholds": None if run.thresholds_text is None else text_digest(run.thresholds_text),
            "sources": provenance.sources_digest(),
            "engine": engine,
        },
        "counts": {str(outcome): sum(r.outcome is outcome for r in records) for outcome in Outcome},
        "properties": _properties(records, required, judged),
        "situations": situations,
        "statistics": statistics,
        "faults": _faults(records, required, judged),
        "not_run": _not_run(records),
        "not_covered": [*required.not_covered, *scenarios.load().not_covered(required.rig)],
        "warnings": [
            *_warnings(situations, source, engine, run.facts),
            *replay_warnings(outcomes, whole=judged is not None),
        ],
        "known_issues": _known_issues(run, required.rig, records),
        "session_errors": list(errors),
        "tests": [asdict(record) | {"outcome": str(record.outcome)} for record in records],
        "verdict": {
            "word": verdict.word,
            "exit_code": int(verdict.exit_code),
            "certified": certified,
            "reasons": list(verdict.reasons),
        },
    }
    validate(report)
    return report


def foreign_engine(facts: dict[str, Any]) -> list[str]:
    """The command of a rig description that starts another engine than the shipped one; empty for the shipped one."""
    return list((facts.get("options") or {}).get("engine_command") or [])


def is_certificate(profile: str, exit_code: int, dirty: bool | None, facts: dict[str, Any]) -> bool:
    """A certificate is profile `full`, passed, of the shipped engine, from a clean tree; all else is a report."""
    return profile == "full" and exit_code == int(ExitCode.PASS) and dirty is False and not foreign_engine(facts)


def _with_missing(records: Sequence[TestRecord], profile: Profile | None) -> list[TestRecord]:
    """The records, with those required tests that nobody even collected."""
    if profile is None:
        return list(records)
    known = {record.id for record in records}
    absent = [
        TestRecord(test_id, "", name, Outcome.MISSING, message="required and not collected", phase="collection")
        for name, requirement in profile.properties.items()
        for test_id in requirement.tests
        if test_id not in known
    ]
    return [*records, *absent]


def _claim(
    run: RunDescription,
    required: RequiredSet,
    verdict: RunVerdict,
    certified: bool,
    engine: dict[str, str],
    source: dict[str, Any],
) -> dict[str, Any]:
    names = (
        ", ".join(required.profile(run.profile).properties) if run.judges_required else "the tests that were selected"
    )
    model = run.model.get("name") or "no model"
    what = f"engine {_short_engine(engine)} with model {model} (sha256 {_short(run.model.get('sha256'))})"
    match verdict.exit_code:
        case ExitCode.PASS:
            text = f"On rig {run.rig}, {what} passed {'every required check of: ' * run.judges_required}{names}."
        case ExitCode.PROPERTY_FAILED:
            text = f"On rig {run.rig}, {what} broke at least one property."
        case _:
            aim = f"has the required properties: {names}" if run.judges_required else f"passes {names}"
            text = f"On rig {run.rig}, it could not be decided whether {what} {aim}."
    if certified:
        standing = "This is a certificate: profile full, clean source tree, required set complete."
    elif run.shard:
        standing = (
            f"This is a signed report on shard {run.shard} of a run; `blink certificate join` makes one of all of them."
        )
    elif not run.judges_required:
        standing = "This is a signed report on the tests that were selected; the rig's required set was not judged."
    elif run.profile != "full":
        standing = f"This is a signed report, not a certificate: only profile full gives one, this is {run.profile}."
    elif source["dirty"] is not False:
        standing = "This is a signed report, not a certificate: the source tree was not a clean git tree."
    else:
        standing = "This is a signed report, not a certificate: the required set was not passed."
    return {
        "text": text,
        "standing": standing,
        "scope": required.scope,
        "model": {key: run.model.get(key) for key in ("name", "path", "sha256")},
        "options": run.facts.get("options", {}),
    }


def _short(digest: object) -> str:
    return digest[:12] if isinstance(digest, str) else "unknown"


def _short_engine(engine: dict[str, str]) -> str:
    return ", ".join(_short(digest) for digest in engine.values()) or "(no compiled module found)"


def _properties(records: Sequence[TestRecord], required: RequiredSet, profile: Profile | None) -> list[dict[str, Any]]:
    wanted = () if profile is None else tuple(profile.properties)
    if profile is None:  # what was left out on request is no hole in a selection
        records = [r for r in records if r.message not in (DESELECTED, DONE) and not r.message.startswith(OTHER)]
    names = dict.fromkeys([*wanted, *(r.property for r in records if r.property is not None)])
    return [_property(name, [r for r in records if r.property == name], required, name in wanted) for name in names]


def _property(name: str, own: list[TestRecord], required: RequiredSet, wanted: bool) -> dict[str, Any]:
    text = required.properties.get(name)
    everything, own = own, [r for r in own if not r.id.startswith(PREFIX)]  # a replay is a case that was counted
    decided = [r for r in own if r.outcome in (Outcome.PASSED, Outcome.PRODUCT_FAILURE)]
    failed = sum(r.outcome is Outcome.PRODUCT_FAILURE for r in decided)
    # A test that counts no cases of its own is one case. A failed test has at least one bad case; how many more, nobody
    # counted, so the interval is for the number of cases shown to be bad.
    cases = sum(max(1, r.cases) for r in decided)
    interval = rate_interval(failed, cases)
    ran: list[Outcome] = [r.outcome for r in everything if r.outcome is not Outcome.FILTERED]
    if everything and not ran and not wanted:  # nothing of it is for this rig or profile, and nobody asked for it
        ran = [Outcome.FILTERED]
    return {
        "name": name,
        "title": text.title if text else name,
        "statement": text.statement if text else "",
        "required": wanted,
        "outcome": str(gravest(ran)),
        "tests": len(own),
        "passed": sum(r.outcome is Outcome.PASSED for r in own),
        "cases": cases,
        "failures": failed,
        "confidence": CONFIDENCE,
        "failure_rate_interval": None if interval is None else list(interval),
        "duration_s": sum(r.duration_s for r in everything),
    }


def _situations(
    records: Sequence[TestRecord], expected: Sequence[str], capabilities: frozenset[str] | None
) -> list[dict[str, Any]]:
    """Every situation that the profile expects or a test recorded: how often, and which tests reached it.

    One that no rig with these capabilities can reach does not apply: it is listed, and missed by nobody.
    """
    counts: dict[str, Counter[str]] = {name: Counter() for name in expected}
    for record in records:
        for name, count in record.situations.items():
            counts.setdefault(name, Counter())[record.id] += int(count)
    entries = []
    for name, by_test in counts.items():
        known = SITUATIONS.get(name)
        tests = [test for test, count in by_test.most_common() if count]
        entries.append(
            {
                "name": name,
                "title": known.title if known else "",
                "source": known.source if known else "the test itself",
                "reached": bool(tests),
                "expected": name in expected,
                "applies": capabilities is None or reachable(name, capabilities),
                "count": sum(by_test.values()),
                "tests": tests,
            }
        )
    return entries


P_VALUE = "p-value"  # the unit of a measurement that a statistical test made


def _statistics(records: Sequence[TestRecord], thresholds_text: str | None) -> tuple[dict[str, Any], list[str]]:
    """How many statistical tests the run made, how often a correct product would fail one of them by chance, and what
    is wrong with that: more tests than registered, or thresholds that nobody can read (a run has a report all the
    same)."""
    made = sum(m["unit"] == P_VALUE for record in records for m in record.measurements.values())
    values: dict[str, Any] = {"tests": made, "most_tests": 0, "error_rate": 0.0, "family_wise_error_rate": 0.0}
    if thresholds_text is None:
        return values, []
    try:
        limits = parse_thresholds(thresholds_text.encode(), "thresholds.yaml")
    except ThresholdError as error:
        return values, [str(error)]
    rate, most = limits.sampling.error_rate, limits.statistics.most_tests
    values |= {"most_tests": most, "error_rate": rate, "family_wise_error_rate": made * rate}
    return values, [f"{made} statistical tests were made, at most {most} are registered"] if made > most else []


def missed(situations: Sequence[dict[str, Any]]) -> list[str]:
    """The warnings about situations that a report must carry."""
    return [f"situation {s['name']} was not reached" for s in situations if s["applies"] and not s["reached"]]


def _faults(records: Sequence[TestRecord], required: RequiredSet, profile: Profile | None) -> dict[str, Any]:
    """Faults planted by each test, and `pooled`: those that several tests with the same name planted, which differ in
    parameters only, such as shares of one sample: one rate of all of them."""
    planted: list[dict[str, Any]] = []
    pools: dict[tuple[str | None, str, str], list[dict[str, Any]]] = {}
    for record in records:
        for fault in record.planted_faults:
            one = _with_interval(fault | {"test": record.id, "property": record.property})
            planted.append(one)
            if not record.id.startswith(PREFIX):  # a replay is a case that was counted
                pools.setdefault((record.property, record.id.partition("[")[0], fault["name"]), []).append(one)
    pooled = [
        _with_interval(
            {
                "name": name,
                "test": f"{base}[*]",
                "property": of,
                "caught": sum(one["caught"] for one in ones),
                "planted": sum(one["planted"] for one in ones),
                "tests": len(ones),
            }
        )
        for (of, base, name), ones in pools.items()
        if len(ones) > 1
    ]
    ran = {r.property for r in records} if profile is None else set(profile.properties)
    texts = {name: text for name, text in required.properties.items() if name in ran}
    return {
        "planted": planted,
        "pooled": pooled,
        "would_detect": {name: list(text.would_detect) for name, text in texts.items()},
        "would_not_detect": {name: list(text.would_not_detect) for name, text in texts.items()},
    }


def _with_interval(fault: dict[str, Any]) -> dict[str, Any]:
    return fault | {"kill_rate_interval": list(rate_interval(fault["caught"], fault["planted"]) or ())}


def _known_issues(run: RunDescription, rig: str, records: Sequence[TestRecord]) -> list[dict[str, Any]]:
    """The known issues of this rig: whom they concern, what they explain here, and whether they are out of date.

    They are notes: nothing else of a report is made from them.
    """
    issues = [known_issues.KnownIssue.model_validate(values) for values in run.known_issues]
    matched: dict[str, list[str]] = {}
    for record in records:
        if record.known_issue:
            matched.setdefault(record.known_issue, []).append(record.id)
    today = dt.datetime.fromisoformat(run.started).date()
    return known_issues.status([issue for issue in issues if issue.is_of(rig)], matched, today)


def known_issue_lines(report: dict[str, Any]) -> list[str]:
    """What a reader of a terminal is told about the known issues of a run."""
    lines = []
    for issue in report["known_issues"]:
        if issue["tests"]:
            tests = ", ".join(issue["tests"])
            lines.append(f"known issue {issue['id']} ({issue['owner']}): {tests}; failures all the same")
        if issue["expired"]:
            lines.append(f"known issue {issue['id']} expired on {issue['expires']}; its owner is {issue['owner']}")
        if issue["unmatched"]:
            lines.append(f"known issue {issue['id']} matched no failure")
    return lines


def _not_run(records: Sequence[TestRecord]) -> list[dict[str, Any]]:
    left_out = (Outcome.FILTERED, Outcome.SKIPPED, Outcome.MISSING, Outcome.BLOCKED)
    return [
        {"id": r.id, "property": r.property, "outcome": str(r.outcome), "reason": r.message or MEANINGS[r.outcome]}
        for r in records
        if r.outcome in left_out
    ]


def replay_warnings(tests: Sequence[TestOutcome], *, whole: bool) -> list[str]:
    """The warnings about saved failures that cannot be replayed here, which a report must carry."""
    return [
        f"saved failure {test} was not replayed: its test is filtered here, not for this rig, model or run"
        for test in not_applicable(tests, whole=whole)
    ]


def _warnings(
    situations: Sequence[dict[str, Any]], source: dict[str, Any], engine: dict[str, str], facts: dict[str, Any]
) -> list[str]:
    warnings = missed(situations)
    for engine_name, why in (facts.get("situations_unread") or {}).items():
        warnings.append(f"situations of engine {engine_name} were not all seen: {why}")
    warnings += interruptions.warnings(facts.get("interrupted") or [])
    if command := foreign_engine(facts):
        warnings.append(f"not the shipped engine: the rig's description starts it by {shlex.join(command)}")
    if source["git_commit"] is None:
        warnings.append("the sources are not in a git tree: no commit is recorded")
    elif source["dirty"]:
        warnings.append("the source tree has uncommitted changes")
    if not engine:
        warnings.append("no compiled engine module was found: no engine digest is recorded")
    return warnings
