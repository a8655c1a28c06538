"""KV content of the running engine against HuggingFace's past_key_values."""

from __future__ import annotations

import pytest

from verification.certificate.recorder import Recorder
from verification.criterion import KVScores
from verification.fixtures import Judge, Subject
from verification.properties import kv_content
from verification.suite.observation import Observation
from verification.suite.running import serve
from verification.suite.situations import Lengths

pytestmark = [pytest.mark.blink_property("kv-content"), pytest.mark.capability("cpu", "shared-memory", "oracle")]

PROGRAMS = {"model": 1, "tiny": 4}
MOST_TIMES = 6  # so many times more programs are drawn when these give too few positions: a fast model is seldom caught
FEWEST_ROWS = 100
MOST_ROWS = 400  # positions compared with the oracle in one run; more would only cost time


def _check(subject: Subject, record: Recorder, judge: Judge, seed: int, programs: int) -> None:
    parts: list[KVScores] = []
    positions = resumed = 0
    lengths = Lengths(subject)
    for index, program in enumerate(subject.draw(seed, MOST_TIMES * programs)):
        if index >= programs and positions >= FEWEST_ROWS and lengths.reached:
            break
        observation = Observation(subject)
        history = serve(subject, program, judge, every=max(8, subject.shape.most_new), observe=observation)
        for result in observation.results:
            judge(result, history)
        for rows in observation.rows:
            judge(kv_content.check_tokens(history, rows), history)
            # Beyond the budget only rows of a resumed or of a long request, as long as none has been compared.
            chosen = rows
            if positions >= MOST_ROWS:
                chosen = [r for r in rows if (r.preemptions and not resumed) or not lengths.reached]
            if chosen:
                parts.append(kv_content.score(chosen, *subject.oracles))
                positions += sum(len(row.tokens) for row in chosen)
                resumed += sum(row.preemptions > 0 for row in chosen)
                lengths.add(max(len(row.tokens) for row in chosen))
    record.situation("kv-after-preemption", resumed > 0)
    if parts:
        scores = KVScores.concatenate(parts)
        record.series(
            f"{subject.name}: worst K row error by layer",
            range(scores.engine_rms.shape[1]),
            scores.engine_rms[0].max(axis=(1, 2)),
            "RMS",
            x_label="layer",
            kind="bars",
        )
    judge(kv_content.judge(parts, subject.thresholds.kv))
    judge(lengths.check(record, kv_content.PROPERTY))


def test_tiny_models(family: Subject, record: Recorder, judge: Judge, seed: int) -> None:
    """KV of each family's running requests, some of them resumed after preemption, in a pool poisoned with NaN.

    Catches: a foreign or stale row, a page in the wrong place, a rotary position off by one, exchanged heads.
    """
    _check(family, record, judge, seed, PROGRAMS["tiny"])


def test_model_under_test(engine: Subject, record: Recorder, judge: Judge, seed: int) -> None:
    """The same on the real model's weights.

    Catches: a loader that permutes or scales a projection wrongly, besides the above.
    """
    _check(engine, record, judge, seed, PROGRAMS["model"])
