"""Queue ordering and exactly-once delivery, on the engine as it runs."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from blink_core.abi.definition import MAX_LOGPROBS, PRIORITIES
from blink_core.abi.dtypes import SLOT
from blink_core.abi.enums import ErrorReason, EventKind, FinishReason
from blink_core.frontend.ring_client import ProtocolError
from blink_core.transport.checksum import seal_slot, words_checksum
from blink_core.transport.interface import TransportError
from verification.fixtures import Judge, Subject
from verification.history import History
from verification.program import Program, draw_program
from verification.properties import queue_ordering, service_order
from verification.result import CheckResult, Measurement, Verdict
from verification.suite.running import serve

pytestmark = [pytest.mark.blink_property("queue-ordering"), pytest.mark.capability("cpu", "shared-memory", "oracle")]

NO_LOG = 2**63  # an index beyond every log's end
MOST_DRAWS = 20
EARLY = (FinishReason.EOS, FinishReason.STOP_TOKEN)


def check_run(subject: Subject, program: Program, judge: Judge) -> History:
    """Runs a program and enforces every clause."""
    before = subject.snapshot(log_from=NO_LOG)
    history = serve(subject, program, judge)
    start = int(before.header["log_tail"])
    after = subject.snapshot(log_from=start)
    judge(queue_ordering.check_fifo(history, after.log, after.log_gap), history)
    judge(service_order.check_service(before, after, [history]), history)
    return history


def test_drawn_programs(tiny: Subject, judge: Judge) -> None:
    """Drawn requests, arrivals and cancels on a pool that is too small for them.

    Catches: admission out of order, a lost, repeated or misnumbered token, a second or missing terminal event.
    """

    @settings(phases=(Phase.explicit, Phase.generate))  # a rig run is not repeated to shrink it
    @given(st.integers(0, 2**63 - 1))
    def programs(seed: int) -> None:
        check_run(tiny, draw_program(random.Random(seed), tiny.shape), judge)

    programs()


def test_model_under_test(engine: Subject, judge: Judge, seed: int) -> None:
    """The same on the real model, where steps are long and requests arrive while one runs.

    Catches: what only shows when submissions and cancels fall into a step.
    """
    for program in engine.draw(seed, 2):
        check_run(engine, program, judge)


def test_end_of_sequence(tiny: Subject, judge: Judge, seed: int) -> None:
    """Requests that may end by their model's end-of-sequence id or by a stop id; drawn until one has ended early.

    Catches: a token after the end, a finish reason that does not match, an end that is missed.
    """
    rng = random.Random(seed)
    early = 0
    for _ in range(MOST_DRAWS):
        program = _may_end_early(rng, tiny)
        history = check_run(tiny, program, judge)
        early += sum(e["reason"] in EARLY for e in history.events if e["kind"] == EventKind.FINISH)
        if early:
            break
    judge(
        CheckResult(
            Verdict.VALID if early else Verdict.UNKNOWN,
            queue_ordering.PROPERTY,
            "terminal",
            f"{early} requests ended early",
            {},
            {"ended_early": Measurement(early, "requests", 1, limit_is="min")},
        )
    )


def _may_end_early(rng: random.Random, subject: Subject) -> Program:
    requests = []
    for spec in draw_program(rng, subject.shape).requests:
        stops = tuple(rng.randrange(subject.shape.vocab) for _ in range(8))
        params = type(spec.params)(max_tokens=60, temperature=1.5, seed=rng.getrandbits(64), stop_token_ids=stops)
        requests.append(type(spec)(spec.prompt[:80], params, spec.after))
    return Program(tuple(requests))


BAD_FIELDS = {
    "prompt_len": (0, ErrorReason.BAD_LENGTH),
    "max_tokens": (0, ErrorReason.BAD_LENGTH),
    "temperature": (np.nan, ErrorReason.BAD_PARAM),
    "top_p": (1.5, ErrorReason.BAD_PARAM),
    "flags": (0x80, ErrorReason.BAD_PARAM),
    "n_stop": (9, ErrorReason.BAD_PARAM),
    "priority": (PRIORITIES, ErrorReason.BAD_PARAM),
    "min_p": (-0.1, ErrorReason.BAD_PARAM),
    "repetition_penalty": (0.0, ErrorReason.BAD_PARAM),
    "presence_penalty": (np.nan, ErrorReason.BAD_PARAM),
    "frequency_penalty": (np.inf, ErrorReason.BAD_PARAM),
    "min_tokens": (5, ErrorReason.BAD_PARAM),
    "n_bias": (2**31, ErrorReason.BAD_PARAM),
    "logprobs": (MAX_LOGPROBS + 1, ErrorReason.BAD_PARAM),
    "mask_box": (1, ErrorReason.BAD_PARAM),
}


@pytest.mark.parametrize("field", sorted(BAD_FIELDS))
def test_malformed_descriptor(tiny: Subject, judge: Judge, field: str, seed: int) -> None:
    """A descriptor with one bad field between two programs' requests.

    Catches: a refusal that hangs the ring, reaches a neighbour, or gives no reason.
    """
    value, reason = BAD_FIELDS[field]
    slot = np.zeros(1, SLOT)
    prompt = np.arange(1, 20, dtype="<i4")
    slot["prompt_len"], slot["max_tokens"], slot["top_p"], slot["repetition_penalty"] = prompt.size, 4, 1.0, 1.0
    slot[field] = value
    slot["prompt_checksum"] = words_checksum(prompt)
    _refused(tiny, judge, slot, prompt, reason)
    check_run(tiny, draw_program(random.Random(seed), tiny.shape), judge)


def test_foreign_token_id(tiny: Subject, judge: Judge) -> None:
    """A prompt with an id just beyond the vocabulary.

    Catches: a lookup outside the embedding table.
    """
    prompt = np.array([1, 2, tiny.rig.descriptor.config.vocab], "<i4")
    slot = np.zeros(1, SLOT)
    slot["prompt_len"], slot["max_tokens"], slot["top_p"], slot["repetition_penalty"] = prompt.size, 4, 1.0, 1.0
    _refused(tiny, judge, slot, prompt, ErrorReason.BAD_TOKEN)
    judge.record.cases()


def test_torn_descriptor(tiny: Subject, judge: Judge) -> None:
    """A descriptor whose checksum never matches: re-read until the visibility deadline, then an error.

    Catches: acting on a torn descriptor, and waiting for it for ever.
    """
    prompt = np.array([1, 2, 3], "<i4")
    slot = np.zeros(1, SLOT)
    slot["prompt_len"], slot["max_tokens"], slot["top_p"], slot["repetition_penalty"] = prompt.size, 4, 1.0, 1.0
    seal_slot(slot)  # sealed before generation and offset are filled in
    _refused(tiny, judge, slot, prompt, ErrorReason.CHECKSUM, seal=False)
    judge.record.cases()


def _refused(
    subject: Subject,
    judge: Judge,
    slot: np.ndarray,
    prompt: np.ndarray,
    reason: ErrorReason,
    *,
    seal: bool = True,
) -> None:
    expected = f"one ERROR {reason.name}"
    try:
        handle = subject.client.submit_slot(slot, prompt, seal=seal)
        events = subject.client.poll(10.0)
    except (ProtocolError, TransportError) as e:
        ok, found = False, f"{type(e).__name__}: {e}"
    else:
        got = [(int(e["slot"]), int(e["generation"]), int(e["kind"]), int(e["reason"])) for e in events]
        ok = got == [(handle.slot, handle.generation, int(EventKind.ERROR), int(reason))]
        found = f"{got} for slot {handle.slot} generation {handle.generation}"
    if not ok and (dead := subject.rig.wait(0.0) or subject.reattach()) is not None:
        subject.lost(dead)
        found += f"; the engine is gone: {dead}"
    verdict = Verdict.VALID if ok else Verdict.INVALID
    judge(CheckResult(verdict, queue_ordering.PROPERTY, "refusal", f"expected {expected}, got {found}"))
