"""The two calls (T): poll and boundary, with commit (C) and the life cycle of the engine (L6, L7)."""

from __future__ import annotations

from collections.abc import Sequence

from blink_core.abi.config import EngineConfig
from blink_core.abi.enums import (
    EngineState,
    ErrorReason,
    EventKind,
    FinishReason,
    LogKind,
    RequestState,
    SlotFlag,
    StepStatus,
)
from verification.spec import kv, life, plan, ring
from verification.spec.state import ENGINE, PlanRow, Request, Result, State

ERROR_OF = {int(StepStatus.NAN_LOGITS): ErrorReason.NAN_LOGITS, int(StepStatus.NO_TOKEN): ErrorReason.NO_TOKEN}


class Machine(State):
    """The specification of one engine: others write `rings[r].memory`, `stop`, `drain`; `boundary` and `poll` act."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        life.enter(self, EngineState.READY)

    def poll(self, now: int) -> None:
        """T4. `now` in microseconds."""
        self.begin(0, now)
        ring.poll(self)

    def boundary(self, now: int, results: Sequence[Result] = (), failed: bool = False) -> list[PlanRow]:
        """T3: ends the step in flight with its results, one a plan row; returns the rows of the next one, if any."""
        self.begin(1, now)
        self.boundaries += 1
        if self.plan is not None:
            commit(self, results, failed)
        life.deadlines(self)
        self.control()
        if self.live:
            self.number = self.step + 1
            rows = plan.make_plan(self)
            if rows:
                self.plan, self.step = rows, self.number
                tokens = rows[-1].q_start + rows[-1].q_len
                self.note(LogKind.STEP, ENGINE, len(rows), tokens, sum(row.sample for row in rows))
        return self.plan or []

    def control(self) -> None:
        if self.stop and self.engine != EngineState.STOPPED:  # L7
            self.note(LogKind.CONTROL, a=2)
            self.engine = EngineState.DRAINING
            for request in life.by_index(self):
                life.end(self, request, ErrorReason.DRAINING)
            ring.poll(self)
            life.enter(self, EngineState.STOPPED)
        elif self.drain and self.engine == EngineState.READY:  # L6
            self.note(LogKind.CONTROL, a=1)
            life.enter(self, EngineState.DRAINING)
        if self.engine == EngineState.DRAINING and not self.live:
            life.enter(self, EngineState.DRAINED)


def commit(s: State, results: Sequence[Result], failed: bool) -> None:
    rows, s.plan = s.plan or [], None
    s.committed += 1
    kv.end_quarantine(s)  # K5
    for r in s.rings:
        r.memory.epoch_ack = r.epoch  # R2
        r.planned = 0
    for at, row in enumerate(rows):
        request = row.request
        if request.state != RequestState.RUNNING:  # C1, L5; a request object is of one generation
            continue
        request.computed = row.context_len  # C2
        if failed:
            life.end(s, request, ErrorReason.MODEL_ERROR)
        elif row.sample:
            take_result(s, request, results[at])


def take_result(s: State, request: Request, result: Result) -> None:  # C3
    s.note(LogKind.RESULT, request, result.token, result.status, result.logprob)  # E4
    if result.status != StepStatus.OK or not 0 <= result.token < s.config.vocab:
        return life.end(s, request, ERROR_OF.get(result.status, ErrorReason.MODEL_ERROR))
    kv.publish(s, request)  # K6
    r, slot, generation = request.ring, request.slot, request.generation
    for first in range(0, request.descriptor.logprobs, 2):
        tops = result.tops[first : min(first + 2, request.descriptor.logprobs)]
        pairs = [value for pair in tops for value in pair]
        life.write_event(s, r, slot, EventKind.LOGPROBS, len(tops), generation, *pairs)
    s.note(LogKind.TOKEN, request, request.emitted, result.token)
    emitted, token, logprob = request.emitted, result.token, result.logprob
    life.write_event(s, r, slot, EventKind.TOKEN, 0, generation, emitted, token, logprob, s.step)
    request.tokens.append(result.token)
    request.emitted += 1
    s.tokens += 1
    reason = end_of(s, request, result.token)
    if reason is not None:
        life.end(s, request, reason)


def end_of(s: State, request: Request, token: int) -> FinishReason | None:  # C4
    d, stops = request.descriptor, request.emitted > request.descriptor.min_tokens
    rules = (
        (stops and token in s.config.eos_ids and not d.flags & SlotFlag.IGNORE_EOS, FinishReason.EOS),
        (stops and token in d.stop_ids[: d.n_stop], FinishReason.STOP_TOKEN),
        (request.emitted == d.max_tokens, FinishReason.LENGTH),
        (len(request.tokens) == s.config.max_len, FinishReason.CONTEXT),
    )
    return next((reason for holds, reason in rules if holds), None)
