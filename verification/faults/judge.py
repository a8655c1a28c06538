"""Decides a fault scenario from what was observed, as a pure function (design section 9).

Clauses:
  control       without the fault every request finishes
  hit           the fault hit a live request, took effect and was what it declares (unknown otherwise: then nothing
                was tested)
  goodput       requests outside the blast radius finish with the tokens of the control run
  meanwhile     what the fault itself demands while it lasts, e.g. pages that are free when a lease has lapsed
  outcome       victims end as the fault declares, within its bound if it has one; nobody gets a wrong token, or
                anything after the end
  recovery      everyone is served again within the fault's bound, with the tokens of the control run
  conservation  when idle no request lives and every page is free
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verification.faults.model import Blast, End
from verification.faults.scenario import FaultRun
from verification.faults.traffic import Call
from verification.result import CheckResult, Measurement, Verdict, merge

PROPERTY = "fault-tolerance"


def _result(verdict: Verdict, clause: str, message: str, **witness: Any) -> CheckResult:
    return CheckResult(verdict, PROPERTY, clause, message, witness)


def _bad(clause: str, message: str, **witness: Any) -> CheckResult:
    return _result(Verdict.INVALID, clause, message, **witness)


def check(run: FaultRun) -> CheckResult:
    """All clauses; the gravest decides."""
    merged = merge(list(_results(run)), property=PROPERTY)
    counts = {
        "live requests hit": Measurement(len(run.hit.requests), "requests"),
        "recovered after": Measurement(run.recovered_s, "s", run.fault.recovery_s),
    }
    if run.told_s is not None:
        counts["victims told after"] = Measurement(run.told_s, "s", run.fault.told_within_s)
    message = f"{run.fault.name}: {merged.message}"
    return CheckResult(merged.verdict, PROPERTY, merged.clause, message, merged.witness, counts)


def _results(run: FaultRun) -> Iterator[CheckResult]:
    unfinished = [_shown(call) for call in run.control.values() if call.end is not End.FINISHED]
    if unfinished or not run.control:
        yield _bad("control", f"{len(unfinished)} requests did not finish without any fault", calls=unfinished)
        return
    if run.void is not None:
        # What victims saw may be another fault's doing. Those whom it touches no more than this one must be served all
        # the same (they may be why it took so long), and pages must add up.
        yield _result(Verdict.UNKNOWN, "hit", f"not the fault that is declared: {run.void}")
        if run.fault.blast is not Blast.NONE:
            yield _check_goodput(run)
        yield _check_conservation(run)
        return
    yield _check_hit(run)
    if run.trouble is not None:
        yield _bad("recovery", run.trouble)
        return
    if run.wrong is not None:
        yield _bad("meanwhile", run.wrong)
    yield _check_goodput(run)
    yield _check_outcome(run)
    yield _check_recovery(run)
    yield _check_conservation(run)


def _shown(call: Call) -> dict[str, Any]:
    return {"call": call.name, "end": str(call.end), "detail": call.detail, "delivered": len(call.output)}


def _check_hit(run: FaultRun) -> CheckResult:
    if not run.hit.requests:
        return _result(Verdict.UNKNOWN, "hit", "no victim was live at the injection")
    if run.proof is None or not run.proof.holds:
        said = "it was never looked for" if run.proof is None else run.proof.evidence
        return _result(Verdict.UNKNOWN, "hit", f"no proof that the fault took effect: {said}")
    return _result(Verdict.VALID, "hit", f"{len(run.hit.requests)} live requests hit; {run.proof.evidence}")


def _differs(call: Call, control: Call) -> str | None:
    if call.end is not End.FINISHED:
        return f"{call.name} ended as {call.end} ({call.detail})"
    if call.seen() != control.seen() or call.detail != control.detail:
        return f"{call.name} finished ({call.detail}) with other tokens than in the control run ({control.detail})"
    return None


def _check_goodput(run: FaultRun) -> CheckResult:
    wrong = []
    bystanders = [call for name, call in run.faulted.items() if name.startswith(("http-", "ring-"))]
    for call in bystanders:
        if (why := _differs(call, run.control[call.name])) is not None:
            wrong.append(why)
    if wrong:
        return _bad("goodput", f"outside the blast radius ({run.fault.blast}): {wrong[0]}", all=wrong)
    return _result(
        Verdict.VALID, "goodput", f"{len(bystanders)} requests outside the blast radius as in the control run"
    )


def _check_outcome(run: FaultRun) -> CheckResult:
    for name, call in run.faulted.items():
        if call.after_end:
            return _bad("outcome", f"{name} got {call.after_end} events after its terminal one", call=_shown(call))
    for name, call in run.faulted.items():
        if not name.startswith("victim-"):
            continue
        control = run.control[name].seen()
        if call.end not in run.fault.ends:
            allowed = ", ".join(sorted(run.fault.ends))
            return _bad("outcome", f"{name} ended as {call.end} ({call.detail}), allowed: {allowed}", call=_shown(call))
        if call.end is End.ERROR and run.fault.says not in call.detail:
            return _bad("outcome", f"{name} was told {call.detail!r}, expected {run.fault.says!r}", call=_shown(call))
        if call.end is End.FINISHED and (why := _differs(call, run.control[name])) is not None:
            return _bad("outcome", why)
        if call.output and control[: len(call.seen())] != call.seen():
            return _bad("outcome", f"{name} got tokens that the control run did not give", call=_shown(call))
    bound = run.fault.told_within_s
    if bound is not None:
        if run.told_s is None:
            return _result(Verdict.UNKNOWN, "outcome", "when the victims were told was not measured")
        if run.told_s - run.stalled_s > bound:
            stalled = f" ({run.stalled_s:.2f} s of them the machine stood still)" if run.stalled_s else ""
            late = f"the last victim was told after {run.told_s:.2f} s{stalled}, the bound is {bound:g} s"
            return _bad("outcome", late)
    return _result(Verdict.VALID, "outcome", f"victims ended as declared: {run.fault.expected}")


def _check_recovery(run: FaultRun) -> CheckResult:
    for lane in ("http", "ring"):
        probe, control = run.faulted.get(f"probe-{lane}"), run.control[f"{lane}-0"]
        why = f"no probe over {lane}" if probe is None else _differs(probe, control)
        if why is not None:
            return _bad("recovery", f"after the heal {why}")
    bound = run.fault.recovery_s
    if run.recovered_s > bound:
        return _bad("recovery", f"served again {run.recovered_s:.1f} s after the heal, the bound is {bound:g} s")
    return _result(Verdict.VALID, "recovery", f"served again within {bound:g} s")


def _check_conservation(run: FaultRun) -> CheckResult:
    if run.idle is None or run.live_at_end is None:
        return _result(Verdict.UNKNOWN, "conservation", "the idle engine's state was not read")
    if run.live_at_end:
        return _bad("conservation", f"{run.live_at_end} requests still live when every client is done")
    if not run.idle.ok():
        return _result(run.idle.verdict, "conservation", run.idle.message, **dict(run.idle.witness))
    return _result(Verdict.VALID, "conservation", "no request lives, every page is free")
