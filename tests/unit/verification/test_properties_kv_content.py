"""The checker of KV content on hand-made rows (the criterion's own tests are in test_criterion_kv)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blink_core.abi.enums import EventKind
from blink_core.abi.params import SamplingParams
from verification.criterion import score_kv
from verification.history import History, Submitted
from verification.program import Program, RequestSpec
from verification.properties import kv_content
from verification.result import Verdict
from verification.thresholds import Thresholds

SHAPE = (2, 60, 2, 16)


def gathered(tokens: list[int], slot: int = 3, generation: int = 2) -> kv_content.Gathered:
    empty = np.zeros((1, len(tokens), 1, 2), np.float32)
    return kv_content.Gathered(slot, generation, 0, np.array(tokens, np.int32), empty, empty)


def history() -> History:
    program = Program((RequestSpec((4, 5, 6), SamplingParams(8)),))
    events: list[dict[str, Any]] = [
        {"slot": 3, "generation": 2, "kind": EventKind.TOKEN, "index": i, "token": t} for i, t in enumerate((7, 8))
    ]
    return History(program, 1, [Submitted(0, 3, 2, 0)], events=events)


@pytest.mark.parametrize("tokens", [[4], [4, 5, 6], [4, 5, 6, 7, 8]])
def test_known_tokens_pass(tokens: list[int]) -> None:
    """Catches: a checker that wants more computed than is."""
    assert kv_content.check_tokens(history(), [gathered(tokens)]).ok()


@pytest.mark.parametrize(
    "row",
    [
        gathered([4, 5, 7]),
        gathered([4, 5, 6, 8]),
        gathered([4, 5, 6, 7, 8, 9]),
        gathered([4, 5], slot=2),
        gathered([4, 5], generation=1),
    ],
)
def test_other_tokens_are_invalid(row: kv_content.Gathered) -> None:
    """Catches: the right KV of a wrong token, of one never delivered, or of a request that nobody submitted."""
    result = kv_content.check_tokens(history(), [gathered([4, 5]), row])
    assert (result.clause, result.verdict) == ("tokens", Verdict.INVALID)


def test_rows_are_judged_and_none_is_unknown(limits: Thresholds) -> None:
    """Catches: a pass, or an exception, where no request was running at any observed boundary."""
    draw = np.random.default_rng(5)
    k, v = draw.normal(size=SHAPE), draw.normal(size=SHAPE)
    ordinary = (k + 1e-6 * draw.normal(size=SHAPE), v + 1e-6 * draw.normal(size=SHAPE))
    parts = [score_kv(k=ordinary[0], v=ordinary[1], hf64=(k, v), hf32=ordinary)]
    assert kv_content.judge(parts, limits.kv).ok()
    foreign = ordinary[1].copy()
    foreign[1, 7, 1] = foreign[1, 8, 1]
    wrong = kv_content.judge([score_kv(k=ordinary[0], v=foreign, hf64=(k, v), hf32=ordinary)], limits.kv)
    assert (wrong.clause, wrong.verdict) == ("v-rows", Verdict.INVALID)
    assert kv_content.judge([], limits.kv).verdict is Verdict.UNKNOWN
    assert kv_content.check_tokens(history(), []).verdict is Verdict.UNKNOWN
