"""What the KV sanitizer of an engine said (design section 5), against what was done to that engine.

Clauses:
  quiet    an engine whose plans are as the scheduler made them raises no report, over rows that were in fact checked
  named    each wrong plan is reported at the step and place where it was planted, as what it is, with reader and writer
  poison   the pool starts from NaN in every row
  alone    no request is reported to which nothing was done, and none but those reported is broken off
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from blink_core.abi.dtypes import Array
from blink_core.abi.enums import ErrorReason, EventKind
from verification.history import History
from verification.result import CheckResult, Measurement, Verdict

PROPERTY = "kv-sanitizer"

# What each wrong plan of `verification.faults.wrong_plans` may be called. Where a row was not written, what is read
# there is whatever the page held before.
KINDS: Mapping[str, frozenset[str]] = {
    "foreign-page": frozenset({"foreign"}),
    "swapped-pages": frozenset({"position", "foreign"}),
    "freed-page": frozenset({"foreign"}),
    "stale-prefix-page": frozenset({"foreign"}),
    "wrong-position": frozenset({"position"}),
    "wrong-token": frozenset({"tokens"}),
    "lost-append": frozenset({"unwritten", "foreign", "not-shared", "position", "tokens", "not-now"}),
    "shifted-append": frozenset({"unwritten", "foreign", "not-shared", "position", "tokens", "not-now"}),
    "freed-early": frozenset({"freed"}),
    "given-away": frozenset({"taken"}),
}

Identity = tuple[int, int, int]  # ring, slot, generation


def _party(raw: Mapping[str, Any] | None) -> Identity | None:
    return None if raw is None else (int(raw["ring"]), int(raw["slot"]), int(raw["generation"]))


def _identity(raw: Sequence[int] | None) -> Identity | None:
    return None if raw is None else (int(raw[0]), int(raw[1]), int(raw[2]))


def check_quiet(
    before: Mapping[str, int], after: Mapping[str, int], reports: Sequence[Mapping[str, Any]]
) -> CheckResult:
    """Clause quiet, from the counters before and after a run, and the reports made meanwhile."""
    done = {name: after[name] - before[name] for name in after}
    measured = {
        "kv_rows_checked": Measurement(done["rows"], "rows", 1, limit_is="min"),
        "kv_rows_shared": Measurement(done["shared"], "rows"),
        "kv_sanitizer_steps": Measurement(done["steps"], "steps"),
    }
    if reports or done["reports"]:
        first = dict(reports[0]) if reports else {}
        message = f"{done['reports']} reports of the KV sanitizer, the first of kind {first.get('kind')}"
        return CheckResult(Verdict.INVALID, PROPERTY, "quiet", message, {"report": first}, measured)
    if done["rows"] < 1:
        return CheckResult(Verdict.UNKNOWN, PROPERTY, "quiet", "the KV sanitizer checked no row", {}, measured)
    message = f"{done['rows']} rows of {done['steps']} steps checked, {done['shared']} of them other requests'"
    return CheckResult(Verdict.VALID, PROPERTY, "quiet", message, {}, measured)


def unexpected(engine: str, count: int, first: Mapping[str, Any]) -> CheckResult:
    """Clause quiet, of an engine that was under the sanitizer beside a test's own checks. count: of reports, above 0;
    first: the first of them, empty where it could not be read."""
    what = "which could not be read"
    if first:
        reader = "ring {} slot {} generation {}".format(*(_party(first["reader"]) or ()))
        what = f"{first['kind']}: step {first['step']}, layer {first['layer']} {first['kv']}, page {first['page']}, "
        what += f"read by {reader} at its position {first['reader']['position']}"
    message = f"engine {engine}: {count} reports of the KV sanitizer, the first {what}"
    return CheckResult(Verdict.INVALID, PROPERTY, "quiet", message, {"report": dict(first)}, {})


def fault_found(planted: Mapping[str, Any], reports: Sequence[Mapping[str, Any]]) -> str | None:
    """Clause named for one planted fault: what is wrong with the report of it, None if nothing is."""
    reader = _identity(planted["reader"])
    mine = [r for r in reports if _party(r["reader"]) == reader]
    if not mine:
        return "not reported"
    report = mine[0]
    if report["kind"] not in KINDS[planted["fault"]]:
        return f"called {report['kind']}"
    if report["step"] != planted["step"]:
        return f"reported in step {report['step']}, planted in step {planted['step']}"
    if report["reader"]["position"] != planted["position"]:
        return f"reported at position {report['reader']['position']}, planted at {planted['position']}"
    if planted.get("page", report["page"]) != report["page"]:
        return f"reported of page {report['page']}, planted in page {planted['page']}"
    writer = _party(report["writer"])
    if "writer" in planted and writer != _identity(planted["writer"]):
        return f"written by {writer}, in truth by {_identity(planted['writer'])}"
    if "writer" not in planted and (writer is None) != (report["kind"] == "unwritten"):
        return f"{report['kind']} without its writer"
    if "page_owner" in planted and _identity(report["page_owner"]) != _identity(planted["page_owner"]):
        return f"page said to belong to {report['page_owner']}, in truth to {planted['page_owner']}"
    return None


def check_named(planted: Sequence[Mapping[str, Any]], reports: Sequence[Mapping[str, Any]]) -> CheckResult:
    """Clause named over all that was planted."""
    wrong = [(p["fault"], why) for p in planted if (why := fault_found(p, reports)) is not None]
    message = f"{len(planted) - len(wrong)} of {len(planted)} wrong plans reported as what they are"
    if wrong:
        return CheckResult(Verdict.INVALID, PROPERTY, "named", f"{message}; {wrong[0][0]}: {wrong[0][1]}")
    missing = sorted(set(KINDS) - {p["fault"] for p in planted})
    if missing:
        return CheckResult(Verdict.UNKNOWN, PROPERTY, "named", f"never planted: {', '.join(missing)}")
    return CheckResult(Verdict.VALID, PROPERTY, "named", message)


def check_alone(
    history: History, planted: Sequence[Mapping[str, Any]], reports: Sequence[Mapping[str, Any]]
) -> CheckResult:
    """Clause alone, of one run and what was planted and reported meanwhile."""
    struck = {_identity(p["reader"]) for p in planted}
    strangers = [r for r in reports if _party(r["reader"]) not in struck]
    if strangers:
        message = f"{len(strangers)} reports of requests to which nothing was done"
        return CheckResult(Verdict.INVALID, PROPERTY, "alone", message, {"report": dict(strangers[0])})
    for s in history.submitted:
        ends = [e for e in history.events_of(s) if e["kind"] in (EventKind.FINISH, EventKind.ERROR)]
        broken = [e["reason"] for e in ends if e["kind"] == EventKind.ERROR]
        expected = [ErrorReason.MODEL_ERROR] if (history.ring, s.slot, s.generation) in struck else []
        if len(ends) != 1 or broken != expected:
            message = f"request {s.request} ended {len(ends)} times, with errors {broken}; expected {expected}"
            return CheckResult(Verdict.INVALID, PROPERTY, "alone", message)
    return CheckResult(Verdict.VALID, PROPERTY, "alone", f"{len(history.submitted)} requests ended as they must")


def check_poison(poisoned: Array, expected: Array, *, fresh: bool) -> CheckResult:
    """Clause poison: every page of `expected` (bool [pages]) holds nothing but NaN, and in a pool that served any
    request some page does not."""
    clean = np.flatnonzero(expected & ~poisoned)
    measured = {"pages_poisoned": Measurement(int(poisoned.sum()), "pages", n=int(poisoned.size))}
    if clean.size:
        message = f"{clean.size} pages that nobody wrote are not poisoned, the first of them page {int(clean[0])}"
        return CheckResult(Verdict.INVALID, PROPERTY, "poison", message, {}, measured)
    if not fresh and bool(poisoned.all()):
        return CheckResult(Verdict.UNKNOWN, PROPERTY, "poison", "the run wrote no page", {}, measured)
    message = f"{int(expected.sum())} pages that nobody wrote hold nothing but NaN"
    return CheckResult(Verdict.VALID, PROPERTY, "poison", message, {}, measured)
