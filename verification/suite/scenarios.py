"""What the scenarios of the fault corpus share: requests by length, runs with their log, and what each gives alone.

A scenario states its revealing condition; a run in which it did not occur is undecided, never a pass.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from blink_core.abi.dtypes import Array
from blink_core.abi.enums import ErrorReason, EventKind, FinishReason, LogKind
from blink_core.abi.params import SamplingParams
from verification.fixtures import Judge, Subject
from verification.history import History, Submitted
from verification.program import Program, RequestSpec
from verification.properties import kv_conservation, queue_ordering
from verification.result import CheckResult, Measurement, Verdict

PROPERTY = "scenarios"
NO_LOG = 2**63  # an index beyond every log's end


@dataclass(frozen=True, slots=True)
class Ran:
    """One run: its history and the event log of it, at level ALL, in which nobody else is."""

    history: History
    log: Array

    @property
    def outputs(self) -> list[list[int]]:
        """Tokens by request of the program."""
        return [self.history.tokens_of(s) for s in sorted(self.history.submitted, key=lambda s: s.request)]

    @property
    def found(self) -> list[int]:
        """Prompt tokens found in the prefix cache, by request; -1 of one that did not finish."""
        by_request = {
            s.request: int(e["token"])
            for s in self.history.submitted
            for e in self.history.events_of(s)
            if e["kind"] == EventKind.FINISH
        }
        return [by_request.get(s.request, -1) for s in sorted(self.history.submitted, key=lambda s: s.request)]

    def entries(self, kind: LogKind, submitted: Submitted | None = None) -> Array:
        """Entries of a kind, of one request or of all."""
        chosen = self.log["kind"] == kind
        if submitted is not None:
            chosen &= (self.log["slot"] == submitted.slot) & (self.log["generation"] == submitted.generation)
        found: Array = self.log[chosen]
        return found

    @property
    def most_rows(self) -> int:
        """The most requests of this ring that one step computed."""
        return max(Counter(self.entries(LogKind.PLAN_ROW)["step"].tolist()).values(), default=0)


def request(rng: random.Random, subject: Subject, length: int, new: int, **fields: Any) -> RequestSpec:
    """A greedy request of `length` drawn tokens and `new` to come; `fields` of `SamplingParams` and `RequestSpec`."""
    own = {name: fields.pop(name) for name in ("after", "cancel_after") if name in fields}
    params = SamplingParams(max_tokens=new, ignore_eos=True, seed=rng.getrandbits(64))
    prompt = fields.pop("prompt", None) or [rng.randrange(3, subject.shape.vocab) for _ in range(length)]
    return RequestSpec(tuple(prompt), replace(params, **fields), **own)


def run(
    subject: Subject,
    judge: Judge,
    *requests: RequestSpec,
    explained: tuple[ErrorReason, ...] = (),
    pages: bool = True,
    together: bool = False,
) -> Ran:
    """Runs requests and enforces delivery, ends and, from the event log, the life of every page.

    explained: errors that the scenario brings about. together: as `Subject.run` says.
    """
    program = Program(requests)
    judge.case(program)
    before = subject.snapshot(log_from=NO_LOG)
    history = subject.run(program, together=together)
    result = queue_ordering.check_history(
        history, eos_ids=subject.eos_ids, max_len=subject.max_len, explained=explained
    )
    judge(result, history)
    after = subject.snapshot(log_from=int(before.header["log_tail"]))
    if pages:
        judge(kv_conservation.check_snapshot(after), history)
        judge(kv_conservation.check_log(before, after), history)
    return Ran(history, after.log)


def alone(subject: Subject, judge: Judge, spec: RequestSpec) -> list[int]:
    """What a request gives by itself: nobody beside it, nothing from the prefix cache, nobody cancels it."""
    plain = replace(spec, after=0, cancel_after=None, params=replace(spec.params, prefix_cache=False))
    return run(subject, judge, plain, pages=False).outputs[0]


def condition(judge: Judge, row: str, reached: bool, what: str, **measured: float) -> None:
    """The revealing condition of a row; the test is undecided where it did not occur."""
    verdict = Verdict.VALID if reached else Verdict.UNKNOWN
    values = {name: Measurement(float(value), "") for name, value in measured.items()}
    judge(CheckResult(verdict, PROPERTY, row, f"{what}: {'occurred' if reached else 'did not occur'}", {}, values))


def hold(judge: Judge, row: str, ok: bool, message: str, *histories: History, **witness: Any) -> None:
    """What the row's fault would break."""
    judge(CheckResult(Verdict.VALID if ok else Verdict.INVALID, PROPERTY, row, message, witness), *histories)


def same(judge: Judge, row: str, ran: Ran, expected: list[list[int]]) -> None:
    """Every request has the tokens that it has alone; one that was cancelled, the first of them."""
    for at, (tokens, want) in enumerate(zip(ran.outputs, expected, strict=True)):
        cancelled = at in ran.history.cancels
        ok = tokens == want[: len(tokens)] and (cancelled or len(tokens) == len(want))
        hold(judge, row, ok, f"request {at} got other tokens than alone", ran.history, found=tokens, alone=want)


def ended(ran: Ran, reason: FinishReason) -> int:
    """Requests that finished for a reason."""
    return sum(e["kind"] == EventKind.FINISH and e["reason"] == reason for e in ran.history.events)
