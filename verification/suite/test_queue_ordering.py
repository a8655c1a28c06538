"""Queue ordering and exactly-once delivery, on the engine as it runs."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from blink_core.abi.dtypes import SLOT
from blink_core.abi.enums import ErrorReason, EventKind
from blink_core.transport.checksum import seal_slot, words_checksum
from verification.certificate.outcomes import enforce
from verification.certificate.recorder import Recorder
from verification.fixtures import Subject
from verification.history import History
from verification.program import Program, draw_program
from verification.properties import queue_ordering
from verification.result import CheckResult, Verdict
from verification.suite.situations import record_situations

pytestmark = [pytest.mark.blink_property("queue-ordering"), pytest.mark.capability("cpu", "shared-memory")]


def check_run(subject: Subject, program: Program, record: Recorder) -> History:
    """Runs a program and enforces every clause."""
    before = subject.snapshot()
    history = subject.run(program)
    after = subject.snapshot()
    start = int(before.header["log_tail"])
    config = after.config
    result = queue_ordering.check(
        history,
        after.log[max(0, start - after.log_lost) :],
        max(0, after.log_lost - start),
        eos_ids=config.eos_ids,
        max_len=config.max_len,
    )
    record_situations(record, after)
    record.check(result)
    return history


def test_drawn_programs(tiny: Subject, record: Recorder) -> None:
    """Drawn requests, arrivals and cancels on a pool that is too small for them.

    Catches: admission out of order, a lost, repeated or misnumbered token, a second or missing terminal event.
    """

    @settings(phases=(Phase.explicit, Phase.generate))  # a rig run is not repeated to shrink it
    @given(st.randoms(use_true_random=False))
    def programs(rng: random.Random) -> None:
        check_run(tiny, draw_program(rng, tiny.shape), record)

    programs()


def test_model_under_test(engine: Subject, record: Recorder, seed: int) -> None:
    """The same on the real model, where steps are long and requests arrive while one runs.

    Catches: what only shows when submissions and cancels fall into a step.
    """
    for program in engine.draw(seed, 2):
        check_run(engine, program, record)


def test_end_of_sequence(tiny: Subject, record: Recorder, seed: int) -> None:
    """Requests that may end by their model's end-of-sequence id or by a stop id.

    Catches: a token after the end, a finish reason that does not match, an end that is missed.
    """
    rng = random.Random(seed)
    vocab = tiny.rig.descriptor.config.vocab
    requests = []
    for spec in draw_program(rng, tiny.shape).requests:
        stops = tuple(rng.randrange(vocab) for _ in range(8))
        params = type(spec.params)(max_tokens=60, temperature=1.5, seed=rng.getrandbits(64), stop_token_ids=stops)
        requests.append(type(spec)(spec.prompt[:80], params, spec.after))
    check_run(tiny, Program(tuple(requests)), record)


BAD_FIELDS = {
    "prompt_len": (0, ErrorReason.BAD_LENGTH),
    "max_tokens": (0, ErrorReason.BAD_LENGTH),
    "temperature": (np.nan, ErrorReason.BAD_PARAM),
    "top_p": (1.5, ErrorReason.BAD_PARAM),
    "flags": (0x80, ErrorReason.BAD_PARAM),
    "n_stop": (9, ErrorReason.BAD_PARAM),
    "priority": (1, ErrorReason.BAD_PARAM),
    "deadline_us": (1, ErrorReason.BAD_PARAM),
}


@pytest.mark.parametrize("field", sorted(BAD_FIELDS))
def test_malformed_descriptor(tiny: Subject, record: Recorder, field: str, seed: int) -> None:
    """A descriptor with one bad field between two programs' requests.

    Catches: a refusal that hangs the ring, reaches a neighbour, or gives no reason.
    """
    value, reason = BAD_FIELDS[field]
    slot = np.zeros(1, SLOT)
    prompt = np.arange(1, 20, dtype="<i4")
    slot["prompt_len"], slot["max_tokens"], slot["top_p"] = prompt.size, 4, 1.0
    slot[field] = value
    slot["prompt_checksum"] = words_checksum(prompt)
    _refused(tiny, slot, prompt, reason)
    check_run(tiny, draw_program(random.Random(seed), tiny.shape), record)


def test_foreign_token_id(tiny: Subject, record: Recorder) -> None:
    """A prompt with an id just beyond the vocabulary.

    Catches: a lookup outside the embedding table.
    """
    prompt = np.array([1, 2, tiny.rig.descriptor.config.vocab], "<i4")
    slot = np.zeros(1, SLOT)
    slot["prompt_len"], slot["max_tokens"], slot["top_p"] = prompt.size, 4, 1.0
    _refused(tiny, slot, prompt, ErrorReason.BAD_TOKEN)
    record.cases()


def test_torn_descriptor(tiny: Subject, record: Recorder) -> None:
    """A descriptor whose checksum never matches: re-read until the visibility deadline, then an error.

    Catches: acting on a torn descriptor, and waiting for it for ever.
    """
    prompt = np.array([1, 2, 3], "<i4")
    slot = np.zeros(1, SLOT)
    slot["prompt_len"], slot["max_tokens"], slot["top_p"] = prompt.size, 4, 1.0
    seal_slot(slot)  # sealed before generation and offset are filled in
    _refused(tiny, slot, prompt, ErrorReason.CHECKSUM, seal=False)
    record.cases()


def _refused(
    subject: Subject,
    slot: np.ndarray,
    prompt: np.ndarray,
    reason: ErrorReason,
    *,
    seal: bool = True,
) -> None:
    handle = subject.client.submit_slot(slot, prompt, seal=seal)
    events = subject.client.poll(10.0)
    found = [(int(e["slot"]), int(e["generation"]), int(e["kind"]), int(e["reason"])) for e in events]
    expected = [(handle.slot, handle.generation, int(EventKind.ERROR), int(reason))]
    ok = found == expected
    enforce(
        CheckResult(
            Verdict.VALID if ok else Verdict.INVALID,
            queue_ordering.PROPERTY,
            "refusal",
            f"expected one ERROR {reason.name}, got {found}",
        )
    )
