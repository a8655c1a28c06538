"""KV content of the running engine against HuggingFace's past_key_values."""

from __future__ import annotations

import pytest

from verification.certificate.recorder import Recorder
from verification.criterion import KVScores, judge_kv
from verification.fixtures import Subject
from verification.properties import kv_content

pytestmark = [pytest.mark.blink_property("kv-content"), pytest.mark.capability("cpu", "shared-memory", "oracle")]

RING = 1
PROGRAMS = {"model": 1, "tiny": 4}
MOST_ROWS = 400  # positions compared with the oracle in one run; more would only cost time


def _check(subject: Subject, record: Recorder, seed: int, programs: int) -> None:
    parts: list[KVScores] = []
    resumed = 0
    for program in subject.draw(seed, programs):
        observed: list[list[kv_content.Gathered]] = []

        def observe(observed: list[list[kv_content.Gathered]] = observed) -> None:
            memory = subject.rig.memory
            with memory.hold():
                observed.append(kv_content.gather(memory, memory.snapshot(), RING))

        history = subject.run(program, every=max(8, subject.shape.most_new), observe=observe)
        for rows in observed:
            record.check(kv_content.check_tokens(history, rows))
            resumed += sum(row.preemptions > 0 for row in rows)
            if rows and sum(p.engine_rms.shape[2] for p in parts) < MOST_ROWS:
                parts.append(kv_content.score(rows, *subject.oracles))
    record.situation("kv-after-preemption", resumed > 0)
    scores = KVScores.concatenate(parts)
    record.series(
        f"{subject.name}: worst K row error by layer",
        range(scores.engine_rms.shape[1]),
        scores.engine_rms[0].max(axis=(1, 2)),
        "RMS",
        x_label="layer",
        kind="bars",
    )
    record.check(judge_kv(scores, subject.thresholds.kv))


def test_tiny_models(tiny: Subject, record: Recorder, seed: int) -> None:
    """KV of running requests, some of them resumed after preemption, in a pool poisoned with NaN.

    Catches: a foreign or stale row, a page in the wrong place, a rotary position off by one, exchanged heads.
    """
    _check(tiny, record, seed, PROGRAMS["tiny"])


def test_model_under_test(engine: Subject, record: Recorder, seed: int) -> None:
    """The same on the real model's weights.

    Catches: a loader that permutes or scales a projection wrongly, besides the above.
    """
    _check(engine, record, seed, PROGRAMS["model"])
