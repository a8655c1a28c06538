"""Log probabilities delivered are those of the logits that the token was chosen from (design section 7)."""

from __future__ import annotations

from collections.abc import Mapping

from blink_core.abi.dtypes import Array
from blink_core.abi.enums import EventKind
from verification.history import History
from verification.oracles.sampler import alternatives, log_probabilities
from verification.properties.logprobs import pairs_of
from verification.result import CheckResult, Verdict

Key = tuple[int, int, int, int]
PROPERTY = "token-equivalence"


def check_log_probabilities(history: History, rows: Mapping[Key, Array], tolerance: float) -> CheckResult:
    """Clause logprob: of each token and of its alternatives, which are the most probable ids by the raw logits.

    rows: capture records by ring, slot, generation and position. tolerance: `sampling.logprob_tolerance`. Presupposes
    `check_capture`.
    """
    count, pairs = 0, 0
    for s in history.submitted:
        start = len(history.program.requests[s.request].prompt)
        found: list[tuple[int, float]] = []
        for event in history.events_of(s):
            if event["kind"] == EventKind.LOGPROBS:
                found += pairs_of(event)
            if event["kind"] != EventKind.TOKEN:
                continue
            logits = rows[history.ring, s.slot, s.generation, start + event["index"]]["logits"]
            expected = [(event["token"], float(log_probabilities(logits)[event["token"]]))]
            expected += alternatives(logits, len(found)) if found else ()
            for shown, true in zip([(event["token"], event["logprob"]), *found], expected, strict=True):
                # The difference of NaN is NaN, and no limit holds for it; -inf stands where the logit is -inf.
                same = shown[1] == true[1] or abs(shown[1] - true[1]) <= tolerance * max(1.0, abs(true[1]))
                if shown[0] != true[0] or not same:
                    what = f"request {s.request}, index {event['index']}: token {shown[0]} with {shown[1]:.6g}"
                    message = f"{what}; the logits give token {true[0]} with {true[1]:.6g}"
                    return CheckResult(Verdict.INVALID, PROPERTY, "logprob", message)
            count, pairs, found = count + 1, pairs + len(found), []
    if count == 0:
        return CheckResult(Verdict.UNKNOWN, PROPERTY, "logprob", "no token was delivered")
    return CheckResult(Verdict.VALID, PROPERTY, "logprob", f"log probabilities of {count} tokens, {pairs} alternatives")
