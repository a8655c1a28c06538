"""Results of checks: verdicts, merging, JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from verification.result import CheckResult, Measurement, Verdict, merge


def _result(verdict: Verdict, clause: str = "c", **measurements: Measurement) -> CheckResult:
    return CheckResult(verdict, "p", clause, f"{clause} {verdict}", {"clause": clause}, measurements)


def test_json_round_trip_keeps_everything() -> None:
    """Catches: a field lost or changed between a checker and the report."""
    witness: Any = {"layer": np.int64(3), "ratio": np.float64(2.5), "rows": np.arange(3)}
    first = CheckResult(
        Verdict.INVALID,
        "kv-content",
        "k-rows",
        "one row",
        {**witness, "nested": {"a": [1, None, True]}},
        {"worst": Measurement(2.5, "ratio", 2.0, 10, "min"), "n": Measurement(3, "rows")},
    )
    text = json.dumps(first.to_json(), allow_nan=False)
    again = CheckResult.from_json(json.loads(text))
    assert again == first
    assert dict(again.witness) == {"layer": 3, "ratio": 2.5, "rows": [0, 1, 2], "nested": {"a": [1, None, True]}}


def test_non_finite_numbers_stay_valid_json() -> None:
    """Catches: a NaN ratio that makes report.json unreadable for strict parsers, or comes back as another number."""
    result = CheckResult(Verdict.INVALID, "p", "c", "m", {"x": float("nan")}, {"r": Measurement(float("inf"))})
    again = CheckResult.from_json(json.loads(json.dumps(result.to_json(), allow_nan=False)))
    assert again.witness["x"] == "nan"
    assert again.measurements["r"].value == float("inf")


def test_a_witness_without_json_form_is_refused_at_once() -> None:
    """Catches: a run that fails only when its report is written."""
    with pytest.raises(TypeError, match="object"):
        CheckResult(Verdict.VALID, "p", "c", "m", {"x": object()})  # type: ignore[dict-item]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_merge_takes_the_worst(order: tuple[int, ...]) -> None:
    """Catches: a failure hidden by a later pass, or an unknown counted as one."""
    items = [_result(Verdict.VALID, "a"), _result(Verdict.UNKNOWN, "b"), _result(Verdict.INVALID, "c")]
    merged = merge([items[i] for i in order])
    assert (merged.verdict, merged.clause, merged.witness["clause"]) == (Verdict.INVALID, "c", "c")
    assert merge(items[:2]).verdict is Verdict.UNKNOWN
    assert merge(items[:1]).ok()


def test_merge_of_nothing_is_unknown() -> None:
    """Catches: a property that passes because no case reached its checker."""
    assert merge([], property="p").verdict is Verdict.UNKNOWN
    with pytest.raises(ValueError, match="name"):
        merge([])


def test_merge_keeps_measurements_of_equal_name() -> None:
    """Catches: one request's measurement overwriting another's."""
    merged = merge(
        [_result(Verdict.VALID, x=Measurement(1)), _result(Verdict.VALID, x=Measurement(2), y=Measurement(3))]
    )
    assert {name: m.value for name, m in merged.measurements.items()} == {"c[0].x": 1, "c[1].x": 2, "y": 3}
