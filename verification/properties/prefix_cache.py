"""The prefix cache as its users see it: what was found, and that it makes no difference (design sections 5 and 9).

Clauses:
  found    prompt tokens found in the cache are whole pages, at least one prompt token is left to compute; requests that
           must have found some did
  same     tokens and logits with and without the cache are the same, bit for bit (batch-invariant mode)
  opt-out  a request that asks for no prefix cache neither shares a page nor gives one
"""

from __future__ import annotations

from typing import Any

import numpy as np

from blink_core.abi.dtypes import Array
from blink_core.abi.enums import EventKind, LogKind
from verification.history import History
from verification.properties.token_equivalence import Key
from verification.result import CheckResult, Measurement, Verdict

Rows = dict[Key, Array]
_SHARING = (LogKind.PAGE_SHARE, LogKind.PAGE_PUBLISH, LogKind.PREFIX_HIT)


def found_by(history: History) -> dict[int, int]:
    """Prompt tokens found in the cache, by request, of those that finished."""
    return {
        s.request: int(event["token"])
        for s in history.submitted
        for event in history.events_of(s)
        if event["kind"] == EventKind.FINISH
    }


def check_hits(history: History, page_size: int, *, expected: bool) -> CheckResult:
    """Clause found. expected: that some request found a prefix, or that none did. Presupposes `check_history`."""
    found = found_by(history)
    for request, tokens in found.items():
        prompt = len(history.program.requests[request].prompt)
        if tokens % page_size or not 0 <= tokens < prompt:
            message = f"request {request} of {prompt} prompt tokens found {tokens}, pages have {page_size}"
            return CheckResult(Verdict.INVALID, "kv-content", "found", message)
    hits = sum(tokens > 0 for tokens in found.values())
    message = f"{hits} of {len(found)} requests found a part of their prompts in the prefix cache"
    if expected and not hits:
        return CheckResult(Verdict.UNKNOWN, "kv-content", "found", message)
    verdict = Verdict.VALID if expected or not hits else Verdict.INVALID
    measured = {
        "prefix_hits": Measurement(hits, "requests", None, len(found)),
        "tokens_found": Measurement(sum(found.values()), "tokens"),
    }
    return CheckResult(verdict, "kv-content", "found", message, {}, measured)


def check_found(history: History, expected: dict[int, int]) -> CheckResult:
    """Clause found, where it is known what the cache holds: prompt tokens found, by request. Presupposes
    `check_hits`."""
    found = found_by(history)
    wrong = {request: found.get(request) for request, tokens in expected.items() if found.get(request) != tokens}
    if wrong:
        request = min(wrong)
        prompt = len(history.program.requests[request].prompt)
        message = f"request {request} of {prompt} prompt tokens found {wrong[request]}, {expected[request]} are cached"
        return CheckResult(Verdict.INVALID, "kv-content", "found", message, {"request": request})
    return CheckResult(Verdict.VALID, "kv-content", "found", f"{len(expected)} requests found what there is")


def check_same(on: History, on_rows: Rows, off: History, off_rows: Rows) -> CheckResult:
    """Clause same. Both histories are of the same requests, and their rows are whole (`check_capture`)."""
    compared = 0
    for a, b in zip(
        sorted(on.submitted, key=lambda s: s.request), sorted(off.submitted, key=lambda s: s.request), strict=True
    ):
        tokens = on.tokens_of(a), off.tokens_of(b)
        if tokens[0] != tokens[1]:
            message = f"request {a.request} got other tokens with the prefix cache than without"
            return _result(Verdict.INVALID, message, on=tokens[0], off=tokens[1])
        prompt = len(on.program.requests[a.request].prompt)
        for index in range(len(tokens[0])):
            rows = (
                on_rows[on.ring, a.slot, a.generation, prompt + index]["logits"],
                off_rows[off.ring, b.slot, b.generation, prompt + index]["logits"],
            )
            if rows[0].tobytes() != rows[1].tobytes():
                apart = float(np.abs(rows[0].astype(np.float64) - rows[1]).max())
                message = f"request {a.request}: logits of token {index} differ by {apart:g} with the prefix cache"
                return _result(Verdict.INVALID, message)
            compared += 1
    if compared == 0:
        return _result(Verdict.UNKNOWN, "no token was delivered")
    return _result(Verdict.VALID, f"{compared} tokens and their logits are the same, bit for bit")


def _result(verdict: Verdict, message: str, **witness: Any) -> CheckResult:
    return CheckResult(verdict, "token-equivalence", "same", message, witness)


def check_opt_out(log: Array, private: set[tuple[int, int]]) -> CheckResult:
    """Clause opt-out. log: one ring's entries at level ALL. private: (slot, generation) of who asked for it."""
    entries = log[np.isin(log["kind"], _SHARING)]
    for e in entries:
        if (int(e["slot"]), int(e["generation"])) in private:
            name = LogKind(int(e["kind"])).name
            message = f"slot {int(e['slot'])} asked for no prefix cache, the log shows {name} of page {int(e['a'])}"
            return CheckResult(Verdict.INVALID, "kv-conservation", "opt-out", message)
    seen = len(entries) > 0 and len(private) > 0
    message = f"{len(private)} requests kept their pages to themselves, others shared {len(entries)} times"
    return CheckResult(Verdict.VALID if seen else Verdict.UNKNOWN, "kv-conservation", "opt-out", message)
