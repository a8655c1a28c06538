"""Queue ordering and exactly-once delivery (design sections 3 and 9).

Clauses:
  limits         end-of-sequence ids and model length of the engine are those of the oracle and of the rig's options
  sequence       the completion queue's sequence numbers have no gap (seen by the ring client)
  delivery       events belong to accepted requests; indices 0, 1, 2 ...; one terminal event, nothing after it
  logprobs       each token comes behind as many alternatives as were asked for, distinct, most probable first
  terminal       reason and count of the terminal event agree with what was asked and delivered; prompt tokens found in
                 the prefix cache leave at least one to compute
  bounded-wait   every request is accepted and terminal before the deadline; the engine lives and can be reached
  goodput        requests that were not cancelled finish, unless they asked for an end that may come first, or the run's
                 own story explains it
  linearisability  some order of submissions, cancels and events that extends the order of the calls is legal
                 (`verification.linearisability`)
  fifo           requests of one ring and class are first admitted in the order of their submission entries, and none
                 gets a token without having been admitted
  class-order, reservation, fairness, deadline, lease: see `service_order`, which judges between rings
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import pairwise
from typing import Any

from blink_core.abi.config import EngineConfig
from blink_core.abi.dtypes import Array
from blink_core.abi.enums import ErrorReason, EventKind, FinishReason, LogKind
from verification.history import History, Submitted, enum_name
from verification.linearisability.recorded import check_recorded
from verification.program import RequestSpec
from verification.properties.logprobs import check_alternatives, pairs_of
from verification.result import CheckResult, Measurement, Verdict, merge

PROPERTY = "queue-ordering"
TERMINAL = (EventKind.FINISH, EventKind.ERROR)


def _result(verdict: Verdict, clause: str, message: str, **witness: Any) -> CheckResult:
    return CheckResult(verdict, PROPERTY, clause, message, witness)


def check_limits(config: EngineConfig, eos_ids: Iterable[int], max_len: int) -> CheckResult:
    """Clause limits. eos_ids: of the oracle, never the engine's. max_len: what the rig was started with."""
    eos = sorted(set(eos_ids))
    if sorted(set(config.eos_ids)) != eos:
        return _result(
            Verdict.INVALID, "limits", f"the engine ends at ids {sorted(set(config.eos_ids))}, HuggingFace at {eos}"
        )
    if config.max_len != max_len:
        return _result(Verdict.INVALID, "limits", f"the engine's length is {config.max_len}, {max_len} was asked for")
    return _result(Verdict.VALID, "limits", f"end-of-sequence ids {eos} and length {max_len} agree")


def check_delivery(history: History) -> CheckResult:
    """Clauses sequence, delivery and bounded-wait."""
    if history.broken is not None:
        return _result(Verdict.INVALID, "sequence", history.broken)
    if history.died is not None:
        return _result(Verdict.INVALID, "bounded-wait", f"the engine is gone: {history.died}")
    known = {(s.slot, s.generation): s for s in history.submitted}
    next_index: dict[tuple[int, int], int] = {}
    alternatives: dict[tuple[int, int], list[list[tuple[int, float]]]] = defaultdict(list)
    ended: dict[tuple[int, int], dict[str, Any]] = {}
    for event in history.events:
        key = (event["slot"], event["generation"])
        if key not in known:
            return _result(Verdict.INVALID, "delivery", "event of a request that was never accepted", event=event)
        request = known[key].request
        if key in ended:
            return _result(
                Verdict.INVALID,
                "delivery",
                f"request {request} got an event after its terminal event",
                event=event,
                terminal=ended[key],
            )
        if event["kind"] == EventKind.TOKEN:
            expected = next_index.get(key, 0)
            if event["index"] != expected:
                return _result(
                    Verdict.INVALID,
                    "delivery",
                    f"request {request} got token index {event['index']} where {expected} was next",
                    event=event,
                )
            next_index[key] = expected + 1
            asked = history.program.requests[request].params.logprobs
            wrong = check_alternatives(alternatives.pop(key, []), event, asked)
            if wrong:
                return _result(Verdict.INVALID, "logprobs", f"request {request}: {wrong}", event=event)
        elif event["kind"] == EventKind.LOGPROBS:
            alternatives[key].append(pairs_of(event))
        elif event["kind"] in TERMINAL:
            if key in alternatives:
                return _result(
                    Verdict.INVALID, "logprobs", f"request {request} got alternatives of no token", event=event
                )
            ended[key] = event
        else:
            return _result(Verdict.INVALID, "delivery", f"event of unknown kind {event['kind']}", event=event)
    lost = [s.request for s in history.submitted if (s.slot, s.generation) not in ended]
    if lost or not history.complete:
        return _result(Verdict.INVALID, "bounded-wait", f"{len(lost)} requests never ended", requests=lost)
    count = len(history.program.requests)
    if len(history.submitted) != count or count == 0:
        return _result(Verdict.UNKNOWN, "delivery", f"{len(history.submitted)} of {count} requests were submitted")
    return _result(Verdict.VALID, "delivery", f"{len(history.events)} events of {len(known)} requests, each once")


def check_terminals(
    history: History, eos_ids: Iterable[int], max_len: int, explained: Collection[ErrorReason] = ()
) -> CheckResult:
    """Clauses terminal and goodput. Presupposes `check_delivery`.

    explained: reasons for an ERROR that the run's own story gives, e.g. LEASE_LOST where its front end stood still.
    """
    eos = set(eos_ids)
    finished = broken_off = 0
    for s in history.submitted:
        spec = history.program.requests[s.request]
        last = next((e for e in history.events_of(s) if e["kind"] in TERMINAL), None)
        if last is None:
            return _result(Verdict.INVALID, "bounded-wait", f"request {s.request} never ended")
        tokens = history.tokens_of(s)
        why: str | None
        if last["kind"] == EventKind.ERROR and last["reason"] in {*explained, *_asked_for(spec)}:
            broken_off += last["index"] == len(tokens)
            why = None if last["index"] == len(tokens) else f"terminal event counts {last['index']}, not {len(tokens)}"
        else:
            why = _wrong_terminal(history, s, last, tokens, eos, max_len)
        if why:
            clause = "goodput" if last["kind"] == EventKind.ERROR else "terminal"
            return _result(
                Verdict.INVALID, clause, f"request {s.request}: {why}", event=last, max_tokens=spec.params.max_tokens
            )
        finished += last["kind"] == EventKind.FINISH and last["reason"] != FinishReason.CANCELLED
    wanted = len(history.submitted) - len(history.cancels) - broken_off
    if finished < wanted:
        return _result(Verdict.INVALID, "goodput", f"{finished} requests finished, {wanted} were not cancelled")
    if finished == 0:
        return _result(Verdict.UNKNOWN, "goodput", f"none of {len(history.submitted)} requests finished")
    return _result(Verdict.VALID, "terminal", f"{finished} requests finished for the right reason")


def _asked_for(spec: RequestSpec) -> set[ErrorReason]:
    """Errors that a request may end with because of what it asked for."""
    params = spec.params
    reasons: set[ErrorReason] = set()
    if params.deadline_us:
        reasons.add(ErrorReason.DEADLINE)
    if spec.mask_seed is not None or params.mask_box is not None or params.logit_bias or params.min_tokens:
        reasons.add(ErrorReason.NO_TOKEN)
    return reasons


def _wrong_terminal(
    history: History, s: Submitted, last: dict[str, Any], tokens: list[int], eos: set[int], max_len: int
) -> str | None:
    params = history.program.requests[s.request].params
    prompt = len(history.program.requests[s.request].prompt)
    if last["kind"] == EventKind.ERROR:
        return f"ended with ERROR {enum_name(ErrorReason, last['reason'])}, nothing was wrong with it"
    if last["index"] != len(tokens):
        return f"terminal event counts {last['index']} tokens, {len(tokens)} were delivered"
    if len(tokens) > params.max_tokens:
        return f"{len(tokens)} tokens delivered, {params.max_tokens} were asked for"
    found = last["token"]
    if not 0 <= found < max(1, prompt) or (found and not params.prefix_cache):
        return f"{found} of {prompt} prompt tokens are said to come from the prefix cache"
    reason = last["reason"]
    ends_with_eos = bool(tokens) and not params.ignore_eos and tokens[-1] in eos
    ends_with_stop = bool(tokens) and tokens[-1] in params.stop_token_ids
    stops = [i for i, t in enumerate(tokens) if (not params.ignore_eos and t in eos) or t in params.stop_token_ids]
    if stops and stops[0] < params.min_tokens:
        return f"token {stops[0]} is the stop token {tokens[stops[0]]}, barred before min_tokens {params.min_tokens}"
    if stops and stops[0] < len(tokens) - 1:
        return f"went on after the stop token {tokens[stops[0]]}"
    expected: dict[int, bool] = {
        FinishReason.EOS: ends_with_eos,
        FinishReason.STOP_TOKEN: ends_with_stop,
        FinishReason.LENGTH: len(tokens) == params.max_tokens,
        FinishReason.CONTEXT: prompt + len(tokens) == max_len,
        FinishReason.CANCELLED: s.request in history.cancels,
    }
    if not expected.get(reason):
        name = enum_name(FinishReason, reason)
        return f"finish reason {name} does not agree with {len(tokens)} tokens of {params.max_tokens}"
    return None


def check_fifo(history: History, log: Array, log_lost: int) -> CheckResult:
    """Clause fifo. log: all `LogEntry` records of the run; log_lost: entries overwritten before it was read."""
    if log_lost:
        return _result(Verdict.UNKNOWN, "fifo", f"{log_lost} event-log entries were overwritten", gap=log_lost)
    mine = log[log["ring"] == history.ring]
    order = {(s.slot, s.generation): s for s in history.submitted}

    def indices(entries: Array, priority: int | None = None) -> list[int]:
        found = [order[key] for e in entries if (key := (int(e["slot"]), int(e["generation"]))) in order]
        specs = history.program.requests
        return [s.sq_index for s in found if priority in (None, specs[s.request].params.priority)]

    accepted = indices(mine[mine["kind"] == LogKind.ACCEPT])
    firsts = mine[(mine["kind"] == LogKind.ADMIT) & (mine["c"] == 0)]  # c counts preemptions: first admissions
    admitted = indices(firsts)
    for name, sequence in [
        ("taken", accepted),
        *(("admitted", indices(firsts, p)) for p in {r.params.priority for r in history.program.requests}),
    ]:
        for before, after in pairwise(sequence):
            if after <= before:
                return _result(
                    Verdict.INVALID,
                    "fifo",
                    f"submission {after} was {name} after submission {before} of the same ring",
                    order=sequence,
                )
    if len(accepted) != len(history.submitted):
        return _result(
            Verdict.INVALID, "fifo", f"{len(history.submitted)} submitted, the log shows {len(accepted)} accepted"
        )
    spoke = {s.sq_index: s.request for s in history.submitted if history.tokens_of(s)}
    unseen = sorted(spoke[index] for index in spoke.keys() - set(admitted))
    if unseen:
        return _result(
            Verdict.INVALID, "fifo", f"{len(unseen)} requests got tokens, the log shows no admission", requests=unseen
        )
    if not admitted:
        return _result(Verdict.UNKNOWN, "fifo", "no request was admitted: there is no order to judge")
    return _result(Verdict.VALID, "fifo", f"{len(admitted)} first admissions in submission order")


def check_history(
    history: History, *, eos_ids: Iterable[int], max_len: int, explained: Collection[ErrorReason] = ()
) -> CheckResult:
    """Clauses of the history alone. Other properties ask for them first: what was not delivered shows nothing.

    explained: as in `check_terminals`.
    """
    first = check_delivery(history)
    if not first.ok():
        return first
    return merge([first, check_terminals(history, eos_ids, max_len, explained), check_recorded(history, explained)])


def check(history: History, log: Array, log_lost: int, *, eos_ids: Iterable[int], max_len: int) -> CheckResult:
    """All clauses but limits; the first that is violated decides. log, log_lost: as in `check_fifo`."""
    first = check_history(history, eos_ids=eos_ids, max_len=max_len)
    if not first.ok():
        return first
    results = [first, check_fifo(history, log, log_lost)]
    merged = merge(results, property=PROPERTY)
    counts = {
        "requests": Measurement(len(history.submitted), "requests"),
        "events": Measurement(len(history.events), "events"),
    }
    return CheckResult(merged.verdict, PROPERTY, merged.clause, merged.message, merged.witness, counts)
