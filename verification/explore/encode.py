"""A scope as the 64-bit words that blink_core/runtime/native/explore_scope.hpp reads."""

from __future__ import annotations

from array import array
from collections import Counter

import numpy as np

from blink_core.abi.dtypes import SLOT
from blink_core.abi.enums import ErrorReason, FinishReason
from blink_core.transport.checksum import seal_slot, words_checksum
from verification.explore.scope import Attach, Cancel, Host, Outcome, Scope, Submit

_SUBMIT, _CANCEL, _ATTACH = 1, 2, 3


def _bits(*reasons: int) -> int:
    return sum(1 << int(reason) for reason in set(reasons))


def _finishes(scope: Scope, index: int) -> int:
    """Reasons for a FINISH that the scope allows (C4, R10), by bit."""
    request, engine = scope.requests[index], scope.engine()
    fits = len(scope.prompt(index)) + request.max_tokens <= engine.max_len
    reasons = [FinishReason.LENGTH if fits else FinishReason.CONTEXT]
    if scope.outcomes & Outcome.EOS:
        reasons.append(FinishReason.EOS)
    if any(isinstance(op, Cancel) and op.request == index for program in scope.programs for op in program):
        reasons.append(FinishReason.CANCELLED)
    return _bits(*reasons)


def _errors(scope: Scope, index: int) -> int:
    """Reasons for an ERROR that the scope allows, by bit."""
    reasons: list[ErrorReason] = []
    if scope.outcomes & Outcome.NAN_ROW:
        reasons.append(ErrorReason.NAN_LOGITS)
    if scope.outcomes & Outcome.NO_TOKEN_ROW:
        reasons.append(ErrorReason.NO_TOKEN)
    if scope.outcomes & (Outcome.BAD_ID | Outcome.STEP_FAILED):
        reasons.append(ErrorReason.MODEL_ERROR)
    if scope.host != Host.NOTHING:
        reasons.append(ErrorReason.DRAINING)
    if scope.requests[index].deadline_us:
        reasons.append(ErrorReason.DEADLINE)
    if scope.engine().lease_us:
        reasons.append(ErrorReason.LEASE_LOST)
    if scope.unordered and scope.ticks:
        reasons += [ErrorReason.CHECKSUM, ErrorReason.BAD_GENERATION]
    return _bits(*reasons)


def encode(scope: Scope) -> bytes:
    """Raises ValueError for a program that submits a request twice, not at all, or from another ring, and for several
    attaches of a ring with unordered words: the state keeps where one predecessor stood, not where each did; also for
    an attach beside a living front end with unordered words, since that one's operations are delivered whole.
    """
    for ring, program in enumerate(scope.programs):
        attaches = sum(isinstance(op, Attach) for op in program)
        if scope.unordered and attaches > 1:
            raise ValueError(f"scope {scope.name}: unordered words and {attaches} attaches of ring {ring}; at most 1")
        attaching = [op for op in program if isinstance(op, Attach)]
        if scope.unordered and any(op.beside for op in attaching):
            raise ValueError(f"scope {scope.name}: unordered words and an attach beside a living front end")
        if any(op.during for op in attaching[:1]) or any(op.during and op.beside for op in attaching):
            raise ValueError(f"scope {scope.name}: an attach of ring {ring} during none, or beside one as well")
    words = array("q", [int(scope.outcomes), int(scope.unordered), int(scope.consume_all), scope.tick_us, scope.ticks])
    words.extend([sum(1 << r for r in scope.may_die), int(scope.host), int(scope.plant), len(scope.requests)])
    generation, after = _generations(scope)
    offsets = [0] * len(scope.programs)
    for index, request in enumerate(scope.requests):
        prompt = np.array(scope.prompt(index), "<i4")
        slot = np.zeros(1, SLOT)
        slot["generation"], slot["prompt_len"] = generation[index], prompt.size
        slot["prompt_offset"], slot["max_tokens"] = offsets[request.ring], request.max_tokens
        slot["top_p"], slot["repetition_penalty"] = 1.0, 1.0
        slot["priority"], slot["deadline_us"], slot["tag"] = request.priority, request.deadline_us, index
        slot["prompt_checksum"] = words_checksum(prompt)
        seal_slot(slot)
        offsets[request.ring] += prompt.size
        words.extend([request.ring, request.slot, generation[index], _finishes(scope, index), _errors(scope, index)])
        words.extend([after[index], prompt.size, *prompt.tolist()])
        words.frombytes(slot.tobytes())
    for program in scope.programs:
        words.append(len(program))
        for op in program:
            if isinstance(op, Attach):
                words.extend([_ATTACH, op.epoch, 2 if op.during else int(op.beside)])
            else:
                words.extend([_SUBMIT if isinstance(op, Submit) else _CANCEL, op.request, int(op.optional)])
    return words.tobytes()


def _generations(scope: Scope) -> tuple[list[int], list[int]]:
    """Of each request: its slot's generation, and the request whose terminal event the slot waits for, or -1."""
    generation, after = [0] * len(scope.requests), [-1] * len(scope.requests)
    for ring, program in enumerate(scope.programs):
        used: Counter[int] = Counter()
        last: dict[int, int] = {}
        for op in program:
            if isinstance(op, Attach):
                used.clear()
                last.clear()
            elif isinstance(op, Submit):
                request = scope.requests[op.request]
                if request.ring != ring or generation[op.request]:
                    raise ValueError(f"scope {scope.name}: request {op.request} cannot be submitted by ring {ring}")
                used[request.slot] += 1
                generation[op.request] = used[request.slot]
                after[op.request] = last.get(request.slot, -1)
                last[request.slot] = op.request
            elif scope.requests[op.request].ring != ring:
                raise ValueError(f"scope {scope.name}: request {op.request} is not of ring {ring}")
            elif not generation[op.request]:
                raise ValueError(f"scope {scope.name}: request {op.request} is cancelled before it is submitted")
    if 0 in generation:
        raise ValueError(f"scope {scope.name}: request {generation.index(0)} is never submitted")
    return generation, after
