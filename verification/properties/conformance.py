"""Property `conformance`: a recorded event log is one that docs/rules.md allows, entry by entry.

Clauses: those of docs/rules.md, by their numbers; `check` of `verification.trace.monitor` names the first one violated.
A log with a gap, or with a descriptor that was not recorded, is `unknown` from there on.
"""

from __future__ import annotations

from verification.result import JSON, CheckResult, Measurement, Verdict
from verification.trace.format import Trace
from verification.trace.monitor import UNKNOWN, VALID, VIOLATED, check

PROPERTY = "conformance"
_VERDICTS = {VALID: Verdict.VALID, VIOLATED: Verdict.INVALID, UNKNOWN: Verdict.UNKNOWN}


def check_trace(trace: Trace) -> CheckResult:
    """Steps the executable specification over a trace of one engine, from its first entry on."""
    verdict = check(trace)
    measured = {"checked": Measurement(verdict.checked, "entries", n=verdict.total)}
    if verdict.word == VIOLATED:
        message = f"clause {verdict.clause} at entry {verdict.entry}, step {verdict.step}: {verdict.way}"
        witness: dict[str, JSON] = {"entry": verdict.entry, "step": verdict.step}
        witness |= {"expected": verdict.expected, "found": verdict.found}
        return CheckResult(Verdict.INVALID, PROPERTY, verdict.clause, message, witness, measured)
    message = f"{verdict.checked} of {verdict.total} entries are as the specification predicts"
    if verdict.reasons:
        message += f"; {'; '.join(verdict.reasons)}"
    elif not verdict.checked:
        return CheckResult(Verdict.UNKNOWN, PROPERTY, "E2", "the log holds nothing to check", {}, measured)
    return CheckResult(_VERDICTS[verdict.word], PROPERTY, "log", message, {}, measured)
